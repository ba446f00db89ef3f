"""What `attention` has to give: the contract in float64 numpy, row by row, forward and backward.

Independent of the package. Each row picks the keys that it may attend before anything is multiplied, so NaN cannot
cross where nothing may. `plain` is the yardstick of precision: the usual formula in the operands' own dtype.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from cases import Inputs

Results = dict[str, np.ndarray]


def reference(inputs: Inputs) -> Results:
    """{"out", "lse", "d" + name for each differentiable operand}, all float64, of the calls's shapes."""
    view = Aligned(inputs)
    q, k, v = view.q, view.k, view.v
    entries, seqlen_q, num_q_heads, _ = q.shape
    group = num_q_heads // k.shape[2] if k.shape[2] else 1
    scale, cap = view.scale, view.cap

    out = np.zeros((entries, seqlen_q, num_q_heads, v.shape[-1]))
    lse = np.full((entries, num_q_heads, seqlen_q), -np.inf)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dbias = None if view.bias is None else np.zeros(view.bias.shape)
    dsinks = np.zeros(num_q_heads)

    for b in range(entries):
        for n in range(num_q_heads):
            for i in range(seqlen_q):
                js = np.flatnonzero(view.allowed(b, n, i))
                ks, vs = k[b, js, n // group], v[b, js, n // group]
                s = scale * (ks @ q[b, i, n])
                if view.bias is not None:
                    s = s + view.bias[b, n, i, js]
                slope = np.ones_like(s)
                if cap is not None:
                    s = cap * np.tanh(s / cap)
                    slope = 1 - np.square(s / cap)
                sink = -np.inf if view.sinks is None else view.sinks[n]
                lse[b, n, i] = _logsumexp(np.append(s, sink))
                p = np.exp(s - lse[b, n, i]) if len(js) else s
                if len(js):
                    out[b, i, n] = p @ vs

                if i >= view.q_length(b):
                    continue
                dout, dlse = view.dout[b, i, n] if len(js) else np.zeros(v.shape[-1]), view.dlse[b, n, i]
                delta = out[b, i, n] @ dout - dlse
                if view.sinks is not None:
                    dsinks[n] -= np.exp(sink - lse[b, n, i]) * delta
                if not len(js):
                    continue
                ds = np.where(p == 0, 0, p * (vs @ dout - delta) * slope)
                dq[b, i, n] = scale * (ds @ ks)
                dk[b, js, n // group] += scale * ds[:, None] * q[b, i, n]
                dv[b, js, n // group] += p[:, None] * dout
                if dbias is not None:
                    dbias[b, n, i, js] += ds

    operands, batch = inputs.operands, view.batch
    results = {"out": out.reshape(*batch, *out.shape[1:]), "lse": lse.reshape(*batch, *lse.shape[1:])}
    results |= {"d" + n: x.reshape(operands[n].shape) for n, x in (("query", dq), ("key", dk), ("value", dv))}
    if dbias is not None:
        results["dbias"] = _sum_to(dbias.reshape(*batch, *dbias.shape[1:]), operands["bias"].shape)
    if view.sinks is not None:
        results["dsinks"] = dsinks
    return results


class Aligned:
    """The operands in float64 with one batch dimension, and the mask of the row that is asked about."""

    def __init__(self, inputs: Inputs):
        operands, options = inputs.operands, inputs.options
        query = operands["query"]
        self.batch = query.shape[:-3]
        self.entries = math.prod(self.batch)
        self.q, self.k, self.v = (self._float(operands[n], 3) for n in ("query", "key", "value"))
        self.seqlen_q, self.seqlen_kv = self.q.shape[1], self.k.shape[1]
        scores = (*self.batch, query.shape[-2], self.seqlen_q, self.seqlen_kv)
        self.bias = self._full(operands.get("bias"), scores, 3)
        self.mask = self._full(operands.get("mask"), scores, 3)
        self.sinks = None if "sinks" not in operands else np.asarray(operands["sinks"], np.float64)
        head_dim = query.shape[-1]
        self.scale = options.get("scale", 1 / math.sqrt(head_dim) if head_dim else 1.0)
        self.cap = options.get("logits_soft_cap")
        self.is_causal = options.get("is_causal", False)
        window = options.get("local_window_size")
        self.window = window if isinstance(window, tuple) else (window, window)

        rows, cols = np.arange(self.seqlen_q), np.arange(self.seqlen_kv)
        offset = self._ints(operands.get("query_offset", 0), ())
        self.qpos = rows + offset[:, None]
        if "query_positions" in operands:
            self.qpos = self._ints(operands["query_positions"], (self.seqlen_q,))
        self.kpos = self._ints(operands.get("key_value_positions", cols), (self.seqlen_kv,))
        self.q_lengths = self._ints(operands.get("query_seq_lengths", self.seqlen_q), ())
        self.kv_lengths = self._ints(operands.get("key_value_seq_lengths", self.seqlen_kv), ())
        ids = operands.get("segment_ids")
        q_ids, kv_ids = (ids.q, ids.kv) if hasattr(ids, "kv") else (ids, ids)
        self.segments = ids is not None
        if self.segments:
            self.q_ids = self._ints(q_ids, (self.seqlen_q,))
            self.kv_ids = self._ints(kv_ids, (self.seqlen_kv,))

        self.dout = self._float(inputs.dout, 3)
        zero = np.zeros((*self.batch, query.shape[-2], self.seqlen_q))
        self.dlse = self._float(zero if inputs.dlse is None else inputs.dlse, 2)

    def q_length(self, b: int) -> int:
        return self.q_lengths[b]

    def allowed(self, b: int, n: int, i: int) -> np.ndarray:
        """[S] bool: which keys row i of head n of entry b may attend."""
        keep = (np.arange(self.seqlen_kv) < self.kv_lengths[b]) & (i < self.q_lengths[b])
        if self.mask is not None:
            keep &= self.mask[b, n, i]
        if self.segments:
            keep &= self.kv_ids[b] == self.q_ids[b, i]
        distance = self.kpos[b] - self.qpos[b, i]
        if self.is_causal:
            keep &= distance <= 0
        left, right = self.window
        if left is not None:
            keep &= distance >= -left
        if right is not None:
            keep &= distance <= right
        return keep

    def _float(self, x: Any, trailing: int) -> np.ndarray:
        x = np.asarray(x).astype(np.float64)
        return x.reshape(self.entries, *x.shape[x.ndim - trailing :])

    def _full(self, x: Any, shape: tuple[int, ...], trailing: int) -> np.ndarray | None:
        if x is None:
            return None
        x = np.asarray(x)
        x = x if x.dtype == bool else x.astype(np.float64)
        return np.broadcast_to(x, shape).reshape(self.entries, *shape[-trailing:])

    def _ints(self, x: Any, trailing: tuple[int, ...]) -> np.ndarray:
        x = np.asarray(x).astype(np.int64)
        return np.broadcast_to(x, (*self.batch, *trailing)).reshape(self.entries, *trailing)


def _logsumexp(s: np.ndarray) -> float:
    top = s.max()
    if top == -np.inf:
        return -np.inf
    return top + math.log(np.exp(s - top).sum()) if np.isfinite(top) else top


def _sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(d for d, size in enumerate(shape) if size != x.shape[d]), keepdims=True)


def plain(inputs: Inputs) -> Results:
    """The same results from the formula as one would write it in JAX: products in the operands' dtype, softmax in
    float32, probabilities rounded to the dtype, and what differentiation makes of it. Rows with nothing to attend are
    cleared at the end, so that errors can be compared.
    """
    view, operands, batch = Aligned(inputs), inputs.operands, inputs.operands["query"].shape[:-3]
    dtype, num_q_heads = operands["query"].dtype, operands["query"].shape[-2]
    entries, seqlen_q, seqlen_kv = view.entries, view.seqlen_q, view.seqlen_kv
    group = num_q_heads // view.k.shape[2] if view.k.shape[2] else 1

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(dtype).astype(np.float32)

    def heads_first(x: np.ndarray, repeats: int = 1) -> np.ndarray:
        return np.repeat(np.swapaxes(x.astype(np.float32), 1, 2), repeats, axis=1)

    def heads_last(x: np.ndarray) -> np.ndarray:
        return np.swapaxes(x, 1, 2)

    def sum_of_group(x: np.ndarray) -> np.ndarray:
        return functools.reduce(lambda a, b: rounded(a + b), (x[:, i::group] for i in range(group)))

    q, k, v = heads_first(view.q), heads_first(view.k, group), heads_first(view.v, group)
    dout = heads_first(view.dout)
    every = [(b, n, i) for b in range(entries) for n in range(num_q_heads) for i in range(seqlen_q)]
    keep = np.array([view.allowed(*at) for at in every], bool).reshape(
        entries, num_q_heads, seqlen_q, seqlen_kv
    )
    attends = keep.any(-1, keepdims=True)

    scale = np.float32(view.scale)
    s = q @ np.swapaxes(k, -1, -2) * scale
    if view.bias is not None:
        s = s + view.bias.astype(np.float32)
    slope = np.float32(1)
    if view.cap is not None:
        cap = np.float32(view.cap)
        s = cap * np.tanh(s / cap)
        slope = 1 - np.square(s / cap)
    s = np.where(keep, s, np.float32(-1e30))
    sinks = np.full(num_q_heads, -1e30) if view.sinks is None else view.sinks
    sinks = np.broadcast_to(sinks.astype(np.float32)[:, None, None], (*s.shape[:-1], 1))
    s = np.concatenate([s, sinks], -1)
    top = s.max(-1, keepdims=True)
    e = np.exp(s - top)
    total = e.sum(-1, keepdims=True)
    p, lse = e / total, (np.log(total) + top)[..., 0]
    out = np.where(attends, rounded(rounded(p[..., :-1]) @ v), 0)

    dout = np.where(attends, dout, 0)
    dlse = np.where(np.arange(seqlen_q) < view.q_lengths[:, None, None], view.dlse, 0).astype(np.float32)
    dp = np.concatenate([rounded(dout @ np.swapaxes(v, -1, -2)), np.zeros_like(sinks)], -1)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True) + dlse[..., None])
    dsinks = ds[..., -1].sum((0, 2))
    ds = np.where(keep, ds[..., :-1], 0) * slope
    dq = rounded(ds * scale @ k)
    dk = sum_of_group(rounded(np.swapaxes(ds * scale, -1, -2) @ q))
    dv = sum_of_group(rounded(np.swapaxes(rounded(p[..., :-1]), -1, -2) @ dout))

    lse = np.where(lse < -1e29, -np.inf, lse)
    results = {"out": heads_last(out).reshape(*batch, *heads_last(out).shape[1:])}
    results["lse"] = lse.reshape(*batch, *lse.shape[1:])
    for name, x in (("query", dq), ("key", dk), ("value", dv)):
        results["d" + name] = heads_last(x).reshape(operands[name].shape)
    if view.bias is not None:
        results["dbias"] = _sum_to(ds.reshape(*batch, *ds.shape[1:]), operands["bias"].shape)
        results["dbias"] = results["dbias"].astype(operands["bias"].dtype)
    if view.sinks is not None:
        results["dsinks"] = dsinks
    return results

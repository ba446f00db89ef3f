"""The specification as plain einsums: `implementation="xla"`.

O(T*S) memory, any platform, differentiable any number of times in both modes. It follows the contract of `attention`
literally, so that tests can lean on it: masks select, an empty row is exactly zero, and what a row may not attend by
segment or by length reaches neither its result nor any derivative, although 0 * NaN is NaN (see `_isolated`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from jax_fmha import _core, _ffi, _sharding
from jax_fmha._mask import TileMask
from jax_fmha._problem import Options


def attention_xla(operands: Mapping[str, Any], options: Options) -> tuple[Any, Any]:
    """(out, lse) with the shapes of the custom call."""
    shapes = _ffi.result_shapes(tuple(operands), tuple(operands.values()), None)
    dtype, accumulator = operands["q"].dtype, shapes["lse"][1]
    q, k, v = (operands[name].astype(accumulator) for name in "qkv")
    num_q_heads, num_kv_heads = q.shape[-2], k.shape[-2]
    group = num_q_heads // num_kv_heads if num_kv_heads else 1
    isolated, masked = allowed_pairs(operands, options)
    allowed = _all([m for m in (isolated, masked) if m is not None])
    attends = None if allowed is None else allowed.any(-1)

    q = _select_rows(attends, q)
    rows = q.reshape(*q.shape[:-2], num_kv_heads, group, q.shape[-1])
    s = _scores(rows, k, isolated)
    s = s.reshape(*s.shape[:-4], num_q_heads, *s.shape[-2:])
    s = s * operands["scale"][..., None, None, None]
    if "bias" in operands:
        s = s + operands["bias"].astype(accumulator)
    # Selected before the soft cap, too: its derivative at NaN is NaN.
    s = _select(allowed, s, 0)
    if "logits_soft_cap" in operands:
        cap = operands["logits_soft_cap"][..., None, None, None]
        s = cap * jnp.tanh(s / cap)
    s = _select(allowed, s, -jnp.inf)

    p, lse = _softmax(s, operands.get("sinks"))
    out = _weighted(p.reshape(*p.shape[:-3], num_kv_heads, group, *p.shape[-2:]), v, isolated)
    out = _select_rows(attends, out.reshape(*out.shape[:-3], num_q_heads, out.shape[-1]))
    if "q_seq_lengths" in operands:  # the lse of a row beyond the length is the sink, but tells it nothing
        valid = jnp.arange(q.shape[-3]) < operands["q_seq_lengths"][..., None, None]
        lse = jnp.where(valid, lse, jax.lax.stop_gradient(lse))
    return (
        jnp.broadcast_to(out.astype(dtype), shapes["out"][0]),
        jnp.broadcast_to(lse, shapes["lse"][0]),
    )


def allowed_pairs(operands: Mapping[str, Any], options: Options) -> tuple[Any, Any]:
    """Two bool masks [*batch|1, N|1, T|1, S|1], True where row i may attend key j; None where nothing restricts.

    The first holds lengths and segments, across which not even NaN may pass; the second everything else.
    """
    seqlen_q, seqlen_kv = operands["q"].shape[-3], operands["k"].shape[-3]
    isolated, masked = [], []

    leading = (1,) * (operands["q"].ndim - 2)
    rows = jnp.arange(seqlen_q).reshape(*leading, seqlen_q, 1)
    cols = jnp.arange(seqlen_kv).reshape(*leading, 1, seqlen_kv)
    if "q_seq_lengths" in operands:
        isolated.append(rows < operands["q_seq_lengths"][..., None, None, None])
    if "kv_seq_lengths" in operands:
        isolated.append(cols < operands["kv_seq_lengths"][..., None, None, None])
    if "q_segment_ids" in operands:
        q_ids, kv_ids = operands["q_segment_ids"], operands["kv_segment_ids"]
        isolated.append(q_ids[..., None, :, None] == kv_ids[..., None, None, :])

    if "mask" in operands:
        masked.append(operands["mask"])
    if "mask_tiles" in operands:
        masked.append(TileMask(operands["mask_tiles"], operands["mask_bits"]).dense(seqlen_q, seqlen_kv))
    qpos = rows
    if "q_positions" in operands:
        qpos = operands["q_positions"][..., None, :, None]
    elif "query_offset" in operands:
        qpos = rows + operands["query_offset"][..., None, None, None]
    kpos = operands["kv_positions"][..., None, None, :] if "kv_positions" in operands else cols
    if options.is_causal:
        masked.append(kpos <= qpos)
    if options.window_left < _core.UNBOUNDED:
        masked.append(kpos >= _saturating_add(qpos, -options.window_left))
    if options.window_right < _core.UNBOUNDED:
        masked.append(kpos <= _saturating_add(qpos, options.window_right))
    return _all(isolated), _all(masked)


def _saturating_add(positions: Any, step: int) -> Any:
    """positions + step, held at the ends of the integer type instead of wrapping around."""
    lowest, highest = (int(end) for end in (jnp.iinfo(positions.dtype).min, jnp.iinfo(positions.dtype).max))
    step = min(max(step, lowest), highest)
    if step < 0:
        return jnp.where(positions < lowest - step, lowest, positions + step)
    return jnp.where(positions > highest - step, highest, positions + step)


def _all(masks: list[Any]) -> Any:
    if not masks:
        return None
    first, *others = masks
    for mask in others:
        first = first & mask
    return first


def _select(mask: Any, x: Any, otherwise: float) -> Any:
    return x if mask is None else jnp.where(mask, x, otherwise)


def _select_rows(mask: Any, x: Any) -> Any:
    """x [*batch, T, N, H], zero in the rows where the [*batch|1, N|1, T|1] mask is False."""
    return x if mask is None else jnp.where(jnp.swapaxes(mask, -1, -2)[..., None], x, 0)


def _softmax(s: Any, sinks: Any) -> tuple[Any, Any]:
    """(probabilities, lse) over the last axis; a row of -inf is all zeros with lse -inf (or the sink)."""
    top = jnp.max(s, axis=-1, keepdims=True, initial=-jnp.inf)
    if sinks is not None:
        sinks = sinks[..., None, None]
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    e = jnp.exp(s - top)
    total = e.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    lse = jnp.where(empty, -jnp.inf, jnp.log(total) + top)
    return e / total, lse[..., 0]


# Products of rows, keys and pairs -------------------------------------------------------------------------------------
# rows [*batch, T, K, G, H] are queries or outputs, cols [*batch, S, K, H] are keys or values, and pairs
# [*batch, K, G, T, S] are scores or probabilities. Batch dimensions have size 1 where they are shared.

# Result of a product -> its einsum, and for the transposes by the first and by the second operand: the product and
# the places of (cotangent, other operand) in it.
_PRODUCTS = {
    "pairs": ("...tkgh,...skh->...kgts", ("rows", False), ("cols", False)),  # of (rows, cols)
    "rows": ("...kgts,...skh->...tkgh", ("pairs", False), ("cols", True)),  # of (pairs, cols)
    "cols": ("...kgts,...tkgh->...skh", ("pairs", True), ("rows", True)),  # of (pairs, rows)
}


def _scores(rows: Any, cols: Any, isolated: Any) -> Any:
    return (
        _product("pairs", rows, cols) if isolated is None else _isolated(rows, cols, isolated, result="pairs")
    )


def _weighted(pairs: Any, cols: Any, isolated: Any) -> Any:
    return (
        _product("rows", pairs, cols) if isolated is None else _isolated(pairs, cols, isolated, result="rows")
    )


def _product(result: str, x: Any, y: Any) -> Any:
    return jnp.einsum(_PRODUCTS[result][0], x, y)


def _isolated(x: Any, y: Any, isolated: Any, *, result: str) -> Any:
    """The product without the pairs where `isolated` [*batch|1, 1, T|1, S|1] is False.

    Nothing passes through such a pair, not even NaN. This has to hold for every derivative, whose operands are
    cotangents that may be NaN, so it is a primitive: its transposes are products of the same kind.
    """
    return _isolated_p.bind(*_sharding.match_varying_axes([x, y, isolated[..., None, :, :]]), result=result)


def _isolated_impl(x: Any, y: Any, isolated: Any, *, result: str) -> Any:
    """A non-finite element of y makes NaN of every sum that it takes part in."""
    if result == "pairs":
        return jnp.where(isolated, _product(result, x, y), 0)
    finite = jnp.isfinite(y)
    total = _product(result, jnp.where(isolated, x, 0), jnp.where(finite, y, 0))
    everywhere = jnp.where(isolated, jnp.ones_like(x), 0)  # ones_like: with x's sharding
    reached = _product(result, everywhere, (~finite).astype(y.dtype))
    return jnp.where(reached > 0, jnp.nan, total)


def _isolated_abstract_eval(*avals: Any, result: str) -> Any:
    (aval,) = jax.make_jaxpr(lambda *args: _isolated_impl(*args, result=result))(*avals).out_avals
    return aval


def _isolated_transpose(ct: Any, x: Any, y: Any, isolated: Any, *, result: str) -> Any:
    by_first = ad.is_undefined_primal(x)
    wanted, other = (x, y) if by_first else (y, x)
    if type(ct) is ad.Zero:
        return [None] * 3
    of, swapped = _PRODUCTS[result][1 if by_first else 2]
    grad = _isolated_p.bind(*((other, ct) if swapped else (ct, other)), isolated, result=of)
    shared = [d for d, size in enumerate(wanted.aval.shape) if size != grad.shape[d]]
    grad = grad.sum(shared, keepdims=True)
    return [grad, None, None] if by_first else [None, grad, None]


def _isolated_batch(args: Any, dims: Any, *, result: str) -> Any:
    args = [x[None] if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    return _isolated_p.bind(*args, result=result), 0


_isolated_p = jex_core.Primitive("jax_fmha_isolated_product")
_isolated_p.def_impl(jax.jit(_isolated_impl, static_argnames="result"))
_isolated_p.def_abstract_eval(_isolated_abstract_eval)
ad.defjvp(
    _isolated_p,
    lambda t, x, y, isolated, *, result: _isolated_p.bind(t, y, isolated, result=result),
    lambda t, x, y, isolated, *, result: _isolated_p.bind(x, t, isolated, result=result),
    None,
)
ad.primitive_transposes[_isolated_p] = _isolated_transpose
batching.primitive_batchers[_isolated_p] = _isolated_batch
mlir.register_lowering(_isolated_p, mlir.lower_fun(_isolated_impl, multiple_results=False))

"""Ours and the peers: from a `Row` and its numbers to functions that can be timed.

Every contestant gets the same values in the layout that it likes best (torch: heads before rows) and, where
it cannot express segments or windows, a ready-made boolean mask. The backward is timed alone for everybody:
one forward keeps what it needs, then the gradients for query, key and value are computed from a given output
cotangent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fmha
from rows import Row

try:
    import torch
except ImportError:
    torch = None


class Unavailable(Exception):
    """A peer does not take part in a row; the message says why."""


@dataclasses.dataclass(frozen=True)
class Functions:
    """`forward()` and `backward()` return when done; `result(which)` gives float32 [B, T, N, H]s."""

    forward: Callable[[], Any]
    backward: Callable[[], Any]
    result: Callable[[str], list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Data:
    """float32 arrays, batch first, rows before heads."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray

    @classmethod
    def of(cls, row: Row) -> Data:
        random = np.random.default_rng(0)

        def normal(length: int, heads: int) -> np.ndarray:
            return random.standard_normal((row.batch, length, heads, row.head_dim), np.float32)

        q, dout = (normal(row.seqlen_q, row.num_q_heads) for _ in range(2))
        k, v = (normal(row.seqlen_kv, row.num_kv_heads) for _ in range(2))
        return cls(q, k, v, dout)


def _jax_functions(attend: Callable[..., jax.Array], row: Row, data: Data) -> Functions:
    dtype = jnp.dtype(row.dtype)
    q, k, v, dout = (jnp.asarray(x, dtype) for x in (data.q, data.k, data.v, data.dout))
    forward = jax.jit(attend)
    cotangents = jax.jit(lambda vjp, dout: vjp(dout))
    vjp = None

    def backward() -> Any:
        nonlocal vjp
        if vjp is None:
            _, vjp = jax.vjp(forward, q, k, v)
        return jax.block_until_ready(cotangents(vjp, dout))

    def result(which: str) -> list[np.ndarray]:
        got = [forward(q, k, v)] if which == "forward" else backward()
        return [np.asarray(x, np.float32) for x in got]

    return Functions(lambda: forward(q, k, v).block_until_ready(), backward, result)


def ours(row: Row, data: Data) -> Functions:
    segment_ids = jnp.asarray(row.segment_ids()) if row.documents else None
    window = None if row.window is None else (row.window - 1, 0)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax_fmha.attention(
            q, k, v, is_causal=row.is_causal, segment_ids=segment_ids, local_window_size=window
        )

    return _jax_functions(attend, row, data)


# A peer that writes all T*S scores keeps about this many copies of them, in float32, over a backward.
SCORE_COPIES = 6
SCORE_LIMIT_GIB = 8.0


def jax_nn(row: Row, data: Data) -> Functions:
    scores = row.batch * row.num_q_heads * row.seqlen_q * row.seqlen_kv * 4 * SCORE_COPIES / 2**30
    if scores > SCORE_LIMIT_GIB:
        raise Unavailable(f"about {scores:.0f} GiB of scores")
    mask = jnp.asarray(row.mask())[None, None] if row.needs_mask else None

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        is_causal = row.is_causal and mask is None
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=is_causal, implementation="xla")

    return _jax_functions(attend, row, data)


def torch_sdpa(row: Row, data: Data) -> Functions:
    if torch is None:
        raise Unavailable("torch is not installed")
    dtype = getattr(torch, row.dtype)
    q, k, v, dout = (
        torch.from_numpy(x).transpose(1, 2).contiguous().to(dtype)
        for x in (data.q, data.k, data.v, data.dout)
    )
    mask = torch.from_numpy(row.mask()) if row.needs_mask else None

    def attend(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=row.is_causal and mask is None,
            enable_gqa=row.num_q_heads != row.num_kv_heads,
        )

    saved = None

    def forward() -> Any:
        with torch.no_grad():
            return attend(q, k, v)

    def backward() -> Any:
        nonlocal saved
        if saved is None:
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            saved = inputs, attend(*inputs)
        return torch.autograd.grad(saved[1], saved[0], dout, retain_graph=True)

    def result(which: str) -> list[np.ndarray]:
        got = [forward()] if which == "forward" else backward()
        return [x.transpose(1, 2).float().numpy() for x in got]

    return Functions(forward, backward, result)


CONTESTANTS = {"ours": ours, "torch": torch_sdpa, "jax.nn": jax_nn}

SGEMM_SIZE = 2048


def sgemm() -> dict[str, Callable[[], Any]]:
    """Square float32 products: what this machine's best libraries reach."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((SGEMM_SIZE, SGEMM_SIZE), np.float32) for _ in range(2))
    ja, jb = jnp.asarray(a), jnp.asarray(b)
    dot = jax.jit(jnp.dot)
    products: dict[str, Callable[[], Any]] = {"XLA dot": lambda: dot(ja, jb).block_until_ready()}
    if torch is not None:
        ta, tb = torch.from_numpy(a), torch.from_numpy(b)
        products["torch.mm"] = lambda: torch.mm(ta, tb)
    return products


def disagreement(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    """Largest difference of two results, relative to the largest value."""
    return max(
        float(np.abs(g - w).max() / max(np.abs(w).max(), 1e-30)) for g, w in zip(got, want, strict=True)
    )

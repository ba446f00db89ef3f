"""Ours and the peers on a GPU: from a `GpuRow` to a function of query, key and value.

Peers that pack documents get their offsets ready-made; ours works out its plan from the segment ids in every call.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

import jax_fmha
from contestants import Unavailable
from gpu_rows import GpuRow

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def ours(row: GpuRow) -> Attend:
    ids = jnp.asarray(row.segment_ids()) if row.documents else None
    window = None if row.window is None else (row.window - 1, 0)
    return lambda q, k, v: jax_fmha.attention(
        q,
        k,
        v,
        is_causal=row.is_causal,
        segment_ids=ids,
        local_window_size=window,
        logits_soft_cap=row.logits_soft_cap,
    )


def fa3(row: GpuRow) -> Attend:
    """FlashAttention-3 through the package dew-flash-attn."""
    try:
        from dew_flash_attn import flash_mha, flash_mha_varlen
    except (ImportError, OSError) as error:
        raise Unavailable("dew-flash-attn is not installed") from error
    if row.logits_soft_cap is not None:
        raise Unavailable("has no soft cap")
    if row.documents:
        starts, longest = jnp.asarray(row.cu_seqlens()), max(row.documents)
        return lambda q, k, v: flash_mha_varlen(q[0], k[0], v[0], starts, longest, is_causal=True)[None]
    window = (-1, -1) if row.window is None else (row.window - 1, 0)
    pad = row.head_dim - row.head_dim_v  # takes one head_dim only
    if pad:
        widths = [(0, 0)] * 3 + [(0, pad)]
        return lambda q, k, v: flash_mha(q, k, jnp.pad(v, widths), is_causal=row.is_causal)[..., :-pad]
    return lambda q, k, v: flash_mha(q, k, v, is_causal=row.is_causal, window_size=window)


def cudnn(row: GpuRow) -> Attend:
    if row.documents:
        raise Unavailable("takes no segments")
    if row.head_dim != row.head_dim_v:
        raise Unavailable("takes one head_dim only")
    window = None if row.window is None else (row.window - 1, 0)
    return lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, is_causal=row.is_causal, local_window_size=window, implementation="cudnn"
    )


def jax_nn(row: GpuRow) -> Attend:
    """Plain einsums with a dense mask, for what no fused peer does; without the soft cap, so it has less to do."""
    if row.kind != "splash":
        raise Unavailable("measured on splash rows only")
    mask = jnp.asarray(row.mask())[:, None]
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="xla")


def tokamax(row: GpuRow) -> Attend:
    try:
        import tokamax
    except ImportError as error:
        raise Unavailable("tokamax is not installed") from error
    if row.kind == "splash":
        mask = jnp.asarray(row.mask())[:, None]
        return lambda q, k, v: tokamax.dot_product_attention(
            q, k, v, mask=mask, logits_soft_cap=row.logits_soft_cap
        )
    if row.documents or row.window is not None or row.head_dim != row.head_dim_v:
        raise Unavailable("measured on dense, grouped and splash rows only")
    return lambda q, k, v: tokamax.dot_product_attention(q, k, v, is_causal=row.is_causal)


PEERS: dict[str, Callable[[GpuRow], Attend]] = {
    "fa3": fa3,
    "cudnn": cudnn,
    "tokamax": tokamax,
    "jax.nn": jax_nn,
}

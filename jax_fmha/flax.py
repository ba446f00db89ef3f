"""`attention_fn` for Flax layers, linen and nnx, on our kernels. Does not import Flax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_fmha._attention import run
from jax_fmha._problem import canonical_call, mistake, show

Array = jax.Array


# linen passes the keyword arguments whose names stand in this signature and drops the others silently; nnx
# passes all of its own, `module` and `is_causal` among them. So every name of both must stand here.
def attention_fn(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Array] | None = None,
    qk_attn_weights_einsum: Callable[..., Array] | None = None,
    attn_weights_value_einsum: Callable[..., Array] | None = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
) -> Array:
    """Drop-in for the `dot_product_attention` of flax.linen and of flax.nnx as a layer's attention_fn.

    A row with nothing to attend gives 0; Flax gives the mean of all values.

    Args:
      query: `[*batch, T, N, H]`.
      key: `[*batch, S, K, H]`; N a multiple of K.
      value: `[*batch, S, K, Hv]`.
      bias: broadcastable to `[*batch, N, T, S]`, added after scaling by 1/sqrt(H).
      mask: bool, or numbers of which all but 0 keep; broadcastable to `[*batch, N, T, S]`.
      broadcast_dropout: how dropout would be drawn; none is.
      dropout_rng: needed by nothing, since no dropout is drawn.
      dropout_rate: 0, or anything if `deterministic`.
      deterministic: no dropout whatever the rate.
      dtype: of the computation and the result; by default the common type of query, key and value.
      precision: a `jax.lax.Precision`, its name, a pair of them, or None: a lower bound, which products in
        the operands' own dtype with float32 accumulation meet.
      module: a layer that asks for the attention weights; refused, since they are never formed.
      force_fp32_for_softmax: the softmax always is in float32.
      einsum_dot_general: refused.
      qk_attn_weights_einsum: refused.
      attn_weights_value_einsum: refused.
      promote_dtype: called as `promote_dtype((query, key, value), dtype=dtype)` in place of the default
        promotion.
      is_causal: row i attends keys up to i.

    Returns:
      `[*batch, T, N, Hv]`.

    Raises:
      ValueError: an operand does not fit.
      NotImplementedError: dropout, attention weights, or an einsum of the caller's.
    """
    del broadcast_dropout, dropout_rng, force_fp32_for_softmax
    if dropout_rate > 0 and not deterministic:
        raise NotImplementedError(
            f"attention_fn: dropout_rate: expected 0 while not deterministic, got {dropout_rate}. The "
            "kernels draw no attention dropout; set dropout_rate=0, pass deterministic=True, or drop out "
            "the layer's output."
        )
    if module is not None:
        raise NotImplementedError(
            "attention_fn: module: expected None, got a module that asks for the attention weights "
            "(sow_weights). They are never formed; use Flax's own attention where they are wanted."
        )
    for name, function in (
        ("einsum_dot_general", einsum_dot_general),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if function is not None:
            raise NotImplementedError(
                f"attention_fn: {name}: expected None, got {function!r}. The products run inside of one "
                "kernel and cannot be replaced; use Flax's own attention for quantised products."
            )
    _check_precision(precision)
    if promote_dtype is None:
        query, key, value = _promote(query, key, value, dtype)
    else:
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
    if mask is not None:
        mask = jnp.asarray(mask) != 0
    out, _ = run(canonical_call(query, key, value, bias, mask, is_causal=bool(is_causal)))
    return out


def _check_precision(precision: Any) -> None:
    for one in precision if isinstance(precision, (tuple, list)) else (precision,):
        if one is None:
            continue
        try:
            jax.lax.Precision(one)
        except ValueError as error:
            raise NotImplementedError(
                f"attention_fn: precision: expected a jax.lax.Precision or None, got {one!r}. The kernels "
                "multiply in the operands' dtype and accumulate in float32; cast the operands to choose "
                "another."
            ) from error


def _promote(query: Array, key: Array, value: Array, dtype: Any) -> tuple[Array, Array, Array]:
    """All three in `dtype`, or in their common floating type."""
    if dtype is None:
        dtype = jnp.result_type(query, key, value)
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise mistake("dtype", "a floating type", f"{jnp.dtype(dtype).name} for query {show(query)}", "Cast.")
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    return query, key, value

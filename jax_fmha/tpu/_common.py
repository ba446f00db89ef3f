"""What the TPU fronts share: promotion, mask sentinels, and the call that names its residuals."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_fmha._mask import SegmentIds as SegmentIds
from jax_fmha._problem import canonical_call
from jax_fmha._reference import attention_xla
from jax_fmha._vjp import CHECKPOINT_NAMES, attention_vjp

Array = jax.Array

DEFAULT_MASK_VALUE = -0.7 * float(np.finfo(np.dtype("float32")).max)

# A logit written for "masked" that is at least this low has weight 0 next to any logit of a float32 softmax
# that means something; a higher one would let masked keys take part.
HIGHEST_MASK_VALUE = -1e30


def check_mask_value(front: str, mask_value: Any) -> None:
    """Our masks select, so there is no sentinel to set; only values that mean just that are accepted."""
    if not mask_value <= HIGHEST_MASK_VALUE:
        raise NotImplementedError(
            f"{front}: mask_value: expected at most {HIGHEST_MASK_VALUE:g}, got {mask_value!r}. Masks "
            "select here, no sentinel is written into the logits; keys that should keep a weight need a "
            "bias, not a mask."
        )


def check_blocks(sizes: Any, nested: Sequence[tuple[str, str]]) -> None:
    """Raises ValueError unless all tiles of `sizes` are positive ints or None, and outer ones multiples of inner ones.

    Args:
      sizes: a dataclass whose fields `block_*` are tile sizes.
      nested: (outer, inner) names.
    """
    front = type(sizes).__name__
    for field in dataclasses.fields(sizes):
        size = getattr(sizes, field.name)
        if not field.name.startswith("block_") or (size is None and field.default is None):
            continue
        if not isinstance(size, numbers.Integral) or size < 1:
            raise ValueError(f"{front}: {field.name}: expected a positive int, got {size!r}.")
    for outer_name, inner_name in nested:
        outer, inner = getattr(sizes, outer_name), getattr(sizes, inner_name)
        if outer is not None and inner is not None and outer % inner:
            raise ValueError(
                f"{front}: {inner_name}: expected a divisor of {outer_name}={outer}, got {inner}."
            )


def check_kind(front: str, name: str, value: Any, kind: type) -> None:
    """Raises ValueError unless `value` is None or a `kind`: another library's object could mean something else."""
    if value is not None and not isinstance(value, kind):
        raise ValueError(
            f"{front}: {name}: expected {kind.__module__}.{kind.__qualname__} or None, got "
            f"{type(value).__module__}.{type(value).__qualname__}. Import it from the same module as the maker."
        )


def check_segment_ids(
    front: str, segment_ids: Any, q_shape: tuple[int, ...], kv_shape: tuple[int, ...]
) -> None:
    """Raises ValueError unless `segment_ids` is a pair of arrays of these shapes."""
    if not (hasattr(segment_ids, "q") and hasattr(segment_ids, "kv")):
        raise ValueError(
            f"{front}: segment_ids: expected SegmentIds(q, kv), got {type(segment_ids).__name__}. Build the "
            "pair."
        )
    for side, ids, shape in (("q", segment_ids.q, q_shape), ("kv", segment_ids.kv, kv_shape)):
        if tuple(ids.shape) != shape:
            raise ValueError(
                f"{front}: segment_ids.{side}: expected {list(shape)}, got {list(ids.shape)}. "
                "Ids follow the rows of query and of key."
            )


def promote(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """The three in one dtype: the originals accept mixed ones."""
    dtype = jnp.result_type(query, key, value)
    return query.astype(dtype), key.astype(dtype), value.astype(dtype)


def attention_with_names(
    query: Array,
    key: Array,
    value: Array,
    *,
    residual_checkpoint_name: str | None = None,
    interpret: bool = False,
    **kwargs: Any,
) -> tuple[Array, Array]:
    """`jax_fmha.attention(..., return_lse=True)` with residuals that carry `residual_checkpoint_name`.

    Args:
      query: `[*batch, T, N, H]`.
      key: `[*batch, S, K, H]`.
      value: `[*batch, S, K, Hv]`.
      residual_checkpoint_name: for both residuals; None keeps `jax_fmha.CHECKPOINT_NAMES`.
      interpret: evaluate by plain einsums (`implementation="xla"`) instead of a native kernel.
      **kwargs: as for `attention`.

    Returns:
      out `[*batch, T, N, Hv]`, lse `[*batch, N, T]`.
    """
    name = residual_checkpoint_name
    names = CHECKPOINT_NAMES if name is None else (name, name)
    call = canonical_call(query, key, value, implementation="xla" if interpret else None, **kwargs)
    if interpret:
        out, lse = attention_xla(call.operands, call.options)
        out, lse = checkpoint_name(out, names[0]), checkpoint_name(lse, names[1])
    else:
        out, lse = attention_vjp(call, names)
    return (out[0], lse[0]) if call.unbatched else (out, lse)

"""From the arguments of a public function to one checked, canonical `Call`.

Everything that depends on shapes and types alone is judged here, at trace time: the alignment of batch dimensions in
Python, the rest by the C++ validator that also guards the custom call at run time.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_fmha import _core
from jax_fmha._mask import SegmentIds, TileMask

IMPLEMENTATIONS = ("cpu", "sm90", "sm100", "xla")
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Options:
    """The static part of a call: hashable, the same for the forward and the backward."""

    is_causal: bool = False
    window_left: int = _core.UNBOUNDED
    window_right: int = _core.UNBOUNDED
    deterministic: bool = False
    implementation: str = ""

    def attributes(self) -> dict[str, Any]:
        """Attributes of the custom calls."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Call:
    """Operands by internal name, each with all batch dimensions (in full or 1) in front; absent ones left out."""

    operands: Mapping[str, Any]
    options: Options
    unbatched: bool  # the caller gave no batch dimension; one of size 1 was added

    def problem(self) -> _core.Problem:
        return describe(self.operands, self.options)


def describe(operands: Mapping[str, Any], options: Options, *, backward: bool = False) -> _core.Problem:
    """Runs the C++ validator on shapes and types. Raises ValueError."""
    specs = {name: (list(x.shape), jnp.dtype(x.dtype).name) for name, x in operands.items()}
    return _core.describe(backward, specs, options.attributes())


def mistake(operand: str, expected: str, got: str, remedy: str) -> ValueError:
    return ValueError(f"attention: {operand}: expected {expected}, got {got}. {remedy}")


def show(x: Any) -> str:
    return f"{list(x.shape)} {jnp.dtype(x.dtype).name}"


def canonical_window(window: Any) -> tuple[int, int]:
    """(left, right) with `UNBOUNDED` for None."""
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2 or not all(s is None or isinstance(s, numbers.Integral) for s in sides):
        raise mistake(
            "local_window_size",
            "None, an int, or a pair (left, right) of ints or None",
            repr(window),
            "A window is static: it shapes the schedule.",
        )
    left, right = (_core.UNBOUNDED if s is None else int(s) for s in sides)
    return left, right


def canonical_implementation(implementation: str | None) -> str:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise mistake(
            "implementation",
            "None or one of " + ", ".join(IMPLEMENTATIONS),
            repr(implementation),
            "None selects the best native kernel of the platform.",
        )
    return implementation or ""


def canonical_call(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    local_window_size: Any = None,
    logits_soft_cap: Any = None,
    query_offset: Any = 0,
    query_positions: Any = None,
    key_value_positions: Any = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    segment_ids: Any = None,
    sinks: Any = None,
    deterministic: bool = False,
    implementation: str | None = None,
) -> Call:
    """Checks and aligns all arguments of `attention`. Raises ValueError naming the operand and the remedy."""
    for name, flag in (("is_causal", is_causal), ("deterministic", deterministic)):
        if not isinstance(flag, (bool, np.bool_)):
            raise mistake(name, "a Python bool", repr(flag), "It is static; mark it so under jit.")
    window_left, window_right = canonical_window(local_window_size)
    options = Options(
        is_causal=bool(is_causal),
        window_left=window_left,
        window_right=window_right,
        deterministic=bool(deterministic),
        implementation=canonical_implementation(implementation),
    )

    q, k, v = (_array(n, x) for n, x in (("query", query), ("key", key), ("value", value)))
    if q.ndim < 3:
        raise mistake("query", "[*batch, T, N, H]", show(q), "Add the missing dimensions.")
    unbatched = q.ndim == 3
    batch_rank = max(1, q.ndim - 3)
    aligned = _Aligner(batch_rank, unbatched)
    operands = {name: aligned.exactly(x, 3) for name, x in (("q", q), ("k", k), ("v", v))}

    if bias is not None:
        operands["bias"] = aligned.broadcast("bias", _array("bias", bias), 3)
    if isinstance(mask, TileMask):
        for part in ("tiles", "bits"):
            x = _array(f"mask.{part}", getattr(mask, part))
            operands[f"mask_{part}"] = aligned.broadcast(f"mask.{part}", x, 3)
    elif mask is not None:
        operands["mask"] = aligned.broadcast("mask", _array("mask", mask), 3)

    accumulator = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0
    operands["scale"] = aligned.scalar("scale", scale, accumulator)
    if logits_soft_cap is not None:
        if isinstance(logits_soft_cap, numbers.Real) and not float(logits_soft_cap) > 0:
            raise mistake("logits_soft_cap", "a positive number", repr(logits_soft_cap), "None turns it off.")
        operands["logits_soft_cap"] = aligned.scalar("logits_soft_cap", logits_soft_cap, accumulator)
    if sinks is not None:
        sinks = _array("sinks", sinks)
        if not jnp.issubdtype(sinks.dtype, jnp.floating) or sinks.ndim != 1:
            raise mistake("sinks", "float [N], one logit per query head", show(sinks), "Reshape or cast it.")
        operands["sinks"] = aligned.broadcast("sinks", sinks.astype(accumulator), 1)

    if not (isinstance(query_offset, numbers.Integral) and query_offset == 0):
        operands["query_offset"] = aligned.integers("query_offset", query_offset, 0)
    if segment_ids is not None:
        ids = segment_ids if _is_segment_ids(segment_ids) else SegmentIds(segment_ids, segment_ids)
        operands["q_segment_ids"] = aligned.integers("segment_ids.q", ids.q, 1)
        operands["kv_segment_ids"] = aligned.integers("segment_ids.kv", ids.kv, 1)
    for name, public, x, trailing in (
        ("q_positions", "query_positions", query_positions, 1),
        ("kv_positions", "key_value_positions", key_value_positions, 1),
        ("q_seq_lengths", "query_seq_lengths", query_seq_lengths, 0),
        ("kv_seq_lengths", "key_value_seq_lengths", key_value_seq_lengths, 0),
    ):
        if x is not None:
            operands[name] = aligned.integers(public, x, trailing)

    call = Call(operands, options, unbatched)
    call.problem()
    return call


def _is_segment_ids(x: Any) -> bool:
    """Ours, or another library's pair of the same field names."""
    return hasattr(x, "q") and hasattr(x, "kv")


def _array(name: str, x: Any) -> Any:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise mistake(name, "an array", type(x).__name__, "Pass a jax or numpy array.") from error


class _Aligner:
    """Brings operands to `batch_rank` leading dimensions, adding dimensions of size 1 for what is shared."""

    def __init__(self, batch_rank: int, unbatched: bool):
        self.batch_rank = batch_rank
        self.unbatched = unbatched

    def exactly(self, x: Any, trailing: int) -> Any:
        return x[None] if self.unbatched and x.ndim == trailing else x

    def broadcast(self, name: str, x: Any, trailing: int) -> Any:
        rank = self.batch_rank + trailing
        if x.ndim > rank:
            raise mistake(name, f"at most {rank} dimensions", show(x), "Drop or merge dimensions.")
        return jnp.expand_dims(x, range(rank - x.ndim))

    def scalar(self, name: str, x: Any, dtype: Any) -> Any:
        x = _array(name, x)
        if x.ndim != 0 or not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
            raise mistake(name, "a scalar", show(x), "vmap over a scale per entry, or fold it into query.")
        return jnp.expand_dims(x.astype(dtype), range(self.batch_rank))

    def integers(self, name: str, x: Any, trailing: int) -> Any:
        x = _array(name, x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise mistake(name, "integers", show(x), "Cast it to int32.")
        if x.ndim not in (trailing, self.batch_rank - self.unbatched + trailing):
            shape = "[*batch]" if trailing == 0 else "[*batch, length]"
            raise mistake(
                name, f"{shape} or the same without batch dimensions", show(x), "Reshape or broadcast it."
            )
        return _int32_or_int64(name, jnp.expand_dims(x, range(self.batch_rank + trailing - x.ndim)))


def _int32_or_int64(name: str, x: Any) -> Any:
    if x.dtype in (jnp.int32, jnp.int64):
        return x
    if x.dtype in (jnp.uint32, jnp.uint64):
        raise mistake(name, "int32, int64 or a narrower integer", show(x), "Cast it to int32.")
    return x.astype(jnp.int32)

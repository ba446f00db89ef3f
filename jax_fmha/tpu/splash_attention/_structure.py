"""From a mask object to what a kernel takes: a band, chunks, and parts that must be evaluated.

allowed[i, j] = p[i] + lowest <= j <= p[i] + highest          p: position of row i, 0, 1, 2, ... unless given
                and p[i] // c == j // c                       for every chunk size c
                and part[i, j]                                for every part that has no such structure
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_fmha._mask import TileMask
from jax_fmha.tpu.splash_attention.splash_attention_mask import (
    CausalMask,
    ChunkedCausalMask,
    FullMask,
    LocalMask,
    LogicalAnd,
    LogicalOr,
    Mask,
    _ComputableMask,
)


class Part:
    """A mask to evaluate; equal where the masks say so, and to itself where they cannot tell."""

    def __init__(self, mask: Mask):
        self.mask = mask

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Part):
            return NotImplemented
        if self.mask is other.mask:
            return True
        try:
            return bool(self.mask == other.mask)
        except NotImplementedError:
            return False

    def __hash__(self) -> int:
        try:
            return hash(self.mask)
        except (NotImplementedError, TypeError):
            return id(self.mask)


@dataclasses.dataclass(frozen=True)
class Structure:
    """See the module. Equal structures allow the same pairs."""

    lowest: float = -math.inf
    highest: float = math.inf
    chunks: tuple[int, ...] = ()
    positions: bytes | None = None  # int32; None for 0, 1, 2, ...
    parts: tuple[Part, ...] = ()

    def uses_positions(self) -> bool:
        return self.lowest > -math.inf or self.highest < math.inf or bool(self.chunks)

    def is_band(self) -> bool:
        return not self.chunks and not self.parts


def structure(mask: Mask) -> Structure:
    """The structure of one head's mask."""
    if isinstance(mask, FullMask):
        return Structure()
    if isinstance(mask, LogicalAnd):
        return _intersection(structure(mask.left), structure(mask.right), mask.right)
    if isinstance(mask, LogicalOr):
        union = _union(structure(mask.left), structure(mask.right))
        return union if union is not None else Structure(parts=(Part(mask),))
    rule = _own_rule(mask)
    if isinstance(rule, CausalMask):
        found = Structure(highest=rule.offset)
    elif isinstance(rule, LocalMask):
        left, right = (math.inf if side is None else side for side in rule.window_size)
        found = Structure(lowest=rule.offset - left, highest=rule.offset + right)
    elif isinstance(rule, ChunkedCausalMask):
        found = Structure(highest=0, chunks=(rule.chunk_size,))
    else:
        return Structure(parts=(Part(mask),))
    return _bound(found, mask)


def _own_rule(mask: Any) -> Any:
    """The mask of this library whose rule `mask` follows; None if it brings a rule of its own."""
    if not isinstance(mask, _ComputableMask) or type(mask).__getitem__ is not _ComputableMask.__getitem__:
        return None
    function: Any = mask.mask_function
    own = (CausalMask._allows, LocalMask._allows, ChunkedCausalMask._allows)
    return function.__self__ if getattr(function, "__func__", None) in own else None


def _bound(found: Structure, mask: Any) -> Structure:
    """`found` with the mask's positions; limits that no pair reaches go, those that all pass are cut."""
    rows, columns = mask.shape
    positions = np.asarray(mask.q_sequence)
    if positions.shape != (rows,) or not np.issubdtype(positions.dtype, np.integer):
        raise ValueError(
            f"{type(mask).__name__}.q_sequence: expected int32 [{rows}], one position per query row, got "
            f"{list(positions.shape)} {positions.dtype}."
        )
    if not positions.size:
        return Structure()
    first, last = int(positions.min()), int(positions.max())
    lowest, highest = found.lowest, found.highest
    lowest = -math.inf if last + lowest <= 0 else min(lowest, columns - first)
    highest = math.inf if first + highest >= columns - 1 else max(highest, -1 - last)
    own = None if np.array_equal(positions, np.arange(rows)) else positions.astype(np.int32).tobytes()
    result = dataclasses.replace(found, lowest=lowest, highest=highest, positions=own)
    return result if result.uses_positions() else Structure()


def _intersection(left: Structure, right: Structure, right_mask: Mask) -> Structure:
    if left.uses_positions() and right.uses_positions() and left.positions != right.positions:
        right = Structure(parts=(Part(right_mask),))
    return Structure(
        lowest=max(left.lowest, right.lowest),
        highest=min(left.highest, right.highest),
        chunks=tuple(sorted({*left.chunks, *right.chunks})),
        positions=(left if left.uses_positions() else right).positions,
        parts=(*left.parts, *(p for p in right.parts if p not in left.parts)),
    )


def _union(left: Structure, right: Structure) -> Structure | None:
    """The union where it is a band again: of bands that overlap or touch."""
    if left == right:
        return left
    if Structure() in (left, right):
        return Structure()
    if not (left.is_band() and right.is_band()) or left.positions != right.positions:
        return None
    for band, other in ((left, right), (right, left)):
        if band.lowest > band.highest:
            return other
    if max(left.lowest, right.lowest) > min(left.highest, right.highest) + 1:
        return None
    joined = dataclasses.replace(
        left, lowest=min(left.lowest, right.lowest), highest=max(left.highest, right.highest)
    )
    return joined if joined.uses_positions() else Structure()


def evaluate(heads: Sequence[tuple[Part, ...]], shape: tuple[int, int], tile: tuple[int, int]) -> TileMask:
    """What all parts of a head allow, for each head; read tile by tile, and once for heads that are equal."""
    readers = {parts: _reader(parts) for parts in heads}
    return TileMask.from_readers([readers[parts] for parts in heads], shape, tile)


def _reader(parts: Sequence[Part]) -> Callable[[slice, slice], np.ndarray]:
    def read(rows: slice, columns: slice) -> np.ndarray:
        found: Any = True
        for part in parts:
            with jax.ensure_compile_time_eval():  # a rule may be written in jax.numpy
                allowed = np.asarray(part.mask[rows, columns])
            if allowed.dtype != bool:
                raise ValueError(
                    f"{type(part.mask).__name__}: expected bool, got {allowed.dtype}. Let the mask's rule "
                    "compare, as in `!= 0`."
                )
            found = found & allowed
        return found

    return read


def chunk_ids(found: Structure, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """int32 ids `[T]` and `[S]`, equal where row and key share the chunk of every size."""
    rows, columns = shape
    positions = np.arange(rows) if found.positions is None else np.frombuffer(found.positions, np.int32)
    both = np.concatenate([positions, np.arange(columns)]).astype(np.int64)
    per_size = np.stack([both // size for size in found.chunks], axis=1)
    _, ids = np.unique(per_size, axis=0, return_inverse=True)
    ids = ids.reshape(-1).astype(np.int32)
    return ids[:rows], ids[rows:]

"""Mask objects of splash attention under the names of the original.

A mask says which keys a query row may attend: indexed with two slices it gives a bool array, True keeps. What
our kernels can take of a mask as structure is read off by `_structure`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class Mask:
    """Base of all masks: a shape `(T, S)` and bool values on demand."""

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    def __getitem__(self, idx: Any) -> np.ndarray:
        raise NotImplementedError

    def __bool__(self) -> bool:
        raise NotImplementedError(
            "Mask: a mask has no truth value. Combine masks with `&` and `|`, not with `and` and `or`."
        )

    def __or__(self, other: Mask) -> Mask:
        return LogicalOr(self, other)

    def __and__(self, other: Mask) -> Mask:
        return LogicalAnd(self, other)


# Dense masks as arrays --------------------------------------------------------------------------------------


def _rows_and_columns(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = shape
    return np.arange(rows, dtype=np.int32)[:, None], np.arange(columns, dtype=np.int32)[None, :]


def make_causal_mask(shape: tuple[int, int], offset: int = 0) -> np.ndarray:
    """bool `[T, S]`: key j <= row i + offset."""
    i, j = _rows_and_columns(shape)
    return j <= i + offset


def make_local_attention_mask(
    shape: tuple[int, int], window_size: tuple[int | None, int | None], *, offset: int = 0
) -> np.ndarray:
    """bool `[T, S]`: row i + offset - left <= key j <= row i + offset + right; None leaves a side open."""
    i, j = _rows_and_columns(shape)
    left, right = window_size
    mask = np.ones(shape, np.bool_)
    if left is not None:
        mask &= i + offset - left <= j
    if right is not None:
        mask &= j <= i + offset + right
    return mask


def make_chunk_attention_mask(shape: tuple[int, int], chunk_size: int) -> np.ndarray:
    """bool `[T, S]`: key j <= row i in the same chunk of `chunk_size` (positive) positions."""
    if chunk_size <= 0:
        raise ValueError(f"make_chunk_attention_mask: chunk_size must be positive, got {chunk_size}")
    i, j = _rows_and_columns(shape)
    return (j <= i) & (i // chunk_size == j // chunk_size)


def make_random_mask(shape: tuple[int, int], sparsity: float, seed: int) -> np.ndarray:
    """bool `shape`, each element False with probability `sparsity`; the values of the original for a seed."""
    return np.random.RandomState(seed).binomial(n=1, p=1.0 - sparsity, size=shape).astype(np.bool_)


# Combinations -----------------------------------------------------------------------------------------------


def _same_shape(left: Mask, right: Mask) -> None:
    if left.shape != right.shape:
        raise ValueError(f"Mask: shapes differ: {left.shape} and {right.shape}")


@dataclasses.dataclass
class LogicalOr(Mask):
    """What either mask allows."""

    left: Mask
    right: Mask

    def __post_init__(self) -> None:
        _same_shape(self.left, self.right)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.left.shape

    def __getitem__(self, idx: Any) -> np.ndarray:
        return self.left[idx] | self.right[idx]

    def __hash__(self) -> int:
        return hash((type(self), self.left, self.right))


@dataclasses.dataclass
class LogicalAnd(Mask):
    """What both masks allow."""

    left: Mask
    right: Mask

    def __post_init__(self) -> None:
        _same_shape(self.left, self.right)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.left.shape

    def __getitem__(self, idx: Any) -> np.ndarray:
        return self.left[idx] & self.right[idx]

    def __hash__(self) -> int:
        return hash((type(self), self.left, self.right))


@dataclasses.dataclass
class MultiHeadMask(Mask):
    """One mask per query head, all of one shape; indexed as `[heads, T, S]`."""

    masks: Sequence[Mask]

    def __post_init__(self) -> None:
        if not self.masks:
            raise ValueError("MultiHeadMask: expected at least one mask, got none")
        for mask in self.masks:
            if not isinstance(mask, Mask) or isinstance(mask, MultiHeadMask):
                raise ValueError(
                    "MultiHeadMask: expected masks of this module for single heads, got "
                    f"{type(mask).__name__}"
                )
            _same_shape(self.masks[0], mask)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.masks), *self.masks[0].shape)

    def __getitem__(self, idx: Any) -> np.ndarray:
        if len(idx) != 3:
            raise NotImplementedError(f"MultiHeadMask: expected an index and two slices, got {idx}")
        head, *rest = idx
        if isinstance(head, slice):
            return np.stack([mask[tuple(rest)] for mask in self.masks[head]])
        return self.masks[head][tuple(rest)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return list(self.masks) == list(other.masks)

    def __hash__(self) -> int:
        return hash((type(self), *self.masks))


# Masks by rule ----------------------------------------------------------------------------------------------


def _bounds(idx: Any, shape: tuple[int, ...]) -> list[slice]:
    """Two slices with both ends filled in. Raises NotImplementedError for any other index."""
    if len(idx) != 2 or not all(isinstance(s, slice) and s.step in (None, 1) for s in idx):
        raise NotImplementedError(f"Mask: expected two slices of step 1, got {idx}")
    bounds = []
    for s, size in zip(idx, shape, strict=True):
        start = 0 if s.start is None else s.start
        stop = size if s.stop is None else s.stop
        if start < 0 or stop > size:
            raise IndexError(f"Mask: slice {start}:{stop} is outside of 0:{size}")
        bounds.append(slice(start, stop))
    return bounds


class _ComputableMask(Mask):
    """A mask given by a rule; subclass it, or pass the rule.

    Attributes:
      q_sequence: position of each query row, int32 `[T]`; 0, 1, 2, ... unless overwritten.
      mask_function: called with positions `[rows, 1]` and key indices `[1, columns]`, returns bool, True
        keeps.
    """

    _shape: tuple[int, int]
    q_sequence: np.ndarray
    mask_function: Callable[..., Any]

    def __init__(self, shape: tuple[int, int], mask_function: Callable[..., Any], shard_count: int = 1):
        if shape[0] % shard_count**2:
            raise ValueError(
                f"{type(self).__name__}: shard_count squared ({shard_count**2}) must divide the number of "
                f"query rows ({shape[0]})"
            )
        self._shape = shape
        self.mask_function = mask_function
        self.q_sequence = np.arange(shape[0], dtype=np.int32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def __getitem__(self, idx: Any) -> np.ndarray:
        rows, columns = _bounds(idx, self.shape)
        keys = np.arange(columns.start, columns.stop)
        return self.mask_function(self.q_sequence[rows][:, None], keys[None, :])

    def __eq__(self, other: object) -> bool:
        raise NotImplementedError(
            f"{type(self).__name__}: define __eq__ to let equal masks of heads be recognised"
        )

    def __hash__(self) -> int:
        raise NotImplementedError(
            f"{type(self).__name__}: define __hash__ to let equal masks of heads be recognised"
        )


class _RuleMask(_ComputableMask):
    """A computable mask whose rule is the method `_allows` and whose parameters are `_parameters`."""

    def __init__(self, shape: tuple[int, int], shard_count: int):
        super().__init__(shape, self._allows, shard_count)

    def _allows(self, q_ids: Any, kv_ids: Any) -> Any:
        raise NotImplementedError

    def _parameters(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return (
            self.shape == other.shape
            and self._parameters() == other._parameters()
            and np.array_equal(self.q_sequence, other.q_sequence)
        )

    def __hash__(self) -> int:
        return hash((type(self), self.shape, self._parameters(), self.q_sequence.tobytes()))


class CausalMask(_RuleMask):
    """Key j <= position + offset."""

    offset: int

    def __init__(self, shape: tuple[int, int], offset: int = 0, shard_count: int = 1):
        self.offset = offset
        super().__init__(shape, shard_count)

    def _allows(self, q_ids: Any, kv_ids: Any) -> Any:
        return kv_ids <= q_ids + self.offset

    def _parameters(self) -> tuple[Any, ...]:
        return (self.offset,)


class LocalMask(_RuleMask):
    """Position + offset - left <= key j <= position + offset + right; None leaves a side open."""

    window_size: tuple[int | None, int | None]
    offset: int

    def __init__(
        self,
        shape: tuple[int, int],
        window_size: tuple[int | None, int | None],
        offset: int,
        shard_count: int = 1,
    ):
        self.window_size = window_size
        self.offset = offset
        super().__init__(shape, shard_count)

    def _allows(self, q_ids: Any, kv_ids: Any) -> Any:
        left, right = self.window_size
        center = q_ids + self.offset
        mask = np.ones((q_ids.shape[0], kv_ids.shape[1]), np.bool_)
        if left is not None:
            mask = mask & (center - left <= kv_ids)
        if right is not None:
            mask = mask & (kv_ids <= center + right)
        return mask

    def _parameters(self) -> tuple[Any, ...]:
        return (tuple(self.window_size), self.offset)


class ChunkedCausalMask(_RuleMask):
    """Key j <= position, in the same chunk of `chunk_size` positions (Llama 4)."""

    chunk_size: int

    def __init__(self, shape: tuple[int, int], chunk_size: int, shard_count: int = 1):
        if chunk_size <= 0:
            raise ValueError(f"ChunkedCausalMask: chunk_size must be positive, got {chunk_size}")
        self.chunk_size = chunk_size
        super().__init__(shape, shard_count)

    def _allows(self, q_ids: Any, kv_ids: Any) -> Any:
        return (kv_ids <= q_ids) & (q_ids // self.chunk_size == kv_ids // self.chunk_size)

    def _parameters(self) -> tuple[Any, ...]:
        return (self.chunk_size,)


# Masks by value ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class NumpyMask(Mask):
    """A bool array `[T, S]`."""

    array: np.ndarray

    def __post_init__(self) -> None:
        if self.array.ndim != 2 or self.array.dtype != np.bool_:
            raise ValueError(
                f"NumpyMask: expected bool [T, S], got {list(self.array.shape)} {self.array.dtype}. Convert "
                "with `!= 0`."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __getitem__(self, idx: Any) -> np.ndarray:
        return self.array[idx]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash((type(self), self.array.tobytes()))


@dataclasses.dataclass(frozen=True)
class FullMask(Mask):
    """Every key."""

    _shape: tuple[int, int]

    def __post_init__(self) -> None:
        if not isinstance(self._shape, tuple):
            raise ValueError(f"FullMask: expected a tuple (T, S), got {type(self._shape).__name__}")

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def __getitem__(self, idx: Any) -> np.ndarray:
        rows, columns = _bounds(idx, self.shape)
        return np.ones((rows.stop - rows.start, columns.stop - columns.start), np.bool_)

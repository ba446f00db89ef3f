"""Masks with structure: segment ids, and block-sparse masks of tile classes plus packed bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

EMPTY, FULL, FIRST_PARTIAL = 0, 1, 2


class SegmentIds(NamedTuple):
    """Segment ids of queries and of keys/values. A query attends the keys whose id equals its own.

    Attributes:
      q: ints `[*batch, T]`, or `[T]` shared by all batch entries.
      kv: ints `[*batch, S]`, or `[S]`.
    """

    q: jax.typing.ArrayLike
    kv: jax.typing.ArrayLike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TileMask:
    """A bool mask in tiles: kernels skip empty tiles, do not look into full ones, and read bits in partial ones.

    Memory is 4 bytes per tile and one bit per pair of each distinct partial tile, not O(T*S) bytes; equal partial
    tiles are stored once. Pass it as `mask=` to `attention`.

    Attributes:
      tiles: int32 `[*batch|1, N|1, ceil(T / rows), ceil(S / cols)]`: 0 nothing may attend, 1 everything may, 2 + p
        as partial tile p says. Batch dimensions may be left out.
      bits: uint8 `[*batch|1, P, rows, cols / 8]`: pair (i, j) of a tile is bit j % 8 (least significant first) of byte
        j // 8 of row i; set where attended. What lies past T or S is not read.
    """

    tiles: Any
    bits: Any

    @classmethod
    def from_functions(
        cls,
        functions: Sequence[Callable[[np.ndarray, np.ndarray], np.ndarray]],
        shape: tuple[int, int],
        tile: tuple[int, int] = (128, 128),
    ) -> TileMask:
        """Evaluates masks tile by tile, in numpy, one row of tiles at a time.

        Args:
          functions: one per query head, or a single one for all: takes row numbers `[rows, 1]` and column numbers
            `[1, S]`, gives bool `[rows, S]` (or broadcastable), True where attended. Equal ones are evaluated once.
          shape: (T, S).
          tile: (rows, cols) of a tile; cols a multiple of 8.
        """
        builder = _Builder(shape, tile)
        seqlen_q, seqlen_kv = shape
        cols = np.arange(seqlen_kv)[None, :]
        done: dict[Any, np.ndarray] = {}
        for function in functions:
            if function not in done:
                stripes = (
                    np.broadcast_to(
                        np.asarray(function(rows, cols), bool),
                        (len(rows), seqlen_kv),
                    )
                    for rows in (
                        np.arange(start, min(start + tile[0], seqlen_q))[:, None]
                        for start in range(0, seqlen_q, tile[0])
                    )
                )
                done[function] = builder.classify(stripes)
        return builder.finish([done[function] for function in functions])

    @classmethod
    def from_array(cls, mask: np.ndarray, tile: tuple[int, int] = (128, 128)) -> TileMask:
        """From a dense bool array `[N|1, T, S]` in host memory."""
        mask = np.asarray(mask)
        if mask.dtype != bool or mask.ndim != 3:
            raise ValueError(
                f"attention: mask: expected bool [N|1, T, S] in host memory, got {list(mask.shape)} {mask.dtype}."
            )
        builder = _Builder(mask.shape[1:], tile)
        return builder.finish(
            [
                builder.classify(head[start : start + tile[0]] for start in range(0, head.shape[0], tile[0]))
                for head in mask
            ]
        )

    def dense(self, seqlen_q: int, seqlen_kv: int) -> jax.Array:
        """The mask as bool `[*batch|1, N|1, T, S]`: O(T*S) memory, for `implementation="xla"` and tests."""
        rows, cols = self.bits.shape[-2], self.bits.shape[-1] * 8
        partial = jnp.unpackbits(self.bits, axis=-1, bitorder="little").astype(bool)
        constant = [jnp.full((*partial.shape[:-3], 1, rows, cols), value) for value in (False, True)]
        table = jnp.concatenate([*constant, partial], axis=-3)
        batch = np.broadcast_shapes(self.tiles.shape[:-3], table.shape[:-3])
        tiles = jnp.broadcast_to(self.tiles, (*batch, *self.tiles.shape[-3:]))
        table = jnp.broadcast_to(table, (*batch, *table.shape[-3:]))
        take: Any = lambda entries, numbers: entries[numbers]  # noqa: E731
        for _ in batch:
            take = jax.vmap(take)
        blocks = jnp.swapaxes(take(table, tiles), -3, -2)  # [*batch, N|1, tile rows, rows, tile cols, cols]
        whole = blocks.reshape(*blocks.shape[:-4], blocks.shape[-4] * rows, blocks.shape[-2] * cols)
        return whole[..., :seqlen_q, :seqlen_kv]


class _Builder:
    """Collects distinct partial tiles while heads are classified."""

    def __init__(self, shape: tuple[int, ...], tile: tuple[int, int]):
        self.rows, self.cols = tile
        if self.rows < 1 or self.cols < 8 or self.cols % 8:
            raise ValueError(
                f"attention: mask: expected tiles of (rows, a multiple of 8 columns), got {tile}."
            )
        self.grid = tuple(-(-size // edge) for size, edge in zip(shape, tile, strict=True))
        self.numbers: dict[bytes, int] = {}

    def classify(self, stripes: Iterable[np.ndarray]) -> np.ndarray:
        """Tile classes of one head, from its rows of tiles in order."""
        tiles = np.zeros(self.grid, np.int32)
        for i, stripe in enumerate(stripes):
            for j in range(self.grid[1]):
                block = stripe[:, j * self.cols : (j + 1) * self.cols]
                if block.all():
                    tiles[i, j] = FULL
                elif block.any():
                    tiles[i, j] = self._number(block)
        return tiles

    def _number(self, block: np.ndarray) -> int:
        padded = np.zeros((self.rows, self.cols), bool)
        padded[: block.shape[0], : block.shape[1]] = block
        packed = np.packbits(padded, axis=-1, bitorder="little").tobytes()
        return self.numbers.setdefault(packed, FIRST_PARTIAL + len(self.numbers))

    def finish(self, heads: Sequence[np.ndarray]) -> TileMask:
        shared = all(head is heads[0] for head in heads)
        tiles = np.stack(heads[:1] if shared else heads) if heads else np.zeros((0, *self.grid), np.int32)
        bits = np.frombuffer(b"".join(self.numbers), np.uint8)
        return TileMask(tiles, bits.reshape(len(self.numbers), self.rows, self.cols // 8))

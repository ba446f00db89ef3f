"""Masks with structure: segment ids, and block-sparse masks of tile classes plus packed bits."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

EMPTY, FULL, FIRST_PARTIAL = 0, 1, 2

TILE = (128, 128)

# Pairs that are evaluated together on the host: bounds the temporaries of a rule, whatever T and S are.
_PAIRS_AT_A_TIME = 1 << 20


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

    Memory is 4 bytes per tile and one bit per pair of each partial tile, not O(T*S) bytes. Made in host memory, equal
    partial tiles are stored once; made from a `jax.Array`, which may be traced, every tile has its bits. Pass it as
    `mask=` to `attention`.

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
        tile: tuple[int, int] = TILE,
    ) -> TileMask:
        """Evaluates masks in numpy, a few tiles at a time.

        Args:
          functions: one per query head, or a single one for all: takes row numbers `[rows, 1]` and column numbers
            `[1, cols]`, gives bool `[rows, cols]` (or broadcastable), True where attended. Equal ones are evaluated
            once.
          shape: (T, S).
          tile: (rows, cols) of a tile; cols a multiple of 8.
        """

        def reader(function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Reader:
            return lambda rows, cols: function(
                np.arange(rows.start, rows.stop)[:, None], np.arange(cols.start, cols.stop)[None, :]
            )

        readers = {function: reader(function) for function in functions}
        return cls.from_readers([readers[function] for function in functions], shape, tile)

    @classmethod
    def from_readers(
        cls, readers: Sequence[Reader], shape: tuple[int, int], tile: tuple[int, int] = TILE
    ) -> TileMask:
        """Like `from_functions`, from functions of two slices, as a mask in memory would be indexed."""
        builder = _Builder(shape, tile)
        done = {reader: builder.classify(reader) for reader in dict.fromkeys(readers)}
        heads = readers[:1] if len(done) == 1 else readers
        tiles = np.array([done[reader] for reader in heads], np.int32)
        return cls(tiles.reshape(len(heads), *builder.grid), builder.bits())

    @classmethod
    def from_array(cls, mask: np.ndarray | jax.Array, tile: tuple[int, int] = TILE) -> TileMask:
        """From a dense bool array `[*batch, N|1, T, S]`.

        Args:
          mask: a numpy array is read on the host, and its partial tiles are stored once. A `jax.Array`, also a traced
            one, is classified and packed where it lives; a shape cannot depend on its values, so that bits are kept
            for every tile: an eighth of the array.
          tile: (rows, cols) of a tile; cols a multiple of 8.
        """
        if mask.dtype != bool or mask.ndim < 3:
            raise ValueError(
                f"attention: mask: expected bool [*batch, N|1, T, S], got {list(mask.shape)} {mask.dtype}. Cast it "
                "with `!= 0`, and add dimensions of size 1."
            )
        if isinstance(mask, jax.Array):
            return number_tiles(*pack_tiles(mask, tile))
        *leading, seqlen_q, seqlen_kv = mask.shape
        heads = mask.reshape(math.prod(leading), seqlen_q, seqlen_kv)
        builder = _Builder((seqlen_q, seqlen_kv), tile)
        tiles = [builder.classify(lambda rows, cols, head=head: head[rows, cols]) for head in heads]
        return cls(np.array(tiles, np.int32).reshape(*leading, *builder.grid), builder.bits())

    def dense(self, seqlen_q: int, seqlen_kv: int) -> jax.Array:
        """The mask as bool `[*batch|1, N|1, T, S]`: O(T*S) memory, for `implementation="xla"` and tests."""
        rows, cols = self.bits.shape[-2], self.bits.shape[-1] * 8
        partial = (jnp.asarray(self.bits)[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1 != 0
        partial = partial.reshape(*self.bits.shape[:-1], cols)
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


def _grid(shape: Sequence[int], tile: tuple[int, int]) -> tuple[int, int]:
    """(tile rows, tile columns)"""
    rows, cols = tile
    if rows < 1 or cols < 8 or cols % 8:
        raise ValueError(
            f"attention: mask: expected tiles of (rows, a multiple of 8 columns), got {tile}. The default is {TILE}."
        )
    return -(-shape[0] // rows), -(-shape[1] // cols)


def _whole_bytes(seqlen_kv: int, cols: int) -> np.ndarray:
    """uint8 `[tile columns, cols / 8]`: a row that attends everything; what lies past S is not set."""
    columns = -(-seqlen_kv // cols) * cols
    return np.packbits(np.arange(columns) < seqlen_kv, bitorder="little").reshape(-1, cols // 8)


# In host memory -------------------------------------------------------------------------------------------------------

Reader = Callable[[slice, slice], Any]


class _Builder:
    """Collects distinct partial tiles while masks of one shape are classified."""

    def __init__(self, shape: Sequence[int], tile: tuple[int, int]):
        self.shape = tuple(shape)
        self.tile = tile
        self.grid = _grid(shape, tile)
        self._numbers: dict[bytes, int] = {}

    def classify(self, read: Reader) -> np.ndarray:
        """int32 `[tile rows, tile columns]` of one mask."""
        (rows, cols), (seqlen_q, seqlen_kv) = self.tile, self.shape
        tiles = np.zeros(self.grid, np.int32)
        together = max(1, _PAIRS_AT_A_TIME // (rows * cols))
        for i in range(self.grid[0]):
            below = slice(i * rows, min((i + 1) * rows, seqlen_q))
            for j in range(0, self.grid[1], together):
                across = slice(j * cols, min((j + together) * cols, seqlen_kv))
                block = np.asarray(read(below, across))
                if block.dtype != bool:
                    raise ValueError(
                        f"attention: mask: expected bool from its rule, got {block.dtype}. Compare with `!= 0`."
                    )
                shape = (below.stop - below.start, across.stop - across.start)
                tiles[i, j : j + together] = self._classes(np.broadcast_to(block, shape))
        return tiles

    def bits(self) -> np.ndarray:
        """uint8 `[P, rows, cols / 8]` of all partial tiles so far."""
        rows, cols = self.tile
        joined = np.frombuffer(b"".join(self._numbers), np.uint8)
        return joined.reshape(len(self._numbers), rows, cols // 8)

    def _classes(self, block: np.ndarray) -> np.ndarray:
        """Classes of a few tiles side by side; partial ones that are new get the next number."""
        (rows, cols), (height, width) = self.tile, block.shape
        whole = _whole_bytes(width, cols)
        packed = np.zeros((rows, whole.size), np.uint8)
        packed[:height, : -(-width // 8)] = np.packbits(block, axis=1, bitorder="little")
        packed = packed.reshape(rows, *whole.shape)
        full = (packed[:height] == whole).all((0, 2))
        classes = np.where(full, FULL, EMPTY)
        for t in np.flatnonzero(packed.any((0, 2)) & ~full):
            bits = packed[:, t].tobytes()
            classes[t] = self._numbers.setdefault(bits, FIRST_PARTIAL + len(self._numbers))
        return classes


# On the device --------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="tile")
def pack_tiles(mask: jax.Array, tile: tuple[int, int] = TILE) -> tuple[jax.Array, jax.Array]:
    """Classes and bits of every tile of a bool array `[*batch, T, S]`, concrete or traced.

    Returns:
      int32 `[*batch, tile rows, tile columns]`: `EMPTY`, `FULL` or `FIRST_PARTIAL`.
      uint8 `[*batch, tile rows, tile columns, rows, cols / 8]`.
    """
    rows, cols = tile
    *leading, seqlen_q, seqlen_kv = mask.shape
    grid = _grid((seqlen_q, seqlen_kv), tile)
    missing = [(0, 0)] * len(leading) + [(0, grid[0] * rows - seqlen_q), (0, grid[1] * cols - seqlen_kv)]
    packed = jnp.packbits(jnp.pad(mask, missing), axis=-1, bitorder="little")
    packed = packed.reshape(*leading, grid[0], rows, grid[1], cols // 8)
    outside = (np.arange(grid[0] * rows) >= seqlen_q).reshape(grid[0], rows, 1, 1)
    full = (outside | (packed == _whole_bytes(seqlen_kv, cols))).all((-3, -1))
    some = (packed != 0).any((-3, -1))
    classes = jnp.where(full, FULL, jnp.where(some, FIRST_PARTIAL, EMPTY))
    return classes.astype(jnp.int32), jnp.swapaxes(packed, -3, -2)


def number_tiles(classes: jax.Array, bits: jax.Array) -> TileMask:
    """The mask of `[*batch, N|1, T, S]` that `pack_tiles` has packed, or of some of its heads or rows of tiles."""
    heads_and_grid = classes.shape[-3:]
    number = jnp.arange(math.prod(heads_and_grid), dtype=jnp.int32).reshape(heads_and_grid)
    tiles = jnp.where(classes == FIRST_PARTIAL, FIRST_PARTIAL + number, classes)
    return TileMask(tiles, bits.reshape(*classes.shape[:-3], number.size, *bits.shape[-2:]))

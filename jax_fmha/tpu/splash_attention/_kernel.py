"""The kernel object behind all splash spellings: a mask, planned once, and the call that applies it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_fmha._mask import TILE, TileMask, number_tiles, pack_tiles
from jax_fmha.tpu._common import SegmentIds, attention_with_names, check_segment_ids, promote
from jax_fmha.tpu.splash_attention._structure import Part, Structure, chunk_ids, evaluate, structure
from jax_fmha.tpu.splash_attention.splash_attention_mask import Mask, MultiHeadMask, NumpyMask

Array = jax.Array


class GroupArrays(NamedTuple):
    """Arrays of one group of heads, or their PartitionSpecs; None where the mask needs none.

    Attributes:
      positions: int32 `[T]`, position of each query row, if not 0, 1, 2, ...
      q_chunks: int32 `[T]`.
      kv_chunks: int32 `[S]`; a row attends keys with its own chunk id.
      tiles: int32 `[1, tile rows, tile columns]` for all heads of the group, or `[heads, ...]`: the classes of
        a `TileMask`.
      bits: uint8 `[P, rows, cols / 8]`, the partial tiles of all heads; of a `jax.Array` mask, whose values
        decide nothing about shapes, `[1|heads, tile rows, tile columns, rows, cols / 8]`.
    """

    positions: Any = None
    q_chunks: Any = None
    kv_chunks: Any = None
    tiles: Any = None
    bits: Any = None


class KernelArrays(NamedTuple):
    """All arrays of a kernel, or their PartitionSpecs.

    Attributes:
      starts: int32 `[q_seq_shards]`, first query row of each shard; None for one shard.
      groups: one entry per group of heads.
    """

    starts: Any
    groups: tuple[GroupArrays, ...]


@dataclasses.dataclass(frozen=True)
class Group:
    """Static part of a group of heads.

    Attributes:
      lowest: least key index minus query position.
      highest: greatest key index minus query position.
      mask_heads: what the head dimension of `GroupArrays.tiles` counts: nothing (size 1, or no mask), the
        heads of the group within one period of the pattern, or all heads, sharded with them.
    """

    lowest: float = -math.inf
    highest: float = math.inf
    mask_heads: Literal["none", "group", "all"] = "none"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static part of a kernel: hashable, part of the pytree's structure.

    Attributes:
      shape: (T, S) of the whole mask.
      pattern: group of each head; repeats over the heads.
      groups: static part of each group.
      head_shards: the mask was given for so many times `len(pattern)` heads, or for any number if the pattern
        is (0,).
      q_seq_shards: query rows come in so many equal pieces under shard_map.
      is_mqa: key and value have no head dimension.
      save_residuals: return lse, too.
      attn_logits_soft_cap: None or positive.
      residual_checkpoint_name: name of out and lse for remat policies.
      interpret: evaluate by plain einsums.
    """

    shape: tuple[int, int]
    pattern: tuple[int, ...]
    groups: tuple[Group, ...]
    head_shards: int
    q_seq_shards: int
    is_mqa: bool
    save_residuals: bool
    attn_logits_soft_cap: float | None
    residual_checkpoint_name: str | None
    interpret: bool


def plan(mask: Any, *, head_shards: int, q_seq_shards: int, **options: Any) -> tuple[Plan, KernelArrays]:
    """Plans a mask for all heads.

    Args:
      mask: `MultiHeadMask`, bool numpy `[heads, T, S]`, or bool jax.Array `[heads, T, S]` (concrete or
        traced).
      head_shards: pieces of the head dimension under shard_map.
      q_seq_shards: pieces of the query rows under shard_map.
      **options: the remaining fields of `Plan`.

    Raises:
      ValueError: another kind of mask, or sizes that the shards do not divide.
    """
    if isinstance(mask, np.ndarray) and mask.ndim == 3:
        mask = MultiHeadMask([NumpyMask(head) for head in mask])
    is_array = isinstance(mask, jax.Array)
    if not (isinstance(mask, MultiHeadMask) or is_array) or len(mask.shape) != 3:
        raise ValueError(
            "splash attention: mask: expected a MultiHeadMask of masks of this library, or bool [heads, T, "
            f"S], got {type(mask).__name__} of shape {getattr(mask, 'shape', None)}. Wrap one mask per "
            "query head in MultiHeadMask."
        )
    heads, rows, columns = mask.shape
    for name, shards, size in (("head_shards", head_shards, heads), ("q_seq_shards", q_seq_shards, rows)):
        if shards < 1 or size % shards:
            raise ValueError(f"splash attention: {name}: expected a divisor of {size}, got {shards}.")
    tile = (_tile_rows(rows, q_seq_shards), TILE[1])
    if is_array:
        if mask.dtype != jnp.bool_:
            raise ValueError(
                f"splash attention: mask: expected bool, got {mask.dtype}. Convert a 0/1 mask with `mask != "
                "0`."
            )
        pattern, groups = (0,), (Group(mask_heads="all" if heads > 1 else "none"),)
        tiles, bits = pack_tiles(mask, tile)
        arrays = (GroupArrays(tiles=tiles, bits=bits),)
    else:
        pattern, groups, arrays = _group_heads(mask.masks, (rows, columns), head_shards, tile)
    starts = None
    if q_seq_shards > 1:
        starts = jnp.arange(0, rows, rows // q_seq_shards, dtype=jnp.int32)
    planned = Plan(
        shape=(rows, columns),
        pattern=pattern,
        groups=groups,
        head_shards=head_shards,
        q_seq_shards=q_seq_shards,
        **options,
    )
    return planned, KernelArrays(starts, arrays)


def _tile_rows(rows: int, q_seq_shards: int) -> int:
    """Rows of a mask's tile; shards begin where tiles do."""
    if q_seq_shards == 1:
        return TILE[0]
    per_shard = rows // q_seq_shards
    return max(r for r in range(1, TILE[0] + 1) if per_shard % r == 0)


def _group_heads(
    masks: Sequence[Mask], shape: tuple[int, int], head_shards: int, tile: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[Group, ...], tuple[GroupArrays, ...]]:
    """(pattern, groups, arrays): heads of one group share a kernel call.

    That is, they share band, chunks and positions; if their remaining parts differ, they bring a mask each.
    """
    by_id: dict[int, Structure] = {}
    found = [by_id.setdefault(id(m), structure(m)) if id(m) not in by_id else by_id[id(m)] for m in masks]
    per_shard = len(found) // head_shards
    period = found[:per_shard]
    if found != period * head_shards:
        # Devices would need different programs: the masks travel as data instead.
        mask = evaluate([(Part(m),) for m in masks], shape, tile)
        return (0,), (Group(mask_heads="all"),), (_on_device(GroupArrays(tiles=mask.tiles, bits=mask.bits)),)

    kinds: dict[tuple[Structure, bool], list[int]] = {}
    for head, s in enumerate(period):
        kinds.setdefault((dataclasses.replace(s, parts=()), bool(s.parts)), []).append(head)
    pattern = [0] * per_shard
    groups, arrays = [], []
    for index, ((kind, has_parts), members) in enumerate(kinds.items()):
        for head in members:
            pattern[head] = index
        tiles = bits = None
        if has_parts:
            mask = evaluate([period[head].parts for head in members], shape, tile)
            tiles, bits = mask.tiles, mask.bits
        q_chunks, kv_chunks = chunk_ids(kind, shape) if kind.chunks else (None, None)
        positions = None if kind.positions is None else np.frombuffer(kind.positions, np.int32)
        mask_heads = "none" if tiles is None or len(tiles) == 1 else "group"
        groups.append(Group(kind.lowest, kind.highest, mask_heads))
        arrays.append(_on_device(GroupArrays(positions, q_chunks, kv_chunks, tiles, bits)))
    if len(groups) == 1 and groups[0].mask_heads == "none":
        pattern = [0]
    return tuple(pattern), tuple(groups), tuple(arrays)


def _on_device(arrays: GroupArrays) -> GroupArrays:
    return jax.tree.map(jnp.asarray, arrays)


# The call ---------------------------------------------------------------------------------------------------


def apply(
    planned: Plan,
    arrays: KernelArrays,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Any,
    sinks: Array | None,
) -> tuple[Array, Array]:
    """(out [N, T, Hv] in q's dtype, lse [N, T]) for query `[N, T, H]`, key `[K, S, H]`, value `[K, S, Hv]`.

    Under shard_map these are the rows and heads of one shard, and so are `arrays`.
    """
    if planned.is_mqa:
        _expect_rank("k", k, 2, "[S, H]: multi-query attention has one key head")
        _expect_rank("v", v, 2, "[S, Hv]")
        k, v = k[None], v[None]
    _expect_rank("q", q, 3, "[heads, T, H]; vmap over a batch")
    _expect_rank("k", k, 3, "[kv_heads, S, H]; vmap over a batch")
    _expect_rank("v", v, 3, "[kv_heads, S, Hv]; vmap over a batch")
    num_heads, seqlen_q = q.shape[:2]
    num_kv_heads, seqlen_kv = k.shape[:2]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"splash attention: k: expected a number of heads that divides q's {num_heads}, got "
            f"{num_kv_heads}."
        )
    _check_against_mask(planned, arrays, num_heads, seqlen_q, seqlen_kv)
    if segment_ids is not None:
        check_segment_ids("splash attention", segment_ids, (seqlen_q,), (seqlen_kv,))
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(
            f"splash attention: sinks: expected one logit per query head, [{num_heads}], got "
            f"{list(sinks.shape)}."
        )

    start = 0 if arrays.starts is None else arrays.starts[0]
    q_dtype = q.dtype
    q, k, v = promote(q, k, v)
    outs, lses, order = [], [], []
    for index, (group, group_arrays) in enumerate(zip(planned.groups, arrays.groups, strict=True)):
        heads = [h for h in range(num_heads) if planned.pattern[h % len(planned.pattern)] == index]
        kv_heads = _kv_heads(heads, num_heads // num_kv_heads)
        out, lse = attention_with_names(
            _by_row(_take(q, heads)),
            _by_row(_take(k, kv_heads)),
            _by_row(_take(v, kv_heads)),
            mask=_mask(group, group_arrays, len(heads)),
            scale=1.0,
            logits_soft_cap=planned.attn_logits_soft_cap,
            segment_ids=_segment_ids(group_arrays, segment_ids),
            sinks=None if sinks is None else _take(sinks, heads),
            residual_checkpoint_name=planned.residual_checkpoint_name,
            interpret=planned.interpret,
            **_band(group, group_arrays, start),
        )
        outs.append(_by_row(out))
        lses.append(lse)
        order.extend(heads)
    back = np.argsort(order).tolist()
    out, lse = (_take(jnp.concatenate(x) if len(x) > 1 else x[0], back) for x in (outs, lses))
    return out.astype(q_dtype), lse


def _expect_rank(name: str, x: Array, rank: int, shape: str) -> None:
    if x.ndim != rank:
        raise ValueError(f"splash attention: {name}: expected {shape}, got {list(x.shape)}.")


def _check_against_mask(
    planned: Plan, arrays: KernelArrays, num_heads: int, seqlen_q: int, seqlen_kv: int
) -> None:
    rows, columns = planned.shape
    if arrays.starts is not None:
        rows = rows * arrays.starts.shape[0] // planned.q_seq_shards
    if (seqlen_q, seqlen_kv) != (rows, columns):
        raise ValueError(
            f"splash attention: lengths of q and k: expected {rows} and {columns}, the mask's, got "
            f"{seqlen_q} and {seqlen_kv}. Make a kernel for these lengths; under shard_map set q_seq_shards "
            "and pass the kernel with manual_sharding_spec."
        )
    expected: Any = None
    if planned.groups[0].mask_heads == "all":
        expected = arrays.groups[0].tiles.shape[0]
    elif len(planned.pattern) > 1 and num_heads not in range(
        len(planned.pattern), len(planned.pattern) * planned.head_shards + 1, len(planned.pattern)
    ):
        expected = len(planned.pattern)
    if expected is not None and num_heads != expected:
        raise ValueError(
            f"splash attention: q: expected {expected} heads, one per mask, got {num_heads}. Under "
            "shard_map set head_shards and pass the kernel with manual_sharding_spec."
        )


def _kv_heads(heads: Sequence[int], q_heads_per_kv_head: int) -> list[int]:
    """Key/value heads for these query heads, such that the usual grouping holds again."""
    wanted = [h // q_heads_per_kv_head for h in heads]
    used = sorted(set(wanted))
    evenly = len(wanted) == len(used) * wanted.count(used[0]) and len({wanted.count(u) for u in used}) == 1
    return used if evenly else wanted


def _take(x: Array, indices: Sequence[int]) -> Array:
    """x[indices] in the first dimension, as a slice where it is one."""
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    regular = step > 0 and list(indices) == list(range(indices[0], indices[-1] + 1, step))
    if not regular:
        return x[np.asarray(indices)]
    if len(indices) == x.shape[0]:
        return x
    return x[indices[0] : indices[-1] + 1 : step]


def _by_row(x: Array) -> Array:
    """[heads, length, head_dim] to [length, heads, head_dim], and back."""
    return jnp.swapaxes(x, 0, 1)


def _mask(group: Group, arrays: GroupArrays, num_heads: int) -> TileMask | None:
    if arrays.tiles is None:
        return None
    mask = TileMask(arrays.tiles, arrays.bits)
    if arrays.bits.ndim > 3:  # one entry per tile; a shard numbers its own
        mask = number_tiles(arrays.tiles, arrays.bits)
    if group.mask_heads != "group" or mask.tiles.shape[0] == num_heads:
        return mask
    return TileMask(jnp.tile(mask.tiles, (num_heads // mask.tiles.shape[0], 1, 1)), mask.bits)


def _band(group: Group, arrays: GroupArrays, start: Any) -> dict[str, Any]:
    """Arguments of `attention` for lowest <= key index - query position <= highest."""
    kwargs: dict[str, Any] = {}
    if group.highest < math.inf:
        shift = int(group.highest)
        kwargs["is_causal"] = True
        if group.lowest > -math.inf:
            kwargs["local_window_size"] = (shift - int(group.lowest), None)
    elif group.lowest > -math.inf:
        shift = int(group.lowest)
        kwargs["local_window_size"] = (0, None)
    else:
        return kwargs
    if arrays.positions is not None:
        return {**kwargs, "query_positions": arrays.positions + shift}
    return {**kwargs, "query_offset": start + shift}


def _segment_ids(arrays: GroupArrays, segment_ids: Any) -> SegmentIds | None:
    """The caller's ids, the chunks, or one id for each pair of both."""
    if arrays.q_chunks is None:
        return segment_ids
    if segment_ids is None:
        return SegmentIds(arrays.q_chunks, arrays.kv_chunks)
    ids = jnp.concatenate([segment_ids.q, segment_ids.kv])
    pairs = _number_pairs(ids, jnp.concatenate([arrays.q_chunks, arrays.kv_chunks]))
    return SegmentIds(*jnp.split(pairs, [segment_ids.q.shape[0]]))


def _number_pairs(first: Array, second: Array) -> Array:
    """int32 numbers from 0 on, equal where both entries are; ranks, since products of ids could overflow."""
    order = jnp.lexsort((second, first))
    a, b = first[order], second[order]
    is_new = jnp.concatenate([jnp.zeros((1,), bool), (a[1:] != a[:-1]) | (b[1:] != b[:-1])])
    return jnp.zeros(first.shape, jnp.int32).at[order].set(jnp.cumsum(is_new, dtype=jnp.int32))


# Sharding ---------------------------------------------------------------------------------------------------


def sharding_specs(planned: Plan, arrays: KernelArrays, heads: Any, q_seq: Any) -> KernelArrays:
    """PartitionSpecs of `arrays`, heads split over the mesh axes `heads`, query rows over `q_seq`."""

    def group_specs(group: Group, a: GroupArrays) -> GroupArrays:
        of_tiles = PartitionSpec(heads if group.mask_heads == "all" else None, q_seq)
        specs = GroupArrays(
            positions=PartitionSpec(q_seq),
            q_chunks=PartitionSpec(q_seq),
            kv_chunks=PartitionSpec(),
            tiles=of_tiles,
            bits=of_tiles if a.bits is not None and a.bits.ndim > 3 else PartitionSpec(),
        )
        return GroupArrays(*(s if x is not None else None for s, x in zip(specs, a, strict=True)))

    return KernelArrays(
        None if arrays.starts is None else PartitionSpec(q_seq),
        tuple(group_specs(g, a) for g, a in zip(planned.groups, arrays.groups, strict=True)),
    )


def check_shards(planned: Plan, sharding: NamedSharding, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `sharding` divides `shape`, the shards that the kernel was made for."""
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise ValueError(
            f"splash attention: manual_sharding_spec: {sharding.spec} splits further than the kernel was "
            f"made for, head_shards={planned.head_shards} and q_seq_shards={planned.q_seq_shards}. Make it "
            "with as many shards as the mesh has."
        ) from error

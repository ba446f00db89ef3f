"""How the custom calls are split over devices: batch dimensions and heads, never a sequence or a feature dimension.

Every dimension of every operand and result belongs to a factor: "b0", "b1", ... (batch), "k" and "g" (key/value heads
and query heads of each), "t", "s", "h", "v" (query rows, key rows, head dims). One table of factors serves the Shardy
rule under jit, the sums over devices inside a partitioned backward, and the sharding types of explicit meshes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax._src import core, dispatch  # private: there is no public spelling of these two
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import NamedSharding, PartitionSpec

Factors = tuple[tuple[str, ...], ...]  # per dimension: no factor (size 1), one, or ("k", "g")

_TRAILING = {
    "mask_tiles": ("n", "ti", "tj"),
    "mask_bits": ("p", "pi", "pj"),
    "q_positions": ("t",),
    "kv_positions": ("s",),
    "q_segment_ids": ("t",),
    "kv_segment_ids": ("s",),
}
_TRAILING.update(dict.fromkeys(("q", "dq"), ("t", "n", "h")))
_TRAILING.update(dict.fromkeys(("k", "dk"), ("s", "k", "h")))
_TRAILING.update(dict.fromkeys(("v", "dv"), ("s", "k", "v")))
_TRAILING.update(dict.fromkeys(("out", "saved_out", "dout"), ("t", "n", "v")))
_TRAILING.update(dict.fromkeys(("lse", "saved_lse", "dlse"), ("n", "t")))
_TRAILING.update(dict.fromkeys(("bias", "mask", "dbias"), ("n", "t", "s")))
_TRAILING.update(dict.fromkeys(("sinks", "dsinks"), ("n",)))

_UNSHARDABLE = {
    "t": "query's sequence dimension",
    "s": "the sequence dimension of key and value",
    "h": "the head_dim of query and key",
    "v": "the head_dim of value",
    **dict.fromkeys(("ti", "tj", "p", "pi", "pj"), "a tile dimension of the mask"),
}


def lower_with_devices(primitive: Any) -> None:
    """The lowering of `primitive` must know the devices, since it may be partitioned over them."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def mesh_sizes(ctx: Any) -> tuple[int, ...]:
    """Sizes of the mesh axes at a lowering, as far as it knows them."""
    context = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None) or getattr(context, "abstract_mesh", None)
    return tuple(mesh.shape.values()) if mesh is not None else ()


def refuse_partially_manual(ctx: Any) -> None:
    """XLA cannot partition a custom call over the axes that a shard_map leaves to it."""
    context = ctx.module_context.axis_context
    manual = getattr(context, "manual_axes", frozenset())
    left = [a for a, size in context.mesh.shape.items() if size > 1 and a not in manual] if manual else []
    if left:
        raise NotImplementedError(
            f"attention: inside a shard_map that is manual over {sorted(manual)} but not over {left}. Make it manual "
            "over all mesh axes (leave out axis_names), or use jit with sharded operands."
        )


def match_varying_axes(args: Sequence[Any]) -> Sequence[Any]:
    """Inside shard_map: all operands vary over the mesh axes that any of them varies over."""
    return core.auto_insert_reshard(*args)


def factors_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Factors]:
    """Factors of each operand's and result's dimensions, by name."""
    rank = len(shapes["q"]) - 3
    num_q_heads, num_kv_heads = shapes["q"][-2], shapes["k"][-2]
    heads = tuple(
        factor
        for factor, size in (("k", num_kv_heads), ("g", num_q_heads // max(num_kv_heads, 1)))
        if size != 1
    )
    names = {"n": heads}

    def factors(name: str, shape: Sequence[int]) -> Factors:
        labels = (*(f"b{d}" for d in range(rank)), *_TRAILING.get(name, ()))
        return tuple(
            () if size == 1 else names.get(label, (label,)) for label, size in zip(labels, shape, strict=True)
        )

    return {name: factors(name, shape) for name, shape in shapes.items()}


# Mesh axes of factors -------------------------------------------------------------------------------------------------


def axes_by_factor(
    factors: Mapping[str, Factors],
    shapes: Mapping[str, Sequence[int]],
    specs: Mapping[str, Any],
    mesh_shape: Mapping[Any, int],
) -> dict[str, tuple[Any, ...]]:
    """Mesh axes that split each factor. Raises ValueError where operands disagree or a factor cannot be split."""
    found: dict[str, tuple[Any, ...]] = {}
    num_kv_heads = shapes["k"][-2]

    def note(operand: str, factor: str, axes: tuple[Any, ...]) -> None:
        if axes and factor in _UNSHARDABLE:
            raise ValueError(
                f"attention: {_UNSHARDABLE[factor]} is sharded over mesh axes {axes}, expected it whole on each "
                "device. Shard batch or heads instead (jax.lax.with_sharding_constraint or jax.reshard in front of "
                "the call), or split the sequence yourself inside jax.shard_map and merge by lse."
            )
        if found.setdefault(factor, axes) != axes:
            raise ValueError(
                f"attention: {operand}: expected its dimension of factor {factor!r} to be sharded over "
                f"{found[factor]} as the other operands, got {axes}. Reshard it (jax.reshard)."
            )

    def note_heads(operand: str, axes: tuple[Any, ...]) -> None:
        """Query heads: those that share a key/value head are neighbours, so the axes of "k" come first."""
        of_k = found.get("k", ())
        if axes and not of_k and num_kv_heads % math.prod(mesh_shape[a] for a in axes) == 0:
            of_k = found["k"] = axes
        rest = axes[len(of_k) :]
        if axes[: len(of_k)] != of_k or (rest and math.prod(mesh_shape[a] for a in of_k) != num_kv_heads):
            raise ValueError(
                f"attention: {operand}: expected its query heads to be sharded as the {num_kv_heads} key/value "
                f"heads are ({of_k or 'not at all'}), got {axes}. Shard heads over axes whose size divides the "
                "number of key/value heads, or repeat the key/value heads."
            )
        note(operand, "g", rest)

    def entries(num_factors: int) -> Any:
        for name, dims in factors.items():
            for dim, entry in zip(dims, specs[name], strict=True):
                if len(dim) == num_factors:
                    axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
                    yield name, dim, axes

    for name, (factor,), axes in entries(1):
        note(name, factor, axes)
    for name, _, axes in entries(2):
        note_heads(name, axes)
    return {factor: axes for factor, axes in found.items() if axes}


def _spec(dims: Factors, axes: Mapping[str, tuple[Any, ...]]) -> PartitionSpec:
    entries = [tuple(itertools.chain(*(axes.get(f, ()) for f in dim))) for dim in dims]
    return PartitionSpec(*(None if not e else e[0] if len(e) == 1 else e for e in entries))


# Sharding types (explicit meshes) and varying axes (shard_map) --------------------------------------------------------


def result_avals(present: Sequence[str], avals: Sequence[Any], results: Mapping[str, Any]) -> list[Any]:
    """Abstract results: shapes and types of `results`, sharded as the operands' sharding types say."""
    core.standard_vma_rule("jax_fmha", *avals)
    model = avals[0]
    mesh = model.sharding.mesh
    shapes = {name: x.shape for name, x in zip(present, avals, strict=True)}
    specs = {name: x.sharding.spec for name, x in zip(present, avals, strict=True)}
    factors = factors_of(shapes | {name: shape for name, (shape, _) in results.items()})
    axes = axes_by_factor({name: factors[name] for name in present}, shapes, specs, mesh.shape)
    for name in present:
        if specs[name] != (expected := _spec(factors[name], axes)):
            raise ValueError(
                f"attention: {name}: expected sharding {expected} to go with the other operands, got "
                f"{specs[name]}. Reshard it (jax.reshard)."
            )
    return [
        model.update(
            shape=shape,
            dtype=dtype,
            weak_type=False,
            sharding=NamedSharding(mesh, _spec(factors[name], axes)),
        )
        for name, (shape, dtype) in results.items()
    ]


# Partitioning under jit -----------------------------------------------------------------------------------------------


def partitioned(
    per_device: Callable[..., Any],
    present: Sequence[str],
    shapes: Mapping[str, Sequence[int]],
    results: Sequence[str],
    mesh_sizes: Sequence[int],
) -> Callable[..., Any]:
    """`per_device` as a function that XLA splits over batch and heads without moving data.

    Args:
      per_device: takes the operands in order, whole or one device's part of them, and gives the results.
      present: names of the operands.
      shapes: global shapes of operands and results.
      results: names of the results.
      mesh_sizes: sizes of the mesh axes, as far as they are known.
    """
    factors = factors_of(shapes)

    def partition(mesh: Any, args: Any, out: Any) -> Any:
        specs = {n: x.sharding.spec for n, x in zip((*present, *results), (*args, *out), strict=True)}
        axes = axes_by_factor(factors, shapes, specs, mesh.shape)
        shardings = {name: NamedSharding(mesh, _spec(dims, axes)) for name, dims in factors.items()}

        def run(*operands: Any) -> Any:
            # One device's view: an explicit mesh around the jit would put sharding types inside the reductions.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return [
                    _sum_missing(x, factors[name], axes)
                    for name, x in zip(results, per_device(*operands), strict=True)
                ]

        return mesh, run, [shardings[n] for n in results], tuple(shardings[n] for n in present)

    call = custom_partitioning(lambda *operands: per_device(*operands))
    call.def_partition(partition, sharding_rule=_rule(factors, shapes, present, results, mesh_sizes))
    return call


def _sum_missing(x: Any, dims: Factors, axes: Mapping[str, tuple[Any, ...]]) -> Any:
    """A gradient of something shared is summed over the devices that split what shares it."""
    own = set(itertools.chain(*dims))
    missing = tuple(itertools.chain(*(a for factor, a in axes.items() if factor not in own)))
    return jax.lax.psum(x, missing) if missing else x


def _rule(
    factors: Mapping[str, Factors],
    shapes: Mapping[str, Sequence[int]],
    present: Sequence[str],
    results: Sequence[str],
    mesh_sizes: Sequence[int],
) -> SdyShardingRule:
    num_q_heads, num_kv_heads = shapes["q"][-2], shapes["k"][-2]
    # Shardy may split a mesh axis between "k" and "g", which no PartitionSpec can say. Where that could happen, the
    # heads of key and value do not propagate, and `partition` says what to do about it.
    linked = all(math.gcd(num_kv_heads, size) in (1, size) for size in mesh_sizes)
    unique = (f"u{i}" for i in itertools.count())

    def dimension(dim: tuple[str, ...]) -> Any:
        if len(dim) == 2:
            return CompoundFactor(*dim)
        return dim[0] if dim and (linked or dim != ("k",)) else next(unique)

    operands, outputs = (
        tuple(ArrayMapping(*map(dimension, factors[name])) for name in names) for names in (present, results)
    )
    # A factor that occurs only inside ("k", "g") has no dimension to take its size from.
    sizes = {}
    if ("k", "g") in factors["q"]:
        sizes["g"] = num_q_heads // num_kv_heads if num_kv_heads else 1
        if not linked:
            sizes["k"] = num_kv_heads
    return SdyShardingRule(operands, outputs, **sizes)

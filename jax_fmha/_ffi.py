"""The two custom calls as JAX primitives: shapes, vmap, lowering. The only `ffi_call` site.

`forward_p` and `backward_p` take operands by name (`present` lists them in order), each with all batch dimensions in
front, in full or of size 1. vmap adds one more batch dimension, of size 1 to operands that are not mapped, so nothing
is copied. The custom call itself has one fixed signature: an absent operand is an array of shape (0,).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from jax_fmha import _core, _sharding
from jax_fmha._problem import Options, describe

FORWARD_OPERANDS = (
    "q",
    "k",
    "v",
    "bias",
    "mask",
    "mask_tiles",
    "mask_bits",
    "scale",
    "logits_soft_cap",
    "query_offset",
    "q_positions",
    "kv_positions",
    "q_seq_lengths",
    "kv_seq_lengths",
    "q_segment_ids",
    "kv_segment_ids",
    "sinks",
)
BACKWARD_OPERANDS = (*FORWARD_OPERANDS, "saved_out", "saved_lse", "dout", "dlse")

SECOND_ORDER = (
    "jax_fmha: forward-mode and second-order derivatives are not available from the native kernels "
    '(implementation=None, "cpu", "sm90", "sm100"); implementation="xla" supports them, in O(T*S) memory.'
)

forward_p = jex_core.Primitive("jax_fmha_forward")
backward_p = jex_core.Primitive("jax_fmha_backward")


def forward(operands: Mapping[str, Any], options: Options) -> tuple[Any, Any]:
    """(out [*batch, T, N, Hv], lse [*batch, N, T])."""
    return tuple(_bind(forward_p, FORWARD_OPERANDS, operands, options=options))


def backward(operands: Mapping[str, Any], options: Options, *, wants: tuple[str, ...]) -> dict[str, Any]:
    """Gradients by name: dq, dk, dv, and those of ("dbias", "dsinks") that are wanted."""
    grads = _bind(backward_p, BACKWARD_OPERANDS, operands, options=options, wants=wants, num_mapped=0)
    return dict(zip(("dq", "dk", "dv", *wants), grads, strict=True))


def _bind(primitive: Any, order: Sequence[str], operands: Mapping[str, Any], **params: Any) -> list[Any]:
    present = tuple(name for name in order if name in operands)
    args = _sharding.match_varying_axes([operands[name] for name in present])
    return primitive.bind(*args, present=present, **params)


# Results --------------------------------------------------------------------------------------------------------------


def accumulator_dtype(dtype: Any) -> Any:
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _batch_shape(shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """Per batch dimension the one size that is not 1, else 1."""
    rank = len(shapes["q"]) - 3
    sizes = [{shape[d] for shape in shapes.values()} - {1} for d in range(rank)]
    return tuple(next(iter(s)) if s else 1 for s in sizes)


def result_shapes(
    present: Sequence[str], avals: Sequence[Any], wants: Sequence[str] | None, num_mapped: int = 0
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """{result: (shape, dtype)} of the forward (`wants` None) or of the backward.

    dbias and dsinks have the shape of their operand, but in full along the `num_mapped` dimensions that vmap added:
    one gradient per mapped entry, which custom_vjp sums where the operand is shared.
    """
    by_name = dict(zip(present, avals, strict=True))
    batch = _batch_shape({name: x.shape for name, x in by_name.items()})
    q, v = by_name["q"], by_name["v"]
    seqlen_q, num_q_heads = q.shape[-3:-1]
    accumulator = accumulator_dtype(q.dtype)
    if wants is None:
        return {
            "out": ((*batch, seqlen_q, num_q_heads, v.shape[-1]), q.dtype),
            "lse": ((*batch, num_q_heads, seqlen_q), accumulator),
        }
    results = {"d" + name: ((*batch, *by_name[name].shape[-3:]), q.dtype) for name in "qkv"}
    for name in wants:
        operand = by_name[name[1:]]
        results[name] = ((*batch[:num_mapped], *operand.shape[num_mapped:]), operand.dtype)
    return results


def _abstract_eval(*avals: Any, present: Sequence[str], options: Options, **params: Any) -> list[Any]:
    del options
    results = result_shapes(present, avals, **_result_params(params))
    return _sharding.result_avals(present, avals, results)


def _result_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Of a primitive's parameters those that `result_shapes` wants."""
    return {"wants": params.get("wants"), "num_mapped": params.get("num_mapped", 0)}


def _batch(
    primitive: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[list[Any], list[int]]:
    args = [x[None] if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    if "num_mapped" in params:
        params["num_mapped"] += 1
    results = primitive.bind(*args, **params)
    return results, [0] * len(results)


# Lowering -------------------------------------------------------------------------------------------------------------


def device(platform: str, compute_capability: int | None = None) -> _core.Device:
    """Where a program lowered for `platform` in this process will run, or a CUDA device elsewhere.

    A process without CUDA devices may still lower for CUDA, for any device and an installation that we cannot see.
    """
    if platform != "cuda":
        # Threads that XLA's CPU pool may run: what the scratch is sized for, no promise.
        affinity = getattr(os, "sched_getaffinity", None)
        workers = len(affinity(0)) if affinity else os.cpu_count() or 1
        return _core.Device(platform, 0, False, workers)
    if compute_capability is None:
        try:
            here = jax.devices("cuda")[0]
        except RuntimeError:
            return _core.Device(platform, 0, True, 1)
        return _core.Device(platform, capability_number(here.compute_capability), _core.has_cuda_kernels(), 1)
    return _core.Device(platform, compute_capability, True, 1)


def capability_number(compute_capability: str | float) -> int:
    """10 * major + minor of "9.0" or 9.0."""
    return round(float(compute_capability) * 10)


def _call(
    *args: Any,
    platform: str,
    present: Sequence[str],
    options: Options,
    **params: Any,
) -> list[Any]:
    """The custom call on one device's operands, workspace included."""
    backward = "wants" in params
    by_name = dict(zip(present, args, strict=True))
    results = result_shapes(present, args, **_result_params(params))
    described = dict(by_name)
    described.update((n, jax.ShapeDtypeStruct(*results[n])) for n in ("dbias", "dsinks") if n in results)
    problem = describe(described, options, backward=backward)
    workspace = _core.workspace_bytes(problem, device(platform))

    absent = jnp.zeros((0,), jnp.float32)
    order = BACKWARD_OPERANDS if backward else FORWARD_OPERANDS
    order_out = ("dq", "dk", "dv", "dbias", "dsinks") if backward else ("out", "lse")
    outputs = [jax.ShapeDtypeStruct(*results.get(n, ((0,), jnp.float32))) for n in order_out]
    outputs.append(jax.ShapeDtypeStruct((workspace,), jnp.uint8))
    call = jax.ffi.ffi_call("jax_fmha_backward" if backward else "jax_fmha_forward", outputs)
    *got, _ = call(*(by_name.get(name, absent) for name in order), **options.attributes())
    return [x for name, x in zip(order_out, got, strict=True) if name in results]


def _lower(ctx: Any, *args: Any, platform: str, **params: Any) -> Any:
    _sharding.refuse_partially_manual(ctx)
    present = params["present"]
    results = result_shapes(present, ctx.avals_in, **_result_params(params))
    shapes = {name: x.shape for name, x in zip(present, ctx.avals_in, strict=True)}
    shapes.update((name, shape) for name, (shape, _) in results.items())
    per_device = functools.partial(_call, platform=platform, **params)
    call = _sharding.partitioned(per_device, present, shapes, tuple(results), _sharding.mesh_sizes(ctx))
    return mlir.lower_fun(call, multiple_results=True)(ctx, *args)


def _refuse_derivative(*args: Any, **params: Any) -> Any:
    del args, params
    raise NotImplementedError(SECOND_ORDER)


for _primitive in (forward_p, backward_p):
    _primitive.multiple_results = True
    _primitive.def_impl(
        jax.jit(_primitive.bind, static_argnames=("present", "options", "wants", "num_mapped"), inline=True)
    )
    _primitive.def_abstract_eval(_abstract_eval)
    batching.primitive_batchers[_primitive] = functools.partial(_batch, _primitive)
    ad.primitive_jvps[_primitive] = _refuse_derivative
    for _platform in ("cpu", "cuda"):
        mlir.register_lowering(_primitive, functools.partial(_lower, platform=_platform), platform=_platform)
    _sharding.lower_with_devices(_primitive)

del _primitive, _platform


def _register_targets() -> None:
    """For CUDA too, whether or not there is a device: JAX keeps the registration until a backend wants it, and an
    exported program may come without a lowering of ours. The library with the kernels is loaded by the first call.
    """
    for platform, targets in _core.targets().items():
        for name, capsule in targets.items():
            jax.ffi.register_ffi_target(name, capsule, platform=platform)


_register_targets()


# Guards ---------------------------------------------------------------------------------------------------------------
# custom_vjp knows nothing of forward mode and answers with an error of its own, or with a zero where an operand's
# gradient is not defined. These identities in front of it give the clear answer instead.

_guard_p = jex_core.Primitive("jax_fmha_reverse_mode_only")
_guard_tangent_p = jex_core.Primitive("jax_fmha_reverse_mode_only_tangent")
_constant_p = jex_core.Primitive("jax_fmha_not_differentiable")


def reverse_mode_only(x: Any) -> Any:
    """Identity whose tangent may be transposed but not computed."""
    return _guard_p.bind(x)


def not_differentiable(x: Any, *, name: str) -> Any:
    """Identity that refuses to be differentiated."""
    return _constant_p.bind(x, name=name)


def _guard_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    if type(t) is ad.Zero:
        return _guard_p.bind(x), t
    return _guard_p.bind(x), _guard_tangent_p.bind(t)


def _constant_jvp(primals: Any, tangents: Any, *, name: str) -> Any:
    del primals, tangents
    raise NotImplementedError(
        f"attention: {name}: the native kernels have no gradient for it. Fold a learned scale into query, or use "
        'implementation="xla".'
    )


for _primitive in (_guard_p, _guard_tangent_p, _constant_p):
    _primitive.def_abstract_eval(lambda x, **_: x)
    batching.primitive_batchers[_primitive] = lambda args, dims, _p=_primitive, **params: (
        _p.bind(*args, **params),
        dims[0],
    )
for _primitive in (_guard_p, _constant_p):
    _primitive.def_impl(lambda x, **_: x)
    mlir.register_lowering(_primitive, lambda _, x, **__: [x])
_guard_tangent_p.def_impl(_refuse_derivative)
mlir.register_lowering(_guard_tangent_p, _refuse_derivative)
ad.primitive_jvps[_guard_p] = _guard_jvp
ad.primitive_jvps[_constant_p] = _constant_jvp
ad.deflinear2(_guard_tangent_p, lambda ct, _: [ct])
del _primitive

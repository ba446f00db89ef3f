"""`custom_vjp`: links the forward to the backward kernels through q, k, v, out and lse, and nothing of size T*S."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_fmha import _ffi, _sharding
from jax_fmha._problem import Call, Options

# Operands with a gradient; all others are integers, booleans, or scalars that refuse one.
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")

# Names of the two residuals that a remat policy may save instead of running the forward again.
CHECKPOINT_NAMES = ("jax_fmha_out", "jax_fmha_lse")


def attention_vjp(call: Call, names: tuple[str, str] = CHECKPOINT_NAMES) -> tuple[Any, Any]:
    """(out, lse) of a native kernel, differentiable once in reverse mode."""
    primals, rest = {}, {}
    # Here, so that the sum over mesh axes that a shared operand's gradient needs is differentiation's own.
    operands = dict(zip(call.operands, _sharding.match_varying_axes([*call.operands.values()]), strict=True))
    for name, x in operands.items():
        if name in DIFFERENTIABLE:
            primals[name] = _ffi.reverse_mode_only(x)
        elif jnp.issubdtype(x.dtype, jnp.floating):
            rest[name] = _ffi.not_differentiable(x, name=name)
        else:
            rest[name] = x
    return _attention_jit(call.options, names, primals, rest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(options: Options, names: tuple[str, str], primals: Any, rest: Any) -> tuple[Any, Any]:
    del names
    return _ffi.forward({**primals, **rest}, options)


def _forward(options: Options, names: tuple[str, str], primals: Any, rest: Any) -> Any:
    perturbed = {name: p.perturbed for name, p in primals.items()}
    primals = {name: p.value for name, p in primals.items()}
    rest = {name: p.value for name, p in rest.items()}
    out, lse = _ffi.forward({**primals, **rest}, options)
    out = checkpoint_name(out, names[0])
    lse = checkpoint_name(lse, names[1])
    return (out, lse), (primals, rest, out, lse, _wants_as_residual(perturbed))


# Those of dbias and dsinks that are asked for travel to the backward as a shape. In the tree of residuals they would
# not be safe: JAX keeps the jaxpr of each pattern of perturbed operands, but only the tree of the pattern traced last,
# so that after the gradients of all operands and those of q alone, the next gradients of all would lack dbias.
_OPTIONAL = ("bias", "sinks")


def _wants_as_residual(perturbed: Mapping[str, bool]) -> jax.Array:
    return jnp.zeros((0, *(1 + perturbed.get(name, False) for name in _OPTIONAL)))


def _wants_of(residual: jax.Array) -> tuple[str, ...]:
    sizes = residual.shape[-len(_OPTIONAL) :]
    return tuple("d" + name for name, size in zip(_OPTIONAL, sizes, strict=True) if size == 2)


def _backward(options: Options, names: tuple[str, str], residuals: Any, cotangents: Any) -> Any:
    del names
    primals, rest, out, lse, wants_residual = residuals
    dout, dlse = cotangents
    operands = {**primals, **rest, "saved_out": out, "saved_lse": lse}
    operands["dout"] = _instantiate(dout)
    if not isinstance(dlse, SymbolicZero):
        operands["dlse"] = dlse
    grads = _ffi.backward(operands, options, wants=_wants_of(wants_residual))
    dprimals = {
        name: grads["d" + name] if "d" + name in grads else jnp.zeros_like(x) for name, x in primals.items()
    }
    drest = {name: _no_gradient(x) for name, x in rest.items()}
    return dprimals, drest


def backward_operands(call: Call) -> dict[str, Any]:
    """Shapes of everything that the backward of `call` may see, its own results dbias and dsinks included."""
    operands = call.operands
    shapes = _ffi.result_shapes(tuple(operands), tuple(operands.values()), None)
    out, lse = (jax.ShapeDtypeStruct(*shapes[name]) for name in ("out", "lse"))
    described = {**operands, "saved_out": out, "saved_lse": lse, "dout": out, "dlse": lse}
    described.update(("d" + name, operands[name]) for name in _OPTIONAL if name in operands)
    return described


def _instantiate(x: Any) -> Any:
    if not isinstance(x, SymbolicZero):
        return x
    aval: Any = x.aval
    return jnp.zeros(aval.shape, aval.dtype)


def _no_gradient(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


_attention.defvjp(_forward, _backward, symbolic_zeros=True)

# An eager shard_map takes no custom_vjp with symbolic zeros, but takes a jit that has one inside. While tracing a
# program it is inlined.
_attention_jit = jax.jit(_attention, static_argnums=(0, 1), inline=True)

"""How the tests call `attention`, compare results with the oracle, look into programs, and start fresh processes."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fmha
import oracle
from cases import Case, Inputs

TESTS = pathlib.Path(__file__).parent

# What runs on this machine: the best native kernel, and the einsum reference.
IMPLEMENTATIONS = (None, "xla")
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=["native", "xla"])


def vjp(f: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[[Any], Any]]:
    """`jax.vjp` as one compiled program: operation by operation the reference takes ten times as long."""

    @jax.jit
    def both(cotangents: Any, *primals: Any) -> tuple[Any, Any]:
        results, pullback = jax.vjp(f, *primals)
        return results, pullback(cotangents)

    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(f, *primals))
    return both(zeros, *primals)[0], lambda cotangents: both(cotangents, *primals)[1]


def attention(operands: dict[str, Any], options: dict[str, Any], implementation: str | None) -> Any:
    """(out, lse)"""
    return jax_fmha.attention(**operands, **options, return_lse=True, implementation=implementation)


def run(inputs: Inputs, f: Callable[..., Any]) -> oracle.Results:
    """Results of `f(operands, options) -> (out, lse)` by name, gradients of all differentiable operands included."""
    options = tuple(sorted(inputs.options.items()))
    results = _run(f, options, inputs.differentiable(), inputs.rest(), inputs.dout, inputs.dlse)
    return {name: np.asarray(x) for name, x in results.items()}


# One program for all values of operands of the same shapes: compiling takes most of the time of the tests.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(
    f: Callable[..., Any],
    options: tuple[tuple[str, Any], ...],
    primals: dict[str, Any],
    rest: dict[str, Any],
    dout: Any,
    dlse: Any,
) -> dict[str, Any]:
    (out, lse), pullback = jax.vjp(lambda p: f({**p, **rest}, dict(options)), primals)
    (grads,) = pullback((dout, jnp.zeros_like(lse) if dlse is None else dlse.astype(lse.dtype)))
    return {"out": out, "lse": lse, **{"d" + name: g for name, g in grads.items()}}


def run_attention(inputs: Inputs, implementation: str | None, **options: Any) -> oracle.Results:
    inputs = dataclasses.replace(inputs, options={**inputs.options, **options})
    return run(inputs, _attention_by(implementation))


@functools.cache
def _attention_by(implementation: str | None) -> Callable[..., Any]:
    return lambda operands, options: attention(operands, options, implementation)


@functools.cache
def expected(case: Case, dtype: str) -> oracle.Results:
    return oracle.reference(case.make(dtype))


@functools.cache
def plain(case: Case, dtype: str) -> oracle.Results:
    """The yardstick; its gradients of bias and sinks too."""
    return oracle.plain(case.make(dtype))


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest absolute difference; infinite unless both are non-finite in the same way at the same places."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want)
    assert got.shape == want.shape
    if not np.array_equal(np.isnan(got), np.isnan(want)):
        return np.inf
    with np.errstate(invalid="ignore"):
        difference = np.where((got == want) | np.isnan(want), 0, np.abs(got - want))
    return float(difference.max(initial=0))


def size(x: np.ndarray) -> float:
    """Largest finite magnitude."""
    return float(np.abs(x[np.isfinite(x)]).max(initial=0))


# Absolute error allowed relative to 1 + the largest magnitude, where the plain formula is no yardstick.
PRECISION = {"float32": 1e-5, "float64": 1e-12}


def check(got: oracle.Results, case: Case, dtype: str) -> None:
    """Every result that the case has, as precise as promise 7 has it."""
    assert set(got) == set(expected(case, dtype))
    for name, x in got.items():
        check_result(name, x, case, dtype)


def check_result(name: str, x: np.ndarray, case: Case, dtype: str) -> None:
    """Precision as promise 7 has it: 1e-5 for float32, 1e-12 for float64, in 16 bits 2x the error of the plain formula
    plus one rounding of the result.

    Gradients of bias and sinks are sums in which almost everything cancels (a bias that is constant over the keys has
    gradient 0). They get one rounding of the residual out for each row sum <out, dout> in them, added up like noise.
    So do gradients of query and key, once: where a row sees one or two keys, theirs cancel as well.
    """
    want = expected(case, dtype)
    rounding = float(jnp.finfo(dtype).eps) / 2
    row_sums = np.abs(want["out"] * case.make(dtype).dout.astype(np.float64)).sum(-1)
    magnitude = size(want[name])
    if dtype in PRECISION:
        bound = PRECISION[x.dtype.name] * (1 + magnitude)
    else:
        if name in ("dbias", "dsinks"):
            entries = x.size if name == "dsinks" else math.prod(x.shape[:-1])
            magnitude += size(row_sums) * math.sqrt(row_sums.size / max(entries, 1))
        elif name in ("dquery", "dkey"):
            magnitude += size(row_sums)
        allowance = 1e-5 * (1 + magnitude) if name == "lse" else rounding * magnitude
        bound = 2 * error(plain(case, dtype)[name], want[name]) + allowance
    assert error(x, want[name]) <= bound, f"{name}: error {error(x, want[name]):.3g}, allowed {bound:.3g}"


def check_close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Trees of arrays agree to `tolerance` times 1 + the largest magnitude."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        y = np.asarray(y).astype(np.float64)
        assert error(x, y) <= tolerance * (1 + size(y))


def check_equal(got: Any, want: Any) -> None:
    """Trees of arrays agree bit by bit (NaN equals NaN)."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# Programs -------------------------------------------------------------------------------------------------------------


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr and of those inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(eqn.params, is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, (jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr))


def calls(compiled: Any) -> dict[str, int]:
    """How often a compiled program calls the forward and the backward."""
    text = compiled.as_text()
    return {p: text.count(f'custom_call_target="jax_fmha_{p}"') for p in ("forward", "backward")}


# Fresh processes ------------------------------------------------------------------------------------------------------


def python(program: str, *args: str, devices: int = 1, **environment: str) -> str:
    """stdout of a program file of tests/programs in a fresh interpreter that sees the same jax_fmha."""
    package = pathlib.Path(jax_fmha.__file__).parent.parent
    env = os.environ | environment
    env["PYTHONPATH"] = os.pathsep.join([str(package), str(TESTS)])
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    env["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        [sys.executable, str(TESTS / "programs" / program), *args],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@functools.cache
def checks(program: str, devices: int = 1) -> dict[str, str | None]:
    """Runs every `check_*` of a program; {name: None, or the traceback of its failure}."""
    return json.loads(python(program, devices=devices).splitlines()[-1])


def check_names(program: str) -> list[str]:
    lines = (TESTS / "programs" / program).read_text().splitlines()
    return [line.split("(")[0].removeprefix("def ") for line in lines if line.startswith("def check_")]

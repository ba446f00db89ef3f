"""A plugin of pytest for the tests of the fronts, which call with float32, on kernels that take 16 bits.

    PYTHONPATH=tests/gpu JAX_PLATFORMS=cuda,cpu python -m pytest -p fronts tests/test_tpu_*.py tests/test_flax.py

Operands are rounded to bfloat16 on the way to a native kernel and filled up with zeros to head dims that are multiples
of 8; results come back in the caller's type and size. The originals go on in float32, all of it, so that the comparison
allows for the rounding of operands and of probabilities, and for no mistake in what attends what. A line at the
end says how many calls of native kernels were traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

import support
from jax_fmha import _attention, _vjp
from jax_fmha._problem import Call
from jax_fmha.tpu import _common

# Of 1 + the largest magnitude of a result: four roundings of an operand.
TOLERANCE = 4 * float(jnp.finfo(jnp.bfloat16).eps)
WIDE = ("float32", "float64")
calls = 0


def in_16_bits(call: Call, *names: Any) -> tuple[Any, Any]:
    global calls
    calls += 1
    operands = dict(call.operands)
    dtype, head_dim_v = operands["q"].dtype, operands["v"].shape[-1]
    for name in ("q", "k", "v"):
        x = operands[name]
        x = x.astype(jnp.bfloat16) if x.dtype.name in WIDE else x
        operands[name] = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 8)])
    out, lse = _vjp.attention_vjp(dataclasses.replace(call, operands=operands), *names)
    return out[..., :head_dim_v].astype(dtype), lse


def check_close(got: Any, want: Any, tolerance: float = 0.0) -> None:
    exactly(got, want, max(tolerance, TOLERANCE))


exactly = support.check_close
support.check_close = check_close
_attention.attention_vjp = _common.attention_vjp = in_16_bits

interpret_mode = pltpu.force_tpu_interpret_mode


@contextlib.contextmanager
def interpret_mode_on_the_host() -> Iterator[None]:
    with interpret_mode(), jax.default_device(jax.devices("cpu")[0]):
        yield


pltpu.force_tpu_interpret_mode = interpret_mode_on_the_host


# Workers of xdist hand their count to the process that reports.
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["calls"] = calls


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    global calls
    calls += getattr(node, "workeroutput", {}).get("calls", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"{calls} calls of native kernels on {jax.default_backend()}")

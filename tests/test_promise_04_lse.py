"""Promise 4: lse is an output like any other."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jax_fmha
import oracle
from cases import BY_NAME
from support import attention, check_close, each_implementation, vjp

CASES = (
    "plain",
    "gqa",
    "soft_cap",
    "sinks_dlse_lengths",
    "mask_b111_bias_BNTS",
    "segments_disjoint",
    "tiles_causal",
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@each_implementation
def test_dtype_and_shape(dtype: str, implementation: str | None):
    inputs = BY_NAME["gqa"].make(jnp.dtype(dtype))
    out, lse = attention(inputs.operands, inputs.options, implementation)
    assert out.dtype == dtype
    assert lse.dtype == np.float32
    assert lse.shape == (2, 6, 13)


@each_implementation
@pytest.mark.parametrize("name", CASES)
def test_gradient_through_lse_alone(name: str, implementation: str | None):
    case = BY_NAME[name]
    inputs = case.make(np.float32)
    dlse = np.random.default_rng(0).standard_normal(oracle.reference(inputs)["lse"].shape).astype(np.float32)
    want = oracle.reference(type(inputs)(inputs.operands, inputs.options, np.zeros_like(inputs.dout), dlse))
    f = lambda p: attention({**inputs.operands, **p}, inputs.options, implementation)[1]  # noqa: E731
    (grads,) = vjp(f, inputs.differentiable())[1](dlse)
    check_close({"d" + n: g for n, g in grads.items()}, {n: want[n] for n in want if n not in ("out", "lse")})


@each_implementation
def test_lse_is_not_returned_unless_asked(implementation: str | None):
    x = np.ones((2, 3, 4, 8), np.float32)
    assert jax_fmha.attention(x, x, x, implementation=implementation).shape == x.shape


@each_implementation
def test_two_halves_merge_exactly(implementation: str | None):
    """out and lse of two halves of the keys give those of all keys, gradients included."""
    inputs = BY_NAME["gqa"].make(np.float32)
    q, k, v = (inputs.operands[n] for n in ("query", "key", "value"))

    def whole(q: Any, k: Any, v: Any) -> Any:
        return jax_fmha.attention(q, k, v, return_lse=True, implementation=implementation)

    def merged(q: Any, k: Any, v: Any) -> Any:
        (out_a, lse_a), (out_b, lse_b) = (whole(q, k[:, s], v[:, s]) for s in (slice(0, 7), slice(7, None)))
        lse = jnp.logaddexp(lse_a, lse_b)
        weight = [jnp.swapaxes(jnp.exp(x - lse), 1, 2)[..., None] for x in (lse_a, lse_b)]
        return weight[0] * out_a + weight[1] * out_b, lse

    (want, pull_want), (got, pull_got) = vjp(whole, q, k, v), vjp(merged, q, k, v)
    check_close(got, want)
    cotangents = inputs.dout, jnp.cos(want[1])
    check_close(pull_got(cotangents), pull_want(cotangents))

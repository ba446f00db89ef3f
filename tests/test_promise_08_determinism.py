"""Promise 8: the forward bitwise equal from run to run, the backward too with `deterministic=True`."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from cases import BY_NAME
from support import attention, check_equal, run_attention

REPEATS = 6
CASES = (
    "gqa",
    "tiles",
    "tiles_causal_gqa",
    "tiles_segments",
    "tiles_mask_bias",
    "tiles_lengths",
    "decode_long",
    "mix_1",
)


@pytest.mark.parametrize("name", CASES)
def test_forward(name: str):
    inputs = BY_NAME[name].make(np.float32)
    f = jax.jit(lambda operands: attention(operands, inputs.options, None))
    first = f(inputs.operands)
    for _ in range(REPEATS):
        check_equal(f(inputs.operands), first)


@pytest.mark.parametrize("name", CASES)
def test_backward(name: str):
    inputs = BY_NAME[name].make(np.float32)
    options = {**inputs.options, "deterministic": True}

    @jax.jit
    def gradients(primals: dict) -> dict:
        (_, lse), pullback = jax.vjp(lambda p: attention({**inputs.operands, **p}, options, None), primals)
        return pullback((inputs.dout, np.cos(np.arange(lse.size, dtype=np.float32)).reshape(lse.shape)))[0]

    first = gradients(inputs.differentiable())
    for _ in range(REPEATS):
        check_equal(gradients(inputs.differentiable()), first)


def test_deterministic_changes_no_result():
    inputs = BY_NAME["tiles_lengths"].make(np.float32)
    got, want = (run_attention(inputs, None, deterministic=d) for d in (True, False))
    for name, x in got.items():
        np.testing.assert_allclose(x, want[name], rtol=1e-5, atol=1e-5)


def test_batch_entries_do_not_depend_on_their_neighbours():
    """An entry's result is the same bit by bit alone and in a batch of others with the same shapes."""
    inputs = BY_NAME["gqa"].make(np.float32)
    whole = attention(inputs.operands, inputs.options, None)
    swapped = attention({n: x[::-1] for n, x in inputs.operands.items()}, inputs.options, None)
    check_equal(swapped, jax.tree.map(lambda x: x[::-1], whole))

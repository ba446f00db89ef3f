"""Promise 5: gradients for query, key, value, bias and sinks, each alone and together; float0 for the rest.

Together, in all dtypes and with lse's cotangent, they are graded in test_promise_07_precision.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fmha
from cases import BY_NAME, DIFFERENTIABLE
from support import attention, check_close, each_implementation, expected

ALONE = (
    "gqa",
    "causal",
    "window_positions",
    "segments_shuffled",
    "sinks_dlse_lengths",
    "mask_B1TS_bias_bN11",
    "mask_b11S_bias_BNT1",
    "mask_B111_bias_bNTS",
    "mask_b1T1_bias_BN1S",
    "unbatched_segments",
    "tiles_mask_bias",
    "tiles_lengths",
    "mix_1",
    "mix_4",
    "mix_8",
)


def gradients(name: str, operands: tuple[str, ...], implementation: str | None) -> dict[str, Any]:
    (grads,) = gradients_of_each(name, [operands], implementation)
    return grads


def gradients_of_each(
    name: str, groups: list[tuple[str, ...]], implementation: str | None
) -> list[dict[str, Any]]:
    """Differentiated group by group, compiled together: the groups share a forward."""
    inputs = BY_NAME[name].make(np.float32)
    f = lambda p: attention({**inputs.operands, **p}, inputs.options, implementation)  # noqa: E731

    def pull(primals: Any) -> Any:
        (_, lse), pullback = jax.vjp(f, primals)
        return pullback((inputs.dout, jnp.zeros_like(lse) if inputs.dlse is None else inputs.dlse))[0]

    def pull_each(primals: Any) -> Any:
        return [pull({n: primals[n] for n in operands}) for operands in groups]

    return jax.jit(pull_each)({n: inputs.operands[n] for operands in groups for n in operands})


@each_implementation
@pytest.mark.parametrize("name", ALONE)
def test_each_alone(name: str, implementation: str | None):
    case = BY_NAME[name]
    want = expected(case, "float32")
    alone = [(operand,) for operand in case.make(np.float32).differentiable()]
    for (operand,), got in zip(alone, gradients_of_each(name, alone, implementation), strict=True):
        check_close(got, {operand: want["d" + operand]})


@pytest.mark.parametrize(
    "operands", [c for r in (2, 3, 4) for c in itertools.combinations(DIFFERENTIABLE, r)]
)
def test_every_combination(operands: tuple[str, ...]):
    want = expected(BY_NAME["mix_1"], "float32")
    got = gradients("mix_1", operands, None)
    check_close(got, {name: want["d" + name] for name in operands})


@each_implementation
def test_what_was_asked_before_changes_nothing(implementation: str | None):
    """JAX keeps traces of a call, among them those for the gradients of other operands."""
    want = expected(BY_NAME["mix_8"], "float32")
    everything, less = DIFFERENTIABLE, ("query",)
    for operands in (
        everything,
        less,
        everything,
        ("bias",),
        ("sinks",),
        ("query", "bias"),
        everything,
        less,
    ):
        got = gradients("mix_8", operands, implementation)
        check_close(got, {name: want["d" + name] for name in operands})


@each_implementation
def test_gradients_have_the_dtype_of_their_operand(implementation: str | None):
    x = np.ones((2, 3, 4, 8), jnp.bfloat16)
    operands = {
        "query": x,
        "key": x,
        "value": x,
        "bias": np.zeros((1, 4, 3, 3), np.float16),
        "sinks": np.zeros(4, jnp.bfloat16),
    }
    grads = jax.grad(
        lambda p: jax_fmha.attention(**p, implementation=implementation).astype(np.float32).sum()
    )(operands)
    assert {n: (g.shape, g.dtype) for n, g in grads.items()} == {
        n: (a.shape, a.dtype) for n, a in operands.items()
    }


@each_implementation
def test_integers_and_booleans_get_float0(implementation: str | None):
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 8)).astype(np.float32)
    rest = {
        "mask": np.ones((2, 1, 3, 3), bool),
        "segment_ids": jax_fmha.SegmentIds(np.zeros((2, 3), np.int32), np.zeros((2, 3), np.int32)),
        "query_positions": np.arange(3, dtype=np.int32),
        "key_value_positions": np.arange(3, dtype=np.int32),
        "query_seq_lengths": np.full(2, 3, np.int32),
        "key_value_seq_lengths": np.full(2, 3, np.int32),
    }

    def loss(rest: Any) -> Any:
        return jax_fmha.attention(x, x, x, is_causal=True, implementation=implementation, **rest).sum()

    grads = jax.grad(loss, allow_int=True)(rest)
    leaves = jax.tree.leaves(grads)
    assert len(leaves) == 7
    assert all(g.dtype == jax.dtypes.float0 for g in leaves)
    offset = jax.grad(
        lambda i: jax_fmha.attention(x, x, x, is_causal=True, query_offset=i).sum(), allow_int=True
    )
    assert offset(np.array([0, 1], np.int32)).dtype == jax.dtypes.float0


@pytest.mark.parametrize("name", ["scale", "logits_soft_cap"])
def test_scalars_refuse_a_gradient_or_give_the_right_one(name: str):
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 8)).astype(np.float32)

    def loss(scalar: Any, implementation: str | None) -> Any:
        return jnp.square(jax_fmha.attention(x, x, x, **{name: scalar}, implementation=implementation)).sum()

    with pytest.raises(NotImplementedError, match=rf'{name}.*implementation="xla"'):
        jax.grad(loss)(0.5, None)
    step = 1e-2
    value, slope = (jax.jit(lambda x, f=f: f(x, "xla")) for f in (loss, jax.grad(loss)))
    difference = (value(0.5 + step) - value(0.5 - step)) / (2 * step)
    np.testing.assert_allclose(slope(0.5), difference, rtol=2e-2)


def test_shared_operands_sum_over_the_batch():
    """bias and sinks without batch dimensions have the gradient of the sum over entries."""
    inputs = BY_NAME["mix_1"].make(np.float32)
    shared = gradients("mix_1", ("bias", "sinks"), None)
    per_entry = []
    for b in range(2):
        entry = {
            n: x[b] for n, x in inputs.operands.items() if n in ("query", "key", "value", "query_seq_lengths")
        }
        entry["segment_ids"] = jax_fmha.SegmentIds(*(x[b] for x in inputs.operands["segment_ids"]))
        rest = {"bias": inputs.operands["bias"][0], "sinks": inputs.operands["sinks"]}
        f = lambda p, entry=entry: attention({**entry, **p}, inputs.options, None)  # noqa: E731
        per_entry.append(jax.vjp(f, rest)[1]((inputs.dout[b], inputs.dlse[b]))[0])
    check_close(
        {n: np.squeeze(shared[n], 0) if n == "bias" else shared[n] for n in shared},
        {n: np.asarray(per_entry[0][n] + per_entry[1][n]) for n in shared},
    )

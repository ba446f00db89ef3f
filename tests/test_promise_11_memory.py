"""Promise 11: memory O(T + S) per head beyond inputs and outputs, forward and backward; no state between calls."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest

import jax_fmha
from cases import BY_NAME, Inputs
from jax_fmha import SegmentIds
from support import attention, check_equal, equations, run_attention

N, K, H = 2, 1, 8


def operands(length: int) -> dict[str, Any]:
    """Everything that needs no array of size T*S by itself."""
    spec = jax.ShapeDtypeStruct
    return {
        "query": spec((1, length, N, H), np.float32),
        "key": spec((1, length, K, H), np.float32),
        "value": spec((1, length, K, H), np.float32),
        "bias": spec((1, N, 1, length), np.float32),
        "mask": spec((1, 1, length, 1), bool),
        "segment_ids": spec((1, length), np.int32),
        "query_positions": spec((1, length), np.int32),
        "key_value_positions": spec((1, length), np.int32),
        "query_seq_lengths": spec((1,), np.int32),
        "sinks": spec((N,), np.float32),
    }


def step(primals: dict[str, Any], rest: dict[str, Any]) -> Any:
    def loss(primals: dict[str, Any]) -> Any:
        options = {
            "is_causal": True,
            "local_window_size": (1000, 0),
            "logits_soft_cap": 5.0,
            "deterministic": True,
        }
        out, lse = attention({**primals, **rest}, options, None)
        return out.sum() + lse.sum()

    return jax.value_and_grad(loss)(primals)


def arguments(length: int) -> tuple[dict[str, Any], dict[str, Any]]:
    inputs = Inputs(operands(length), {}, np.zeros(0), None)
    return inputs.differentiable(), inputs.rest()


def test_no_array_of_size_T_times_S_in_the_jaxpr():
    length = 16_384
    jaxpr = jax.make_jaxpr(step)(*arguments(length))
    largest = max(v.aval.size for eqn in equations(jaxpr.jaxpr) for v in (*eqn.invars, *eqn.outvars))
    assert largest == length * N * H  # out


@pytest.mark.parametrize("case", ["all", "plain"])
def test_compiled_memory_grows_with_T_not_with_its_square(case: str):
    sizes = {}
    for length in (16_384, 65_536):
        primals, rest = arguments(length)
        if case == "plain":
            primals, rest = {n: primals[n] for n in ("query", "key", "value")}, {}
        compiled = jax.jit(step).lower(primals, rest).compile()
        sizes[length] = compiled.memory_analysis().temp_size_in_bytes
        for dims in re.findall(r"[a-z]+\d+\[([\d,]+)\]", compiled.as_text()):
            assert np.prod([int(d) for d in dims.split(",")], dtype=np.int64) < length * length
    assert sizes[65_536] < 4.2 * sizes[16_384]
    assert sizes[65_536] < 65_536 * N * H * 4 * 32  # a few dozen times out


def test_the_reference_is_not_linear():
    """Guards the tests above: they can tell."""
    primals, rest = arguments(512)
    f = lambda p, r: attention({**p, **r}, {}, "xla")[0]  # noqa: E731
    text = jax.jit(f).lower(primals, rest).compile().as_text()
    assert re.search(r"\[(1,)*2,512,512\]|\[1,1,2,512,512\]|512,512\]", text)


def test_residuals_are_operands_out_and_lse():
    """What the forward saves for the backward, beside its operands."""
    q = np.ones((1, 32, N, H), np.float32)
    k = np.ones((1, 48, K, H), np.float32)
    _, pullback = jax.vjp(lambda q, k, v: jax_fmha.attention(q, k, v, is_causal=True), q, k, k)
    shapes = sorted(x.shape for x in jax.tree.leaves(pullback) if hasattr(x, "shape") and x.size > 1)
    saved = [q.shape, k.shape, k.shape, (1, 32, N, H), (1, N, 32)]
    assert [s for s in shapes if s not in saved] == []
    assert (1, N, 32) in shapes


def test_no_state_between_calls():
    """Other calls in between, of other sizes and options, change nothing."""
    names = ("tiles_segments", "causal", "decode_long", "mix_1", "no_keys", "tiles")
    first = {name: run_attention(BY_NAME[name].make(np.float32), None) for name in names}
    for name in reversed(names):
        check_equal(run_attention(BY_NAME[name].make(np.float32), None), first[name])


def test_segments_need_no_memory_of_their_square():
    """10^5 tokens compile and need megabytes, whatever the ids turn out to be."""
    length = 100_000
    x = jax.ShapeDtypeStruct((1, length, 1, 8), np.float32)
    ids = SegmentIds(*[jax.ShapeDtypeStruct((1, length), np.int32)] * 2)
    f = jax.jit(lambda q, k, v, ids: jax_fmha.attention(q, k, v, segment_ids=ids))
    assert f.lower(x, x, x, ids).compile().memory_analysis().temp_size_in_bytes < 64 * 2**20

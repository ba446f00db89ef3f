"""`explain` says which kernels would run, for any machine, without running anything."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jax_fmha import SegmentIds, attention, explain

SPEC = jax.ShapeDtypeStruct
Q, KV = SPEC((2, 64, 4, 32), np.float32), SPEC((2, 128, 2, 32), np.float32)


def test_shapes_are_enough_and_arrays_do():
    from_specs = explain(Q, KV, KV, is_causal=True)
    arrays = [np.zeros(x.shape, x.dtype) for x in (Q, KV, KV)]
    assert explain(*arrays, is_causal=True) == from_specs


def test_kernel_names_forward_and_backward():
    forward, backward = explain(Q, KV, KV, platform="cpu").kernel
    assert isinstance(forward, str)
    assert isinstance(backward, str)
    assert forward != backward


def test_every_other_kernel_has_a_reason():
    explanation = explain(Q, KV, KV, platform="cpu")
    assert not set(explanation.kernel) & set(explanation.refusals)
    assert len(explanation.refusals) >= 1
    assert all(isinstance(reason, str) and reason for reason in explanation.refusals.values())


def test_decode_has_its_own_kernel():
    one = SPEC((2, 1, 4, 32), np.float32)
    assert explain(one, KV, KV, platform="cpu").kernel[0] != explain(Q, KV, KV, platform="cpu").kernel[0]


@pytest.mark.parametrize("implementation", ["sm90", "sm100"])
def test_a_kernel_of_another_platform(implementation: str):
    explanation = explain(Q, KV, KV, implementation=implementation, platform="cpu")
    assert explanation.kernel == (None, None)
    assert all(implementation in reason or "CUDA" in reason for reason in explanation.refusals.values())


@pytest.mark.parametrize("capability", ["9.0", 9.0, "10.0", 10.3])
def test_cuda_without_a_device(capability: Any):
    """The CPU kernels refuse a CUDA device whatever else there is."""
    explanation = explain(Q, KV, KV, platform="cuda", compute_capability=capability)
    cpu = set(explain(Q, KV, KV, platform="cpu").kernel)
    assert cpu <= set(explanation.refusals)


def test_the_reference():
    explanation = explain(Q, KV, KV, implementation="xla")
    assert explanation.kernel == ("xla", "xla")
    assert explanation.refusals == {}


def test_takes_what_attention_takes():
    kwargs = {
        "bias": SPEC((1, 4, 1, 128), np.float32),
        "mask": SPEC((2, 1, 64, 128), bool),
        "segment_ids": SegmentIds(SPEC((2, 64), np.int32), SPEC((2, 128), np.int32)),
        "key_value_seq_lengths": SPEC((2,), np.int32),
        "sinks": SPEC((4,), np.float32),
        "local_window_size": (16, 0),
        "logits_soft_cap": 20.0,
        "query_offset": 64,
        "return_lse": True,
        "deterministic": True,
    }
    assert None not in explain(Q, KV, KV, **kwargs, platform="cpu").kernel


def test_mistakes_are_those_of_attention():
    wrong = SPEC((2, 128, 2, 31), np.float32)
    with pytest.raises(ValueError, match="key: expected head_dim 32") as ours:
        explain(Q, wrong, KV)
    with pytest.raises(ValueError, match="key: expected head_dim 32") as theirs:
        attention(*(np.zeros(x.shape, x.dtype) for x in (Q, wrong, KV)))
    assert str(ours.value) == str(theirs.value)


def test_unknown_platform():
    with pytest.raises(NotImplementedError, match=r'"rocm".*implementation="xla"'):
        explain(Q, KV, KV, platform="rocm")


def test_says_what_runs():
    """The name belongs to the kernel of the implementation that was asked for."""
    assert all(
        name.startswith("cpu") for name in explain(Q, KV, KV, implementation="cpu", platform="cpu").kernel
    )

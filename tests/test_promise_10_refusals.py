"""Promise 10: the caller's mistakes are ValueErrors at trace time with operand, expected, got and remedy; what no
kernel takes is a NotImplementedError with each kernel's reason; no argument is accepted and ignored."""

from __future__ import annotations

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fmha
from jax_fmha import SegmentIds, attention
from support import each_implementation, python

B, T, S, N, K, H = 2, 5, 7, 4, 2, 8


def f32(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def i32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


GOOD = {"query": f32(B, T, N, H), "key": f32(B, S, K, H), "value": f32(B, S, K, H)}

# Mistake -> arguments beside the good ones, the operand, words of what was expected, what was got.
MISTAKES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "query_rank": ({"query": f32(T, H)}, "query", "[*batch, T, N, H]", "[5, 8] float32"),
    "query_dtype": ({n: np.asarray(x, np.int32) for n, x in GOOD.items()}, "query", "float32", "int32"),
    "query_complex": ({"query": f32(B, T, N, H) * 1j}, "query", "float", "unsupported"),
    "query_is_no_array": ({"query": "text"}, "query", "an array", "str"),
    "key_dtype": ({"key": GOOD["key"].astype(jnp.bfloat16)}, "key", "float32", "bfloat16"),
    "value_dtype": ({"value": GOOD["value"].astype(np.float16)}, "value", "float32", "float16"),
    "key_rank": ({"key": f32(S, K, H)}, "key", "[*batch, S, K, H]", "[7, 2, 8] float32"),
    "key_head_dim": ({"key": f32(B, S, K, H + 1)}, "key", "head_dim 8", "[2, 7, 2, 9] float32"),
    "key_batch": ({"key": f32(B + 1, S, K, H)}, "key", "[2, 5, 4, 8]", "[3, 7, 2, 8]"),
    "key_heads": (
        {"key": f32(B, S, 3, H), "value": f32(B, S, 3, H)},
        "key",
        "divides",
        "[2, 7, 3, 8] float32",
    ),
    "value_length": ({"value": f32(B, S + 1, K, H)}, "value", "2", "[2, 8, 2, 8] float32"),
    "value_heads": ({"value": f32(B, S, 1, H)}, "value", "2", "[2, 7, 1, 8] float32"),
    "bias_dtype": ({"bias": i32(1, N, T, S)}, "bias", "float", "int32"),
    "bias_shape": ({"bias": f32(1, N, T, S + 1)}, "bias", "[4, 5, 7]", "[1, 4, 5, 8] float32"),
    "bias_rank": ({"bias": f32(1, 1, 1, N, T, S)}, "bias", "at most 4", "[1, 1, 1, 4, 5, 7] float32"),
    "bias_kv_heads": ({"bias": f32(1, K, T, S)}, "bias", "[4, 5, 7]", "[1, 2, 5, 7] float32"),
    "mask_dtype": ({"mask": f32(1, 1, T, S)}, "mask", "bool", "float32"),
    "mask_int": ({"mask": i32(1, 1, T, S)}, "mask", "bool", "int32"),
    "mask_shape": ({"mask": np.ones((B, 1, S, T), bool)}, "mask", "[4, 5, 7]", "[2, 1, 7, 5] bool"),
    "mask_batch": ({"mask": np.ones((3, 1, T, S), bool)}, "mask", "2", "[3, 1, 5, 7] bool"),
    "scale_shape": ({"scale": f32(N)}, "scale", "a scalar", "[4] float32"),
    "scale_complex": ({"scale": 1j}, "scale", "a scalar", "complex64"),
    "causal": ({"is_causal": 1}, "is_causal", "bool", "1"),
    "deterministic": ({"deterministic": "yes"}, "deterministic", "bool", "'yes'"),
    "window_float": ({"local_window_size": 2.5}, "local_window_size", "int", "2.5"),
    "window_triple": ({"local_window_size": (1, 2, 3)}, "local_window_size", "pair", "(1, 2, 3)"),
    "window_array": ({"local_window_size": np.array([1, 2])}, "local_window_size", "pair", "array([1, 2])"),
    "soft_cap_zero": ({"logits_soft_cap": 0}, "logits_soft_cap", "positive", "0"),
    "soft_cap_negative": ({"logits_soft_cap": -1.0}, "logits_soft_cap", "positive", "-1.0"),
    "soft_cap_shape": ({"logits_soft_cap": f32(2)}, "logits_soft_cap", "a scalar", "[2] float32"),
    "offset_float": ({"query_offset": 1.5}, "query_offset", "integers", "float32"),
    "offset_shape": ({"query_offset": i32(3)}, "query_offset", "2", "[3] int32"),
    "query_positions": ({"query_positions": i32(B, S)}, "query_positions", "T = 5", "[2, 7] int32"),
    "key_value_positions": ({"key_value_positions": i32(T)}, "key_value_positions", "S = 7", "[1, 5] int32"),
    "positions_float": ({"query_positions": f32(T)}, "query_positions", "integers", "float32"),
    "query_lengths": ({"query_seq_lengths": i32(B, 1)}, "query_seq_lengths", "[*batch]", "[2, 1] int32"),
    "lengths_bool": (
        {"key_value_seq_lengths": np.ones(B, bool)},
        "key_value_seq_lengths",
        "integers",
        "bool",
    ),
    "lengths_batch": ({"key_value_seq_lengths": i32(3)}, "key_value_seq_lengths", "2", "[3] int32"),
    "lengths_unsigned": (
        {"query_seq_lengths": np.ones(B, np.uint32)},
        "query_seq_lengths",
        "int32",
        "uint32",
    ),
    "segments_one_side": ({"segment_ids": i32(B, T)}, "segment_ids", "S = 7", "[2, 5] int32"),
    "segments_shape": (
        {"segment_ids": SegmentIds(i32(B, S), i32(B, S))},
        "segment_ids",
        "T = 5",
        "[2, 7] int32",
    ),
    "segments_float": ({"segment_ids": SegmentIds(f32(T), i32(S))}, "segment_ids", "integers", "float32"),
    "sinks_shape": ({"sinks": f32(K)}, "sinks", "[N]", "[1, 2] float32"),
    "sinks_dtype": ({"sinks": i32(N)}, "sinks", "float", "[4] int32"),
    "implementation": ({"implementation": "cudnn"}, "implementation", "sm90", "'cudnn'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake(mistake: str):
    """Raised while tracing, with a sentence that helps."""
    wrong, operand, expected, got = MISTAKES[mistake]
    with pytest.raises(ValueError, match=rf"^attention: {operand}\S*: expected ") as caught:
        attention(**{**GOOD, **wrong})
    message = str(caught.value)
    found = re.fullmatch(r"attention: [\w.]+: expected (.*), got (.*?)\. (.+)", message, re.DOTALL)
    assert found, message
    assert expected in found[1], message
    assert got in found[2], message
    assert len(found[3].split()) >= 1
    assert found[3].rstrip().endswith("."), message


@pytest.mark.parametrize("mistake", ["key_dtype", "mask_shape", "segments_one_side", "implementation"])
def test_mistake_at_trace_time_for_the_reference_and_explain_too(mistake: str):
    wrong, operand, *_ = MISTAKES[mistake]
    arguments = {**GOOD, **wrong}
    with pytest.raises(ValueError, match=operand):
        jax_fmha.explain(**arguments)
    arguments.setdefault("implementation", "xla")
    static = arguments.pop("implementation")
    with pytest.raises(ValueError, match=operand):
        jax.eval_shape(lambda x: attention(**x, implementation=static), arguments)


@pytest.mark.parametrize("implementation", ["sm90", "sm100"])
def test_no_kernel_gives_each_reason(implementation: str):
    """A valid call that nothing on this machine takes: no silent fallback, and the way out is named."""
    with pytest.raises(NotImplementedError, match="no kernel takes this call") as caught:
        attention(**GOOD, implementation=implementation)
    message = str(caught.value)
    for kernel in jax_fmha.explain(**GOOD, implementation=implementation).refusals:
        if "backward" not in kernel:
            assert re.search(rf"\n  {kernel}: \S", message), message
    assert f'implementation="{implementation}"' in message
    assert 'implementation="xla"' in message


def test_no_fallback_to_the_reference():
    text = jax.jit(lambda x: attention(**x)).lower(GOOD).as_text()
    assert "jax_fmha_forward" in text
    assert "dot_general" not in text
    text = jax.jit(lambda x: attention(**x, implementation="xla")).lower(GOOD).as_text()
    assert "jax_fmha_forward" not in text


# Every argument of `attention` beside query, key, value: a setting that must change the result (or what runs).
EFFECTS: dict[str, Any] = {
    "bias": f32(1, N, T, S),
    "mask": np.arange(S) < 3,
    "scale": 3.0,
    "is_causal": True,
    "local_window_size": (1, 1),
    "logits_soft_cap": 0.1,
    "query_offset": 2,
    "query_positions": np.arange(T)[::-1].copy(),
    "key_value_positions": np.arange(S)[::-1].copy(),
    "query_seq_lengths": np.array([2, 3]),
    "key_value_seq_lengths": np.array([2, 3]),
    "segment_ids": SegmentIds(np.arange(T) % 2, np.arange(S) % 2),
    "sinks": f32(N),
    "return_lse": True,
    "deterministic": True,
    "implementation": "xla",
}


def test_every_argument_is_listed():
    assert set(inspect.signature(attention).parameters) - {"query", "key", "value"} == set(EFFECTS)


@each_implementation
@pytest.mark.parametrize(
    "name", [n for n in EFFECTS if n not in ("return_lse", "deterministic", "implementation")]
)
def test_no_argument_is_ignored(name: str, implementation: str | None):
    needs_causal = name in ("query_offset", "query_positions", "key_value_positions")
    options = {"is_causal": needs_causal, "implementation": implementation}
    before, after = (
        jax.jit(lambda x, extra=extra: attention(**x, **{**options, **extra}))(GOOD)
        for extra in ({}, {name: EFFECTS[name]})
    )
    assert np.abs(before - after).max() > 1e-3


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="dropout"):
        attention(**GOOD, dropout=0.1)


@pytest.mark.parametrize("name", ["scale", "logits_soft_cap", "query_offset"])
@each_implementation
def test_scalars_may_be_traced(name: str, implementation: str | None):
    value = 2 if name == "query_offset" else 1.5
    f = lambda x: attention(**GOOD, is_causal=True, **{name: x}, implementation=implementation)  # noqa: E731
    np.testing.assert_allclose(jax.jit(f)(value), f(value), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "kind",
    [
        "numpy_bool",
        "numpy_int32",
        "numpy_int64",
        "list_window",
        "numpy_scalars",
        "python_scalars",
        "insists",
        "raw_int_for_bool",
        "raw_int32_for_int64",
        "raw_float_for_int64",
        "raw_missing",
        "raw_extra",
    ],
)
def test_attribute_types_in_a_fresh_process(kind: str):
    python("attributes.py", kind)

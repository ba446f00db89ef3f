"""Promise 2: what a row may not attend by segment or length cannot reach it, not even NaN or Inf; nor its gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cases import BY_NAME, Inputs
from jax_fmha import SegmentIds
from oracle import Aligned, reference
from support import (
    check_equal,
    each_implementation,
    expected,
    python,
    run_attention,
)

LENGTHS = ("lengths_q", "lengths_kv", "lengths_both", "lengths_scalar", "sinks_dlse_lengths", "tiles_lengths")
SEGMENTS = (
    "segments_runs",
    "segments_shuffled",
    "segments_negative",
    "segments_tiny",
    "segments_disjoint",
    "segments_shared",
    "tiles_segments",
    "tiles_shuffled",
    "mix_1",
    "mix_3",
    "mix_6",
    "mix_8",
    "mix_9",
)
each_value = pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])


def poisoned(inputs: Inputs, rows: np.ndarray, keys: np.ndarray, value: float) -> Inputs:
    """`value` in whole rows: rows [*batch, T] of query, dout and dlse, keys [*batch, S] of key and value.

    With sinks, dlse only beyond the query length: a row without keys passes it on to the sink.
    """
    operands = dict(inputs.operands)
    for name, where in (("query", rows), ("key", keys), ("value", keys)):
        operands[name] = np.where(where[..., None, None], value, operands[name]).astype(np.float32)
    dout = np.where(rows[..., None, None], value, inputs.dout).astype(np.float32)
    dlse = inputs.dlse
    if dlse is not None:
        if "sinks" in operands:
            view = Aligned(dataclasses.replace(inputs, dlse=None))
            rows = (np.arange(view.seqlen_q) >= view.q_lengths[:, None]).reshape(rows.shape)
        dlse = np.where(rows[..., None, :], value, dlse).astype(np.float32)
    return dataclasses.replace(inputs, operands=operands, dout=dout, dlse=dlse)


def isolated(inputs: Inputs) -> np.ndarray:
    """[*batch, T, S] bool: pairs that segments and lengths allow."""
    stays = ("query", "key", "value", "query_seq_lengths", "key_value_seq_lengths", "segment_ids")
    operands = {name: x for name, x in inputs.operands.items() if name in stays}
    view = Aligned(dataclasses.replace(inputs, operands=operands, options={}, dlse=None))
    pairs = [[view.allowed(b, 0, i) for i in range(view.seqlen_q)] for b in range(view.entries)]
    return np.array(pairs).reshape(*view.batch, view.seqlen_q, view.seqlen_kv)


@each_value
@each_implementation
@pytest.mark.parametrize("name", LENGTHS + SEGMENTS)
def test_unused_rows(name: str, implementation: str | None, value: float):
    """Rows without a partner on the other side hold anything: all results are the same bit by bit."""
    inputs = BY_NAME[name].make(np.float32)
    pairs = isolated(inputs)
    bad = poisoned(inputs, ~pairs.any(-1), ~pairs.any(-2), value)
    got, want = run_attention(bad, implementation), run_attention(inputs, implementation)
    check_equal(got, want)
    assert np.isfinite(got["out"]).all()


@each_value
@each_implementation
@pytest.mark.parametrize(
    "name", ["segments_runs", "segments_shuffled", "segments_negative", "tiles_segments", "mix_8"]
)
def test_other_segments(name: str, implementation: str | None, value: float):
    """One segment is all NaN, in query, key, value and dout: the others do not notice."""
    inputs = BY_NAME[name].make(np.float32)
    ids = inputs.operands["segment_ids"]
    victim = ids.q[..., 3:4]
    rows, keys = ids.q == victim, ids.kv == victim
    assert rows.any()
    assert not rows.all()
    bad = poisoned(inputs, rows, keys, value)
    got, want = run_attention(bad, implementation), run_attention(inputs, implementation)
    for result, where in (("out", rows), ("dquery", rows), ("dkey", keys), ("dvalue", keys)):
        check_equal(got[result][~where], want[result][~where])
        assert np.isfinite(got[result][~where]).all()
    lse_rows = np.broadcast_to(rows[..., None, :], want["lse"].shape)
    check_equal(got["lse"][~lse_rows], want["lse"][~lse_rows])


@each_implementation
def test_nan_bias_between_segments(implementation: str | None):
    case = dataclasses.replace(BY_NAME["segments_runs"], bias="BNTS", soft_cap=2.0)
    inputs = case.make(np.float32)
    apart = ~isolated(inputs)[:, None]
    bias = np.where(apart, np.nan, inputs.operands["bias"])
    bad = dataclasses.replace(inputs, operands={**inputs.operands, "bias": bias})
    check_equal(run_attention(bad, implementation), run_attention(inputs, implementation))


@each_implementation
@pytest.mark.parametrize("operand", ["query", "key", "value", "dout"])
def test_nan_stays_in_its_segment_and_is_not_lost_there(operand: str, implementation: str | None):
    """A legitimate NaN propagates to just what depends on it, as the oracle computes it row by row."""
    ids = SegmentIds(np.array([0, 0, 1, 1, 1]), np.array([1, 0, 1, 0, 0, 1]))
    case = dataclasses.replace(BY_NAME["plain"], T=5, S=6, segments="runs")
    inputs = case.make(np.float32)
    operands = {**inputs.operands, "segment_ids": ids}
    if operand == "dout":
        dout = inputs.dout.copy()
        dout[0, 3, 1] = np.nan
        inputs = dataclasses.replace(inputs, operands=operands, dout=dout)
    else:
        operands[operand] = operands[operand].copy()
        operands[operand][0, 2, 1] = np.nan
        inputs = dataclasses.replace(inputs, operands=operands)
    got = run_attention(inputs, implementation)

    want = reference(inputs)
    assert any(np.isnan(x).any() for x in want.values())
    for result, x in want.items():
        np.testing.assert_array_equal(np.isnan(got[result]), np.isnan(x), err_msg=result)
        np.testing.assert_allclose(got[result], x, rtol=1e-5, atol=1e-5)


@each_implementation
def test_large_logits_are_ordinary(implementation: str | None):
    """No sentinel: logits of -1e6 and -1e30 keep their order beside masked ones.

    A float32 of 1e6 has steps of 1/16: weights between neighbours are good to a few percent.
    """
    q = np.ones((1, 3, 1, 1), np.float32)
    k = np.array([-1e6, -1e6 - 1, -1e30, 5], np.float32).reshape(1, 4, 1, 1)
    v = np.array([1, 2, 3, 4], np.float32).reshape(1, 4, 1, 1)
    mask = np.array([[1, 1, 0, 0], [0, 0, 1, 0], [0, 1, 1, 0]], bool)
    operands = {"query": q, "key": k, "value": v, "mask": mask}
    inputs = Inputs(operands, {"scale": 1.0}, np.ones((1, 3, 1, 1), np.float32), None)
    got = run_attention(inputs, implementation)
    p = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(got["out"].ravel(), [p + 2 * (1 - p), 3, 2], rtol=3e-2)
    np.testing.assert_allclose(
        got["lse"].ravel(), [-1e6 + np.log1p(np.exp(-1.0)), -1e30, -1e6 - 1], rtol=1e-6
    )
    # The weight of the key at -1e30 is a difference of two float32 of that size: 1 or 0, nothing else.
    dvalue = got["dvalue"].ravel()
    np.testing.assert_allclose(dvalue[[0, 1, 3]], [p, 1 - p + 1, 0], rtol=6e-2)
    assert 0 <= dvalue[2] <= 1


@pytest.mark.skipif(
    not hasattr(__import__("os"), "sched_getaffinity"), reason="glibc fills memory, others do not"
)
@pytest.mark.parametrize("fill", ["fe", "7f"])
def test_fresh_memory_is_never_read(fill: str):
    """Outputs and workspace arrive filled with huge numbers; every element is written, nothing else is read."""
    python("dirty_memory.py", fill, MALLOC_PERTURB_=str(int(fill, 16) ^ 0xFF))


def test_the_oracle_isolates():
    """Guards the tests above: the oracle's own results do not change with what is poisoned."""
    case = BY_NAME["segments_disjoint"]
    inputs = case.make(np.float32)
    pairs = isolated(inputs)

    got: Any = reference(poisoned(inputs, ~pairs.any(-1), ~pairs.any(-2), np.nan))
    for name, x in expected(case, "float32").items():
        np.testing.assert_array_equal(got[name], x)

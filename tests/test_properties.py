"""Shapes, masks, segments and every option drawn by hypothesis, against the oracle."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
from cases import Case, Inputs
from jax_fmha import SegmentIds, attention
from support import check_close, run_attention

sizes = st.integers(1, 40)
side = st.none() | st.integers(-3, 20)


@st.composite
def cases(draw: Any) -> Case:
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    scores = st.tuples(*(st.sampled_from(pair) for pair in ("Bb", "N1", "T1", "S1"))).map("".join)
    return Case(
        name=f"drawn_{draw(st.integers(0, 1000))}",
        batch=draw(st.sampled_from([(), (1,), (2,), (2, 2)])),
        T=draw(sizes),
        S=draw(sizes),
        N=kv_heads * group,
        K=kv_heads,
        H=draw(st.integers(1, 20)),
        Hv=draw(st.integers(1, 20)),
        is_causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(side, side)),
        offset=draw(st.sampled_from(["", "scalar", "entry"])),
        positions=draw(st.sampled_from(["", "", "q", "kv", "both", "shared"])),
        lengths=draw(st.sampled_from(["", "q", "kv", "both", "scalar"])),
        segments=draw(st.sampled_from(["", "runs", "shuffled", "negative", "tiny", "disjoint"])),
        mask=draw(st.just("") | scores),
        bias=draw(st.just("") | scores),
        soft_cap=draw(st.none() | st.floats(0.5, 30)),
        sinks=draw(st.booleans()),
        dlse=draw(st.booleans()),
    )


@given(cases())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_call(case: Case):
    inputs = case.make(np.float32)
    check_close(run_attention(inputs, None), oracle.reference(inputs), 2e-5)


@given(st.data())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_segments_equal_a_mask(data: Any):
    """Segment ids of any values in any order mean the mask of equality."""
    T, S = data.draw(sizes), data.draw(sizes)
    ids = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 2)
    q_ids, kv_ids = (np.array(data.draw(st.lists(ids, min_size=n, max_size=n)), np.int32) for n in (T, S))
    inputs = Case("segments_equal_a_mask", batch=(1,), T=T, S=S, N=2, K=1).make(np.float32)
    segmented = {**inputs.operands, "segment_ids": SegmentIds(q_ids, kv_ids)}
    masked = {**inputs.operands, "mask": q_ids[:, None] == kv_ids[None, :]}
    got, want = (
        run_attention(Inputs(operands, {}, inputs.dout, None), None) for operands in (segmented, masked)
    )
    check_close(got, want, 1e-6)


@given(st.data())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_permuting_keys_changes_nothing(data: Any):
    """Keys with their positions and ids in any order give the same rows."""
    S = data.draw(st.integers(1, 60))
    inputs = Case("permuted", batch=(1,), T=17, S=S, N=2, K=1, segments="shuffled").make(np.float32)
    order = np.array(data.draw(st.permutations(range(S))))
    x = inputs.operands
    options = {"is_causal": True, "local_window_size": (9, 0), "query_offset": S // 2, "return_lse": True}
    want = attention(**x, **options)
    moved = {n: x[n][:, order] for n in ("key", "value")}
    ids = SegmentIds(x["segment_ids"].q, x["segment_ids"].kv[:, order])
    got = attention(
        x["query"], **moved, segment_ids=ids, key_value_positions=order.astype(np.int32), **options
    )
    check_close(jax.tree.map(np.asarray, got), want, 1e-6)

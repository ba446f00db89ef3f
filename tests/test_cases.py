"""The table of cases keeps its promises, and the oracle is right by finite differences."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

import oracle
from cases import BY_NAME, CASES
from support import check_equal, error

FEATURES = sorted(set().union(*(case.features() for case in CASES)))


def test_names_are_unique():
    assert len(BY_NAME) == len(CASES)


def test_features_meet_pairwise():
    met = {pair for case in CASES for pair in itertools.combinations(sorted(case.features()), 2)}
    assert set(itertools.combinations(FEATURES, 2)) - met == set()


@pytest.mark.parametrize("operand", ["mask", "bias"])
def test_every_broadcast_shape_occurs(operand: str):
    shapes = {getattr(case, operand) for case in CASES}
    assert {"".join(s) for s in itertools.product("Bb", "N1", "T1", "S1")} <= shapes


def test_operands_are_the_same_every_time():
    a, b = (BY_NAME["mix_1"].make(np.float32) for _ in range(2))
    check_equal(a.operands, b.operands)


@pytest.mark.parametrize(
    "name",
    ["gqa", "soft_cap", "sinks_dlse_lengths", "segments_disjoint", "mix_1", "mix_3", "mix_8", "mix_10"],
)
def test_oracle_gradients_by_finite_differences(name: str):
    """<gradient, direction> against the central difference of <dout, out> + <dlse, lse>."""
    case = dataclasses.replace(BY_NAME[name], T=7, S=9)
    inputs = case.make(np.float64)
    want = oracle.reference(inputs)
    rng = np.random.default_rng(0)
    finite = np.isfinite(want["lse"])

    def value(operands: dict) -> float:
        got = oracle.reference(dataclasses.replace(inputs, operands=operands))
        # The lse of a row beyond the query length is the sink by definition, not by the data: no gradient there.
        lse = np.where(finite, got["lse"], 0) * (0 if inputs.dlse is None else inputs.dlse)
        if "query_seq_lengths" in operands:
            rows = np.arange(case.T) < operands["query_seq_lengths"][..., None, None]
            lse = np.where(rows, lse, 0)
        return (got["out"] * inputs.dout).sum() + lse.sum()

    for operand, x in inputs.differentiable().items():
        direction = rng.standard_normal(x.shape)
        step = 1e-5
        ahead, behind = (value({**inputs.operands, operand: x + sign * step * direction}) for sign in (1, -1))
        slope = (want["d" + operand] * direction).sum()
        assert abs((ahead - behind) / (2 * step) - slope) < 1e-7 * (1 + abs(slope)), operand


def test_error_measures_what_cannot_be_subtracted():
    assert error(np.array([np.nan, 1.0]), np.array([np.nan, 1.5])) == 0.5
    assert error(np.array([1.0]), np.array([np.nan])) == np.inf
    assert error(np.array([-np.inf]), np.array([-np.inf])) == 0
    assert error(np.array([-np.inf]), np.array([0.0])) == np.inf

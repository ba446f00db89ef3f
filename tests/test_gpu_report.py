"""The report of tests/gpu/run.py: what counts as passed, failed and refused, without a device."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).with_name("gpu")))
import blackwell
import run

PART = blackwell.Part(128, "float16", "deferred", 0, 2)
FORWARD = " sm100_forward out rms 2.3e-03 max 6.1e-03 bad 0 lse rms 1.1e-06 max 2.5e-05 bad 0"
BACKWARD = " sm100_backward dq rms 1.9e-03 max 1.2e-02 bad 0"
PASSED = f"ok plain                  B2 T200 S200 b0:0 cap0 sc0:{FORWARD}{BACKWARD}"
ONE_WAY = (
    f"ok dbias                  B2 T200 S200 b4:1 cap0 sc0:{FORWARD} bwd refused: a gradient of bias: no"
)
REFUSED = "REFUSED tile mask              B2 T600 S500 b0:0 sc0: a tile mask: pass a dense bool mask"
FAILED = f"FAIL gqa B2 b0:0 sc0:{FORWARD} sm100_backward dq rms 1.9e-01 max 1.2e+00 bad 0 FAIL"
CHECKED = "checked: 2 passed, 0 failed, 2 refused"


def test_verdicts():
    passed, one_way, refused, failed = map(blackwell.parse_case, (PASSED, ONE_WAY, REFUSED, FAILED))
    assert passed
    assert passed["verdict"] == "passed"
    assert passed["case"] == "plain B2 T200 S200 b0:0 cap0 sc0"
    assert passed["kernels"] == ["sm100_forward", "sm100_backward"]
    assert one_way
    assert one_way["verdict"] == "passed"
    assert one_way["refused"] == {"sm100_backward": "a gradient of bias: no"}
    assert refused
    assert refused["verdict"] == "refused"
    assert refused["refused"] == {"sm100_forward": "a tile mask: pass a dense bool mask"}
    assert failed
    assert failed["verdict"] == "failed"
    assert "dq rms 1.9e-01" in failed["error"]
    assert blackwell.parse_case(CHECKED) is None


@pytest.mark.parametrize(
    "line",
    [
        PASSED.replace("sm100_forward", "sm90_forward"),
        PASSED.replace(BACKWARD, ""),
        PASSED.replace(FORWARD, ""),
        PASSED.replace(FORWARD, " sm100_forward").replace(BACKWARD, " sm100_backward"),
    ],
)
def test_only_what_the_chosen_kernels_computed_counts(line: str):
    row = blackwell.parse_case(line)
    assert row
    assert row["verdict"] == "failed"


def test_parts_of_one_process():
    rows, failures = blackwell.parse(
        PART, 0, f"{PASSED}\n{ONE_WAY}\n{REFUSED}\n{CHECKED}\n", "sm100: no finding in 9 launches\n"
    )
    assert [row["verdict"] for row in rows] == ["passed", "passed", "refused"]
    assert failures == []


@pytest.mark.parametrize(
    ("code", "out", "err", "failure"),
    [
        (1, f"{FAILED}\n{CHECKED}\n", "", "gqa"),
        (124, f"{PASSED}\n", "", "out of time after 1 cases, behind plain"),
        (3, "", "", "ended with 3 after 0 cases"),
        (86, f"{PASSED}\n{CHECKED}\n", "sm100: hang: block 0 warp 3: site 7: kernel.cuh:1\n", "hang"),
        (87, f"{PASSED}\n{CHECKED}\n", "", "ended with 87"),
    ],
)
def test_nothing_that_went_wrong_is_lost(code: int, out: str, err: str, failure: str):
    _, failures = blackwell.parse(PART, code, out, err)
    assert len(failures) == 1
    assert failure in failures[0]
    assert PART.name in failures[0]


def test_every_case_is_asked_for_in_every_combination():
    parts = blackwell.parts(2)
    assert len(set(parts)) == len(parts) == 5 * 2 * 2 * 2
    assert {part.environment()["SHARD"] for part in parts} == {"0/2", "1/2"}


def test_report():
    rows, failures = blackwell.parse(PART, 1, f"{PASSED}\n{ONE_WAY}\n{REFUSED}\n{FAILED}\n{CHECKED}\n", "")
    section = {"passed": 2, "failures": failures, "notes": blackwell.summary(rows), "seconds": 9.4}
    text = run.markdown({"machine": {"driver": "1"}, "sections": {"blackwell": section}})
    assert "| blackwell | 2 | 1 | 9 |" in text
    assert "- head_dim 128 float16 deferred: 2 passed, 1 failed, 1 refused" in text
    assert "- sm100_backward refused in 1 of 4: a gradient of bias: no" in text
    assert "- **failed** head_dim 128 float16 deferred 1/2: gqa" in text

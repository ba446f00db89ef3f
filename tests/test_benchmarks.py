"""The benchmarks measure what they say: rows, peers, bars, and the program itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jax_fmha

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import bars  # noqa: E402
import contestants  # noqa: E402
import gpu_rows  # noqa: E402
from attention import TOLERANCE  # noqa: E402
from rows import Row, all_rows, quick_rows  # noqa: E402
from summary import markdown  # noqa: E402


def row_id(row: Row) -> str:
    return row.name


def test_rows_have_distinct_names():
    for rows in (all_rows(), quick_rows()):
        assert len({row.name for row in rows}) == len(rows)


def test_rows_cover_what_the_bars_ask_for():
    rows = all_rows()
    dense = {(r.dtype, r.is_causal, r.head_dim, r.seqlen_q) for r in rows if r.kind == "dense"}
    assert len(dense) == 2 * 2 * 2 * 5
    assert {r.kind for r in rows} == {r.kind for r in quick_rows()}
    packed = next(r for r in rows if r.kind == "packed")
    assert sum(packed.documents) == packed.seqlen_q
    assert 64 <= min(packed.documents) <= max(packed.documents) <= 1024


@pytest.mark.parametrize("row", quick_rows(), ids=row_id)
def test_pairs_are_those_of_the_mask(row):
    """A causal square counts as half of its area, so the diagonal makes the only difference."""
    exact = row.mask().sum()
    assert abs(row.pairs() - exact) <= row.seqlen_q
    assert row.flops("backward") == 2.5 * row.flops("forward")


def test_gpu_rows_have_distinct_names():
    rows = gpu_rows.all_rows()
    assert len({row.name for row in rows}) == len(rows)
    assert {r.kind for r in rows} == {r.kind for r in gpu_rows.quick_rows()}


@pytest.mark.parametrize("row", gpu_rows.quick_rows(), ids=lambda row: row.name)
def test_pairs_of_gpu_rows_are_those_of_the_mask(row: gpu_rows.GpuRow):
    assert abs(row.pairs() - row.mask().sum()) <= row.seqlen
    assert row.mask().shape == (1, row.seqlen, row.seqlen)


@pytest.mark.parametrize("row", quick_rows(), ids=row_id)
def test_ours_and_jax_nn_compute_the_same(row):
    data = contestants.Data.of(row)
    ours, peer = contestants.ours(row, data), contestants.jax_nn(row, data)
    for which in row.passes:
        difference = contestants.disagreement(peer.result(which), ours.result(which))
        assert difference < TOLERANCE[row.dtype]


def test_a_peer_that_would_write_too_many_scores_is_left_out():
    row = Row("dense", "float32", 64, 8192, 8192, 8, 8, 64)
    with pytest.raises(contestants.Unavailable, match="GiB of scores"):
        contestants.jax_nn(row, None)


def result(which: str, seqlen: int, ours: float, torch: float, jax_nn: float, kind: str = "dense") -> dict:
    return {
        "name": f"{kind}-{seqlen}",
        "kind": kind,
        "which": which,
        "dtype": "float32",
        "seqlen_q": seqlen,
        "median_ms": {"ours": ours, "torch": torch, "jax.nn": jax_nn},
        "ratios": {"torch": torch / ours, "jax.nn": jax_nn / ours},
    }


def test_bars_by_hand():
    results = [
        result("forward", 512, 1, 2, 1),  # short: no bar against jax.nn
        result("forward", 2048, 1, 8, 4),
        result("backward", 2048, 3, 1.5, 3),
        result("forward", 8192, 1, 2, 9, kind="packed"),
    ]
    found = {bar.text: bar for bar in bars.check(results)}
    assert found["every row against torch, the slowest"].measured == 0.5
    assert found["every row against torch, the slowest"].verdict == "missed"
    forward = found["dense forward float32 against torch, geometric mean"]
    assert forward.measured == pytest.approx(4)
    assert forward.verdict == "met"
    assert found["dense forward bfloat16 against torch, geometric mean"].verdict == "not measured"
    assert found["all rows against torch, geometric mean"].measured == pytest.approx(
        (2 * 8 * 0.5 * 2) ** 0.25
    )
    assert found["dense forward against jax.nn from T = 2048, the slowest"].measured == 4
    both = found["dense forward + backward against jax.nn from T = 2048, the slowest"]
    assert both.measured == pytest.approx((4 + 3) / (1 + 3))
    masked = found["packed and windowed rows against jax.nn with a dense mask, the slowest"]
    assert masked.measured == 9
    assert masked.verdict == "missed"


def test_summary_takes_geometric_means():
    results = [result("forward", 512, 1, 2, 3), result("forward", 1024, 1, 8, 3)]
    for r, rate in zip(results, (90.2, 110.7), strict=True):
        r["gflops"] = {"ours": rate}
    (last,) = markdown({"rows": results}).splitlines()[2:]
    assert last.endswith(", float32 | forward | 90 to 111 | 4.00x | 3.00x |")


RESULTS = BENCHMARKS / "results" / "cpu.json"


@pytest.mark.skipif(not RESULTS.exists(), reason="no measured results")
def test_readme_shows_the_stored_results():
    assert markdown(json.loads(RESULTS.read_text())) in (BENCHMARKS.parent / "README.md").read_text()


def test_program_writes_every_figure(tmp_path):
    out = tmp_path / "deep" / "out.json"
    home = str(Path(jax_fmha.__file__).parents[1])
    command = [sys.executable, str(BENCHMARKS / "attention.py"), "--backend", "cpu", "--quick"]
    command += ["--threads", "1", "--json", str(out), "--rows"]

    def measure(*rows: str) -> str:
        done = subprocess.run(
            [*command, *rows], env=os.environ | {"PYTHONPATH": home}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    printed = measure("decode-f32")
    report = json.loads(out.read_text())
    (row,) = report["rows"]
    assert row["name"] == "decode-f32-T1S512-H64"
    assert row["gflops"]["ours"] == pytest.approx(1e-6 * row["flops"] / row["median_ms"]["ours"])
    assert report["machine"]["sgemm_gflops"]["XLA dot"] > 0
    assert report["machine"]["threads"] == 1
    lines = [text for text in printed.splitlines() if text.startswith(row["name"])]
    assert len(lines) == 1

    measure("decode-bf16", "--update")
    assert json.loads(out.read_text())["rows"][0] == row
    assert [r["name"] for r in json.loads(out.read_text())["rows"]] == [row["name"], "decode-bf16-T1S512-H64"]
    assert [path.name for path in out.parent.iterdir()] == ["out.json"]


def test_program_says_when_no_row_matches():
    command = [sys.executable, str(BENCHMARKS / "attention.py"), "--rows", "no such row"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no such row" in done.stderr

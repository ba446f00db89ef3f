"""The Blackwell kernels on a Hopper GPU, for tests/gpu/run.py: built by tests/sm100, and checked case by case.

Every case of cc/tests/sm90/driver.cu is run for every head dim, type and mode of the emulator. It counts only if the
registry chose the Blackwell kernels for it; the driver tells by name what ran.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HEAD_DIMS = (64, 96, 128, 192, 256)  # values of 192 have 128
DTYPES = ("bfloat16", "float16")
MODES = ("eager", "deferred")
KERNELS = {"sm100_forward": "out", "sm100_backward": "dq"}  # and a result that each has
CASE = re.compile(r"(ok|FAIL|REFUSED) (?:bwd )?(.*?):(?= |$)(.*)")
REFUSED = re.compile(r" bwd refused: (.*)")
FINDING = re.compile(r"sm100: (?!no finding|\d+ findings).*")
Process = Callable[[list[str], dict[str, str], float], tuple[int, str, str]]


@dataclass(frozen=True)
class Part:
    """What one process checks."""

    head_dim: int
    dtype: str
    mode: str
    shard: int
    shards: int

    @property
    def name(self) -> str:
        return f"head_dim {self.head_dim} {self.dtype} {self.mode} {self.shard + 1}/{self.shards}"

    def environment(self) -> dict[str, str]:
        return {
            "HDS": str(self.head_dim),
            "DTYPE": self.dtype,
            "SM100_MODE": self.mode,
            "SHARD": f"{self.shard}/{self.shards}",
            "VERBOSE": "1",
            # Processes share the device, and a launch of one waits for those of others.
            "SM100_TIMEOUT": "5000",
        }


def parts(shards: int) -> list[Part]:
    return [
        Part(head_dim, dtype, mode, shard, shards)
        for dtype, mode, head_dim, shard in itertools.product(DTYPES, MODES, HEAD_DIMS, range(shards))
    ]


def parse_case(line: str) -> dict[str, Any] | None:
    """One line of the driver as a row: passed, failed or refused, by which kernels, and why not."""
    match = CASE.match(line)
    if match is None:
        return None
    verdict, description, text = match.groups()
    row: dict[str, Any] = {"case": " ".join(description.split()), "kernels": [], "refused": {}}
    forward, backward = KERNELS
    if verdict == "REFUSED":
        return row | {"verdict": "refused", "refused": {forward: text.strip()}}
    if refusal := REFUSED.search(text):
        row["refused"] = {backward: refusal[1].strip()}
        text = text[: refusal.start()]
    row["kernels"] = re.findall(r"\b(\w+_(?:forward|backward))\b", text)
    if verdict == "FAIL":
        return row | {"verdict": "failed", "error": text.strip()}
    wanted = [name for name in KERNELS if name not in row["refused"]]
    if row["kernels"] != wanted or not all(f" {KERNELS[name]} rms " in text for name in wanted):
        return row | {"verdict": "failed", "error": f"not a result of {wanted}:{text}"}
    return row | {"verdict": "passed"}


def parse(part: Part, code: int, out: str, err: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of one process, and what failed in it."""
    where = {"head_dim": part.head_dim, "dtype": part.dtype, "mode": part.mode}
    rows = [where | row for row in map(parse_case, out.splitlines()) if row is not None]
    failures = [f"{part.name}: {row['case']}: {row['error']}" for row in rows if row["verdict"] == "failed"]
    findings = collections.Counter(FINDING.findall(err))
    failures += [f"{part.name}: {n} times {finding}" for finding, n in findings.most_common(3)]
    if "\nchecked: " not in f"\n{out}":
        last = rows[-1]["case"] if rows else "the start"
        why = "out of time" if code == 124 else f"ended with {code}"
        failures.append(f"{part.name}: {why} after {len(rows)} cases, behind {last}")
    elif code != 0 and not failures:
        failures.append(f"{part.name}: ended with {code}: {err[-500:]}")
    return rows, failures


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Verdicts by head dim, type and mode, and reasons of refusals with how often each was given."""
    notes = []
    keys = ("head_dim", "dtype", "mode")
    counts: dict[tuple[Any, ...], collections.Counter[str]] = {}
    for row in rows:
        counts.setdefault(tuple(row[k] for k in keys), collections.Counter())[row["verdict"]] += 1
    for (head_dim, dtype, mode), n in sorted(counts.items()):
        told = ", ".join(f"{n[verdict]} {verdict}" for verdict in ("passed", "failed", "refused"))
        notes.append(f"head_dim {head_dim} {dtype} {mode}: {told}")
    refused = collections.Counter(item for row in rows for item in row["refused"].items())
    for (kernel, reason), n in refused.most_common():
        notes.append(f"{kernel} refused in {n} of {len(rows)}: {reason}")
    return notes


def devices() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the devices, one by one."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines()
    return [str(i) for i in range(len(listed))] or ["0"]


def build(folder: Path, cutlass: Path | None, timeout: float, process: Process) -> tuple[Path, str]:
    """The driver with all instances, and what went wrong."""
    command = [sys.executable, str(ROOT / "tests" / "sm100" / "kernels.py"), str(folder)]
    command += [] if cutlass is None else ["--cutlass", str(cutlass.resolve())]
    code, out, err = process(command, dict(os.environ), timeout)
    return folder / "driver", "" if code == 0 else f"the build ended with {code}: {(out + err)[-3000:]}"


def check(driver: Path, jobs: int, fuzz: int, seconds: float, process: Process) -> dict[str, Any]:
    """All parts, `jobs` at a time, spread over the devices, for at most `seconds`."""
    deadline, gpus, todo = time.monotonic() + seconds, devices(), parts(2)

    def run(numbered: tuple[int, Part]) -> tuple[list[dict[str, Any]], list[str]]:
        i, part = numbered
        left = deadline - time.monotonic()
        if left <= 0:
            return [], [f"{part.name}: out of time before its start"]
        env = os.environ | part.environment() | {"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]}
        return parse(part, *process([str(driver), "check", str(fuzz), "1"], env, left))

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(run, enumerate(todo)))
    rows = [row for rows, _ in results for row in rows]
    return {
        "passed": sum(row["verdict"] == "passed" for row in rows),
        "failures": [failure for _, failures in results for failure in failures],
        "notes": summary(rows),
        "rows": rows,
    }

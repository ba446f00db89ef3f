"""Everything that can only be tested on a CUDA device, in one command; writes a report.

    python tests/gpu/run.py                            # 128 MB of kernels at most, some minutes on one H200
    python tests/gpu/run.py --sections table behaviour --head-dims own 128,128

Needs jax with CUDA, the extra `test`, and for the last sections compute-sanitizer and nvcc on PATH. Each section
runs in processes of its own, so that a fault of the device in one leaves the others alone. Writes `--out`.json and
`--out`.md; exit code 1 if anything failed. What a kernel refuses is listed with its reason.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import csv
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import blackwell as emulated

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SECTIONS = ("behaviour", "table", "fronts", "training", "sanitizer", "blackwell")
# Share of the device's memory for all processes of the table together; each has a context of half a GiB besides.
TABLE_MEMORY = 0.15
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# Those that need kernels built for them, see cc/gpu/pipeline.cuh.
TOOLS_WITH_PACKAGE = ("racecheck", "initcheck")
FRONTS = ("test_tpu_flash", "test_tpu_splash", "test_flax", "test_dot_product_attention")
# Losses of native kernels and of plain einsums, in 16 bits, drift apart while both learn.
LARGEST_LOSS_DIFFERENCE = 0.1


def environment(memory_fraction: float, **more: str) -> dict[str, str]:
    """The package under test is the one that this interpreter finds, with the tests beside it."""
    paths = [str(HERE), str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "JAX_PLATFORMS": "cuda,cpu",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": str(memory_fraction),
        **more,
    }


def process(command: list[str], env: dict[str, str], timeout: float) -> tuple[int, str, str]:
    """(exit code, stdout, stderr); code 124 after the time limit."""
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as late:
        text = [
            (x or b"").decode(errors="replace") if not isinstance(x, str) else x
            for x in (late.stdout, late.stderr)
        ]
        return 124, *text
    return done.returncode, done.stdout, done.stderr


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def table(args: argparse.Namespace) -> dict[str, Any]:
    """The table of cases, split over processes that share the device."""

    def shard(i: int) -> tuple[list[dict[str, Any]], str]:
        command = [sys.executable, str(HERE / "table.py"), "--shard", f"{i}/{args.jobs}"]
        command += ["--dtypes", *args.dtypes, "--head-dims", *args.head_dims]
        code, out, err = process(command, environment(TABLE_MEMORY / args.jobs), args.timeout)
        return json_lines(out), "" if code == 0 else f"shard {i} ended with {code}: {err[-1500:]}"

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        shards = list(pool.map(shard, range(args.jobs)))
    rows = [row for rows, _ in shards for row in rows]
    failures = [f"{r['case']} {r['dtype']}: {r['error']}" for r in rows if "error" in r]
    failures += [message for _, message in shards if message]
    refused = collections.Counter(reason for r in rows for reason in r.get("refused", ()))
    return {
        "passed": sum(bool(r.get("results")) for r in rows),
        "failures": failures,
        "notes": [f"refused in {n} of {len(rows)}: {reason}" for reason, n in refused.most_common()],
        "rows": rows,
    }


def behaviour(args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "behaviour.py"), *args.checks]
    # Command buffers from the first call on and around loops, so that every program here is replayed from one.
    flags = "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=+WHILE"
    env = environment(0.45, XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {flags}")
    code, out, err = process(command, env, args.timeout)
    rows = json_lines(out)
    failures = [f"{r['check']}: {r['error']}" for r in rows if r["error"]]
    if code != 0:
        failures.append(f"ended with {code} after {[r['check'] for r in rows][-1:]}: {err[-1500:]}")
    return {
        "passed": sum(r["error"] is None for r in rows),
        "failures": failures,
        "notes": [f"{r['check']}: {r['note']}" for r in rows if r["note"]],
        "rows": rows,
    }


def fronts(args: argparse.Namespace) -> dict[str, Any]:
    """The tests of the fronts against their originals, see tests/gpu/fronts.py."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "fronts",
            "-n",
            str(args.jobs),
            f"--junitxml={report}",
        ]
        command += [str(ROOT / "tests" / f"{name}.py") for name in FRONTS]
        env = environment(TABLE_MEMORY / args.jobs, JAX_DEFAULT_MATMUL_PRECISION="highest")
        code, out, err = process(command, env, args.timeout)
        if not report.exists():
            return {"passed": 0, "failures": [f"ended with {code}: {(out + err)[-2000:]}"], "notes": []}
        cases = list(ElementTree.parse(report).iter("testcase"))
    failures = [
        f"{case.get('classname')}.{case.get('name')}: {problem.get('message')}\n{(problem.text or '')[-1500:]}"
        for case in cases
        for problem in (*case.findall("failure"), *case.findall("error"))
    ]
    skipped = [
        f"{case.get('name')}: skipped, {x.get('message')}" for case in cases for x in case.findall("skipped")
    ]
    calls = [line for line in out.splitlines() if "calls of native kernels" in line]
    if code not in (0, 1):  # neither all passed nor some failed
        failures.append(f"ended with {code}: {(out + err)[-2000:]}")
    if not calls or calls[0].startswith("0 ") or not calls[0].endswith("gpu"):
        failures.append(f"no kernel of a GPU ran: {calls}")
    return {
        "passed": len(cases) - len(failures) - len(skipped),
        "failures": failures,
        "notes": [*calls, *skipped],
    }


def training(args: argparse.Namespace) -> dict[str, Any]:
    """The example learns on the device as it does with plain einsums."""
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable,
            str(ROOT / "examples" / "train_packed_lm.py"),
            "--compare",
            "--steps",
            "100",
        ]
        code, text, err = process([*command, "--out", out], environment(0.1), args.timeout)
        if code != 0:
            return {"passed": 0, "failures": [f"ended with {code}: {err[-2000:]}"], "notes": []}
        with (Path(out) / "loss.csv").open() as file:
            rows = [{k: float(x) for k, x in row.items()} for row in csv.DictReader(file)]
    apart = max(abs(r["native"] - r["xla"]) for r in rows)
    notes = [line for line in text.splitlines() if "held-out" in line]
    notes.append(f"largest difference of two losses {apart:.3f}, last loss {rows[-1]['native']:.3f}")
    bad = [f"losses are {apart:.3f} apart"] if apart > LARGEST_LOSS_DIFFERENCE else []
    if rows[-1]["native"] > 0.75 * rows[0]["native"]:
        bad.append("the loss hardly falls")
    return {"passed": int(not bad), "failures": bad, "notes": notes, "rows": rows}


def sanitizer(args: argparse.Namespace) -> dict[str, Any]:
    """compute-sanitizer's tools on one small case of each kernel; every buffer is an allocation of its own.

    Two of them need kernels built with -DJAX_FMHA_FOR_SANITIZER=ON.
    """
    if shutil.which("compute-sanitizer") is None:
        return {"passed": 0, "failures": [], "notes": ["not run, needs compute-sanitizer on PATH"]}

    def tool(name: str) -> tuple[str, int, str]:
        command = ["compute-sanitizer", "--tool", name, "--error-exitcode", "9"]
        if name != "initcheck":  # which has to see what others write
            command += ["--kernel-name", "kernel_substring=jax_fmha"]
        env = environment(0.1, XLA_PYTHON_CLIENT_ALLOCATOR="platform")
        if name in TOOLS_WITH_PACKAGE:
            env["PYTHONPATH"] = os.pathsep.join([str(args.sanitizer_package), env["PYTHONPATH"]])
        code, out, err = process([*command, sys.executable, str(HERE / "small_case.py")], env, args.timeout)
        return name, code, out + err

    tools = [name for name in TOOLS if args.sanitizer_package or name not in TOOLS_WITH_PACKAGE]
    with concurrent.futures.ThreadPoolExecutor(len(tools)) as pool:
        done = list(pool.map(tool, tools))
    failures = [
        f"{name} ended with {code}: {text_of_reports(text)}" for name, code, text in done if code != 0
    ]
    notes = [f"{name}: {summary(text)}" for name, _, text in done]
    notes += [f"{name}: not run, needs --sanitizer-package" for name in TOOLS if name not in tools]
    return {"passed": len(done) - len(failures), "failures": failures, "notes": notes}


def text_of_reports(text: str) -> str:
    """What the reports say, each kind once with how often it comes, and the beginning of all."""
    kinds: collections.Counter[str] = collections.Counter()
    for report in text.split("========= Error: ")[1:]:
        places = re.findall(r"(Read|Write) access at (.*?)\+0x[0-9a-f]+ in (\S+)", report)
        kinds[", ".join(dict.fromkeys(f"{access} {file}" for access, _, file in places))] += 1
    return "\n".join([*(f"{n} x {kind[:400]}" for kind, n in kinds.most_common(40)), text[:1500]])


def blackwell(args: argparse.Namespace) -> dict[str, Any]:
    """The Blackwell kernels, emulated: see tests/gpu/blackwell.py."""
    if shutil.which("nvcc") is None:
        return {"passed": 0, "failures": [], "notes": ["not run, needs nvcc on PATH"]}
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.blackwell_folder or Path(scratch)
        driver, failure = emulated.build(folder, args.cutlass, args.timeout, process)
        if failure:
            return {"passed": 0, "failures": [failure], "notes": []}
        return emulated.check(driver, args.jobs, args.fuzz, args.timeout, process)


def summary(text: str) -> str:
    """What a tool says at its end, e.g. "ERROR SUMMARY: 0 errors"."""
    lines = [line.strip("= ") for line in text.splitlines() if "SUMMARY" in line]
    return lines[-1] if lines else "no summary"


def machine() -> dict[str, Any]:
    program = (
        "import json, jax, jaxlib, jax_fmha, pathlib\n"
        "ds = jax.local_devices()\n"
        "lib = pathlib.Path(jax_fmha.__file__).parent / 'libjax_fmha_cuda.so'\n"
        "print(json.dumps({'devices': [d.device_kind for d in ds], 'jax': jax.__version__,\n"
        "  'compute_capability': ds[0].compute_capability, 'jax_fmha': jax_fmha.__version__,\n"
        "  'library_mib': round(lib.stat().st_size / 2**20, 1)}))\n"
    )
    code, out, err = process([sys.executable, "-c", program], environment(0.05), 120)
    if code != 0:
        raise SystemExit(f"no CUDA device or no kernels: {err[-1500:]}")
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    return {**json_lines(out)[0], "driver": driver, "python": platform.python_version()}


def markdown(report: dict[str, Any]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    lines = ["# Tests on the GPU", "", f"`python tests/gpu/run.py`; {facts}.", ""]
    lines += ["| section | passed | failed | seconds |", "|---|---|---|---|"]
    for name, s in report["sections"].items():
        lines.append(f"| {name} | {s['passed']} | {len(s['failures'])} | {s['seconds']:.0f} |")
    for name, s in report["sections"].items():
        lines += ["", f"## {name}", ""]
        lines += [f"- {note}" for note in s["notes"]]
        lines += [f"- **failed** {failure_line(failure)}" for failure in s["failures"]]
    return "\n".join(lines) + "\n"


def failure_line(failure: str) -> str:
    """What failed, and the last line of the traceback."""
    what, *rest = failure.strip().splitlines()
    return f"{what.split(': Traceback')[0]}: {rest[-1].strip()}" if rest else what


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--checks", nargs="*", default=[], help="only these of the section behaviour")
    parser.add_argument(
        "--head-dims",
        nargs="+",
        default=["own", "96,96", "128,128", "192,128", "192,192", "256,256"],
        help="sizes for the table; own: each case's, as multiples of 8",
    )
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(8, os.cpu_count() or 1),
        help="processes for the table, the fronts and blackwell",
    )
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for each process")
    parser.add_argument(
        "--cutlass", type=Path, help="cutlass_library/source of the nvidia-cutlass wheel, if not installed"
    )
    parser.add_argument("--blackwell-folder", type=Path, help="where to build, and not again what is there")
    parser.add_argument(
        "--sanitizer-package",
        type=Path,
        help="folder of a jax_fmha built with -DJAX_FMHA_FOR_SANITIZER=ON",
    )
    parser.add_argument("--fuzz", type=int, default=20, help="random cases of each part of blackwell")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_tests")
    args = parser.parse_args()

    runners: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "behaviour": behaviour,
        "table": table,
        "fronts": fronts,
        "training": training,
        "sanitizer": sanitizer,
        "blackwell": blackwell,
    }
    report: dict[str, Any] = {"machine": machine(), "sections": {}}
    for name in args.sections:
        begin = time.perf_counter()
        section = runners[name](args)
        section["seconds"] = time.perf_counter() - begin
        report["sections"][name] = section
        print(
            f"{name}: {section['passed']} passed, {len(section['failures'])} failed, {section['seconds']:.0f} s"
        )
        for failure in section["failures"]:
            print(f"  FAILED {failure}", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # Where this machine keeps its files is nobody's business.
    text = json.dumps(report, indent=1)
    for folder in (str(ROOT), sys.prefix):
        text = text.replace(folder + os.sep, "")
    args.out.with_suffix(".json").write_text(text + "\n")
    args.out.with_suffix(".md").write_text(markdown(report))
    return int(any(s["failures"] for s in report["sections"].values()))


if __name__ == "__main__":
    sys.exit(main())

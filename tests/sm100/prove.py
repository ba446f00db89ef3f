"""Proves the emulator: kernels known to be right pass in every mode, and planted faults are caught.

    python tests/sm100/prove.py FOLDER --cutlass cutlass_library/source [--include DIR]   # build, run, print the tables
    python tests/sm100/prove.py FOLDER --build-only ...                                   # where there is no GPU
    python tests/sm100/prove.py FOLDER                                                    # run what was built

--include names the folder of curand_kernel.h, which the examples' host code wants, where the toolkit has none.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from programs import PROGRAMS, Program

# Kinds of emulator.h.
DROP, EARLY, TWICE, HALVE, ADD, INSTRUCTION, A, B, D, ACCUMULATE, PARITY = range(1, 12)

MODES = {
    "eager": {"SM100_MODE": "eager"},
    "deferred": {"SM100_MODE": "deferred"},
    "random": {"SM100_MODE": "random"},
    "late warps 0-7": {"SM100_MODE": "eager", "SM100_DELAY": "0x00ff:250000"},
    "late warps 8-11": {"SM100_MODE": "eager", "SM100_DELAY": "0x0f00:250000"},
    "late warp 12": {"SM100_MODE": "deferred", "SM100_DELAY": "0x1000:250000"},
    "late warp 13": {"SM100_MODE": "deferred", "SM100_DELAY": "0x2000:250000"},
    "all late": {"SM100_MODE": "random", "SM100_DELAY": "0xffff:60000"},
}


@dataclass(frozen=True)
class Place:
    """The instruction that a fault is planted at: the n-th of those whose name and place match."""

    op: str
    at: str = ""
    n: int = 0


@dataclass(frozen=True)
class Fault:
    what: str
    place: Place
    kind: int
    value: int = 0


MAINLOOP = "sm100_fmha_fwd_mainloop"
# In the forward program. Line numbers are those of CUTLASS 4.2, roles: warps 0-7 softmax, 8-11 correction, 12 products,
# 13 loads, 14 epilogue.
MMA, COMMIT, WAIT, ARRIVE, EXPECT = "tcgen05.mma", "tcgen05.commit", "mbarrier.try_wait", "mbarrier.arrive.shared", "mbarrier.arrive.expect_tx"
FAULTS: tuple[Fault, ...] = ()


@dataclass
class Site:
    number: int
    op: str
    place: str


def sites_of(program: Path) -> list[Site]:
    rows = [line.split("\t") for line in program.with_name(program.name + ".sites").read_text().splitlines()]
    return [Site(int(number), op, place) for number, _, op, place in rows]


def run(program: Path, arguments: list[str], environment: dict[str, str], timeout: float = 60) -> tuple[str, str]:
    """(what came of it, what was printed)"""
    try:
        done = subprocess.run([program.resolve(), *arguments], env={**os.environ, **environment}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout)  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return "timeout", (error.stdout or b"").decode(errors="replace")
    if done.returncode == 0 and "[OK]" in done.stdout:
        return "passed", done.stdout
    if found := re.search(r"^sm100: ([a-z-]+): ", done.stdout, re.MULTILINE):
        return found[1], done.stdout
    return ("wrong result" if "Reference check failed" in done.stdout or "[FAIL]" in done.stdout else "failed"), done.stdout


def known_good(folder: Path, programs: list[Program], jobs: int) -> tuple[list[dict], bool]:
    tasks = [(p, case, mode) for p in programs for case in p.commands() for mode in MODES]
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(
            lambda t: run(folder / t[0].name, t[1], {**MODES[t[2]], "SM100_ALLOW": t[0].findings}), tasks
        ))  # fmt: skip
    rows = []
    for (program, case, mode), (outcome, text) in zip(tasks, outcomes, strict=True):
        rows.append({"program": program.name, "case": " ".join(case), "mode": mode, "outcome": outcome, "text": text})
    return rows, all(row["outcome"] == "passed" for row in rows)


def find(sites: list[Site], place: Place) -> Site:
    return [s for s in sites if s.op.startswith(place.op) and re.search(place.at, s.place)][place.n]


def planted(folder: Path, program: Program, jobs: int) -> tuple[list[dict], bool]:
    path, arguments = folder / program.name, program.commands()[0]
    sites = sites_of(path)
    tasks = [(fault, find(sites, fault.place), mode) for fault in FAULTS for mode in MODES]

    def attempt(task):
        fault, site, mode = task
        return run(path, arguments, {**MODES[mode], "SM100_FAULT": f"{fault.kind}:{site.number}:{fault.value}"})

    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(attempt, tasks))
    rows = [
        {"fault": fault.what, "place": site.place, "mode": mode, "outcome": outcome}
        for (fault, site, mode), (outcome, _) in zip(tasks, outcomes, strict=True)
    ]
    caught = {row["fault"] for row in rows if row["outcome"] != "passed"}
    return rows, caught == {fault.what for fault in FAULTS}


# Every instruction, one fault at a time
# ---------------------------------------------------------------------------------------------------------------------

SWEEP: tuple[tuple[str, tuple[tuple[str, int, int], ...]], ...] = (
    (
        r"tcgen05\.mma",
        (
            ("is not issued", DROP, 0),
            ("has B's major-ness wrong", INSTRUCTION, 1 << 16),
            ("has a wrong swizzle for B", B, 6 << 61),
            ("has a wrong stride for B", B, 64 << 32),
            ("reads B 16 KB away", B, 1 << 10),
            ("writes D one column off", D, 1),
            ("accumulates wrongly", ACCUMULATE, 0),
            ("has A in the wrong format", INSTRUCTION, 1 << 7),
        ),
    ),
    (r"tcgen05\.commit", (("is missing", DROP, 0), ("does not wait for the products", EARLY, 0))),
    (r"mbarrier\.arrive\.expect_tx", (("is missing", DROP, 0), ("expects half the bytes", HALVE, 0))),
    (r"mbarrier\.arrive\.shared", (("is missing", DROP, 0), ("happens twice", TWICE, 0))),
    (r"mbarrier\.try_wait", (("is missing", DROP, 0), ("waits for the other phase", PARITY, 0))),
    (r"tcgen05\.ld", (("reads one column off", ADD, 1), ("reads another warp's lanes", ADD, 32 << 16))),
    (r"tcgen05\.st", (("writes one column off", ADD, 1), ("writes another warp's lanes", ADD, 32 << 16))),
    (r"tcgen05\.wait::st", (("is missing", DROP, 0),)),
    (r"tcgen05\.wait::ld", (("is missing", DROP, 0),)),
    (r"cp\.async\.bulk\.tensor", (("loads 64 rows off", ADD, 64),)),
    (r"tcgen05\.(alloc|dealloc)", (("is missing", DROP, 0),)),
)


def sweep(folder: Path, program: Program, jobs: int) -> list[dict]:
    """Each instruction with each fault, in one mode after the other until it is caught."""
    path, arguments = folder / program.name, program.commands()[0]
    tasks = []
    for pattern, variants in SWEEP:
        matching = [s for s in sites_of(path) if re.match(pattern, s.op)]
        for i, site in enumerate(matching):
            # Products come in dozens that differ in nothing but addresses: a fault each.
            chosen = [variants[i % len(variants)]] if "mma" in pattern else variants
            tasks += [(site, *variant) for variant in chosen]

    def attempt(task):
        site, what, kind, value = task
        for mode, environment in MODES.items():
            outcome, _ = run(path, arguments, {**environment, "SM100_FAULT": f"{kind}:{site.number}:{value}"})
            if outcome != "passed":
                return {"site": site.number, "op": site.op, "place": site.place, "fault": what, "mode": mode, "outcome": outcome}
        return {"site": site.number, "op": site.op, "place": site.place, "fault": what, "mode": "", "outcome": "missed"}

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(attempt, tasks))


# Tables
# ---------------------------------------------------------------------------------------------------------------------


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def pivot(rows: list[dict], keys: list[str]) -> str:
    names = list(dict.fromkeys(tuple(row[k] for k in keys) for row in rows))
    cells = {(tuple(row[k] for k in keys), row["mode"]): row["outcome"] for row in rows}
    return table([*keys, *MODES], [[*name, *(cells[name, mode] for mode in MODES)] for name in names])


def sweep_summary(rows: list[dict]) -> str:
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        op = re.match(r"(tcgen05\.\w+(::\w+)?|mbarrier\.(arrive\.expect_tx|arrive|try_wait)|cp\.async\.bulk\.tensor)", row["op"])[0]
        groups.setdefault((op, row["fault"]), []).append(row)
    lines = []
    for (op, fault), members in groups.items():
        by_mode = {m: sum(r["mode"] == m for r in members) for m in MODES}
        modes = ", ".join(f"{m} {n}" for m, n in by_mode.items() if n)
        lines.append([f"`{op}` {fault}", str(len(members)), str(sum(by_mode.values())), modes])
    return table(["every instruction of its kind", "planted", "caught", "first caught in"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cutlass", type=Path)
    parser.add_argument("--include", type=Path, action="append", default=[])
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--programs", nargs="*", default=[p.name for p in PROGRAMS])
    parser.add_argument("--skip-sweep", action="store_true")
    parser.add_argument("--jobs", type=int, default=8, help="programs at a time")
    parser.add_argument("--json", type=Path, help="also write all outcomes there")
    arguments = parser.parse_args()
    chosen = [p for p in PROGRAMS if p.name in arguments.programs]
    if arguments.cutlass is not None:
        from build import Builder

        builder = Builder(arguments.folder, arguments.cutlass, arguments.include)
        for program in chosen:
            source = program.write(arguments.cutlass, arguments.folder / "sources")
            print("built", builder.build(program.name, [source], program.options), flush=True)
    if arguments.build_only:
        return

    results, passed = {}, True
    results["known good"], ok = known_good(arguments.folder, chosen, arguments.jobs)
    passed &= ok
    print("## Kernels known to be right\n\n" + pivot(results["known good"], ["program", "case"]) + "\n", flush=True)
    for row in results["known good"]:
        if row["outcome"] != "passed":
            print(row["program"], row["case"], row["mode"], row["text"][-2000:], sep="\n", flush=True)
    if FAULTS and "forward" in arguments.programs:
        results["planted"], ok = planted(arguments.folder, PROGRAMS[0], arguments.jobs)
        passed &= ok
        print("## Planted faults\n\n" + pivot(results["planted"], ["fault", "place"]) + "\n", flush=True)
    if not arguments.skip_sweep and "forward" in arguments.programs:
        results["sweep"] = sweep(arguments.folder, PROGRAMS[0], arguments.jobs)
        print("## Every instruction\n\n" + sweep_summary(results["sweep"]) + "\n")
        missed = [[str(r["site"]), r["op"], r["place"], r["fault"]] for r in results["sweep"] if r["outcome"] == "missed"]
        print("Not caught:\n\n" + table(["site", "instruction", "place", "fault"], missed), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()

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
import tempfile
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
    # A late load shows only where products are early, and it is later than the softmax before.
    "late warp 13": {"SM100_MODE": "eager", "SM100_DELAY": "0x2000:4000000"},
    "all late": {"SM100_MODE": "random", "SM100_DELAY": "0xffff:60000"},
}


@dataclass(frozen=True)
class Place:
    """The instruction that a fault is planted at: the n-th of those whose name and place match."""

    op: str
    at: str = ""
    n: int = 0

    def name_of(self, places: str) -> str:
        """The place that was asked for, of all those from which the instruction was inlined."""
        matching = [p for p in places.split(" < ") if re.search(self.at, p)]
        return matching[-1].removeprefix("sm100_fmha_").replace("_tma_warpspecialized", "")


@dataclass(frozen=True)
class Fault:
    what: str
    place: Place
    kind: int
    value: int = 0


# In the first forward program, by the lines of CUTLASS 4.2. Warps 0-7 are the softmax, 8-11 correct, 12 issues
# products, 13 loads, 14 stores.
MMA, COMMIT, WAIT, ARRIVE = "tcgen05.mma", "tcgen05.commit", "mbarrier.try_wait", "mbarrier.arrive.shared"
EXPECT, STORE, LOAD = "mbarrier.arrive.expect_tx", "tcgen05.st", "tcgen05.ld"


def mainloop(op: str, line: int, n: int = 0) -> Place:
    return Place(op, rf"fwd_mainloop_tma_warpspecialized\.hpp:{line}\b", n)


def loading(op: str, line: int) -> Place:
    return Place(op, rf"fmha_load_tma_warpspecialized\.hpp:{line}\b")


FAULTS = (
    Fault("V is taken for K-major", mainloop(MMA, 385), INSTRUCTION, 1 << 16),
    Fault("Q is taken for bfloat16", mainloop(MMA, 334), INSTRUCTION, 1 << 7),
    Fault("M is 64 instead of 128", mainloop(MMA, 334), INSTRUCTION, 12 << 24),
    Fault("N is 256 where tensor memory ends after 128", mainloop(MMA, 494), INSTRUCTION, 48 << 17),
    Fault("K's descriptor has 64-byte swizzle", mainloop(MMA, 334), B, 6 << 61),
    Fault("K's descriptor has twice the stride (SBO)", mainloop(MMA, 334), B, 192 << 32),
    Fault("V's descriptor has a wrong leading stride (LBO)", mainloop(MMA, 385), B, 64 << 16),
    Fault("a descriptor of version 0", mainloop(MMA, 334), B, 1 << 46),
    Fault("a descriptor outside shared memory", mainloop(MMA, 334), B, 1 << 13),
    Fault("V is read from another stage", mainloop(MMA, 385), B, 1 << 11),
    Fault("P is read one column off", mainloop(MMA, 385), A, 1),
    Fault("O is written one column off", mainloop(MMA, 385), D, 1),
    Fault("D lies behind the end of tensor memory", mainloop(MMA, 494), D, 1 << 8),
    Fault("one k-step of S is missing", mainloop(MMA, 334, 3), DROP),
    Fault("S adds to what was there", mainloop(MMA, 334), ACCUMULATE),
    Fault("O starts anew in the loop", mainloop(MMA, 462), ACCUMULATE),
    Fault("S is never announced in the loop", mainloop(COMMIT, 409), DROP),
    Fault("S is announced before it is there", mainloop(COMMIT, 409), EARLY),
    Fault("O is announced before it is there", mainloop(COMMIT, 464), EARLY),
    Fault("V's stage is released before it has been read", mainloop(COMMIT, 433), EARLY),
    Fault("K's stage is never released", mainloop(COMMIT, 449), DROP),
    Fault("the softmax does not wait for S", mainloop(WAIT, 565), DROP),
    Fault("the product does not wait for P", mainloop(WAIT, 460), DROP),
    Fault("the product does not wait for O to be rescaled", mainloop(WAIT, 458), DROP),
    Fault("the product does not wait for V", mainloop(WAIT, 454), DROP),
    Fault("the correction does not wait for O", mainloop(WAIT, 1014), DROP),
    Fault("the correction does not wait for the softmax", mainloop(WAIT, 1004), DROP),
    Fault("a stage is loaded before it is free", loading(WAIT, 280), DROP),
    Fault("the load expects half the bytes", loading(EXPECT, 280), HALVE),
    Fault("the load expects nothing", loading(EXPECT, 280), DROP),
    Fault("another tile of K is loaded", Place("cp.async.bulk.tensor.4d", "", 4), ADD, 64),
    Fault("P is handed over without wait::st", mainloop("tcgen05.wait::st", 663), DROP),
    Fault("O is handed over without wait::st", mainloop("tcgen05.wait::st", 1021), DROP),
    Fault("O is given away without wait::ld", mainloop("tcgen05.wait::ld", 1092), DROP),
    Fault("P is stored one column off", mainloop(STORE, 653), ADD, 1),
    Fault("S is read one column off", mainloop(LOAD, 569), ADD, 1),
    Fault("S is read from another warp's lanes", mainloop(LOAD, 569), ADD, 32 << 16),
    Fault("S is not given back", mainloop(ARRIVE, 666), DROP),
    Fault("S is given back twice", mainloop(ARRIVE, 666), TWICE),
    Fault("a wait for the other phase", mainloop(WAIT, 565), PARITY),
    Fault("tensor memory is not freed", Place("tcgen05.dealloc"), DROP),
    Fault("tensor memory is not allocated", Place("tcgen05.alloc"), DROP),
)
# Registers of a load are waited for by their use, on hardware as here. And products are done in the order of their
# issue: where the softmax has waited for S, the product into O before it is done as well.
HARMLESS = {
    "O is given away without wait::ld",
    "O is announced before it is there",
    "the correction does not wait for O",
}


@dataclass
class Site:
    number: int
    op: str
    place: str


def sites_of(program: Path) -> list[Site]:
    rows = [line.split("\t") for line in program.with_name(program.name + ".sites").read_text().splitlines()]
    return [Site(int(number), op, place) for number, _, op, place in rows]


def run(
    program: Path, arguments: list[str], environment: dict[str, str], timeout: float = 60
) -> tuple[str, str]:
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
    return (
        "wrong result" if "Reference check failed" in done.stdout or "[FAIL]" in done.stdout else "failed"
    ), done.stdout


def known_good(folder: Path, programs: list[Program], jobs: int) -> tuple[list[dict], bool]:
    tasks = [(p, case, mode) for p in programs for case in p.commands() for mode in MODES]
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(
            lambda t: run(folder / t[0].name, t[1], {**MODES[t[2]], "SM100_ALLOW": t[0].findings}), tasks
        ))  # fmt: skip
    rows = []
    for (program, case, mode), (outcome, text) in zip(tasks, outcomes, strict=True):
        rows.append(
            {"program": program.name, "case": " ".join(case), "mode": mode, "outcome": outcome, "text": text}
        )
    return rows, all(row["outcome"] == "passed" for row in rows)


def find(sites: list[Site], place: Place) -> Site:
    return [s for s in sites if s.op.startswith(place.op) and re.search(place.at, s.place)][place.n]


def batch(program: Path, arguments: list[str], mode: str, faults: list[tuple[int, int, int]]) -> list[str]:
    """What came of the first launch with each fault (kind, site, value), all in one process if it lives that long."""
    outcomes: list[str] = []
    while len(outcomes) < len(faults):
        left = faults[len(outcomes) :]
        with tempfile.NamedTemporaryFile("w", suffix=".faults") as file:
            file.write("".join(f"{kind} {site} {value}\n" for kind, site, value in left))
            file.flush()
            environment = {"SM100_TIMEOUT": "200", **MODES[mode], "SM100_BATCH": file.name}
            _, text = run(program, arguments, environment, timeout=20 + len(left))
        found = re.findall(r"^batch \d+ (.*)$", text, re.MULTILINE)
        # A process that dies on the way takes the fault that it was at with it.
        outcomes += found if len(found) == len(left) or found else ["failed"]
        if found and len(found) < len(left) and not re.search(r"^batch \d+ failed$", text, re.MULTILINE):
            outcomes.append("failed")
    return outcomes[: len(faults)]


def planted(folder: Path, program: Program, jobs: int) -> tuple[list[dict], bool]:
    path, arguments = folder / program.name, program.commands()[0]
    sites = sites_of(path)
    placed = [(fault, find(sites, fault.place)) for fault in FAULTS]
    faults = [(fault.kind, site.number, fault.value) for fault, site in placed]
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = dict(
            zip(MODES, pool.map(lambda mode: batch(path, arguments, mode, faults), MODES), strict=True)
        )
    rows = [
        {
            "fault": fault.what,
            "place": fault.place.name_of(site.place),
            "mode": mode,
            "outcome": outcomes[mode][i],
        }
        for i, (fault, site) in enumerate(placed)
        for mode in MODES
    ]
    caught = {row["fault"] for row in rows if row["outcome"] != "passed"}
    return rows, caught | HARMLESS == {fault.what for fault in FAULTS}


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

    rows = [
        {
            "site": site.number,
            "op": site.op,
            "place": site.place,
            "fault": what,
            "mode": "",
            "outcome": "missed",
        }
        for site, what, _, _ in tasks
    ]
    left = list(range(len(tasks)))
    for mode in MODES:
        # Every process gets a share of what is still to be caught.
        shares = [left[i::jobs] for i in range(jobs)]
        with ThreadPoolExecutor(jobs) as pool:
            outcomes = list(pool.map(
                lambda share, mode=mode: batch(
                    path, arguments, mode, [(tasks[i][2], tasks[i][0].number, tasks[i][3]) for i in share]
                ),
                shares,
            ))  # fmt: skip
        found = [
            pair for share, got in zip(shares, outcomes, strict=True) for pair in zip(share, got, strict=True)
        ]
        for i, outcome in found:
            if outcome != "passed":
                rows[i] |= {"mode": mode, "outcome": outcome}
        left = [i for i in left if rows[i]["outcome"] == "missed"]
    return rows


# Instruction by instruction
# ---------------------------------------------------------------------------------------------------------------------

MISTAKES = {
    "leak": "leak",
    "double-free": "bad-dealloc",
    "not-allocated": "not-allocated",
    "wrong-lanes": "wrong-lanes",
    "outside": "outside-tensor-memory",
    "unwritten": "read-unwritten",
    "pending": "read-pending",
    "alloc-again": "alloc-after-relinquish",
    "bad-alloc": "bad-alloc",
    "forgotten": "never-completed",
}


def instructions(program: Path, jobs: int) -> tuple[list[dict], bool]:
    rows = [{"test": "against CuTe", "expected": "passed", "outcome": run(program, [], MODES["deferred"])[0]}]
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(lambda mistake: run(program, [mistake], MODES["deferred"])[0], MISTAKES))
    for (mistake, expected), outcome in zip(MISTAKES.items(), outcomes, strict=True):
        rows.append({"test": mistake, "expected": expected, "outcome": outcome})
    return rows, all(row["outcome"] == row["expected"] for row in rows)


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
        op = re.match(
            r"(tcgen05\.\w+(::\w+)?|mbarrier\.(arrive\.expect_tx|arrive|try_wait)|cp\.async\.bulk\.tensor)",
            row["op"],
        )[0]
        groups.setdefault((op, row["fault"]), []).append(row)
    lines = []
    for (op, fault), members in groups.items():
        by_mode = {m: sum(r["mode"] == m for r in members) for m in MODES}
        modes = ", ".join(f"{m} {n}" for m, n in by_mode.items() if n)
        lines.append([f"`{op}` {fault}", str(len(members)), str(sum(by_mode.values())), modes])
    return table(["every instruction of its kind", "planted", "caught", "first caught in"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cutlass", type=Path)
    parser.add_argument("--include", type=Path, action="append", default=[])
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--programs", nargs="*", default=["instructions", *(p.name for p in PROGRAMS)])
    parser.add_argument("--skip-sweep", action="store_true")
    parser.add_argument("--jobs", type=int, default=8, help="programs at a time")
    parser.add_argument("--json", type=Path, help="also write all outcomes there")
    arguments = parser.parse_args()
    chosen = [p for p in PROGRAMS if p.name in arguments.programs]
    if arguments.cutlass is not None:
        from build import Builder

        builder = Builder(arguments.folder, arguments.cutlass, arguments.include)
        if "instructions" in arguments.programs:
            builder.build("instructions", [Path(__file__).with_name("instructions.cu")])
        for program in chosen:
            source = program.write(arguments.cutlass, arguments.folder / "sources")
            print("built", builder.build(program.name, [source], program.options), flush=True)
    if arguments.build_only:
        return

    results, passed = {}, True
    if "instructions" in arguments.programs:
        results["instructions"], ok = instructions(arguments.folder / "instructions", arguments.jobs)
        passed &= ok
        rows = [[row["test"], row["expected"], row["outcome"]] for row in results["instructions"]]
        print("## Instructions\n\n" + table(["test", "expected", "outcome"], rows) + "\n", flush=True)
    results["known good"], ok = known_good(arguments.folder, chosen, arguments.jobs)
    passed &= ok
    print(
        "## Kernels known to be right\n\n" + pivot(results["known good"], ["program", "case"]) + "\n",
        flush=True,
    )
    for row in results["known good"]:
        if row["outcome"] != "passed":
            print(row["program"], row["case"], row["mode"], row["text"][-2000:], sep="\n", flush=True)
    if "forward" in arguments.programs:
        results["planted"], ok = planted(arguments.folder, PROGRAMS[0], arguments.jobs)
        passed &= ok
        print("## Planted faults\n\n" + pivot(results["planted"], ["fault", "place"]) + "\n", flush=True)
    if not arguments.skip_sweep and "forward" in arguments.programs:
        results["sweep"] = sweep(arguments.folder, PROGRAMS[0], arguments.jobs)
        print("## Every instruction\n\n" + sweep_summary(results["sweep"]) + "\n")
        missed = [
            [str(r["site"]), r["op"], r["place"], r["fault"]]
            for r in results["sweep"]
            if r["outcome"] == "missed"
        ]
        print("Not caught:\n\n" + table(["site", "instruction", "place", "fault"], missed), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()

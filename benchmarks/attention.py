"""Times `jax_fmha.attention` against its peers: on the CPU torch and jax.nn, on a GPU those of --peers.

    python benchmarks/attention.py --backend cpu --json out.json --plot out.png
    python benchmarks/attention.py --backend cuda --peers fa3,cudnn,tokamax,jax.nn --json out.json --plot out.png

On the CPU: one process, `--threads` threads for each contestant, turns taken call by call, medians. Backward
means the gradients alone, from what one forward has kept, for every contestant. Work is counted as
4*B*N*T*S*H operations forward, 2.5 times that backward, and half for a causal row; rows with documents or a
window count their own pairs. On a GPU: see gpu.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
from bars import check, told
from rows import Row, all_rows, quick_rows
from summary import markdown
from timing import Budget, Candidate, measure

# Largest disagreement of two contestants, relative to the largest value, before their times say nothing.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
PEERS = ("torch", "jax.nn")
# Load average from which the machine is not ours alone.
BUSY = 0.7


def is_sgemm_row(row: Row, which: str) -> bool:
    """The row whose rate is held against that of a plain matrix product."""
    return which == "forward" and row.name == "dense-f32-full-T4096-H128"


def run_row(row: Row, budget: Budget) -> list[dict[str, Any]]:
    """One result per pass."""
    import contestants  # brings jax and torch, so only after `machine.pin`

    data = contestants.Data.of(row)
    functions, skipped = {}, {}
    for name, build in contestants.CONTESTANTS.items():
        try:
            functions[name] = build(row, data)
        except contestants.Unavailable as reason:
            skipped[name] = str(reason)
    results = []
    for which in row.passes:
        want = functions["ours"].result(which)
        for name in functions.keys() - {"ours"}:
            difference = contestants.disagreement(functions[name].result(which), want)
            if not difference < TOLERANCE[row.dtype]:
                raise SystemExit(f"{row.name} {which}: {name} differs from ours by {difference:.1e}")
        candidates = [Candidate(name, getattr(f, which)) for name, f in functions.items()]
        products = contestants.sgemm() if is_sgemm_row(row, which) else {}
        extras = [Candidate(name, call) for name, call in products.items()]
        measure(candidates + extras, budget)
        results.append(result_of(row, which, candidates, extras, skipped))
        gc.collect()
    return results


def result_of(
    row: Row, which: str, candidates: list[Candidate], extras: list[Candidate], skipped: dict[str, str]
) -> dict[str, Any]:
    """Everything known about a row's pass, ready for JSON."""
    flops = row.flops(which)
    median = {c.name: c.median for c in candidates}
    ours = next(c for c in candidates if c.name == "ours")
    result = dataclasses.asdict(row)
    del result["passes"]
    result |= {
        "name": row.name,
        "which": which,
        "flops": flops,
        "median_ms": {name: 1e3 * t for name, t in median.items()},
        "gflops": {name: 1e-9 * flops / t for name, t in median.items()},
        "ratios": {c.name: c.times_slower_than(ours) for c in candidates if c is not ours},
        "samples_ms": {c.name: [round(1e3 * t, 4) for t in c.samples] for c in candidates},
        "skipped": skipped,
    }
    if extras:
        rates = sgemm_rates(extras)
        result["sgemm_gflops"] = rates
        result["sgemm_share"] = result["gflops"]["ours"] / max(rates.values())
    return result


def sgemm_rates(products: list[Candidate]) -> dict[str, float]:
    """GFLOP/s of each product."""
    from contestants import SGEMM_SIZE

    return {c.name: 2e-9 * SGEMM_SIZE**3 / c.median for c in products}


HEADER = f"{'row':31} {'pass':8} {'ours ms':>9} {'GF/s':>7}" + "".join(
    f" {peer + ' ms':>10} {'ratio':>7}" for peer in PEERS
)


def line(result: dict[str, Any]) -> str:
    ms, gflops = result["median_ms"]["ours"], result["gflops"]["ours"]
    text = f"{result['name']:31} {result['which']:8} {ms:9.2f} {gflops:7.1f}"
    for peer in PEERS:
        if peer in result["ratios"]:
            text += f" {result['median_ms'][peer]:10.2f} {result['ratios'][peer]:6.2f}x"
        else:
            text += f" {'-':>10} {'-':>7}"
    for peer, reason in result["skipped"].items():
        text += f"  {peer}: {reason}"
    return text


def run(
    rows: list[Row], budget: Budget, threads: int, kept: list[dict[str, Any]], keep: Callable[[Any], None]
) -> dict[str, Any]:
    """Measures all rows, printing each as it is done, and gives the report so far to `keep`.

    Results in `kept` that are not measured again stay in the report, whose rows have the order of the default table.
    """
    import contestants

    if contestants.torch is not None:
        contestants.torch.set_num_threads(threads)
    about = machine.facts(threads)
    products = [Candidate(name, call) for name, call in contestants.sgemm().items()]
    measure(products, budget)
    about["sgemm_gflops"] = sgemm_rates(products)
    for name, value in about.items():
        print(f"{name:17} {_flat(value)}")
    if about["load_average"] > BUSY:
        print("warning: other programs keep this machine busy; these times will not be worth much")
    print(f"\n{HEADER}", flush=True)
    results = {(r["name"], r["which"]): r for r in kept}
    names = [row.name for row in all_rows()] + [r["name"] for r in kept] + [row.name for row in rows]
    report = {"machine": about, "budget": dataclasses.asdict(budget)}
    for row in rows:
        for result in run_row(row, budget):
            print(line(result), flush=True)
            results[row.name, result["which"]] = result
        report["rows"] = sorted(results.values(), key=lambda r: names.index(r["name"]))
        keep(report)
    print()
    return report | {"bars": told(check(report["rows"]))}


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in value.items())
    return ", ".join(value) if isinstance(value, list) else str(value)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--peers", default="fa3,cudnn", help="on a GPU: of fa3, cudnn, tokamax, jax.nn (%(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write every figure and the machine's facts here")
    parser.add_argument("--plot", type=Path, help="draw the result into this picture")
    parser.add_argument("--rows", default="", help="only rows whose name contains this regular expression")
    parser.add_argument(
        "--update", action="store_true", help="keep the rows of --json that are not measured now"
    )
    parser.add_argument("--quick", action="store_true", help="small rows, to see that everything runs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--load", type=Path, help="print and draw a JSON file instead of measuring")
    parser.add_argument("--markdown", action="store_true", help="print the README's table as well")
    args = parser.parse_args(arguments)
    if args.update and (args.backend != "cpu" or args.json is None or not args.json.exists()):
        parser.error("--update needs --backend cpu and the --json file of an earlier run")
    return args


def measure_cpu(args: argparse.Namespace) -> dict[str, Any]:
    rows = chosen(quick_rows() if args.quick else all_rows(), args.rows)
    machine.pin(args.threads)
    kept = json.loads(args.json.read_text())["rows"] if args.update else []
    budget = Budget(seconds=0.02, max_turns=3) if args.quick else Budget()
    return run(rows, budget, args.threads, kept, lambda report: write(report, args.json))


def measure_cuda(args: argparse.Namespace) -> dict[str, Any]:
    import gpu
    import gpu_rows

    rows = chosen(gpu_rows.quick_rows() if args.quick else gpu_rows.all_rows(), args.rows)
    return gpu.run(rows, args.peers.split(","), turns=2 if args.quick else gpu.TURNS)


def chosen(rows: list[Any], pattern: str) -> list[Any]:
    rows = [row for row in rows if re.search(pattern, row.name)]
    if not rows:
        raise SystemExit(f"--rows {pattern}: no row has such a name")
    return rows


def show(report: dict[str, Any]) -> None:
    """The printed lines of a stored report."""
    if report.get("backend") == "cuda":
        import gpu

        print(gpu.header(report["peers"]), *(gpu.line(r, report["peers"]) for r in report["rows"]), sep="\n")
    else:
        print(HEADER, *(line(r) for r in report["rows"]), sep="\n")


def write(report: dict[str, Any], path: Path | None) -> None:
    """As JSON, whole or not at all."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(report, indent=1) + "\n")
    unfinished.replace(path)


def main() -> int:
    args = parse()
    if args.load is not None:
        report = json.loads(args.load.read_text())
        show(report)
    else:
        report = measure_cuda(args) if args.backend == "cuda" else measure_cpu(args)
    if args.markdown:
        print("\n" + markdown(report))
    write(report, args.json)
    if args.plot is not None:
        if report.get("backend") == "cuda":
            from gpu import draw
        else:
            from picture import draw

        args.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(report, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures rows on a GPU: `attention.py --backend cuda`.

Every contestant is a compiled program, called back to back, in turns; a time is the median over the turns. That of a
backward is the time of forward and backward together less that of the forward, for every contestant.
"""

from __future__ import annotations

import dataclasses
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gpu_contestants
from bars import Bar, geometric_mean, told
from contestants import Unavailable
from gpu_rows import GpuRow
from machine import version

TURNS = 5
TURN_SECONDS = 0.04
# Largest disagreement of two contestants, relative to the largest value, before their times say nothing.
TOLERANCE = 5e-2

# Least ratio of the best peer's time to ours; see docs/design.md.
EVERY_ROW_BAR = 1.0
MEAN_BAR = 1.05
SHORT_CAUSAL_BAR = 1.15
SHORT_DOCUMENTS_BAR = 1.5


def operands(row: GpuRow) -> list[jax.Array]:
    """query, key, value and the cotangent of out."""
    B, T, N, K = row.batch, row.seqlen, row.num_q_heads, row.num_kv_heads
    H, Hv = row.head_dim, row.head_dim_v
    shapes = [(B, T, N, H), (B, T, K, H), (B, T, K, Hv), (B, T, N, Hv)]
    return [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes)]


def programs(attend: gpu_contestants.Attend) -> dict[str, Callable[..., Any]]:
    """What is timed, of (q, k, v, dout)."""
    return {
        "forward": jax.jit(lambda q, k, v, _: attend(q, k, v)),
        "both": jax.jit(lambda q, k, v, dout: jax.vjp(attend, q, k, v)[1](dout)),
    }


def seconds(call: Callable[[], Any], repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / repeats


def run_row(row: GpuRow, peers: Sequence[str], turns: int) -> list[dict[str, Any]]:
    """One result per pass."""
    data = operands(row)
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    skipped: dict[str, str] = {}
    results: dict[str, dict[str, Any]] = {}
    for name in ("ours", *peers):
        build = gpu_contestants.ours if name == "ours" else gpu_contestants.PEERS[name]
        for which in ("forward", "both"):
            try:
                program = programs(build(row))[which]
                results.setdefault(which, {})[name] = jax.block_until_ready(program(*data))
            except (Unavailable, NotImplementedError, ValueError, jax.errors.JaxRuntimeError) as reason:
                skipped.setdefault(f"{name} {which}", str(reason).strip().splitlines()[-1][:200])
                continue
            calls[name, which] = lambda program=program: program(*data)
    for which, by_name in results.items():
        for name in by_name.keys() - {"ours"}:
            if "ours" in by_name:
                apart = disagreement(by_name[name], by_name["ours"])
                if not apart < TOLERANCE:
                    skipped[f"{name} {which} differs"] = f"by {apart:.1e}"
    results.clear()

    # The second calls of a program are slow as well: they record its command buffer.
    times = {key: min(seconds(call, 3) for _ in range(2)) for key, call in calls.items()}
    repeats = {key: max(2, min(200, round(TURN_SECONDS / time))) for key, time in times.items()}
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for turn in range(turns):
        order = list(calls)
        first = turn % len(order)
        for key in order[first:] + order[:first]:
            samples[key].append(seconds(calls[key], repeats[key]))
    median = {key: statistics.median(times) for key, times in samples.items()}
    return [result_of(row, which, median, skipped) for which in ("forward", "backward")]


def disagreement(got: Any, want: Any) -> float:
    """Largest difference of two results, relative to the largest value."""

    def one(x: jax.Array, y: jax.Array) -> float:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return float(jnp.abs(x - y).max() / jnp.abs(y).max())

    return max(map(one, jax.tree.leaves(got), jax.tree.leaves(want)))


def result_of(
    row: GpuRow, which: str, median: dict[tuple[str, str], float], skipped: dict[str, str]
) -> dict[str, Any]:
    """Everything known about a row's pass, ready for JSON."""
    times = {}
    for (name, what), t in median.items():
        if which == "forward" and what == "forward":
            times[name] = t
        elif which == "backward" and what == "both" and (name, "forward") in median:
            times[name] = t - median[name, "forward"]
    flops = row.flops(which)
    peers = {name: t for name, t in times.items() if name != "ours"}
    best = min(peers, key=lambda name: peers[name]) if peers else None
    result = dataclasses.asdict(row)
    result["documents"] = len(row.documents)
    return result | {
        "name": row.name,
        "which": which,
        "flops": flops,
        "ms": {name: 1e3 * t for name, t in times.items()},
        "tflops": {name: 1e-12 * flops / t for name, t in times.items()},
        "best_peer": best,
        "ratio": peers[best] / times["ours"] if best and "ours" in times else None,
        "skipped": skipped,
    }


def check(results: list[dict[str, Any]]) -> list[Bar]:
    """The bars, over every row that both ours and a peer ran."""
    known = [r for r in results if r["ratio"] is not None]

    def ratios(select: Callable[[dict[str, Any]], bool] = lambda _: True) -> list[float]:
        return [r["ratio"] for r in known if select(r)]

    short = ratios(lambda r: r["kind"] == "dense" and r["is_causal"] and r["seqlen"] == 1024)
    documents = ratios(lambda r: r["label"] == "16to128")
    return [
        Bar("every row against the best peer, the slowest", EVERY_ROW_BAR, min(ratios(), default=None)),
        Bar("all rows against the best peer, geometric mean", MEAN_BAR, geometric_mean(ratios())),
        Bar("causal rows of T 1024, the slowest", SHORT_CAUSAL_BAR, min(short, default=None)),
        Bar("documents of 16 to 128 tokens, the slowest", SHORT_DOCUMENTS_BAR, min(documents, default=None)),
    ]


def header(peers: Sequence[str]) -> str:
    return (
        f"{'row':36} {'pass':8} {'ours ms':>9} {'TF/s':>6}"
        + "".join(f" {name:>9}" for name in peers)
        + f" {'ratio':>7}"
    )


def line(result: dict[str, Any], peers: Sequence[str]) -> str:
    """Milliseconds and TFLOP/s of ours, TFLOP/s of the peers, and the best peer's time over ours."""

    def cell(name: str, values: dict[str, float], form: str) -> str:
        return format(values[name], form) if name in values else "-"

    text = f"{result['name']:36} {result['which']:8} {cell('ours', result['ms'], '.3f'):>9}"
    text += f" {cell('ours', result['tflops'], '.0f'):>6}"
    text += "".join(f" {cell(name, result['tflops'], '.0f'):>9}" for name in peers)
    text += f" {result['ratio']:6.2f}x" if result["ratio"] is not None else f" {'-':>7}"
    reason = result["skipped"].get("ours forward" if result["which"] == "forward" else "ours both")
    return f"{text}  {reason}" if reason else text


def facts() -> dict[str, Any]:
    device = jax.devices()[0]
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,power.limit", "--format=csv,noheader"]
    try:
        smi = subprocess.run(query, capture_output=True, text=True).stdout.strip().split("\n")[0]
    except OSError:
        smi = ""
    size = 8192
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    product = jax.jit(jnp.dot)
    seconds(lambda: product(a, b), 3)
    rate = 2e-12 * size**3 / statistics.median(seconds(lambda: product(a, b), 20) for _ in range(5))
    return {
        "device": device.device_kind,
        "driver, clock, power limit": smi,
        "bf16 matrix product TFLOP/s": round(rate),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("jax-fmha", "jax", "jaxlib", "tokamax")},
    }


def run(rows: list[GpuRow], peers: Sequence[str], turns: int = TURNS) -> dict[str, Any]:
    """Measures all rows, printing each as it is done."""
    about = facts()
    for name, value in about.items():
        print(f"{name}: {value}")
    print(f"\n{header(peers)}", flush=True)
    results = []
    for row in rows:
        for result in run_row(row, peers, turns):
            print(line(result, peers), flush=True)
            results.append(result)
    print()
    bars = told(check(results))
    return {
        "backend": "cuda",
        "machine": about,
        "peers": list(peers),
        "rows": results,
        "bars": bars,
    }


COLOURS = {
    "ours": "#0b5fa5",
    "fa3": "#e07b39",
    "cudnn": "#76b041",
    "tokamax": "#8a8f98",
    "jax.nn": "#b07aa1",
}
LABELS = {
    "ours": "jax_fmha",
    "fa3": "FlashAttention-3",
    "cudnn": "cuDNN (jax.nn)",
    "tokamax": "tokamax",
    "jax.nn": "jax.nn, einsums",
}


def draw(report: dict[str, Any], path: Path) -> None:
    """TFLOP/s of every contestant, a group of bars per row, forward above backward."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in COLOURS if any(name in r["tflops"] for r in report["rows"])]
    figure, axes = plt.subplots(2, 1, figsize=(17, 9), dpi=120, sharex=True, layout="constrained")
    for ax, which in zip(axes, ("forward", "backward"), strict=True):
        rows = [r for r in report["rows"] if r["which"] == which]
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            at = np.arange(len(rows)) + (i - (len(names) - 1) / 2) * width
            heights = [r["tflops"].get(name, 0) for r in rows]
            ax.bar(at, heights, width, color=COLOURS[name], label=LABELS[name])
        for at, r in enumerate(rows):
            if r["ratio"] is not None:
                top = max(r["tflops"].values())
                ax.annotate(f"{r['ratio']:.2f}x", (at, top), ha="center", va="bottom", fontsize=8)
        ax.axhline(report["machine"]["bf16 matrix product TFLOP/s"], color="black", lw=0.8, ls=":")
        ax.set_ylabel(f"{which}, TFLOP/s")
        ax.grid(axis="y", alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    axes[1].set_xticks(range(len(rows)), [r["name"] for r in rows], rotation=60, ha="right", fontsize=8)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=len(names), frameon=False
    )
    figure.suptitle(
        f"Attention in bfloat16 on {report['machine']['device']}; numbers: time of the best peer over ours; "
        "dotted: a large matrix product"
    )
    figure.savefig(path)
    plt.close(figure)

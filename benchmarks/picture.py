"""Draws the result of `attention.py`: rates of the dense rows by length, and the ratios of all other rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Distinct in hue and in lightness, for print and for colour-blind readers.
COLOURS = {"ours": "#0b5fa5", "torch": "#e07b39", "jax.nn": "#8a8f98"}
LABELS = {"ours": "jax_fmha", "torch": "torch SDPA", "jax.nn": "jax.nn (XLA)"}
PANELS = [("forward", "float32"), ("backward", "float32"), ("forward", "bfloat16"), ("backward", "bfloat16")]
HEAD_DIM = 128


def draw(report: dict[str, Any], path: Path) -> None:
    """Writes a PNG (or whatever the suffix of `path` says)."""
    rows = report["rows"]
    figure = plt.figure(figsize=(15, 7.6), dpi=130, layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1.55, 1])
    _rates(left, rows, report["machine"])
    _ratios(right, [r for r in rows if r["kind"] != "dense"])
    versions = report["machine"]["versions"]
    figure.suptitle(
        f"Attention on {report['machine']['processor']}, {report['machine']['threads']} threads   "
        f"(jax {versions['jax']}, torch {versions['torch']})",
        fontsize=12,
    )
    figure.savefig(path)
    plt.close(figure)


def _rates(figure: Any, rows: list[dict[str, Any]], machine: dict[str, Any]) -> None:
    axes = figure.subplots(2, 2, sharex=True)
    sgemm = max(machine["sgemm_gflops"].values())
    for ax, (which, dtype) in zip(axes.flat, PANELS, strict=True):
        for is_causal, style in ((False, "-"), (True, "--")):
            chosen = [
                r
                for r in rows
                if r["kind"] == "dense"
                and (r["which"], r["dtype"], r["is_causal"], r["head_dim"])
                == (which, dtype, is_causal, HEAD_DIM)
            ]
            for name, colour in COLOURS.items():
                points = [(r["seqlen_q"], r["gflops"][name]) for r in chosen if name in r["gflops"]]
                if points:
                    ax.plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=4)
        ax.axhline(sgemm, color="black", linewidth=0.8, linestyle=":")
        ax.annotate("sgemm", (0.01, sgemm), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
        ax.set_title(f"{which}, {dtype}, H {HEAD_DIM}", fontsize=10)
        ax.set_xscale("log", base=2)
        lengths = sorted({r["seqlen_q"] for r in rows if r["kind"] == "dense"})
        ax.set_xticks(lengths, [str(x) for x in lengths])
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[1]:
        ax.set_xlabel("T = S")
    for ax in axes[:, 0]:
        ax.set_ylabel("GFLOP/s")
    handles = [
        plt.Line2D([], [], color=colour, marker="o", markersize=4, label=LABELS[name])
        for name, colour in COLOURS.items()
    ]
    handles += [
        plt.Line2D([], [], color="black", linestyle=s, label=label)
        for s, label in (("-", "full"), ("--", "causal"))
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)


def _ratios(figure: Any, rows: list[dict[str, Any]]) -> None:
    """One pair of bars per row, longest time ratio to the right, 1x marked."""
    ax = figure.subplots()
    height = 0.38
    for at, r in enumerate(rows):
        for side, peer in ((-0.5, "torch"), (0.5, "jax.nn")):
            if peer not in r["ratios"]:
                continue
            ratio = r["ratios"][peer]
            ax.barh(at + side * height, ratio, height, color=COLOURS[peer])
            ax.annotate(
                f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x",
                (ratio, at + side * height),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
            )
    ax.axvline(1, color="black", linewidth=0.8)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}x")
    ax.margins(x=0.12)
    ax.set_yticks(range(len(rows)), [f"{r['name']}\n{r['which']}" for r in rows], fontsize=7.5)
    ax.invert_yaxis()
    ax.set_xlabel("time of the peer / time of jax_fmha")
    ax.set_title("packed, windowed, grouped and decode rows", fontsize=10)
    ax.grid(axis="x", alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[p], label=LABELS[p]) for p in ("torch", "jax.nn")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)

"""The result of `attention.py` as the table of the README: one line per group of rows."""

from __future__ import annotations

from typing import Any

from bars import geometric_mean

HEAD = """\
| rows | pass | GFLOP/s | against torch | against jax.nn |
|---|---|---|---|---|"""

TITLES = {
    "dense": "dense, T 512 to 8192, full and causal, H 64 and 128",
    "packed": "documents of 64 to 1024 tokens in rows of 8192, causal",
    "window": "window of 512 keys, T 8192",
    "gqa": "8 query heads per key/value head, T 2048, causal",
    "decode": "decode, T 1, S 8192",
}


def markdown(report: dict[str, Any]) -> str:
    """Rates of ours from the slowest to the fastest row, and geometric means of peer time over our time."""
    lines = [HEAD]
    for kind, title in TITLES.items():
        for dtype in ("float32", "bfloat16"):
            for which in ("forward", "backward"):
                rows = [
                    r for r in report["rows"] if (r["kind"], r["dtype"], r["which"]) == (kind, dtype, which)
                ]
                if rows:
                    lines.append(f"| {title}, {dtype} | {which} | {_rates(rows)} | " + _ratios(rows) + " |")
    return "\n".join(lines)


def _rates(rows: list[dict[str, Any]]) -> str:
    rates = sorted(round(r["gflops"]["ours"]) for r in rows)
    return f"{rates[0]}" if rates[0] == rates[-1] else f"{rates[0]} to {rates[-1]}"


def _ratios(rows: list[dict[str, Any]]) -> str:
    cells = []
    for peer in ("torch", "jax.nn"):
        mean = geometric_mean(r["ratios"][peer] for r in rows if peer in r["ratios"])
        cells.append("-" if mean is None else f"{mean:.2f}x" if mean < 10 else f"{mean:.0f}x")
    return " | ".join(cells)

"""What the measured ratios are held against."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

# Least geometric mean of peer time over our time on the dense rows, against torch.
DENSE_BARS = {
    ("forward", "float32"): 1.1,
    ("backward", "float32"): 1.3,
    ("forward", "bfloat16"): 1.3,
    ("backward", "bfloat16"): 8.0,
}
ALL_ROWS_BAR = 2.0
JAX_FORWARD_BAR = 3.0
JAX_BOTH_BAR = 2.0
JAX_FROM_LENGTH = 2048
JAX_MASKED_BAR = 10.0
SGEMM_BAR = 0.85


@dataclasses.dataclass(frozen=True)
class Bar:
    """`measured` must reach `required`; None if the rows that it needs were not measured."""

    text: str
    required: float
    measured: float | None

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        return "met" if self.measured >= self.required else "missed"

    def line(self) -> str:
        measured = "     -" if self.measured is None else f"{self.measured:6.2f}"
        return f"{self.verdict:12}  {measured} of {self.required:5.2f}   {self.text}"


def told(bars: Iterable[Bar]) -> list[dict[str, Any]]:
    """Prints a line for each bar, and gives them for JSON."""
    out = []
    for bar in bars:
        print(bar.line())
        out.append(dataclasses.asdict(bar) | {"verdict": bar.verdict})
    return out


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(x) for x in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def check(results: list[dict[str, Any]]) -> list[Bar]:
    """All bars over the results of `attention.py`."""

    def ratios(peer: str, **wanted: Any) -> list[float]:
        return [
            r["ratios"][peer]
            for r in results
            if peer in r["ratios"] and all(r[field] == x for field, x in wanted.items())
        ]

    bars = [Bar("every row against torch, the slowest", 1.0, min(ratios("torch"), default=None))]
    for (which, dtype), required in DENSE_BARS.items():
        mean = geometric_mean(ratios("torch", kind="dense", which=which, dtype=dtype))
        bars.append(Bar(f"dense {which} {dtype} against torch, geometric mean", required, mean))
    bars.append(Bar("all rows against torch, geometric mean", ALL_ROWS_BAR, geometric_mean(ratios("torch"))))

    long_forward = [
        r["ratios"]["jax.nn"]
        for r in results
        if r["kind"] == "dense" and r["which"] == "forward" and _is_long(r) and "jax.nn" in r["ratios"]
    ]
    bars.append(
        Bar(
            f"dense forward against jax.nn from T = {JAX_FROM_LENGTH}, the slowest",
            JAX_FORWARD_BAR,
            min(long_forward, default=None),
        )
    )
    bars.append(
        Bar(
            f"dense forward + backward against jax.nn from T = {JAX_FROM_LENGTH}, the slowest",
            JAX_BOTH_BAR,
            min(_both_passes(results), default=None),
        )
    )
    masked = [x for kind in ("packed", "window") for x in ratios("jax.nn", kind=kind)]
    bars.append(
        Bar(
            "packed and windowed rows against jax.nn with a dense mask, the slowest",
            JAX_MASKED_BAR,
            min(masked, default=None),
        )
    )
    shares = [r["sgemm_share"] for r in results if "sgemm_share" in r]
    bars.append(
        Bar("f32 full T 4096 H 128 forward, share of the sgemm rate", SGEMM_BAR, min(shares, default=None))
    )
    return bars


def _is_long(result: dict[str, Any]) -> bool:
    return result["seqlen_q"] >= JAX_FROM_LENGTH


def _both_passes(results: list[dict[str, Any]]) -> list[float]:
    """jax.nn's time over ours for forward + backward of each long dense row."""
    times: dict[str, dict[str, dict[str, float]]] = {}
    for r in results:
        if r["kind"] == "dense" and _is_long(r) and "jax.nn" in r["ratios"]:
            times.setdefault(r["name"], {})[r["which"]] = r["median_ms"]
    return [
        sum(t[which]["jax.nn"] for which in ("forward", "backward"))
        / sum(t[which]["ours"] for which in ("forward", "backward"))
        for t in times.values()
        if len(t) == 2
    ]

"""What is measured: one `Row` per shape, in both passes where that makes sense."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

Kind = Literal["dense", "packed", "window", "gqa", "decode"]
DTYPES = ("float32", "bfloat16")
LENGTHS = (512, 1024, 2048, 4096, 8192)


@dataclasses.dataclass(frozen=True)
class Row:
    """Shapes and options of one call.

    Attributes:
      documents: lengths of the documents packed into each batch entry; empty if it is one document.
      window: keys that a query sees, itself and those before it; None if unbounded.
      passes: what is timed.
    """

    kind: Kind
    dtype: str
    batch: int
    seqlen_q: int
    seqlen_kv: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    is_causal: bool = False
    documents: tuple[int, ...] = ()
    window: int | None = None
    passes: tuple[str, ...] = ("forward", "backward")

    @property
    def name(self) -> str:
        parts = [self.kind, {"float32": "f32", "bfloat16": "bf16"}[self.dtype]]
        if self.kind in ("dense", "gqa"):
            parts.append("causal" if self.is_causal else "full")
        if self.window is not None:
            parts.append(f"W{self.window}")
        if self.num_q_heads != self.num_kv_heads:
            parts.append(f"{self.num_q_heads // self.num_kv_heads}to1")
        length = f"T{self.seqlen_q}"
        if self.seqlen_q != self.seqlen_kv:
            length += f"S{self.seqlen_kv}"
        return "-".join([*parts, length, f"H{self.head_dim}"])

    @property
    def needs_mask(self) -> bool:
        """Whether peers can only express it by a mask of size T*S."""
        return bool(self.documents) or self.window is not None

    def segment_ids(self) -> np.ndarray:
        """int32 [T]."""
        return np.repeat(np.arange(len(self.documents), dtype=np.int32), self.documents)

    def mask(self) -> np.ndarray:
        """bool [T, S], True where query i attends key j."""
        rows, cols = np.arange(self.seqlen_q)[:, None], np.arange(self.seqlen_kv)[None, :]
        keep = np.ones((self.seqlen_q, self.seqlen_kv), bool)
        if self.is_causal:
            keep &= cols <= rows
        if self.window is not None:
            keep &= cols > rows - self.window
        if self.documents:
            ids = self.segment_ids()
            keep &= ids[:, None] == ids[None, :]
        return keep

    def pairs(self) -> float:
        """Query-key pairs that count as work; a causal square counts as half of its area."""
        if self.documents:
            return sum(n * n for n in self.documents) / 2
        if self.window is not None:
            return self.seqlen_q * self.window - self.window**2 / 2
        return self.seqlen_q * self.seqlen_kv * (0.5 if self.is_causal else 1)

    def flops(self, which: str) -> float:
        """Two products of 2*H operations a pair forward; five instead of two backward."""
        forward = 4 * self.batch * self.num_q_heads * self.head_dim * self.pairs()
        return forward * (2.5 if which == "backward" else 1)


def documents(total: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Random lengths that fill `total`; the same on every machine."""
    random = np.random.default_rng(0)
    lengths: list[int] = []
    while (left := total - sum(lengths)) >= 2 * longest:
        lengths.append(int(random.integers(shortest, longest + 1)))
    return (*lengths, left - left // 2, left // 2)


def dense(dtype: str, seqlen: int, head_dim: int, is_causal: bool) -> Row:
    """batch * heads * T is constant, so that a row's time grows with T and not with its square."""
    batch = max(1, 2048 // seqlen)
    heads = 8 if seqlen <= 2048 else 8 * 2048 // seqlen
    return Row("dense", dtype, batch, seqlen, seqlen, heads, heads, head_dim, is_causal)


def all_rows() -> list[Row]:
    """The default table."""
    rows = [
        dense(dtype, seqlen, head_dim, is_causal)
        for dtype in DTYPES
        for is_causal in (False, True)
        for head_dim in (64, 128)
        for seqlen in LENGTHS
    ]
    for dtype in DTYPES:
        rows += [
            Row("packed", dtype, 1, 8192, 8192, 4, 4, 128, True, documents=documents(8192, 64, 1024)),
            Row("window", dtype, 1, 8192, 8192, 4, 4, 128, True, window=512),
            Row("gqa", dtype, 1, 2048, 2048, 16, 2, 128, True),
            Row("decode", dtype, 1, 1, 8192, 32, 32, 128, passes=("forward",)),
            Row("decode", dtype, 1, 1, 8192, 32, 4, 128, passes=("forward",)),
        ]
    return rows


def quick_rows() -> list[Row]:
    """One small row of each kind, to see that everything runs; the times mean little."""
    rows = []
    for dtype in DTYPES:
        rows += [
            Row("dense", dtype, 1, 256, 256, 2, 2, 64),
            Row("packed", dtype, 1, 512, 512, 2, 2, 64, True, documents=documents(512, 16, 64)),
            Row("window", dtype, 1, 512, 512, 2, 2, 64, True, window=32),
            Row("gqa", dtype, 1, 256, 256, 8, 1, 64, True),
            Row("decode", dtype, 1, 1, 512, 8, 8, 64, passes=("forward",)),
        ]
    return rows

"""What is measured on a GPU: one `GpuRow` per shape, forward and backward."""

from __future__ import annotations

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class GpuRow:
    """Self-attention in bfloat16.

    Attributes:
      kind: "dense", "grouped", "packed", "window", "mla" or "splash", the options that one asks of splash attention at
        once; rows of one kind stand together in the picture.
      head_dim_v: value's.
      documents: lengths of the causal documents that fill the one row of tokens; empty if it is no packed row.
      label: tells packed rows of one length apart.
      window: keys that a query sees, itself and those before it; None if unbounded.
      logits_soft_cap: None if there is none.
    """

    kind: str
    batch: int
    seqlen: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    is_causal: bool
    documents: tuple[int, ...] = ()
    label: str = ""
    window: int | None = None
    logits_soft_cap: float | None = None

    @property
    def name(self) -> str:
        parts = [self.kind, "causal" if self.is_causal else "full", f"{self.batch}x{self.seqlen}"]
        parts += [self.label] if self.label else []
        parts += [f"W{self.window}"] if self.window is not None else []
        parts += [f"cap{self.logits_soft_cap:g}"] if self.logits_soft_cap is not None else []
        if self.num_q_heads != self.num_kv_heads:
            parts.append(f"{self.num_q_heads}to{self.num_kv_heads}")
        same = self.head_dim == self.head_dim_v
        return "-".join([*parts, f"H{self.head_dim}" if same else f"H{self.head_dim}v{self.head_dim_v}"])

    def pairs(self) -> float:
        """Query-key pairs that count as work; a causal square counts as half of its area."""

        def of(length: int) -> float:
            window = length if self.window is None else min(self.window, length)
            return length * window - window**2 / 2 if self.is_causal else length**2

        return sum(map(of, self.documents or (self.seqlen,)))

    def flops(self, which: str) -> float:
        """Two products forward; the backward's five count as 2.5 times that."""
        forward = 2 * self.batch * self.num_q_heads * (self.head_dim + self.head_dim_v) * self.pairs()
        return forward * (2.5 if which == "backward" else 1)

    def segment_ids(self) -> np.ndarray:
        """int32 [1, T]."""
        return np.repeat(np.arange(len(self.documents), dtype=np.int32), self.documents)[None]

    def cu_seqlens(self) -> np.ndarray:
        """int32, first token of each document and the end."""
        return np.cumsum([0, *self.documents]).astype(np.int32)

    def mask(self) -> np.ndarray:
        """bool [1, T, T], True where query i attends key j."""
        rows, cols = np.arange(self.seqlen)[:, None], np.arange(self.seqlen)[None, :]
        keep = np.ones((self.seqlen, self.seqlen), bool)
        if self.is_causal:
            keep &= cols <= rows
        if self.window is not None:
            keep &= cols > rows - self.window
        if self.documents:
            ids = self.segment_ids()[0]
            keep &= ids[:, None] == ids[None, :]
        return keep[None]


def log_normal_documents(total: int, median: int) -> tuple[int, ...]:
    """Lengths of log-normal distribution (sigma 1, from 16 to 8192) that fill `total`; the same everywhere."""
    return _fill(total, lambda random: int(np.clip(median * math.exp(random.standard_normal()), 16, 8192)))


def short_documents(total: int) -> tuple[int, ...]:
    """Lengths of 16 to 128."""
    return _fill(total, lambda random: int(random.integers(16, 129)))


def _fill(total: int, draw) -> tuple[int, ...]:
    random = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(min(draw(random), total - sum(lengths)))
    return tuple(lengths)


def dense(head_dim: int, is_causal: bool, batch: int, seqlen: int) -> GpuRow:
    """2048 columns in all, and 16,384 tokens."""
    heads = 2048 // head_dim
    return GpuRow("dense", batch, seqlen, heads, heads, head_dim, head_dim, is_causal)


def packed(tokens: int, label: str, documents: tuple[int, ...]) -> GpuRow:
    return GpuRow("packed", 1, tokens, 32, 8, 128, 128, True, documents, label)


def splash(tokens: int, heads: int, kv_heads: int, documents: tuple[int, ...], window: int) -> GpuRow:
    return GpuRow("splash", 1, tokens, heads, kv_heads, 128, 128, True, documents, "", window, 50.0)


def all_rows() -> list[GpuRow]:
    rows = [
        dense(head_dim, is_causal, batch, seqlen)
        for head_dim in (64, 128, 256)
        for is_causal in (False, True)
        for batch, seqlen in ((16, 1024), (4, 4096), (1, 16384))
    ]
    rows += [
        GpuRow("grouped", batch, seqlen, 32, 8, 128, 128, True) for batch, seqlen in ((4, 4096), (1, 16384))
    ]
    for tokens in (16384, 131072):
        rows += [packed(tokens, f"median{m}", log_normal_documents(tokens, m)) for m in (512, 2048)]
        rows.append(packed(tokens, "16to128", short_documents(tokens)))
    rows.append(GpuRow("window", 1, 32768, 32, 8, 128, 128, True, window=1024))
    rows.append(GpuRow("mla", 2, 8192, 16, 16, 192, 128, True))
    rows.append(splash(8192, 32, 8, log_normal_documents(8192, 2048), 1024))
    return rows


def quick_rows() -> list[GpuRow]:
    """One small row of each kind, to see that everything runs; the times mean little."""
    return [
        GpuRow("dense", 2, 512, 4, 4, 128, 128, False),
        GpuRow("grouped", 2, 512, 8, 2, 128, 128, True),
        GpuRow("packed", 1, 1024, 8, 2, 128, 128, True, short_documents(1024), "16to128"),
        GpuRow("window", 1, 1024, 8, 2, 128, 128, True, window=128),
        GpuRow("mla", 1, 512, 4, 4, 192, 128, True),
        splash(1024, 8, 2, log_normal_documents(1024, 300), 128),
    ]

"""The table of named cases that tests and benchmarks share.

A `Case` says what is asked, not in which dtype; `Case.make` draws its operands, the same ones every time. Sizes are
distinct (batch, T, S, N, K, H, Hv), so that an exchanged dimension cannot go unnoticed, and the features meet
pairwise (`test_cases.py` counts the pairs).
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any

import numpy as np

# Keyword arguments of `attention` with a gradient.
DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `attention`.

    Shapes of mask and bias are spelled by letters: B for all batch dimensions, b for as many of size 1, N, T and S for
    the full size, 1 for size 1; "TS" is `[T, S]` without batch dimensions.
    """

    name: str
    batch: tuple[int, ...] = (2,)
    T: int = 13
    S: int = 19
    N: int = 3
    K: int = 3
    H: int = 8
    Hv: int = 5
    is_causal: bool = False
    window: int | tuple[int | None, int | None] | None = None
    offset: str = ""  # "scalar" or "entry": one, or one per batch entry
    positions: str = ""  # "q", "kv", "both", "shared" (both, without batch dimensions)
    lengths: str = ""  # "q", "kv", "both", "scalar"
    segments: str = ""  # see `segment_ids`
    mask: str = ""
    bias: str = ""
    bias_dtype: str = ""  # of query unless given
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    dlse: bool = False  # lse is used: its cotangent is not zero

    def make(self, dtype: Any) -> Inputs:
        """The operands, drawn by the case's name. Floats are of `dtype`, sinks float32 (float64 for float64)."""
        draw = _Draw(self, np.dtype(dtype))
        operands = {
            "query": draw.normal(*self.batch, self.T, self.N, self.H),
            "key": draw.normal(*self.batch, self.S, self.K, self.H),
            "value": draw.normal(*self.batch, self.S, self.K, self.Hv),
        }
        if self.bias:
            bias = draw.normal(*self.score_shape(self.bias))
            operands["bias"] = bias.astype(self.bias_dtype) if self.bias_dtype else bias
        if self.mask:
            operands["mask"] = draw.rng.random(self.score_shape(self.mask)) < 0.7
        if self.sinks:
            operands["sinks"] = draw.normal(self.N).astype(draw.accumulator)
        options: dict[str, Any] = {"is_causal": self.is_causal, "local_window_size": self.window}
        if self.scale is not None:
            options["scale"] = self.scale
        if self.soft_cap is not None:
            options["logits_soft_cap"] = self.soft_cap
        if self.offset:
            shape = self.batch if self.offset == "entry" else ()
            operands["query_offset"] = draw.integers(-3, max(self.S - self.T, 0) + 4, shape)
        operands |= draw.positions() | draw.lengths()
        if self.segments:
            operands["segment_ids"] = draw.segment_ids()
        return Inputs(
            operands=operands,
            options=options,
            dout=draw.normal(*self.batch, self.T, self.N, self.Hv),
            dlse=draw.normal(*self.batch, self.N, self.T).astype(draw.accumulator) if self.dlse else None,
        )

    def score_shape(self, letters: str) -> tuple[int, ...]:
        sizes = {"B": self.batch, "b": (1,) * len(self.batch), "1": (1,)}
        sizes |= {letter: (getattr(self, letter),) for letter in "NTS"}
        return sum((sizes[letter] for letter in letters), ())

    def features(self) -> set[str]:
        """Names of what the case asks for beyond query, key and value."""
        asked = {
            "causal": self.is_causal,
            "window": self.window is not None,
            "offset": self.offset,
            "positions": self.positions,
            "q_lengths": self.lengths in ("q", "both"),
            "kv_lengths": self.lengths in ("kv", "both", "scalar"),
            "segments": self.segments,
            "mask": self.mask,
            "bias": self.bias,
            "soft_cap": self.soft_cap,
            "sinks": self.sinks,
            "dlse": self.dlse,
            "gqa": self.N != self.K,
        }
        return {name for name, on in asked.items() if on}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Operands by the keywords of `attention`, its static options, and cotangents of out and lse."""

    operands: dict[str, Any]
    options: dict[str, Any]
    dout: np.ndarray
    dlse: np.ndarray | None

    def differentiable(self) -> dict[str, Any]:
        return {name: x for name, x in self.operands.items() if name in DIFFERENTIABLE}

    def rest(self) -> dict[str, Any]:
        return {name: x for name, x in self.operands.items() if name not in DIFFERENTIABLE}


class _Draw:
    def __init__(self, case: Case, dtype: np.dtype):
        self.case = case
        self.dtype = dtype
        self.accumulator = np.dtype(np.float64 if dtype == np.float64 else np.float32)
        self.rng = np.random.default_rng(zlib.crc32(case.name.encode()))

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(self.dtype)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> np.ndarray:
        return self.rng.integers(low, high, shape).astype(np.int32)

    def positions(self) -> dict[str, np.ndarray]:
        """In any order and with repetitions, some below 0."""
        case, result = self.case, {}
        batch = () if case.positions == "shared" else case.batch
        for side, name, length in (("q", "query_positions", case.T), ("kv", "key_value_positions", case.S)):
            if case.positions in (side, "both", "shared"):
                result[name] = self.integers(-4, length + 2, (*batch, length))
        return result

    def lengths(self) -> dict[str, np.ndarray]:
        """From 0 to more than there is, in turn over the batch entries."""
        case, result = self.case, {}
        if case.lengths == "scalar":
            return {"key_value_seq_lengths": np.int32(case.S - 4)}
        for side, name, length in (
            ("q", "query_seq_lengths", case.T),
            ("kv", "key_value_seq_lengths", case.S),
        ):
            if case.lengths in (side, "both"):
                choices = [length - 3, length + 5, 0, 1] if side == "q" else [length - 5, 1, length + 3, 0]
                entries = np.resize(np.array(choices, np.int32), math.prod(case.batch))
                result[name] = entries.reshape(case.batch)
        return result

    def segment_ids(self) -> Any:
        """`runs`: documents in order. `shuffled`: ids in any order. `negative`: ids around 0, 0 and -1 among them, the
        first also last. `tiny`: documents of one or two tokens. `disjoint`: ids that only one side has. `shared`: one
        array without batch dimensions for both sides. `int8`: as `runs`, of that type."""
        from jax_fmha import SegmentIds

        case, kind = self.case, self.case.segments
        if kind == "shared":
            return np.sort(self.integers(0, 4, (case.T,)))
        sides = []
        for side, length in (("q", case.T), ("kv", case.S)):
            shape = (*case.batch, length)
            if kind in ("runs", "int8"):
                ids = np.sort(self.integers(1, 4, shape), axis=-1)
            elif kind == "shuffled":
                ids = self.integers(0, 3, shape)
            elif kind == "negative":
                order = np.array([-1, 0, 7, -(2**31), -1], np.int32)
                cuts = np.sort(self.integers(0, len(order), shape), axis=-1)
                ids = order[cuts]
            elif kind == "tiny":
                ids = np.broadcast_to(np.arange(length, dtype=np.int32) * 2 // 3, shape).copy()
            elif kind == "disjoint":
                low = 0 if side == "q" else 2
                ids = self.integers(low, low + 4, shape)
            else:
                raise ValueError(f"unknown kind of segments: {kind!r}")
            sides.append(ids.astype(np.int8) if kind == "int8" else ids)
        return SegmentIds(*sides)


_GQA = {"N": 6, "K": 2}

CASES = (
    Case("plain"),
    Case("scale", scale=0.3),
    Case("gqa", **_GQA),
    Case("mqa", N=4, K=1, H=16, Hv=24),
    # Positions.
    Case("causal", is_causal=True),
    Case("causal_more_queries", T=21, S=11, is_causal=True),
    Case("causal_offset", is_causal=True, offset="scalar"),
    Case("causal_offset_per_entry", batch=(4,), is_causal=True, offset="entry"),
    Case("causal_positions_q", is_causal=True, positions="q"),
    Case("causal_positions_kv", is_causal=True, positions="kv"),
    Case("causal_positions_both", is_causal=True, positions="both"),
    Case("window", window=(3, 2)),
    Case("window_int", window=2),
    Case("window_left", window=(4, None)),
    Case("window_right", window=(None, 1)),
    Case("window_negative_left", window=(-2, 5)),
    Case("window_negative_right", window=(6, -1)),
    Case("window_empty", window=(-3, 2)),
    Case("window_beyond_int32", window=(2**33, 2**35)),
    Case("causal_window", is_causal=True, window=(5, 3)),
    Case("window_offset_per_entry", batch=(3,), window=(4, 1), offset="entry"),
    Case("window_positions", window=(2, 3), positions="both"),
    # Lengths.
    Case("lengths_q", batch=(4,), lengths="q"),
    Case("lengths_kv", batch=(4,), lengths="kv"),
    Case("lengths_both", batch=(4,), lengths="both"),
    Case("lengths_scalar", lengths="scalar"),
    # Segments.
    Case("segments_runs", segments="runs"),
    Case("segments_shuffled", segments="shuffled"),
    Case("segments_negative", segments="negative", T=29, S=31),
    Case("segments_tiny", segments="tiny"),
    Case("segments_disjoint", segments="disjoint"),
    Case("segments_shared", T=17, S=17, segments="shared"),
    Case("segments_int8", segments="int8"),
    # Masks and biases of each broadcast shape.
    Case("mask_BNTS_bias_b111", mask="BNTS", bias="b111"),
    Case("mask_BNT1_bias_b11S", mask="BNT1", bias="b11S"),
    Case("mask_BN1S_bias_b1T1", mask="BN1S", bias="b1T1"),
    Case("mask_BN11_bias_b1TS", mask="BN11", bias="b1TS", batch=(4,)),
    Case("mask_B1TS_bias_bN11", mask="B1TS", bias="bN11"),
    Case("mask_B1T1_bias_bN1S", mask="B1T1", bias="bN1S"),
    Case("mask_B11S_bias_bNT1", mask="B11S", bias="bNT1"),
    Case("mask_B111_bias_bNTS", mask="B111", bias="bNTS", batch=(4,)),
    Case("mask_bNTS_bias_B111", mask="bNTS", bias="B111"),
    Case("mask_bNT1_bias_B11S", mask="bNT1", bias="B11S"),
    Case("mask_bN1S_bias_B1T1", mask="bN1S", bias="B1T1"),
    Case("mask_bN11_bias_B1TS", mask="bN11", bias="B1TS", N=5, K=5),
    Case("mask_b1TS_bias_BN11", mask="b1TS", bias="BN11"),
    Case("mask_b1T1_bias_BN1S", mask="b1T1", bias="BN1S"),
    Case("mask_b11S_bias_BNT1", mask="b11S", bias="BNT1"),
    Case("mask_b111_bias_BNTS", mask="b111", bias="BNTS"),
    Case("mask_TS_bias_S", mask="TS", bias="S"),
    Case("mask_T1_bias_NTS", mask="T1", bias="NTS", **_GQA),
    Case("bias_float32", bias="B1TS", bias_dtype="float32"),
    # Scores.
    Case("soft_cap", soft_cap=1.5),
    Case("sinks", sinks=True),
    Case("dlse", dlse=True),
    Case("sinks_dlse_lengths", batch=(4,), sinks=True, dlse=True, lengths="both"),
    # Batch dimensions.
    Case("unbatched", batch=(), is_causal=True, bias="NTS"),
    Case("unbatched_segments", batch=(), segments="runs", lengths="both", sinks=True, dlse=True),
    Case("batch_rank_2", batch=(2, 3), mask="BN1S", bias="b1TS", lengths="kv"),
    Case("batch_rank_3", batch=(2, 1, 3), is_causal=True, segments="shuffled", offset="entry"),
    # Sizes.
    Case("no_batch_entries", batch=(0,), bias="bNTS"),
    Case("no_queries", T=0, bias="BNTS", sinks=True, dlse=True),
    Case("no_keys", S=0, bias="bNTS", mask="B1TS", dlse=True),
    Case("no_keys_sinks", S=0, sinks=True, dlse=True),
    Case("no_heads", N=0, K=0),
    Case("no_head_dim", H=0, is_causal=True, dlse=True),
    Case("no_value_dim", Hv=0, is_causal=True, dlse=True),
    Case("one_query", T=1, S=37, **_GQA),
    Case("one_query_offset", T=1, S=37, N=8, K=2, is_causal=True, offset="entry", window=(20, 0)),
    Case("one_key", T=11, S=1),
    Case("one_of_each", batch=(1,), T=1, S=1, N=1, K=1, H=1, Hv=1),
    Case("wide_heads", T=9, S=14, N=2, K=2, H=257, Hv=130),
    Case("decode_long", batch=(1,), T=1, S=1031, N=8, K=2, H=64, Hv=48, lengths="kv", sinks=True, dlse=True),
    Case(
        "decode_masked", batch=(3,), T=2, S=300, N=4, K=2, H=40, Hv=33, mask="B1TS", bias="bN1S", soft_cap=3.0
    ),
    # Many tiles.
    Case("tiles", batch=(1,), T=301, S=529, N=2, K=1, H=24, Hv=40),
    Case("tiles_causal", batch=(1,), T=530, S=419, N=2, K=2, H=40, Hv=24, is_causal=True, dlse=True),
    Case(
        "tiles_causal_gqa", batch=(1,), T=307, S=401, N=3, K=1, H=17, Hv=16, is_causal=True, offset="scalar"
    ),
    Case("tiles_window", batch=(1,), T=401, S=433, N=2, K=1, H=16, Hv=9, window=(37, 11), soft_cap=2.0),
    Case("tiles_segments", batch=(2,), T=389, S=523, N=2, K=1, H=16, Hv=12, segments="runs", is_causal=True),
    Case(
        "tiles_shuffled",
        batch=(1,),
        T=331,
        S=347,
        N=2,
        K=1,
        H=16,
        Hv=12,
        segments="shuffled",
        window=(None, 90),
    ),
    Case("tiles_documents", batch=(1,), T=600, S=600, N=1, K=1, H=8, Hv=16, segments="tiny", is_causal=True),
    Case(
        "tiles_positions", batch=(1,), T=283, S=311, N=2, K=1, H=16, Hv=12, positions="both", window=(50, 20)
    ),
    Case(
        "tiles_mask_bias",
        batch=(2,),
        T=270,
        S=300,
        N=2,
        K=1,
        H=16,
        Hv=12,
        mask="B1TS",
        bias="b1TS",
        sinks=True,
    ),
    Case(
        "tiles_lengths",
        batch=(4,),
        T=290,
        S=330,
        N=2,
        K=1,
        H=16,
        Hv=12,
        lengths="both",
        bias="BN1S",
        dlse=True,
    ),
    # Combinations: with the rows above, every two features meet.
    Case("mix_1", **_GQA, is_causal=True, segments="runs", bias="bNTS", sinks=True, dlse=True, lengths="q"),
    Case("mix_2", **_GQA, window=(6, 2), offset="entry", mask="B1TS", soft_cap=2.0, lengths="kv", dlse=True),
    Case(
        "mix_3",
        is_causal=True,
        positions="both",
        segments="shuffled",
        mask="BNTS",
        soft_cap=1.0,
        lengths="both",
    ),
    Case(
        "mix_4",
        **_GQA,
        window=(9, None),
        positions="kv",
        bias="B11S",
        sinks=True,
        offset="scalar",
        lengths="q",
    ),
    Case(
        "mix_5",
        is_causal=True,
        window=(7, 0),
        bias="b1TS",
        soft_cap=4.0,
        sinks=True,
        lengths="kv",
        mask="bN1S",
    ),
    Case(
        "mix_6",
        **_GQA,
        positions="shared",
        is_causal=True,
        dlse=True,
        soft_cap=2.5,
        mask="b11S",
        segments="runs",
    ),
    Case("mix_7", offset="entry", is_causal=True, segments="disjoint", bias="BN11", sinks=True, mask="B1T1"),
    Case(
        "mix_8",
        window=(3, 8),
        segments="negative",
        bias="BNTS",
        sinks=True,
        dlse=True,
        soft_cap=1.2,
        positions="q",
    ),
    Case(
        "mix_9",
        offset="scalar",
        window=(2, 5),
        lengths="both",
        segments="tiny",
        dlse=True,
        bias="NTS",
        soft_cap=2.0,
    ),
    Case(
        "mix_10",
        **_GQA,
        positions="both",
        window=(4, 4),
        lengths="both",
        mask="BN1S",
        bias="b1T1",
        sinks=True,
    ),
)

BY_NAME = {case.name: case for case in CASES}

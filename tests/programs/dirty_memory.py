"""Runs cases while every fresh allocation is filled with bytes that are huge numbers in every float type.

glibc does the filling (`MALLOC_PERTURB_`): outputs and workspace come from malloc in XLA's CPU client.
"""

from __future__ import annotations

import sys

import jax.numpy as jnp
import numpy as np

from cases import BY_NAME
from support import check_close, expected, run_attention

CASES = (
    "causal_more_queries",
    "gqa",
    "lengths_both",
    "segments_disjoint",
    "segments_tiny",
    "mask_B111_bias_bNTS",
    "mask_b111_bias_BNTS",
    "sinks_dlse_lengths",
    "window_empty",
    "one_query_offset",
    "decode_long",
    "tiles_window",
    "tiles_segments",
    "tiles_lengths",
    "mix_4",
    "mix_8",
)

if __name__ == "__main__":
    (fill,) = sys.argv[1:]
    seen = np.empty(1 << 20, np.uint8)
    assert (seen == int(fill, 16)).mean() > 0.99, "this libc does not fill fresh memory"
    del seen
    for name in CASES:
        for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 5e-2)):
            got = run_attention(BY_NAME[name].make(jnp.dtype(dtype)), None)
            check_close(got, expected(BY_NAME[name], dtype), tolerance)

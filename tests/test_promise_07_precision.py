"""Promise 7: the cases of the table in every dtype, forward and all gradients, against the float64 oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fmha
from cases import BY_NAME, CASES, Case
from support import check, each_implementation, error, expected, plain, run_attention

# The reference differs by dtype in nothing but a conversion at either end, and takes long to compile.
XLA_IN_OTHER_DTYPES = [
    "gqa",
    "causal_window",
    "lengths_both",
    "segments_shuffled",
    "mask_BN11_bias_b1TS",
    "bias_float32",
    "no_keys",
    "unbatched_segments",
    "mix_1",
    "mix_3",
]


def _calls(dtypes: tuple[str, ...]) -> list:
    return [
        pytest.param(case, dtype, implementation, id=f"{case.name}-{dtype}-{implementation or 'native'}")
        for case in CASES
        for dtype in dtypes
        for implementation in (None, "xla")
        if implementation is None or dtype == "float32" or case.name in XLA_IN_OTHER_DTYPES
    ]


@pytest.mark.parametrize(("case", "dtype", "implementation"), _calls(("float32", "bfloat16", "float16")))
def test_values_and_gradients(case: Case, dtype: str, implementation: str | None):
    check(run_attention(case.make(jnp.dtype(dtype)), implementation), case, dtype)


@pytest.mark.parametrize(("case", "dtype", "implementation"), _calls(("float64",)))
def test_values_and_gradients_float64(case: Case, dtype: str, implementation: str | None):
    with jax.enable_x64(True):
        got = run_attention(case.make(np.float64), implementation)
    assert got["lse"].dtype == np.float64
    check(got, case, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_yardstick_is_neither_exact_nor_wrong(dtype: str):
    """What the 2x rule compares with errs by about the rounding of its dtype."""
    case = BY_NAME["tiles_causal_gqa"]
    eps = float(jnp.finfo(dtype).eps)
    for name in ("out", "dquery", "dkey", "dvalue"):
        want = expected(case, dtype)[name]
        assert eps / 8 < error(plain(case, dtype)[name], want) / np.abs(want).max() < 8 * eps


@pytest.mark.parametrize("wrong", ["key", "value"])
@each_implementation
def test_dtypes_must_agree(wrong: str, implementation: str | None):
    operands = {name: np.ones((2, 3, 4, 8), np.float32) for name in ("query", "key", "value")}
    operands[wrong] = operands[wrong].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match=rf"{wrong}.*float32.*bfloat16.*Cast"):
        jax_fmha.attention(**operands, implementation=implementation)


def test_statistics_are_float32_for_16_bits():
    """A sum of many small probabilities: 16-bit accumulation would lose them."""
    S = 4096
    q, k = np.zeros((1, 1, 1, 8), jnp.bfloat16), np.zeros((1, S, 1, 8), jnp.bfloat16)
    v = np.ones((1, S, 1, 8), jnp.bfloat16)
    out, lse = jax_fmha.attention(q, k, v, return_lse=True)
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1)
    np.testing.assert_allclose(lse, np.log(S), rtol=1e-6)

"""`dot_product_attention` against `jax.nn.dot_product_attention`.

Documented differences: fully masked rows give 0 (jax.nn: the mean of all values) and NaN beyond a length stays there.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fmha import dot_product_attention
from support import check_close

B, T, S, N, K, H = 2, 11, 17, 6, 3, 8


def draw(dtype: Any = np.float32, *, heads: int = N) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, S, heads, H), (B, S, heads, H)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


RNG = np.random.default_rng(1)
BIAS = RNG.standard_normal((B, N, T, S)).astype(np.float32)
MASK = RNG.random((B, N, T, S)) < 0.7
MASK[..., 0] = True  # jax.nn gives the mean of all values where nothing is attended

TABLE: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "bias": {"bias": BIAS},
    "bias_shared": {"bias": BIAS[:1, :1]},
    "bias_rank_3": {"bias": BIAS[0]},
    "mask": {"mask": MASK},
    "mask_shared_heads": {"mask": MASK[:, :1]},
    "mask_rank_2": {"mask": MASK[0, 0]},
    "mask_and_bias": {"mask": MASK[:, :1], "bias": BIAS[:, :, :1]},
    "window": {"local_window_size": (3, 2)},
    "window_int": {"local_window_size": 4},
    "window_causal": {"local_window_size": (5, 0), "is_causal": True},
    "query_lengths": {"query_seq_lengths": np.array([4, 11], np.int32)},
    "key_value_lengths": {"key_value_seq_lengths": np.array([5, 17], np.int32)},
    "both_lengths_causal": {
        "query_seq_lengths": np.array([4, 11], np.int32),
        "key_value_seq_lengths": np.array([17, 6], np.int32),
        "is_causal": True,
    },
    "everything": {
        "bias": BIAS,
        "mask": MASK,
        "scale": 0.5,
        "is_causal": True,
        "local_window_size": (20, 1),
        "query_seq_lengths": np.array([9, 10], np.int32),
        "key_value_seq_lengths": np.array([14, 17], np.int32),
    },
}
each_row = pytest.mark.parametrize("row", TABLE)


def test_signature():
    """Names, order, kinds and defaults are those of jax.nn."""
    ours, theirs = (
        inspect.signature(f).parameters for f in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        assert (parameter.kind, parameter.default) == (theirs[name].kind, theirs[name].default), name


@pytest.mark.parametrize("implementation", [None, "xla", "cudnn"])
@each_row
def test_same_results(row: str, implementation: Any):
    q, k, v = draw()
    got = dot_product_attention(q, k, v, **TABLE[row], implementation=implementation)
    check_close(got, results_of_jax_nn(row))


@functools.cache
def results_of_jax_nn(row: str) -> Any:
    return jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **TABLE[row]))(*draw())


@each_row
def test_same_gradients(row: str):
    biases = [TABLE[row]["bias"]] if "bias" in TABLE[row] else []
    check_same_gradients(row, biases)


@pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="a sum that cancels, of numbers rounded to 16 bits"
)
@pytest.mark.parametrize("row", [row for row in TABLE if "bias" not in TABLE[row]])
def test_same_gradients_with_one_bias_for_all(row: str):
    check_same_gradients(row, [np.zeros((1, 1, 1, 1), np.float32)])


def check_same_gradients(row: str, biases: list[np.ndarray]):
    operands = (*draw(heads=K), *biases)
    kwargs = {name: x for name, x in TABLE[row].items() if name != "bias"}

    def gradients(f: Any) -> Any:
        loss = lambda operands: jnp.sin(f(*operands, **kwargs)).sum()  # noqa: E731
        return jax.jit(jax.grad(loss))(operands)

    check_close(gradients(dot_product_attention), gradients(jax.nn.dot_product_attention))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("row", ["plain", "everything"])
def test_same_results_in_16_bits(row: str, dtype: str):
    q, k, v = draw(jnp.dtype(dtype))
    got = dot_product_attention(q, k, v, **TABLE[row])
    want = jax.nn.dot_product_attention(q, k, v, **TABLE[row])
    assert got.dtype == want.dtype
    check_close(got, want, 2 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("heads", [N, K])
def test_residual_and_rank(heads: int, batched: bool, dtype: str):
    """[B, T, N, H] or [T, N, H]; the residual [B, T, N] or [T, N] in query's dtype."""
    q, k, v = draw(jnp.dtype(dtype), heads=heads)
    if not batched:
        q, k, v = q[0], k[0], v[0]
    got = dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]
    check_close(got, want, 1e-5 if dtype == "float32" else 2 * float(jnp.finfo(dtype).eps))


def test_residual_has_no_gradient():
    q, k, v = draw()

    def loss(q: Any, f: Any) -> Any:
        return f(q, k, v, return_residual=True)[1].sum()

    assert not jax.grad(loss)(q, dot_product_attention).any()
    assert not jax.grad(loss)(q, jax.nn.dot_product_attention).any()


def test_difference_fully_masked_rows():
    """Stated in the docstring: 0 where jax.nn gives the mean of all values."""
    q, k, v = draw()
    mask = np.ones((B, 1, T, S), bool)
    mask[:, :, 4] = False
    out, lse = dot_product_attention(q, k, v, mask=mask, return_residual=True)
    assert not out[:, 4].any()
    assert np.all(lse[:, 4] == -np.inf)
    theirs = jax.nn.dot_product_attention(q, k, v, mask=mask)
    np.testing.assert_allclose(
        theirs[:, 4], np.broadcast_to(v.mean(1), theirs[:, 4].shape), rtol=1e-4, atol=1e-4
    )
    rest = np.arange(T) != 4
    check_close(out[:, rest], np.asarray(theirs[:, rest]))


def test_difference_nan_beyond_a_length():
    """Stated in the docstring: it reaches nothing here, everything in jax.nn."""
    q, k, v = draw()
    lengths = np.array([5, S], np.int32)
    want = dot_product_attention(q, k, v, key_value_seq_lengths=lengths)
    v[0, 5:] = np.nan
    np.testing.assert_array_equal(dot_product_attention(q, k, v, key_value_seq_lengths=lengths), want)
    assert np.isnan(jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)).any()


def test_differences_are_in_the_docstring():
    text = dot_product_attention.__doc__
    assert "fully masked" in text
    assert "NaN" in text


def test_value_may_have_its_own_head_dim():
    q, k, v = draw()
    assert dot_product_attention(q, k, v[..., :5]).shape == (B, T, N, 5)


def test_unknown_implementation():
    q, k, v = draw()
    with pytest.raises(ValueError, match=r"implementation: expected .*cudnn.*, got 'flash'"):
        dot_product_attention(q, k, v, implementation="flash")

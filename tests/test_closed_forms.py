"""Results that are known without computing: they catch most faults, on every backend."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fmha import SegmentIds, attention
from support import each_implementation, vjp

SIZES = [(1, 1), (3, 5), (64, 64), (65, 130), (200, 77)]
DTYPES = ["float32", "bfloat16", "float16"]


@each_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "S"), SIZES)
def test_all_ones(T: int, S: int, dtype: str, implementation: str | None):
    """out 1, lse scale * H + ln S, dv T / S, dq and dk 0."""
    H = 16
    q, k, v = (np.ones((2, n, 2, H), jnp.dtype(dtype)) for n in (T, S, S))
    f = lambda q, k, v: attention(q, k, v, scale=0.5, return_lse=True, implementation=implementation)  # noqa: E731
    (out, lse), pullback = vjp(f, q, k, v)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(out, np.float64), 1, rtol=max(eps, 1e-5))
    np.testing.assert_allclose(lse, 0.5 * H + np.log(S), rtol=1e-6)
    dq, dk, dv = (np.asarray(x, np.float64) for x in pullback((jnp.ones_like(out), jnp.zeros_like(lse))))
    np.testing.assert_allclose(dv, T / S, rtol=max(eps, 1e-5))
    np.testing.assert_allclose(dq, 0, atol=1e-4)
    np.testing.assert_allclose(dk, 0, atol=1e-4 * max(1, T / S))


@each_implementation
@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, lambda i, S: S),
        ({"is_causal": True}, lambda i, S: min(i + 1, S)),
        ({"is_causal": True, "query_offset": 10}, lambda i, S: min(i + 11, S)),
        ({"is_causal": True, "query_offset": -3}, lambda i, S: max(0, min(i - 2, S))),
        ({"local_window_size": (4, 2)}, lambda i, S: len([j for j in range(S) if i - 4 <= j <= i + 2])),
        ({"local_window_size": 3}, lambda i, S: len([j for j in range(S) if abs(i - j) <= 3])),
        ({"local_window_size": (None, 0)}, lambda i, S: min(i + 1, S)),
        ({"key_value_seq_lengths": 7}, lambda i, S: 7),
    ],
    ids=["full", "causal", "offset", "negative_offset", "window", "window_int", "right", "length"],
)
def test_zero_queries_count_the_keys_that_a_row_sees(
    options: dict, count: object, implementation: str | None
):
    """Uniform probabilities over one-hot values: out[i, j] = 1 / count where j is seen, lse = ln(count)."""
    T, S = 45, 40
    q, k = np.zeros((1, T, 1, 8), np.float32), np.ones((1, S, 1, 8), np.float32)
    v = np.eye(S, dtype=np.float32)[None, :, None]
    out, lse = attention(q, k, v, **options, return_lse=True, implementation=implementation)
    seen = np.array([count(i, S) for i in range(T)])
    np.testing.assert_array_equal((np.asarray(out[0, :, 0]) > 0).sum(-1), seen)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[0, 0], np.log(seen), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(out[0, :, 0].sum(-1), seen > 0, rtol=1e-6)


@each_implementation
def test_one_hot_values_show_segments(implementation: str | None):
    rng = np.random.default_rng(0)
    q_ids, kv_ids = rng.integers(-2, 3, (2, 30)), rng.integers(-2, 3, (2, 50))
    q, k = np.zeros((2, 30, 1, 8), np.float32), np.ones((2, 50, 1, 8), np.float32)
    v = np.broadcast_to(np.eye(50, dtype=np.float32)[None, :, None], (2, 50, 1, 50))
    out = attention(q, k, v, segment_ids=SegmentIds(q_ids, kv_ids), implementation=implementation)
    np.testing.assert_array_equal(np.asarray(out[:, :, 0]) > 0, q_ids[:, :, None] == kv_ids[:, None, :])


@each_implementation
@pytest.mark.parametrize("dtype", DTYPES)
def test_very_negative_scores(dtype: str, implementation: str | None):
    """q = +4, k = -4: every logit is -1024 * scale; the ragged tail of the last tile must not win with its zeros."""
    T, S, H = 37, 69, 64
    q, k = np.full((1, T, 1, H), 4, jnp.dtype(dtype)), np.full((1, S, 1, H), -4, jnp.dtype(dtype))
    v = np.ones((1, S, 1, H), jnp.dtype(dtype))
    f = lambda q, k, v: attention(q, k, v, scale=1.0, return_lse=True, implementation=implementation)  # noqa: E731
    (out, lse), pullback = vjp(f, q, k, v)
    np.testing.assert_allclose(lse, -16 * H + np.log(S), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(out, np.float32), 1, rtol=1e-2)
    grads = [np.asarray(g, np.float32) for g in pullback((jnp.ones_like(out), jnp.zeros_like(lse)))]
    assert all(np.isfinite(g).all() for g in grads)
    np.testing.assert_allclose(grads[2], T / S, rtol=1e-2)
    np.testing.assert_allclose(grads[0], 0, atol=0.3 if dtype != "float32" else 1e-3)


@each_implementation
def test_huge_scores_do_not_overflow(implementation: str | None):
    """One key 10^4 above the others takes everything."""
    q, k = np.ones((1, 3, 1, 1), np.float32), np.zeros((1, 20, 1, 1), np.float32)
    k[0, 13] = 1e4
    v = np.arange(20, dtype=np.float32).reshape(1, 20, 1, 1)
    out, lse = attention(q, k, v, scale=1.0, return_lse=True, implementation=implementation)
    np.testing.assert_array_equal(out, 13)
    np.testing.assert_array_equal(lse, 1e4)


@each_implementation
def test_a_sink_of_equal_logit_halves_one_key(implementation: str | None):
    """One key and a sink of the same logit: out v / 2, lse logit + ln 2, and a quarter of v . dout to the sink."""
    x = np.ones((1, 1, 1, 4), np.float32)
    f = lambda sinks: attention(  # noqa: E731
        x, x, 2 * x, scale=1.0, sinks=sinks, return_lse=True, implementation=implementation
    )
    (out, lse), pullback = vjp(f, np.full(1, 4, np.float32))
    np.testing.assert_allclose(out, 1, rtol=1e-6)
    np.testing.assert_allclose(lse, 4 + np.log(2), rtol=1e-6)
    (dsinks,) = pullback((np.ones_like(out), np.zeros_like(lse)))
    np.testing.assert_allclose(dsinks, -0.25 * 8, rtol=1e-6)


@each_implementation
def test_grouped_heads_read_their_own_keys(implementation: str | None):
    """Query head n reads key/value head n // (N // K)."""
    q, k = np.zeros((1, 2, 6, 4), np.float32), np.zeros((1, 3, 2, 4), np.float32)
    v = np.broadcast_to(np.array([5.0, 7.0], np.float32)[:, None], (1, 3, 2, 1))
    out = attention(q, k, v, implementation=implementation)
    np.testing.assert_allclose(out[0, 0, :, 0], [5, 5, 5, 7, 7, 7], rtol=1e-6)

"""Promise 1: a row with nothing to attend gives out 0, lse -inf (the sink, if there is one), gradients 0, never NaN."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fmha import SegmentIds, attention
from support import each_implementation, vjp

B, T, S, N, K, H, Hv = 2, 5, 7, 4, 2, 8, 6
EMPTY = 3  # the row of every entry that has nothing to attend

# How a row gets to have nothing; the other rows keep something.
WAYS: dict[str, dict[str, Any]] = {
    "mask": {"mask": (np.arange(T) != EMPTY)[:, None]},
    "mask_per_head": {"mask": np.broadcast_to((np.arange(T) != EMPTY)[:, None], (B, N, T, S))},
    "causal_position": {"is_causal": True, "query_positions": np.where(np.arange(T) == EMPTY, -1, 9)},
    "window_position": {
        "local_window_size": (9, 9),
        "query_positions": np.where(np.arange(T) == EMPTY, -99, 3),
    },
    "segment": {"segment_ids": SegmentIds(np.where(np.arange(T) == EMPTY, 5, 0), np.zeros(S, np.int32))},
    "query_length": {"query_seq_lengths": np.array([EMPTY, EMPTY])},
}


def draw() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, Hv), (B, N, T, S)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


@each_implementation
@pytest.mark.parametrize("sinks", [None, np.arange(N, dtype=np.float32) - 2], ids=["", "sinks"])
@pytest.mark.parametrize("way", WAYS)
def test_row(way: str, sinks: np.ndarray | None, implementation: str | None):
    q, k, v, bias = draw()

    def f(q: Any, k: Any, v: Any, bias: Any) -> Any:
        kwargs = WAYS[way] | {"sinks": sinks, "implementation": implementation}
        return attention(q, k, v, bias, kwargs.pop("mask", None), **kwargs, return_lse=True)

    (out, lse), pullback = vjp(f, q, k, v, bias)
    assert np.all(out[:, EMPTY] == 0)
    assert np.all(lse[:, :, EMPTY] == (-np.inf if sinks is None else sinks))
    assert np.all(out[:, 0] != 0)
    dq, dk, dv, dbias = pullback((jnp.ones_like(out), jnp.ones_like(lse)))
    assert np.all(dq[:, EMPTY] == 0)
    assert np.all(dbias[:, :, EMPTY] == 0)
    assert all(np.isfinite(x).all() for x in (dq, dk, dv, dbias))
    # The row contributes nothing: the same gradients with whatever cotangent it has.
    dout, dlse = jnp.ones_like(out).at[:, EMPTY].set(jnp.nan), jnp.ones_like(lse).at[:, :, EMPTY].set(jnp.nan)
    for poisoned, x in zip(pullback((dout, dlse)), (dq, dk, dv, dbias), strict=True):
        np.testing.assert_array_equal(poisoned, x)


@each_implementation
@pytest.mark.parametrize("way", WAYS)
def test_gradient_of_the_sink(way: str, implementation: str | None):
    """lse of an empty row is the sink: its cotangent goes there, unless the row is beyond the query length."""
    q, k, v, bias = draw()
    sinks = np.arange(N, dtype=np.float32) - 2

    def lse(sinks: Any) -> Any:
        kwargs = WAYS[way] | {"implementation": implementation}
        return attention(q, k, v, bias, kwargs.pop("mask", None), sinks=sinks, **kwargs, return_lse=True)[1]

    got, pullback = vjp(lse, sinks)
    (dsinks,) = pullback(jnp.zeros_like(got).at[:, :, EMPTY].set(1.0))
    np.testing.assert_array_equal(dsinks, np.full(N, 0.0 if way == "query_length" else B))


@each_implementation
@pytest.mark.parametrize(
    "lengths", [{"key_value_seq_lengths": np.array([0, 4])}, {"mask": np.zeros((T, S), bool)}]
)
def test_all_rows_of_an_entry(lengths: dict[str, Any], implementation: str | None):
    q, k, v, bias = draw()

    def f(*args: Any) -> Any:
        kwargs = lengths | {"implementation": implementation}
        return attention(*args, kwargs.pop("mask", None), **kwargs, return_lse=True)

    (out, lse), pullback = vjp(f, q, k, v, bias)
    assert np.all(out[0] == 0)
    assert np.all(lse[0] == -np.inf)
    for grad in pullback((jnp.ones_like(out), jnp.ones_like(lse))):
        assert np.all(grad[0] == 0)
        assert np.isfinite(grad).all()


@each_implementation
def test_no_keys(implementation: str | None):
    q, k, v, _ = draw()
    k, v = k[:, :0], v[:, :0]
    (out, lse), pullback = vjp(
        lambda *a: attention(*a, return_lse=True, implementation=implementation), q, k, v
    )
    assert np.all(out == 0)
    assert np.all(lse == -np.inf)
    dq, dk, dv = pullback((jnp.ones_like(out), jnp.ones_like(lse)))
    assert np.all(dq == 0)
    assert dk.shape == k.shape
    assert dv.shape == v.shape


@each_implementation
def test_bias_of_minus_infinity(implementation: str | None):
    """An ordinary logit whose exponential is 0: a row full of it has nothing left either."""
    q, k, v, bias = draw()
    bias[:, :, EMPTY] = -np.inf
    bias[:, :, 0, ::2] = -np.inf
    mask = np.isfinite(bias)
    f = lambda bias, mask: attention(q, k, v, bias, mask, return_lse=True, implementation=implementation)  # noqa: E731
    got, want = f(bias, None), f(np.where(mask, bias, 0), mask)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    assert np.all(got[0][:, EMPTY] == 0)

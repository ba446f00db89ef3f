"""Sliding-window attention: each token sees itself and the `window` tokens in front of it; time grows with
sequence length x window, not with its square, because tiles outside the window are never touched.
"""

import time

import jax
import jax.numpy as jnp

from jax_fmha import attention

window, heads, head_dim = 64, 2, 64


@jax.jit
def sliding(q, k, v):
    return attention(q, k, v, local_window_size=(window, 0))  # (left, right) of the query, both inclusive


@jax.jit
def full(q, k, v):
    return attention(q, k, v, is_causal=True)


def milliseconds(function, *args):
    jax.block_until_ready(function(*args))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds)


# Counting: with q = 0 all keys that a query sees weigh the same, so the share of key 0 is 1 / their number.
q, k, v = jnp.zeros((3, 1, 200, heads, head_dim))
v = v.at[:, 0].set(1)
share = sliding(q, k, v)[0, :, 0, 0]
last = int(jnp.max(jnp.nonzero(share)[0]))
print(f"key 0 is seen by queries 0 to {last}; query {last} sees {1 / share[last]:.0f} keys")
assert jnp.array_equal(share > 0, jnp.arange(200) <= window)
assert jnp.allclose(1 / share[: window + 1], jnp.arange(1, window + 2))

print(f"\nsequence  window {window}, ms  full causal, ms")
for seqlen in (1024, 2048, 4096):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, seqlen, heads, head_dim))
    print(f"{seqlen:8d}  {milliseconds(sliding, q, k, v):13.1f}  {milliseconds(full, q, k, v):15.1f}")
    inside = slice(seqlen - 1 - window, None)
    last = attention(q[:, -1:], k[:, inside], v[:, inside])
    assert jnp.allclose(sliding(q, k, v)[:, -1:], last, atol=1e-5)
print("the last row equals attention over its own window alone")

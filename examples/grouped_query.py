"""Grouped-query attention: 8 query heads share 2 key/value heads, and nothing is repeated in memory.

Query head n reads key/value head n // 4. Then one step of decoding: a single query against a cache of which
only the first rows are filled.
"""

import jax
import jax.numpy as jnp

from jax_fmha import attention

batch, seqlen, query_heads, kv_heads, head_dim = 2, 200, 8, 2, 64
group = query_heads // kv_heads
keys = jax.random.split(jax.random.key(0), 3)
q = jax.random.normal(keys[0], (batch, seqlen, query_heads, head_dim))
k = jax.random.normal(keys[1], (batch, seqlen, kv_heads, head_dim))
v = jax.random.normal(keys[2], (batch, seqlen, kv_heads, head_dim))


def loss(q, k, v):
    return jnp.sum(jnp.sin(attention(q, k, v, is_causal=True)))


def loss_repeated(q, k, v):
    return loss(q, jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2))


grads = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
expected = jax.grad(loss_repeated, argnums=(0, 1, 2))(q, k, v)
for name, gradient, other in zip(("dq", "dk", "dv"), grads, expected, strict=True):
    error = jnp.max(jnp.abs(gradient - other))
    print(f"{name} {gradient.shape}: largest difference from repeated heads {error:.1e}")
    assert jnp.allclose(gradient, other, atol=1e-4)

# Decoding. Entry 0 of the batch has 150 tokens so far, entry 1 has 90; beyond them the cache holds garbage.
lengths = jnp.array([150, 90])
filled = jnp.arange(seqlen)[:, None, None] < lengths[:, None, None, None]
k_cache, v_cache = jnp.where(filled, k, jnp.nan), jnp.where(filled, v, jnp.nan)
last = jnp.take_along_axis(q, (lengths - 1)[:, None, None, None], axis=1)  # [batch, 1, query_heads, head_dim]
token = attention(last, k_cache, v_cache, key_value_seq_lengths=lengths)
whole = attention(q, k, v, is_causal=True)
assert jnp.allclose(token[:, 0], whole[jnp.arange(batch), lengths - 1], atol=1e-5)
print(f"one decoded token {token.shape} equals the same row of the whole sequence")
kib = (k_cache.nbytes + v_cache.nbytes) >> 10
print(
    f"the cache takes {kib} KiB; with as many key/value heads as query heads it would take {group * kib} KiB"
)

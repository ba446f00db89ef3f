"""Documents of different lengths in one row: `segment_ids` keeps them apart, without padding or a mask.

Isolation is exact: each document gets what it would get alone, and not even a NaN crosses a boundary.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fmha import attention

heads, head_dim = 4, 64
lengths = [5, 300, 1, 94]
starts = np.cumsum([0, *lengths])
segment_ids = jnp.repeat(jnp.arange(len(lengths)), jnp.array(lengths))  # 0 0 0 0 0 1 1 1 ... 3 3, [400]

q, k, v = jax.random.normal(jax.random.key(0), (3, 400, heads, head_dim))  # no batch dimension is fine


@jax.jit
def packed(q, k, v):
    return attention(q, k, v, is_causal=True, segment_ids=segment_ids)


out = packed(q, k, v)
for number, (start, length) in enumerate(zip(starts, lengths, strict=False)):
    rows = slice(start, start + length)
    alone = attention(q[rows], k[rows], v[rows], is_causal=True)
    error = float(jnp.max(jnp.abs(out[rows] - alone)))
    print(f"document {number}: {length:3d} tokens, largest difference from attention on it alone {error:.1e}")
    assert error < 1e-6

# Document 1 breaks. The others, and their gradients, do not notice.
broken = v.at[starts[1] : starts[2]].set(jnp.nan)
others = segment_ids != 1
assert jnp.array_equal(packed(q, k, broken)[others], out[others])


def loss_of_others(q, k, v):
    return jnp.sum(jnp.where(others[:, None, None], packed(q, k, v), 0))


dq, dk, dv = jax.grad(loss_of_others, argnums=(0, 1, 2))(q, k, broken)
assert all(jnp.all(jnp.isfinite(gradient[others])) for gradient in (dq, dk, dv))
print("NaN in document 1: the other outputs are bitwise the same, the other gradients are finite")

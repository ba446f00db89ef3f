"""Attention over a key sequence in two halves: each returns (out, lse), and lse is all that merging needs.

This is exact, for outputs and gradients, because exp(lse) of a part is the total weight of its keys:

    lse = logaddexp(lse_1, lse_2)        out = exp(lse_1 - lse) * out_1 + exp(lse_2 - lse) * out_2

The parts may live on different devices (ring attention) or be computed at different times (shared prefixes).
"""

import jax
import jax.numpy as jnp

from jax_fmha import attention


def merge(part_1, part_2):
    """(out [*batch, T, N, H], lse [*batch, N, T]) of both key sets together."""
    (out_1, lse_1), (out_2, lse_2) = part_1, part_2
    lse = jnp.logaddexp(lse_1, lse_2)
    weight_1, weight_2 = (jnp.swapaxes(jnp.exp(x - lse), -1, -2)[..., None] for x in (lse_1, lse_2))
    return weight_1 * out_1 + weight_2 * out_2, lse


def in_one(q, k, v):
    return attention(q, k, v, return_lse=True)


def in_halves(q, k, v):
    half = k.shape[1] // 2
    first = attention(q, k[:, :half], v[:, :half], return_lse=True)
    second = attention(q, k[:, half:], v[:, half:], return_lse=True)
    return merge(first, second)


q, k, v = 2 * jax.random.normal(jax.random.key(0), (3, 2, 257, 4, 64))  # an odd length: the halves differ
for name, value, expected in zip(("out", "lse"), in_halves(q, k, v), in_one(q, k, v), strict=True):
    print(f"{name:>3}: largest difference {jnp.max(jnp.abs(value - expected)):.1e}")
    assert jnp.allclose(value, expected, atol=1e-5)


def grads(function):
    def loss(q, k, v):
        out, lse = function(q, k, v)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


# The gradients go through lse as well: it is an output like any other.
for name, value, expected in zip(("dq", "dk", "dv"), grads(in_halves), grads(in_one), strict=True):
    print(f"{name:>3}: largest difference {jnp.max(jnp.abs(value - expected)):.1e}")
    assert jnp.allclose(value, expected, atol=1e-4)

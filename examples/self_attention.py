"""Causal self-attention and its gradients, checked against plain einsums: jax_fmha in 15 lines."""

import jax
import jax.numpy as jnp

from jax_fmha import attention

q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 300, 8, 64))  # each [batch, sequence, heads, head_dim]
native = jax.value_and_grad(lambda *qkv: jnp.mean(attention(*qkv, is_causal=True) ** 2), argnums=(0, 1, 2))
plain = jax.value_and_grad(
    lambda *qkv: jnp.mean(attention(*qkv, is_causal=True, implementation="xla") ** 2), argnums=(0, 1, 2)
)
(loss, grads), (expected_loss, expected_grads) = jax.jit(native)(q, k, v), jax.jit(plain)(q, k, v)
assert all(jnp.allclose(a, b, rtol=1e-4, atol=1e-8) for a, b in zip(grads, expected_grads, strict=True))
print(f"loss {loss:.6f}, by einsums {expected_loss:.6f}; the gradients of q, k and v agree, too")

"""A linen transformer block trained a few steps, once with Flax's attention and once with ours: equal losses.

python examples/flax_linen.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_fmha.flax import attention_fn

BATCH, LENGTH, VOCABULARY, FEATURES, HEADS, STEPS = 4, 32, 17, 32, 4, 8


class Model(nn.Module):
    """Predicts the next token with one pre-norm block."""

    attention_fn: Callable[..., Any]

    @nn.compact
    def __call__(self, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, FEATURES)(tokens)
        # Flax's masks are float32, 1 keeps; both attention functions take them.
        valid = jnp.arange(tokens.shape[1]) < lengths[:, None]
        mask = nn.combine_masks(nn.make_causal_mask(tokens), nn.make_attention_mask(valid, valid))
        attention = nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=self.attention_fn)
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        x = x + nn.Dense(FEATURES)(nn.gelu(nn.Dense(4 * FEATURES)(nn.LayerNorm()(x))))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def data() -> tuple[jax.Array, jax.Array]:
    """(tokens [batch, length] that count upwards from a random start, lengths [batch])"""
    random = np.random.default_rng(0)
    tokens = (random.integers(0, VOCABULARY, (BATCH, 1)) + np.arange(LENGTH)) % VOCABULARY
    return jnp.asarray(tokens), jnp.asarray(random.integers(LENGTH // 2, LENGTH + 1, BATCH))


def train(attention: Callable[..., Any]) -> list[float]:
    """Losses of STEPS steps from the same start."""
    model = Model(attention)
    tokens, lengths = data()
    parameters = model.init(jax.random.key(0), tokens, lengths)
    optimizer = optax.adam(3e-3)

    def loss(parameters: Any) -> jax.Array:
        logits = model.apply(parameters, tokens, lengths)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        counted = jnp.arange(1, LENGTH) < lengths[:, None]
        return jnp.sum(losses * counted) / jnp.sum(counted)

    @jax.jit
    def step(parameters: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(parameters, updates), state, value

    state, losses = optimizer.init(parameters), []
    for _ in range(STEPS):
        parameters, state, value = step(parameters, state)
        losses.append(float(value))
    return losses


def main() -> None:
    theirs, ours = train(nn.dot_product_attention), train(attention_fn)
    print("step   flax       jax_fmha")
    for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        print(f"{i:4}   {a:.6f}   {b:.6f}")
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert ours[-1] < ours[0]
    print(f"largest difference {np.max(np.abs(np.subtract(ours, theirs))):.1e}")


if __name__ == "__main__":
    main()

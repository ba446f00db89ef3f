"""An nnx transformer block with grouped key/value heads trained a few steps, once with Flax's attention and
once with
ours: equal losses. Then the trained block decodes from a cache.

    python examples/flax_nnx.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_fmha.flax import attention_fn

BATCH, LENGTH, VOCABULARY, FEATURES, HEADS, KV_HEADS, STEPS = 4, 32, 17, 32, 4, 2, 8


class Model(nnx.Module):
    """Predicts the next token with one pre-norm block."""

    def __init__(self, attention: Callable[..., Any], *, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCABULARY, FEATURES, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(FEATURES, rngs=rngs) for _ in range(3)])
        self.attention = nnx.MultiHeadAttention(
            HEADS, FEATURES, num_kv_heads=KV_HEADS, attention_fn=attention, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(FEATURES, 4 * FEATURES, rngs=rngs)
        self.down = nnx.Linear(4 * FEATURES, FEATURES, rngs=rngs)
        self.head = nnx.Linear(FEATURES, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array, *, decode: bool = False) -> jax.Array:
        x = self.embedding(tokens)
        # is_causal reaches our kernels as structure: no mask array. The cache of a decoding layer masks
        # itself.
        x = x + self.attention(self.norms[0](x), is_causal=not decode, decode=decode)
        x = x + self.down(nnx.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x))


def data() -> jax.Array:
    """tokens [batch, length] that count upwards from a random start"""
    start = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, 1))
    return jnp.asarray((start + np.arange(LENGTH)) % VOCABULARY)


def train(attention: Callable[..., Any]) -> tuple[list[float], Model]:
    """(losses of STEPS steps from the same start, the trained model)"""
    model, tokens = Model(attention, rngs=nnx.Rngs(0)), data()
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer) -> jax.Array:
        def loss(model: Model) -> jax.Array:
            logits = model(tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return [float(step(model, optimizer)) for _ in range(STEPS)], model


def decode(model: Model, tokens: jax.Array) -> jax.Array:
    """Logits of one token at a time against the cache."""
    model.attention.init_cache((*tokens.shape, FEATURES))
    step = nnx.jit(lambda model, token: model(token, decode=True))
    return jnp.concatenate([step(model, tokens[:, i : i + 1]) for i in range(tokens.shape[1])], axis=1)


def main() -> None:
    (theirs, _), (ours, model) = train(nnx.dot_product_attention), train(attention_fn)
    print("step   flax       jax_fmha")
    for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        print(f"{i:4}   {a:.6f}   {b:.6f}")
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert ours[-1] < ours[0]
    print(f"largest difference {np.max(np.abs(np.subtract(ours, theirs))):.1e}")

    tokens = data()[:, :8]
    whole, by_step = model(tokens), decode(model, tokens)
    np.testing.assert_allclose(by_step, whole, rtol=1e-4, atol=1e-4)
    print(f"decoding from the cache differs by {np.max(np.abs(by_step - whole)):.1e} from the whole at once")


if __name__ == "__main__":
    main()

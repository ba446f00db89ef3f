"""`jax_fmha.flax.attention_fn` inside Flax's layers against Flax's own attention, and `dot_product_attention`
as Flax's, Equinox's and Keras's layers call it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_fmha
from jax_fmha.flax import attention_fn
from support import check_close

B, T, FEATURES, HEADS = 2, 10, 24, 4

MASKS: dict[str, Any] = {
    "none": None,
    "causal_float": nn.make_causal_mask(jnp.ones((B, T))),
    "causal_bool": nn.make_causal_mask(jnp.ones((B, T)), dtype=bool),
    "padding_float": nn.make_attention_mask(jnp.ones((B, T)), jnp.arange(T)[None] < jnp.asarray([[7], [3]])),
    "per_head": jnp.asarray(np.random.RandomState(0).rand(B, HEADS, T, T) > 0.4) | jnp.eye(T, dtype=bool),
}


def inputs(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.RandomState(seed).standard_normal(shape), dtype)


def linen_layer(function: Callable[..., Any], **options: Any) -> nn.Module:
    return nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=function, **options)


def nnx_layer(function: Callable[..., Any], **options: Any) -> nnx.MultiHeadAttention:
    options = {"decode": False, "rngs": nnx.Rngs(0), **options}
    return nnx.MultiHeadAttention(HEADS, FEATURES, attention_fn=function, **options)


def linen_results(function: Callable[..., Any], x: jax.Array, mask: Any, **options: Any) -> Any:
    """(output, gradients of parameters and inputs)"""
    layer = linen_layer(function, **options)
    parameters = linen_layer(nn.dot_product_attention, **options).init(jax.random.key(0), x)

    def loss(parameters: Any, x: Any) -> Any:
        y = layer.apply(parameters, x, mask=mask)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(parameters, x)
    return y, grads


def nnx_results(
    function: Callable[..., Any], x: jax.Array, mask: Any, is_causal: bool = False, **options: Any
) -> Any:
    graph, state = nnx.split(nnx_layer(function, **options))

    def loss(state: Any, x: Any) -> Any:
        y = nnx.merge(graph, state)(x, mask=mask, is_causal=is_causal)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    (_, y), (dstate, dx) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(state, x)
    return y, (nnx.to_pure_dict(dstate), dx)


# linen and nnx ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKS)
def test_linen(name: str) -> None:
    x = inputs(B, T, FEATURES)
    got, want = (linen_results(f, x, MASKS[name]) for f in (attention_fn, nn.dot_product_attention))
    check_close(got, want)


@pytest.mark.parametrize(
    ("name", "num_kv_heads"), [*((name, 2) for name in MASKS), ("padding_float", HEADS), ("per_head", 1)]
)
def test_nnx(name: str, num_kv_heads: int) -> None:
    x = inputs(B, T, FEATURES)
    got, want = (
        nnx_results(f, x, MASKS[name], num_kv_heads=num_kv_heads)
        for f in (attention_fn, nnx.dot_product_attention)
    )
    check_close(got, want)


@pytest.mark.parametrize("name", ["none", "padding_float", "per_head"])
def test_nnx_is_causal(name: str) -> None:
    x = inputs(B, T, FEATURES)
    got, want = (
        nnx_results(f, x, MASKS[name], is_causal=True) for f in (attention_fn, nnx.dot_product_attention)
    )
    check_close(got, want)


def test_more_batch_dimensions() -> None:
    x = inputs(2, 3, T, FEATURES)
    mask = nn.make_causal_mask(jnp.ones((2, 3, T)))
    check_close(linen_results(attention_fn, x, mask), linen_results(nn.dot_product_attention, x, mask))


def test_cross_attention_and_no_batch() -> None:
    x, y = inputs(T, FEATURES), inputs(7, FEATURES, seed=1)
    parameters = linen_layer(nn.dot_product_attention).init(jax.random.key(0), x, y)
    got, want = (
        jax.jit(linen_layer(f).apply)(parameters, x, y) for f in (attention_fn, nn.dot_product_attention)
    )
    check_close(got, want)


@pytest.mark.parametrize("num_kv_heads", [HEADS, 2])
def test_nnx_decode(num_kv_heads: int) -> None:
    """One row at a time against the whole cache, whose unused part the layer masks."""
    xs = inputs(B, T, FEATURES)

    def decode(function: Callable[..., Any]) -> jax.Array:
        layer = nnx_layer(function, num_kv_heads=num_kv_heads, decode=True)
        layer.init_cache(xs.shape)
        step = nnx.jit(lambda layer, x: layer(x))
        return jnp.concatenate([step(layer, xs[:, i : i + 1]) for i in range(T)], axis=1)

    got = decode(attention_fn)
    check_close(got, decode(nnx.dot_product_attention))
    whole = nnx_layer(attention_fn, num_kv_heads=num_kv_heads)(xs, is_causal=True)
    check_close(got, whole)


def test_linen_decode() -> None:
    xs = inputs(B, T, FEATURES)

    def decode(function: Callable[..., Any]) -> jax.Array:
        layer = linen_layer(function, decode=True)
        variables = linen_layer(nn.dot_product_attention, decode=True).init(jax.random.key(0), xs)
        cache, step = variables["cache"], jax.jit(functools.partial(layer.apply, mutable="cache"))
        rows = []
        for i in range(T):
            y, changed = step({"params": variables["params"], "cache": cache}, xs[:, i : i + 1])
            cache = changed["cache"]
            rows.append(y)
        return jnp.concatenate(rows, axis=1)

    check_close(decode(attention_fn), decode(nn.dot_product_attention))


# Types ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("types", ["f32,bf16,f32", "bf16,bf16,bf16", "f16,bf16,bf16", "i32,i32,i32"])
def test_promotion(types: str, dtype: Any) -> None:
    """All three together, as Flax; the same dtype of the result."""
    names = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16, "i32": jnp.int32}
    q, k, v = (inputs(B, T, HEADS, 8, seed=i, dtype=names[t]) for i, t in enumerate(types.split(",")))
    got = attention_fn(q, k, v, dtype=dtype)
    want = nn.dot_product_attention(q, k, v, dtype=dtype)
    assert got.dtype == want.dtype
    # Flax multiplies, adds and divides in 16 bits; more than a few of their roundings apart is an error.
    check_close(got, want, max(1e-5, 4 * float(jnp.finfo(got.dtype).eps)))


def test_promotion_of_the_caller() -> None:
    def halve(arrays: Any, *, dtype: Any) -> Any:
        return tuple(x.astype(jnp.bfloat16 if dtype is None else dtype) for x in arrays)

    q = inputs(T, HEADS, 8)
    assert attention_fn(q, q, q, promote_dtype=halve).dtype == jnp.bfloat16
    assert attention_fn(q, q, q, promote_dtype=halve, dtype=jnp.float32).dtype == jnp.float32


def test_bias_and_its_gradient() -> None:
    q, k, v = (inputs(B, T, HEADS, 8, seed=i) for i in range(3))
    bias = inputs(1, HEADS, T, T, seed=3)

    def results(function: Callable[..., Any]) -> Any:
        return jax.jit(jax.grad(lambda *a: jnp.sin(function(*a[:3], bias=a[3])).sum(), argnums=(0, 1, 2, 3)))(
            q, k, v, bias
        )

    check_close(results(attention_fn), results(nn.dot_product_attention))


def test_row_without_keys_differs_on_purpose() -> None:
    """0 here, the mean of all values in Flax."""
    q, k, v = (inputs(B, T, HEADS, 8, seed=i) for i in range(3))
    mask = jnp.ones((B, 1, T, T)).at[:, :, 3].set(0)
    got, want = attention_fn(q, k, v, mask=mask), nn.dot_product_attention(q, k, v, mask=mask)
    assert not np.any(got[:, 3])
    check_close(want[:, 3], v.mean(1))
    check_close(got.at[:, 3].set(0), want.at[:, 3].set(0))


# Arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [linen_layer, nnx_layer], ids=["linen", "nnx"])
def test_dropout(layer: Callable[..., Any]) -> None:
    """Refused while not deterministic; nothing to refuse when deterministic."""
    x = inputs(B, T, FEATURES)
    rngs: dict[str, Any] = {"dropout": jax.random.key(1)}

    def apply(function: Callable[..., Any], deterministic: bool) -> Any:
        module = layer(function, dropout_rate=0.1)
        if layer is nnx_layer:
            return module(x, deterministic=deterministic)
        parameters = linen_layer(nn.dot_product_attention).init(jax.random.key(0), x)
        return module.apply(parameters, x, deterministic=deterministic, rngs=rngs)

    with pytest.raises(NotImplementedError, match="dropout_rate"):
        apply(attention_fn, deterministic=False)
    own = nn.dot_product_attention if layer is linen_layer else nnx.dot_product_attention
    check_close(apply(attention_fn, deterministic=True), apply(own, deterministic=True))


def test_weights_are_refused() -> None:
    x = inputs(B, T, FEATURES)
    with pytest.raises(NotImplementedError, match="sow_weights"):
        nnx_layer(attention_fn)(x, sow_weights=True)
    with pytest.raises(NotImplementedError, match="sow_weights"):
        linen_layer(attention_fn).init(jax.random.key(0), x, sow_weights=True)


@pytest.mark.parametrize(
    "name", ["einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"]
)
def test_einsums_are_refused(name: str) -> None:
    q = inputs(T, HEADS, 8)
    with pytest.raises(NotImplementedError, match=name):
        attention_fn(q, q, q, **{name: jnp.einsum})


def test_einsums_of_a_linen_layer_are_refused() -> None:
    einsum = lambda: jnp.einsum  # noqa: E731
    layer = linen_layer(attention_fn, qk_attn_weights_einsum_cls=einsum, attn_weights_value_einsum_cls=einsum)
    with pytest.raises(NotImplementedError, match="qk_attn_weights_einsum"):
        layer.init(jax.random.key(0), inputs(B, T, FEATURES))


@pytest.mark.parametrize("precision", [None, "highest", jax.lax.Precision.HIGH, ("default", "highest")])
def test_precision_is_met(precision: Any) -> None:
    q, k, v = (inputs(B, T, HEADS, 8, seed=i) for i in range(3))
    check_close(
        attention_fn(q, k, v, precision=precision), nn.dot_product_attention(q, k, v, precision="highest")
    )


def test_other_precision_is_refused() -> None:
    q = inputs(T, HEADS, 8)
    with pytest.raises(NotImplementedError, match="precision"):
        attention_fn(q, q, q, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32)
    with pytest.raises(ValueError, match="dtype"):
        attention_fn(q, q, q, dtype=jnp.complex64)


def test_softmax_is_in_float32() -> None:
    q, k, v = (inputs(B, T, HEADS, 8, seed=i, dtype=jnp.bfloat16) for i in range(3))
    got = attention_fn(q, k, v, force_fp32_for_softmax=True)
    np.testing.assert_array_equal(got, attention_fn(q, k, v))
    exact = nn.dot_product_attention(*(x.astype(jnp.float32) for x in (q, k, v)))
    check_close(got, exact, float(jnp.finfo(jnp.bfloat16).eps))


# jax_fmha.dot_product_attention as an attention function ----------------------------------------------------


@pytest.mark.parametrize("name", ["none", "causal_bool", "per_head"])
def test_jax_nn_signature_in_linen(name: str) -> None:
    """linen filters arguments by name; jax.nn's signature takes bool masks only."""
    x = inputs(B, T, FEATURES)
    got = linen_results(jax_fmha.dot_product_attention, x, MASKS[name])
    check_close(got, linen_results(nn.dot_product_attention, x, MASKS[name]))


def test_float_mask_in_the_jax_nn_signature_is_refused() -> None:
    with pytest.raises(ValueError, match="mask"):
        linen_results(jax_fmha.dot_product_attention, inputs(B, T, FEATURES), MASKS["causal_float"])


def test_equinox_style() -> None:
    """One sequence `[T, N, H]` inside vmap, masks `[N, T, S]` or `[T, S]`, as Equinox's layers compute."""
    q, k, v = (inputs(B, T, HEADS, 8, seed=i) for i in range(3))
    for mask in (MASKS["per_head"], jnp.tril(jnp.ones((B, T, T), bool))):

        def loss(function: Callable[..., Any], q: Any, k: Any, v: Any, mask: Any) -> Any:
            return jnp.sin(jax.vmap(lambda q, k, v, m: function(q, k, v, mask=m))(q, k, v, mask)).sum()

        grad = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3)), static_argnums=0)
        as_theirs = mask if mask.ndim == 4 else mask[:, None]
        check_close(
            grad(jax_fmha.dot_product_attention, q, k, v, mask),
            grad(jax.nn.dot_product_attention, q, k, v, as_theirs),
        )


@pytest.mark.parametrize("implementation", ["cudnn", "xla"])
def test_keras_style(implementation: Any) -> None:
    """All keywords at once, `implementation` by whether flash attention is wanted."""
    q, k, v = (inputs(B, T, HEADS, 8, seed=i) for i in range(3))
    options = {"bias": inputs(1, 1, T, T, seed=4), "mask": MASKS["per_head"], "scale": 1 / math.sqrt(8)}

    def results(function: Callable[..., Any], implementation: str) -> Any:
        f = functools.partial(function, **options, is_causal=True, implementation=implementation)
        return jax.jit(jax.value_and_grad(lambda q, k, v: jnp.sin(f(q, k, v)).sum(), argnums=(0, 1, 2)))(
            q, k, v
        )

    check_close(
        results(jax_fmha.dot_product_attention, implementation), results(jax.nn.dot_product_attention, "xla")
    )

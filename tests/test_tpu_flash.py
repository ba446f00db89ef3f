"""`jax_fmha.tpu.flash_attention` against the Pallas TPU kernel in interpret mode, and against its own reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention as original

from jax_fmha.tpu import flash_attention as ours
from support import check_close

B, N, H = 1, 2, 16


def operands(
    seed: int = 0, t: int = 128, s: int = 128, n: int = N, kv_heads: int = N, hv: int = H
) -> dict[str, Any]:
    r = np.random.RandomState(seed)
    shapes = {"q": (B, n, t, H), "k": (B, kv_heads, s, H), "v": (B, kv_heads, s, hv)}
    return {name: jnp.asarray(r.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def bias(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.RandomState(seed).standard_normal(shape), jnp.float32)


def ids(seed: int, length: int, *choices: int) -> jax.Array:
    """Ids in no order."""
    return jnp.asarray(np.random.RandomState(seed).choice(choices, (B, length)), jnp.int32)


def results(f: Any, arrays: dict[str, Any]) -> Any:
    """(out, gradients of all arrays)"""

    def everything(arrays: dict[str, Any]) -> Any:
        out, pullback = jax.vjp(lambda a: f(**a), arrays)
        # Numbers that every type holds exactly.
        dout = ((jnp.arange(out.size) * 5 % 13 - 6) / 8).reshape(out.shape).astype(out.dtype)
        return out, pullback(dout)[0]

    return jax.jit(everything)(arrays)


def reference(q: Any, k: Any, v: Any, ab: Any = None, segment_ids: Any = None, **options: Any) -> Any:
    """The original's einsums; grouped heads repeated, the bias in full."""
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    if segment_ids is not None:
        segment_ids = original.SegmentIds(*segment_ids)
    return original.mha_reference_no_custom_vjp(q, k, v, ab, segment_ids, **options)


# The original compiles for seconds in interpret mode: few cases, each with several features.
KERNEL_CASES = {
    "default_scale_is_1": ({}, {}),
    "bias_before_scale_causal_rectangle": (
        {"s": 256, "ab": bias(1, B, N, 128, 256)},
        {"causal": True, "sm_scale": 0.3},
    ),
    "segments_0_and_minus_1": (
        {"segment_ids": (ids(2, 128, -1, 0, 7), ids(3, 128, -1, 0, 7))},
        {"sm_scale": 0.25},
    ),
}


def split(case: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(sizes, arrays) of a case"""
    arrays = {name: case[name] for name in ("ab", "segment_ids") if name in case}
    return {name: x for name, x in case.items() if name not in arrays}, arrays


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_against_the_kernel(name: str) -> None:
    case, options = KERNEL_CASES[name]
    sizes, arrays = split(case)
    segment_ids = arrays.pop("segment_ids", None)
    arrays |= operands(**sizes)

    def call(module: Any) -> Any:
        pair = None if segment_ids is None else module.SegmentIds(*segment_ids)
        return results(lambda **a: module.flash_attention(**a, segment_ids=pair, **options), arrays)

    with pltpu.force_tpu_interpret_mode():
        want = call(original)
    check_close(call(ours), want)


# What the original refuses, against its einsums.
WIDER_CASES = {
    "lengths": ({"t": 77, "s": 200}, {"causal": True}),
    "one_row": ({"t": 1, "s": 5}, {"sm_scale": 0.5}),
    "grouped_heads": ({"t": 33, "s": 40, "n": 6, "kv_heads": 2}, {"sm_scale": 0.25}),
    "one_kv_head": ({"t": 20, "s": 20, "n": 4, "kv_heads": 1}, {"causal": True}),
    "value_head_dim": ({"t": 20, "s": 30, "hv": 24}, {}),
    "bias_over_rows": ({"t": 20, "s": 30, "ab": bias(4, 1, N, 1, 30)}, {"sm_scale": 0.7}),
    "bias_over_keys": ({"t": 20, "s": 30, "ab": bias(5, 1, 1, 20, 1)}, {"causal": True, "sm_scale": 2.0}),
    "segments_and_bias": (
        {"t": 50, "s": 50, "ab": bias(6, B, N, 50, 50), "segment_ids": (ids(7, 50, 0, 1), ids(8, 50, 0, 1))},
        {"sm_scale": 0.5},
    ),
}


@pytest.mark.parametrize("name", WIDER_CASES)
def test_what_the_original_refuses(name: str) -> None:
    case, options = WIDER_CASES[name]
    sizes, arrays = split(case)
    segment_ids = arrays.pop("segment_ids", None)
    arrays |= operands(**sizes)
    pair = None if segment_ids is None else ours.SegmentIds(*segment_ids)
    got = results(lambda **a: ours.flash_attention(**a, segment_ids=pair, **options), arrays)
    check_close(got, results(lambda **a: reference(**a, segment_ids=segment_ids, **options), arrays))


def test_bias_gradient_has_the_scale() -> None:
    """d out / d ab = sm_scale times the gradient of a bias added after the scale."""
    arrays = operands(t=8, s=8) | {"ab": bias(9, B, N, 8, 8)}
    _, before = results(lambda **a: ours.flash_attention(**a, sm_scale=0.5), arrays)
    after = dict(arrays, ab=arrays["ab"] * 0.5, q=arrays["q"] * 0.5)
    _, folded = results(ours.flash_attention, after)
    check_close(before["ab"], 0.5 * folded["ab"])


def test_row_without_keys_differs_on_purpose() -> None:
    """A query of a segment that no key has: 0 here, the mean of the values there."""
    arrays = operands(t=128, s=128)
    q_ids = jnp.zeros((B, 128), jnp.int32).at[:, 5].set(1)
    kv_ids = jnp.zeros((B, 128), jnp.int32)
    out, grads = results(
        lambda **a: ours.flash_attention(**a, segment_ids=ours.SegmentIds(q_ids, kv_ids)), arrays
    )
    assert not np.any(out[:, :, 5])
    assert not np.any(grads["q"][:, :, 5])
    theirs = reference(**arrays, segment_ids=(q_ids, kv_ids))
    check_close(theirs[:, :, 5], arrays["v"].mean(2))
    check_close(out.at[:, :, 5].set(0), theirs.at[:, :, 5].set(0))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(dtype: Any) -> None:
    arrays = {name: x.astype(dtype) for name, x in operands(t=40, s=56).items()}
    got = results(lambda **a: ours.flash_attention(**a, causal=True, sm_scale=0.25), arrays)
    exact = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    want = results(lambda **a: reference(**a, causal=True, sm_scale=0.25), exact)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(dtype)}
    check_close(got, want, tolerance=2 * float(jnp.finfo(dtype).eps))


def test_mixed_types_give_the_type_of_the_query() -> None:
    arrays = operands(t=16, s=16)
    narrow = arrays | {"k": arrays["k"].astype(jnp.bfloat16), "v": arrays["v"].astype(jnp.bfloat16)}
    out, grads = results(ours.flash_attention, narrow)
    wide = {name: x.astype(jnp.float32) for name, x in narrow.items()}
    check_close(out, results(reference, wide)[0])
    assert out.dtype == jnp.float32
    assert {name: g.dtype for name, g in grads.items()} == {name: x.dtype for name, x in narrow.items()}


def test_vmap_and_jit() -> None:
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(operands(seed, t=12, s=12) for seed in range(3)))
    got = jax.jit(jax.vmap(lambda a: ours.flash_attention(**a, causal=True)))(stacked)
    for i in range(3):
        check_close(got[i], reference(**{name: x[i] for name, x in stacked.items()}, causal=True))


def test_references() -> None:
    arrays = operands(t=24, s=32) | {"ab": bias(10, B, N, 24, 32)}
    pair = (ids(11, 24, 0, 1), ids(12, 32, 0, 1))
    got = results(
        lambda q, k, v, ab: ours.mha_reference(
            q, k, v, ab, ours.SegmentIds(*pair), causal=False, sm_scale=0.5
        ),
        arrays,
    )
    want = results(lambda **a: reference(**a, segment_ids=pair, sm_scale=0.5), arrays)
    check_close(got, want)


def test_written_out_gradient() -> None:
    """`mha_reference_bwd` takes the softmax that the original saves, and gives its gradients."""
    arrays = operands(t=24, s=24) | {"ab": bias(13, B, N, 24, 24)}
    pair = original.SegmentIds(ids(14, 24, 0, 1), ids(14, 24, 0, 1))
    dout = bias(15, B, N, 24, H)

    def gradients(module: Any, sm_scale: float) -> Any:
        scaled = {"segment_ids": pair, "causal": True, "sm_scale": sm_scale}
        saved = original.mha_reference_no_custom_vjp(**arrays, **scaled, save_residuals=True)
        grads = module.mha_reference_bwd(*arrays.values(), pair, *saved, dout, causal=True, sm_scale=sm_scale)
        return dict(zip(arrays, grads, strict=True))

    check_close(
        jax.jit(gradients, static_argnums=(0, 1))(ours, 1.0),
        jax.jit(gradients, static_argnums=(0, 1))(original, 1.0),
    )

    # The original stops at sm_scale 1.
    def by_autodiff() -> Any:
        f = lambda a: ours.mha_reference(**a, segment_ids=pair, causal=True, sm_scale=0.5)  # noqa: E731
        return jax.vjp(f, arrays)[1](dout)[0]

    check_close(jax.jit(gradients, static_argnums=(0, 1))(ours, 0.5), jax.jit(by_autodiff)())


def test_block_sizes_change_nothing() -> None:
    arrays = operands(t=30, s=30)
    blocks = ours.BlockSizes(block_q=64, block_k_major=32, block_k=16, block_b=1)
    np.testing.assert_array_equal(
        ours.flash_attention(**arrays, block_sizes=blocks), ours.flash_attention(**arrays)
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"debug": True}, NotImplementedError, "jax_fmha.explain"),
        ({"q": jnp.zeros((4, 8, H))}, ValueError, r"q: expected \[batch, heads, length, head_dim\]"),
        ({"k": jnp.zeros((B, 3, 8, H)), "v": jnp.zeros((B, 3, 8, H))}, ValueError, "key"),
        ({"ab": jnp.zeros((B, N, 8, 7))}, ValueError, "bias"),
        ({"segment_ids": jnp.zeros((B, 8), jnp.int32)}, ValueError, "SegmentIds"),
        (
            {"segment_ids": ours.SegmentIds(jnp.zeros((B, 7), jnp.int32), jnp.zeros((B, 8), jnp.int32))},
            ValueError,
            r"segment_ids.q: expected \[1, 8\], got \[1, 7\]",
        ),
    ],
)
def test_refusals(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ours.flash_attention(**{**operands(t=8, s=8), **change})


@pytest.mark.parametrize("value", [0.0, -100.0, float("nan")])
def test_mask_value_that_does_not_mask_is_refused(value: float) -> None:
    with pytest.raises(NotImplementedError, match="mask_value"):
        ours.mha_reference(**operands(t=8, s=8), ab=None, mask_value=value)

"""Splash kernels inside shard_map on four devices, as training code calls them: `shard_map(vmap(kernel, ...))`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checklist import main
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fmha.tpu import tokamax_splash_attention
from jax_fmha.tpu.splash_attention import splash_attention_kernel as splash
from jax_fmha.tpu.splash_attention import splash_attention_mask as masks

B, N, K, T, H = 2, 4, 2, 32, 8
tokamax = tokamax_splash_attention.splash_attention_kernel


def operands() -> tuple[Any, ...]:
    r = np.random.RandomState(0)
    q, k, v = (jnp.asarray(r.standard_normal((B, n, T, H)), jnp.float32) for n in (N, K, K))
    row = jnp.asarray(np.sort(r.randint(0, 3, (B, T))), jnp.int32)
    return q, k, v, splash.SegmentIds(row, row), jnp.asarray(r.standard_normal(N), jnp.float32)


def mesh(heads: int, q_seq: int) -> jax.sharding.Mesh:
    return jax.make_mesh((heads, q_seq), ("heads", "q_seq"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def gradients(f: Any, arguments: tuple[Any, ...]) -> Any:
    def loss(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        out = f(q, k, v, arguments[3], sinks)
        return (out * jnp.sin(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*arguments[:3], arguments[4])


def assert_same_as_unsharded(mask: list[Any], heads: int, q_seq: int) -> Any:
    """Out and gradients equal those of the whole; returns the kernel's in_spec."""
    m = mesh(heads, q_seq)
    whole = splash.make_splash_mha_single_device(masks.MultiHeadMask(mask))
    kernel = splash.make_splash_mha(masks.MultiHeadMask(mask), head_shards=heads, q_seq_shards=q_seq)
    spec = kernel.manual_sharding_spec(NamedSharding(m, P("heads", "q_seq")))

    @functools.partial(
        jax.shard_map,
        mesh=m,
        in_specs=(
            spec,
            P(None, "heads", "q_seq"),
            P(None, "heads"),
            P(None, "heads"),
            splash.SegmentIds(P(None, "q_seq"), P()),
            P("heads"),
        ),
        out_specs=P(None, "heads", "q_seq"),
    )
    def sharded(kernel: Any, *arguments: Any) -> Any:
        return jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))(*arguments)

    arguments = operands()
    got = gradients(functools.partial(sharded, kernel), arguments)
    want = gradients(jax.vmap(whole, in_axes=(0, 0, 0, 0, None)), arguments)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    return spec


def causal() -> Any:
    return masks.CausalMask((T, T), 1)


def local() -> Any:
    return masks.LocalMask((T, T), (5, 2), 0)


def computable() -> Any:
    class Own(masks._ComputableMask):
        def __init__(self) -> None:
            super().__init__((T, T), lambda q, k: (q - k) % 2 == 0)

        def __eq__(self, other: object) -> bool:
            return type(self) is type(other)

        def __hash__(self) -> int:
            return hash(type(self).__name__)

    return Own()


def check_heads() -> None:
    spec = assert_same_as_unsharded([causal()] * N, 2, 1)
    assert not jax.tree.leaves(spec), "a causal mask travels as structure"


def check_query_rows() -> None:
    spec = assert_same_as_unsharded([local()] * N, 1, 4)
    assert jax.tree.leaves(spec) == [P("q_seq")]


def check_heads_and_query_rows_with_chunks() -> None:
    assert_same_as_unsharded([masks.ChunkedCausalMask((T, T), 6)] * N, 2, 2)


def check_reordered_rows() -> None:
    mask = causal()
    mask.q_sequence = np.random.RandomState(1).permutation(T).astype(np.int32)
    assert_same_as_unsharded([mask] * N, 1, 4)


def check_the_same_pattern_of_heads_on_each_device() -> None:
    spec = assert_same_as_unsharded([causal(), local()] * 2, 2, 2)
    assert jax.tree.leaves(spec) == [P("q_seq")], "no mask array"


def check_another_pattern_of_heads_on_each_device() -> None:
    spec = assert_same_as_unsharded([causal(), causal(), local(), local()], 2, 2)
    assert P("heads", "q_seq") in jax.tree.leaves(spec)


def check_computable_mask() -> None:
    assert_same_as_unsharded([computable()] * N, 2, 2)


def random_masks() -> list[Any]:
    r = np.random.RandomState(4)
    return [masks.NumpyMask(r.rand(T, T) < 0.4) for _ in range(N)]


def check_random_masks() -> None:
    spec = assert_same_as_unsharded(random_masks(), 2, 2)
    assert jax.tree.leaves(spec) == [P("q_seq"), P("heads", "q_seq"), P()]


def check_kernels_for_more_pieces_than_devices() -> None:
    """A kernel for four pieces on a mesh that has two: a device counts the rows and tiles of its own."""
    m = mesh(1, 2)
    q, k, v, _, _ = operands()
    dense = jnp.asarray(masks.MultiHeadMask(random_masks())[:, :, :])
    for mask in (masks.MultiHeadMask([local()] * N), masks.MultiHeadMask(random_masks()), dense):
        kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=4)
        spec = kernel.manual_sharding_spec(NamedSharding(m, P(None, "q_seq")))
        f = jax.shard_map(
            lambda kernel, q, k, v: kernel(q, k, v),
            mesh=m,
            in_specs=(spec, P(None, "q_seq"), P(), P()),
            out_specs=P(None, "q_seq"),
        )
        want = splash.make_splash_mha_single_device(mask)(q[0], k[0], v[0])
        np.testing.assert_allclose(f(kernel, q[0], k[0], v[0]), want, rtol=1e-5, atol=1e-5)


def check_refused_specs() -> None:
    mixed = masks.MultiHeadMask([causal(), local()] * 2)
    kernel = splash.make_splash_mha(mixed, head_shards=1, q_seq_shards=1)
    m = mesh(2, 2)
    for spec, message in (
        (P("heads", None), "further"),
        (P(None, "q_seq"), "further"),
        (P("heads"), "PartitionSpec"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel.manual_sharding_spec(NamedSharding(m, spec))


def check_array_mask() -> None:
    """Concrete and traced: each device packs, or is given, the tiles of its own heads and rows."""
    dense = jnp.asarray(masks.MultiHeadMask(random_masks())[:, :, :])
    m = mesh(2, 2)
    q, k, v, _, _ = operands()

    def call(dense: Any, q: Any, k: Any, v: Any) -> Any:
        kernel = splash.make_splash_mha(dense, head_shards=2, q_seq_shards=2)
        spec = kernel.manual_sharding_spec(NamedSharding(m, P("heads", "q_seq")))
        assert jax.tree.leaves(spec) == [P("q_seq"), P("heads", "q_seq"), P("heads", "q_seq")]
        f = jax.shard_map(
            lambda kernel, q, k, v: kernel(q, k, v),
            mesh=m,
            in_specs=(spec, P("heads", "q_seq"), P("heads"), P("heads")),
            out_specs=P("heads", "q_seq"),
        )
        return f(kernel, q, k, v)

    want = splash.make_splash_mha_single_device(dense)(q[0], k[0], v[0])
    for f in (call, jax.jit(call)):
        np.testing.assert_allclose(f(dense, q[0], k[0], v[0]), want, rtol=1e-5, atol=1e-5)


def check_tokamax() -> None:
    m = mesh(1, 4)
    q, k, v, _, _ = operands()
    want = splash.make_splash_mha_single_device(masks.MultiHeadMask([local()] * N))(q[0], k[0], v[0])
    static = tokamax.make_splash_mha(local(), q_seq_shards=4)
    dynamic = tokamax.make_dynamic_splash_mha(jnp.asarray(local()[:, :]), mesh=m, mask_spec=P("q_seq"))
    for kernel, spec in (
        (static, static.manual_sharding_spec(NamedSharding(m, P("q_seq")))),
        dynamic,
    ):
        f = jax.shard_map(
            lambda kernel, q, k, v: kernel(q, k, v),
            mesh=m,
            in_specs=(spec, P(None, "q_seq"), P(), P()),
            out_specs=P(None, "q_seq"),
        )
        np.testing.assert_allclose(f(kernel, q[0], k[0], v[0]), want, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    main(dict(globals()))

"""`TileMask`: its makers give the same mask, kernels read it as they read the dense one, and memory is by tile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fmha
from jax_fmha import TileMask
from support import check_close, each_implementation, equations

TILE = (16, 24)
SHAPES = [(1, 48, 48), (2, 50, 61), (3, 5, 7), (1, 1, 100), (2, 0, 5), (2, 5, 0), (0, 9, 9), (2, 3, 33, 49)]


def mask_of(shape: tuple[int, ...]) -> np.ndarray:
    """Empty, full and partial tiles, also at the ragged ends."""
    mask = np.random.RandomState(0).rand(*shape) < 0.5
    mask[..., :16, :24] = False
    mask[..., :16, 24:] = True
    mask[..., 32:, 24:] = True
    mask[..., 32:, :24] = False
    return mask


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, jax.jit(lambda x: x)], ids=["numpy", "jax", "jit"])
def test_from_array(shape: tuple[int, ...], kind: Callable[[Any], Any]) -> None:
    mask = mask_of(shape)
    tiled = TileMask.from_array(kind(mask), TILE)
    np.testing.assert_array_equal(tiled.dense(*shape[-2:]), mask)
    grid = (-(-shape[-2] // TILE[0]), -(-shape[-1] // TILE[1]))
    blocks = np.pad(mask, [(0, 0)] * (len(shape) - 2) + [(0, 16), (0, 24)])
    valid = np.pad(np.ones_like(mask), [(0, 0)] * (len(shape) - 2) + [(0, 16), (0, 24)])
    for i in range(grid[0]):
        for j in range(grid[1]):
            at = (..., slice(16 * i, 16 * (i + 1)), slice(24 * j, 24 * (j + 1)))
            want = np.where((blocks | ~valid)[at].all((-2, -1)), 1, np.where(blocks[at].any((-2, -1)), 2, 0))
            np.testing.assert_array_equal(np.minimum(tiled.tiles[..., i, j], 2), want)


def test_traced_and_under_vmap() -> None:
    masks = jnp.asarray(mask_of((3, 2, 50, 61)))
    dense = jax.jit(jax.vmap(lambda mask: TileMask.from_array(mask, TILE).dense(50, 61)))(masks)
    np.testing.assert_array_equal(dense, masks)


def test_equal_partial_tiles_and_equal_heads_are_stored_once() -> None:
    calls = []

    def every_third(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        calls.append(i.size * j.size)
        return (i - j) % 3 == 0

    tiled = TileMask.from_functions([every_third] * 4, (96, 96), (24, 24))
    assert tiled.tiles.shape == (1, 4, 4)
    assert tiled.bits.shape == (1, 24, 3)
    assert sum(calls) == 96 * 96, "every pair once, for all heads"
    causal = lambda i, j: j <= i  # noqa: E731
    tiled = TileMask.from_functions([every_third, causal, every_third], (96, 96), (24, 24))
    assert tiled.tiles.shape == (3, 4, 4)
    assert tiled.bits.shape[0] == 2
    dense = np.asarray(tiled.dense(96, 96))
    i, j = np.arange(96)[:, None], np.arange(96)[None, :]
    np.testing.assert_array_equal(dense, [(i - j) % 3 == 0, j <= i, (i - j) % 3 == 0])


def test_rules_are_evaluated_a_few_tiles_at_a_time() -> None:
    """However many keys there are: temporaries of a rule are bounded."""
    sizes = []

    def diagonal(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        sizes.append(i.size * j.size)
        return i // 128 == j // 4096

    tiled = TileMask.from_functions([diagonal], (256, 1 << 16))
    assert max(sizes) <= 1 << 20 < 256 << 16
    assert tiled.tiles.nbytes + tiled.bits.nbytes == 4 * 2 * 512
    assert tiled.tiles[0].sum(-1).tolist() == [32, 32]


@functools.partial(jax.jit, static_argnums=0)
def results(implementation: str | None, mask: Any, q: Any, k: Any, v: Any) -> Any:
    """Results and all gradients, with segments and a causal band besides."""
    ids = jax_fmha.SegmentIds(jnp.arange(50) // 20, jnp.arange(61) // 25)

    def loss(q: Any, k: Any, v: Any) -> Any:
        out, lse = jax_fmha.attention(
            q,
            k,
            v,
            mask=mask,
            is_causal=True,
            query_offset=11,
            segment_ids=ids,
            return_lse=True,
            implementation=implementation,
        )
        return jnp.sin(out).sum() + jnp.where(jnp.isfinite(lse), jnp.cos(lse), 0).sum(), (out, lse)

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize(("heads", "batch"), [(1, ()), (4, (1,)), (4, (2,))], ids=str)
@each_implementation
def test_same_as_dense(kind: Any, heads: int, batch: tuple[int, ...], implementation: str | None) -> None:
    r = np.random.RandomState(1)
    q, k, v = (
        jnp.asarray(r.standard_normal((2, n, h, 8)), jnp.float32) for n, h in ((50, 4), (61, 2), (61, 2))
    )
    mask = mask_of((*batch, heads, 50, 61))
    got = results(implementation, TileMask.from_array(kind(mask), TILE), q, k, v)
    check_close(got, results(implementation, jnp.asarray(mask), q, k, v))


def test_vmap_over_masks() -> None:
    """The mask alone, and the mask with everything else."""
    r = np.random.RandomState(2)
    q, k, v = (jnp.asarray(r.standard_normal((2, 50, 4, 8)), jnp.float32) for _ in range(3))
    masks = jnp.asarray(mask_of((2, 4, 50, 50)))
    one = lambda mask, q, k, v: jax_fmha.attention(q, k, v, mask=TileMask.from_array(mask, TILE))  # noqa: E731
    for axes, arrays in (((0, 0, 0, 0), (q, k, v)), ((0, None, None, None), (q[0], k[0], v[0]))):
        got = jax.jit(jax.vmap(one, axes))(masks, *arrays)
        batched = [x if x.ndim == 4 else jnp.stack([x, x]) for x in arrays]
        check_close(got, jax.jit(lambda m, a: jax_fmha.attention(*a, mask=m))(masks, batched))


def test_a_sparse_mask_visits_its_tiles_only() -> None:
    """5% of the tiles: the kernels are given the classes by which they skip the rest, and few bytes."""
    n = 8192
    tiled = TileMask.from_functions([lambda i, j: (i // 128 * 7 + j // 128 * 13) % 20 == 0], (n, n))
    visited = np.count_nonzero(tiled.tiles) / tiled.tiles.size
    assert 0.045 < visited < 0.055
    assert tiled.bits.size == 0
    assert tiled.tiles.nbytes == 4 * 64 * 64


def test_a_traced_mask_takes_an_eighth_of_its_bytes() -> None:
    n = 1024
    pack = lambda mask: TileMask.from_array(mask)  # noqa: E731
    mask = jax.ShapeDtypeStruct((2, n, n), bool)
    tiled = jax.eval_shape(pack, mask)
    assert tiled.bits.size == 2 * n * n // 8
    assert tiled.tiles.size == 2 * 64
    analysis = jax.jit(pack).lower(mask).compile().memory_analysis()
    assert analysis.temp_size_in_bytes <= 2 * n * n, (
        "no copy of the mask beside its packed bits and their turn"
    )
    # And nothing else of that size reaches the kernel.
    x = jax.ShapeDtypeStruct((n, 2, 8), jnp.float32)
    call = lambda mask, x: jax_fmha.attention(x, x, x, mask=TileMask.from_array(mask))  # noqa: E731
    found = [
        e for e in equations(jax.make_jaxpr(call)(mask, x).jaxpr) if e.primitive.name == "jax_fmha_forward"
    ]
    present = dict(zip(found[0].params["present"], (v.aval.size for v in found[0].invars), strict=True))
    assert "mask" not in present
    assert present["mask_bits"] == 2 * n * n // 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TileMask.from_array(np.ones((4, 4), bool)), r"expected bool \[\*batch, N|1, T, S\]"),
        (lambda: TileMask.from_array(np.ones((1, 4, 4))), "!= 0"),
        (lambda: TileMask.from_array(jnp.ones((1, 4, 4), jnp.int8)), "!= 0"),
        (lambda: TileMask.from_array(np.ones((1, 4, 4), bool), (4, 12)), "multiple of 8"),
        (lambda: TileMask.from_array(jnp.ones((1, 4, 4), bool), (0, 8)), "multiple of 8"),
        (lambda: TileMask.from_functions([lambda i, j: i - j], (4, 4)), "bool from its rule"),
    ],
)
def test_refusals(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_mask_for_other_lengths_is_refused() -> None:
    x = jnp.ones((300, 2, 8))
    with pytest.raises(ValueError, match=r"mask.tiles: expected int32 .* 3, 3\]"):
        jax_fmha.attention(x, x, x, mask=TileMask.from_array(np.ones((1, 256, 300), bool)))
    tiled = TileMask.from_array(np.ones((1, 300, 300), bool))
    with pytest.raises(ValueError, match=r"mask.bits: expected uint8"):
        jax_fmha.attention(x, x, x, mask=TileMask(tiled.tiles, tiled.bits.astype(np.int32)))

"""`jax_fmha.tpu.splash_attention` against the Pallas TPU kernel in interpret mode, and against its own reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as original_kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as original_mask

import jax_fmha
from jax_fmha.tpu import tokamax_splash_attention
from jax_fmha.tpu.splash_attention import splash_attention_kernel as our_kernel
from jax_fmha.tpu.splash_attention import splash_attention_mask as our_mask
from support import check_close, check_names, checks, equations

N, K, T, H, HV = 4, 2, 128, 8, 16


# Masks: the same program on the classes of either library ---------------------------------------------------


def every_third(m: Any) -> Any:
    """A subclass as users write it."""

    class EveryThird(m._ComputableMask):
        def __init__(self, shape: tuple[int, int]):
            super().__init__(shape, lambda q_ids, kv_ids: (q_ids - kv_ids) % 3 == 0)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, EveryThird) and self.shape == other.shape

        def __hash__(self) -> int:
            return hash((EveryThird, self.shape))

    return EveryThird((T, T))


def load_balanced(m: Any) -> Any:
    """The rule of a causal mask by a class of its own, and rows in zig-zag order, as context parallelism has them."""

    class LoadBalanced(m._ComputableMask):
        def __init__(self, shape: tuple[int, int]):
            super().__init__(shape, lambda q_ids, kv_ids: q_ids >= kv_ids)
            self.q_sequence = zigzag()

        def __eq__(self, other: object) -> bool:
            return isinstance(other, LoadBalanced)

        def __hash__(self) -> int:
            return hash(LoadBalanced)

    return LoadBalanced((T, T))


def zigzag() -> np.ndarray:
    chunks = np.arange(T, dtype=np.int32).reshape(4, -1)
    return chunks[[0, 3, 1, 2]].reshape(-1)


def reordered(mask: Any) -> Any:
    mask.q_sequence = zigzag()
    return mask


def random_masks(m: Any) -> list[Any]:
    diagonal = np.eye(T, dtype=bool)  # no empty row: there the contracts differ
    return [m.NumpyMask(m.make_random_mask((T, T), 0.7, seed) | diagonal) for seed in range(N)]


def local(m: Any, left: int | None, right: int | None, offset: int = 0) -> Any:
    return m.LocalMask((T, T), (left, right), offset)


MASKS: dict[str, Callable[[Any], list[Any]]] = {
    "full": lambda m: [m.FullMask((T, T))] * N,
    "causal": lambda m: [m.CausalMask((T, T)) for _ in range(N)],
    "causal_offset": lambda m: [m.CausalMask((T, T), 5)] * N,
    "local": lambda m: [local(m, 9, 3, 2)] * N,
    "local_left": lambda m: [local(m, 9, None)] * N,
    "local_right": lambda m: [local(m, None, 4, -1) | m.CausalMask((T, T))] * N,
    "local_open": lambda m: [local(m, None, None)] * N,
    "chunked": lambda m: [m.ChunkedCausalMask((T, T), 24)] * N,
    "causal_and_local": lambda m: [m.CausalMask((T, T), 20) & local(m, 30, None, 1)] * N,
    "two_chunks_and_local": lambda m: (
        [m.ChunkedCausalMask((T, T), 24) & m.ChunkedCausalMask((T, T), 40) & local(m, 10, None)] * N
    ),
    "causal_or_local": lambda m: [m.CausalMask((T, T)) | local(m, 3, 7)] * N,
    "gap": lambda m: [local(m, 2, 2, -20) | local(m, 1, 1)] * N,
    "alternating": lambda m: [m.CausalMask((T, T)), local(m, 7, 0)] * (N // 2),
    "unevenly_grouped": lambda m: [*[m.CausalMask((T, T))] * (N - 1), m.FullMask((T, T))],
    "random": random_masks,
    "computable": lambda m: [every_third(m)] * N,
    "computable_and_causal": lambda m: [every_third(m) & m.CausalMask((T, T), 3), *random_masks(m)[1:]],
    "reordered_causal": lambda m: [reordered(m.CausalMask((T, T)))] * N,
    "reordered_chunks": lambda m: [reordered(m.ChunkedCausalMask((T, T), 24))] * N,
    "reordered_and_not": lambda m: [reordered(m.CausalMask((T, T))) & local(m, 127, 127)] * N,
    "load_balanced": lambda m: [load_balanced(m)] * N,
}
# Masks that reach the kernels as structure.
STRUCTURED = set(MASKS) - {
    "gap",
    "random",
    "computable",
    "computable_and_causal",
    "load_balanced",
}


def operands(seed: int = 0, heads: int = N, kv_heads: int = K, sinks: bool = False) -> dict[str, jax.Array]:
    r = np.random.RandomState(seed)
    shapes = {"q": (heads, T, H), "k": (kv_heads, T, H), "v": (kv_heads, T, HV)}
    if sinks:
        shapes["sinks"] = (heads,)
    return {name: jnp.asarray(r.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def segments(seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Ids -1, 0 and 1, packed in ascending order: under causal and local masks every row keeps its diagonal."""
    row = np.sort(np.random.RandomState(seed).randint(-1, 2, T)).astype(np.int32)
    return jnp.asarray(row), jnp.asarray(row)


def cotangent(x: jax.Array) -> jax.Array:
    """Numbers that every type holds exactly."""
    return ((jnp.arange(x.size) * 5 % 13 - 6) / 8).reshape(x.shape).astype(x.dtype)


def results(f: Callable[..., Any], arrays: dict[str, Any]) -> Any:
    """(out, gradients of all arrays)"""

    def everything(arrays: dict[str, Any]) -> Any:
        out, pullback = jax.vjp(lambda a: f(**a), arrays)
        return out, pullback(jax.tree.map(cotangent, out))[0]

    return jax.jit(everything)(arrays)


def reference(masks: list[Any], is_mqa: bool = False, **options: Any) -> Callable[..., Any]:
    """The original's einsums."""
    make = original_kernel.make_masked_mqa_reference if is_mqa else original_kernel.make_masked_mha_reference
    return functools.partial(make(original_mask.MultiHeadMask(masks)), **options)


def ours(masks: Any, is_mqa: bool = False, **options: Any) -> Any:
    make = our_kernel.make_splash_mqa_single_device if is_mqa else our_kernel.make_splash_mha_single_device
    return make(our_mask.MultiHeadMask(masks) if isinstance(masks, list) else masks, **options)


# Against the original ---------------------------------------------------------------------------------------

# It compiles for seconds in interpret mode: few cases, each with several features.
KERNEL_CASES: dict[str, dict[str, Any]] = {
    "causal_offset": {"soft_cap": 3.0},
    "local": {"segments": True, "soft_cap": 2.0, "sinks": True},
    "alternating": {"segments": True},
    "chunked": {"is_mqa": True, "sinks": True},
    "computable_and_causal": {},
    "load_balanced": {"is_mqa": True},
}


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_against_the_kernel(name: str) -> None:
    case = KERNEL_CASES[name]
    is_mqa = case.get("is_mqa", False)
    arrays = operands(kv_heads=1 if is_mqa else K, sinks=case.get("sinks", False))
    if is_mqa:
        arrays |= {n: arrays[n][0] for n in ("k", "v")}
    pair = segments() if case.get("segments") else None

    def call(kernel: Any, mask: Any, **options: Any) -> Any:
        blocks = kernel.BlockSizes(
            block_q=T, block_kv=T, block_q_dkv=T, block_kv_dkv=T, use_fused_bwd_kernel=True
        )
        make = kernel.make_splash_mqa_single_device if is_mqa else kernel.make_splash_mha_single_device
        attend = make(
            mask.MultiHeadMask(MASKS[name](mask)),
            block_sizes=blocks,
            attn_logits_soft_cap=case.get("soft_cap"),
            **options,
        )
        ids = None if pair is None else kernel.SegmentIds(*pair)
        return results(lambda **a: attend(**a, segment_ids=ids), arrays)

    check_close(call(our_kernel, our_mask), call(original_kernel, original_mask, interpret=True))


@pytest.mark.parametrize("name", MASKS)
def test_against_the_reference(name: str) -> None:
    """Every mask, with sinks, soft cap and segments at once."""
    arrays = operands(sinks=True)
    ids = original_kernel.SegmentIds(*segments())
    kernel = ours(MASKS[name](our_mask), attn_logits_soft_cap=3.0)
    theirs = reference(MASKS[name](original_mask), attn_logits_soft_cap=3.0)
    check_close(
        results(lambda **a: kernel(**a, segment_ids=ids), arrays),
        results(lambda **a: theirs(**a, segment_ids=ids), arrays),
    )


@pytest.mark.parametrize("name", MASKS)
def test_mask_values(name: str) -> None:
    for a, b in zip(MASKS[name](our_mask), MASKS[name](original_mask), strict=True):
        np.testing.assert_array_equal(a[:, :], b[:, :])
        np.testing.assert_array_equal(a[3:50, 100:], b[3:50, 100:])
        assert a.shape == b.shape


def test_array_masks() -> None:
    for name, arguments in {
        "make_causal_mask": ((5, 7), -2),
        "make_chunk_attention_mask": ((9, 7), 3),
        "make_random_mask": ((9, 7), 0.3, 11),
    }.items():
        got, want = (getattr(m, name)(*arguments) for m in (our_mask, original_mask))
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype
    for window in ((None, None), (2, None), (None, 1), (2, 1)):
        got, want = (m.make_local_attention_mask((9, 7), window, offset=1) for m in (our_mask, original_mask))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("is_traced", [False, True], ids=["concrete", "traced"])
@pytest.mark.parametrize("heads", [1, N])
def test_jax_array_mask(heads: int, is_traced: bool) -> None:
    mask = jnp.asarray(np.stack([m[:, :] for m in random_masks(our_mask)[:heads]]))
    arrays = operands()
    make = our_kernel.make_splash_mha_single_device
    f = lambda mask, a: jax.value_and_grad(lambda a: jnp.sin(make(mask)(**a)).sum())(a)  # noqa: E731
    theirs = reference([original_mask.NumpyMask(np.asarray(m)) for m in mask] * (N // heads))
    want = jax.jit(jax.value_and_grad(lambda a: jnp.sin(theirs(**a)).sum()))(arrays)
    check_close((jax.jit(f) if is_traced else f)(mask, arrays), want)


def test_numpy_mask() -> None:
    mask = np.stack([m[:, :] for m in random_masks(our_mask)])
    check_close(ours(mask)(**operands()), reference(random_masks(original_mask))(**operands()))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(dtype: Any) -> None:
    arrays = {name: x.astype(dtype) for name, x in operands().items()}
    got = results(ours(MASKS["local"](our_mask)), arrays)
    exact = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(dtype)}
    check_close(
        got, results(reference(MASKS["local"](original_mask)), exact), 2 * float(jnp.finfo(dtype).eps)
    )


def test_mixed_types_give_the_type_of_the_query() -> None:
    arrays = operands()
    arrays |= {name: arrays[name].astype(jnp.bfloat16) for name in ("k", "v")}
    out, grads = results(ours(MASKS["causal"](our_mask)), arrays)
    check_close(out, results(reference(MASKS["causal"](original_mask)), arrays)[0])
    assert out.dtype == jnp.float32
    assert {name: g.dtype for name, g in grads.items()} == {name: x.dtype for name, x in arrays.items()}


# Where the contract differs on purpose ----------------------------------------------------------------------


def test_rows_without_keys() -> None:
    """Rows 0..4 attend nothing: here 0 and lse -inf (the sink), there means of values, NaN, or 0."""
    masks = [local(our_mask, None, 0, -5)] * N
    arrays = operands()
    (out, (lse,)), grads = results(ours(masks, save_residuals=True), arrays)
    assert not np.any(out[:, :5])
    assert np.all(np.isneginf(lse[:, :5]))
    assert not np.any(grads["q"][:, :5])
    assert all(np.all(np.isfinite(g)) for g in grads.values())

    theirs = reference([local(original_mask, None, 0, -5)] * N, save_residuals=True)
    their_out, (their_lse,) = theirs(**arrays)
    mean = jnp.repeat(arrays["v"].mean(1), N // K, axis=0)
    check_close(their_out[:, :5], jnp.broadcast_to(mean[:, None], (N, 5, HV)))
    assert np.all(their_lse[:, :5] < -1e38)
    check_close((out[:, 5:], lse[:, 5:]), (their_out[:, 5:], their_lse[:, 5:]))

    sinks = jnp.arange(N, dtype=jnp.float32)
    out, (lse,) = ours(masks, save_residuals=True)(**arrays, sinks=sinks)
    assert not np.any(out[:, :5])
    check_close(lse[:, :5], jnp.broadcast_to(sinks[:, None], (N, 5)))


def test_statically_empty_mask() -> None:
    """Nothing is allowed at all, by a band whose limits cross and by a dense mask: zeros. The original stops."""
    arrays = operands()
    crossing = [our_mask.CausalMask((T, T)) & local(our_mask, 0, None, 5)] * N
    for masks in (crossing, np.zeros((N, T, T), bool)):
        (out, (lse,)), grads = results(ours(masks, save_residuals=True), arrays)
        assert not np.any(out)
        assert np.all(np.isneginf(lse))
        assert not any(np.any(g) for g in grads.values())
    with pytest.raises(AssertionError):
        original_kernel.make_splash_mha_single_device(np.zeros((N, T, T), bool), interpret=True)


def test_statically_empty_block_row() -> None:
    """The first 128 of 256 rows attend nothing, a whole row of tiles: 0 here, NaN in the original."""

    def mask(m: Any) -> Any:
        return m.MultiHeadMask([m.CausalMask((2 * T, 2 * T), -T)] * N)

    arrays = {name: jnp.tile(x, (1, 2, 1)) for name, x in operands().items()}
    out = our_kernel.make_splash_mha_single_device(mask(our_mask))(**arrays)
    theirs = original_kernel.make_splash_mha_single_device(mask(original_mask), interpret=True)(**arrays)
    assert not np.any(out[:, :T])
    assert np.all(np.isnan(theirs[:, :T]))
    check_close(out[:, T:], theirs[:, T:])


# Structure --------------------------------------------------------------------------------------------------


def forwards(f: Callable[..., Any], *args: Any) -> list[dict[str, Any]]:
    """{operand: its shaped type} of each forward call."""
    found = equations(jax.make_jaxpr(f)(*args).jaxpr)
    return [
        dict(zip(e.params["present"], (x.aval for x in e.invars), strict=True))
        for e in found
        if e.primitive.name == "jax_fmha_forward"
    ]


@pytest.mark.parametrize("name", MASKS)
def test_structure_reaches_the_kernel_as_structure(name: str) -> None:
    kernel = ours(MASKS[name](our_mask))
    calls = forwards(lambda a: kernel(**a, segment_ids=our_kernel.SegmentIds(*segments())), operands())
    assert any("mask_tiles" in call for call in calls) == (name not in STRUCTURED)
    assert not any("mask" in call for call in calls)
    if name in STRUCTURED:
        assert all(leaf.size <= 2 * T for leaf in jax.tree.leaves(kernel))
    assert len(calls) == (2 if name in ("alternating", "unevenly_grouped", "computable_and_causal") else 1)


def test_equal_masks_are_evaluated_once() -> None:
    """One set of tiles for all heads, whether they share the object or only say that they are equal."""
    for masks in (
        [every_third(our_mask)] * N,
        [our_mask.NumpyMask(our_mask.make_random_mask((T, T), 0.5, 0)) for _ in range(N)],
    ):
        assert [x.shape for x in jax.tree.leaves(ours(masks))] == [(1, 1, 1), (1, 128, 16)]
    half = [our_mask.NumpyMask(our_mask.make_random_mask((T, T), 0.5, head // 2)) for head in range(N)]
    assert [x.shape for x in jax.tree.leaves(ours(half))] == [(N, 1, 1), (2, 128, 16)], "their bits, too"


class Blocks(our_mask._ComputableMask):
    """Whole tiles, 5% of them, and a diagonal; counts what is asked of it."""

    def __init__(self, length: int):
        super().__init__((length, length), self.allowed)
        self.evaluated: list[int] = []

    def allowed(self, q_ids: Any, kv_ids: Any) -> Any:
        self.evaluated.append(q_ids.size * kv_ids.size)
        return ((q_ids // 128 * 7 + kv_ids // 128 * 11) % 20 == 0) | (q_ids == kv_ids)


def test_computable_masks_become_tiles() -> None:
    """Evaluated a few tiles at a time, never a dense array; what a kernel visits and keeps follows the density."""
    length = 4096
    mask = Blocks(length)
    tiles, bits = jax.tree.leaves(ours([mask] * N))
    assert sum(mask.evaluated) == length**2
    assert max(mask.evaluated) <= 2**20
    visited = np.count_nonzero(tiles) / tiles.size
    assert 0.05 < visited < 0.05 + 128 / length
    assert bits.shape == (1, 128, 16), "one diagonal tile stands for all"

    # A subclass may bring an order of its own.
    mask.q_sequence = np.arange(length, dtype=np.int32)[::-1]
    tiles, _ = jax.tree.leaves(ours([mask] * N))
    assert 0.05 < np.count_nonzero(tiles) / tiles.size < 0.05 + 128 / length


@pytest.mark.parametrize("is_traced", [False, True], ids=["concrete", "traced"])
def test_array_masks_become_tiles(is_traced: bool) -> None:
    """Classes and packed bits, made by the program itself: an eighth of the mask."""
    dense = jnp.asarray(np.stack([m[:, :] for m in random_masks(our_mask)]))
    make = our_kernel.make_splash_mha_single_device
    tiles, bits = jax.tree.leaves((jax.jit(make) if is_traced else make)(dense))
    assert tiles.shape == (N, 1, 1)
    assert bits.nbytes == dense.nbytes // 8
    (call,) = forwards(lambda mask, a: make(mask)(**a), dense, operands())
    assert call["mask_bits"].size == dense.size // 8
    assert "mask" not in call


@pytest.mark.parametrize("length", [100, 192, 262])
def test_lengths_that_no_tile_divides(length: int) -> None:
    """One mask per head, whole and for query rows in two pieces."""
    r = np.random.RandomState(0)
    masks = [our_mask.NumpyMask(r.rand(length, length) < 0.3) for _ in range(2)]
    arrays = {n: jnp.asarray(r.standard_normal((2, length, H)), jnp.float32) for n in "qkv"}
    dense = jnp.asarray(np.stack([m.array for m in masks]))
    want = jax_fmha.attention(*(jnp.swapaxes(x, 0, 1) for x in arrays.values()), mask=dense, scale=1.0)
    for mask in (our_mask.MultiHeadMask(masks), dense):
        for shards in (1, 2):
            kernel = our_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=shards)
            check_close(jnp.swapaxes(jax.jit(lambda a, kernel=kernel: kernel(**a))(arrays), 0, 1), want)


def test_grouped_heads_keep_their_groups() -> None:
    """Masks that alternate within a key/value group need no copy of key and value per query head."""
    kernel = ours(MASKS["alternating"](our_mask))
    assert {call["k"].shape for call in forwards(lambda a: kernel(**a), operands())} == {(1, T, K, H)}


def test_many_segments_with_chunks_do_not_collide() -> None:
    """Ids near both ends of int32 with chunks: pairs are numbered, not multiplied."""
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    row = jnp.asarray(np.random.RandomState(3).choice([low, low + 1, 0, high - 1, high], T), jnp.int32)
    ids = original_kernel.SegmentIds(row, row)
    arrays = operands()
    got = ours([our_mask.ChunkedCausalMask((T, T), 5)] * N)(**arrays, segment_ids=ids)
    want = reference([original_mask.ChunkedCausalMask((T, T), 5)] * N)(**arrays, segment_ids=ids)
    check_close(got, want)


def test_limits_beyond_int32() -> None:
    arrays = operands()
    masks = [local(our_mask, 2**40, 0)] * N
    check_close(ours(masks)(**arrays), ours(MASKS["causal"](our_mask))(**arrays))


def test_a_subclass_with_its_own_rule_is_not_taken_for_its_base() -> None:
    class Strict(our_mask.CausalMask):
        def __init__(self, shape: tuple[int, int]):
            super().__init__(shape)
            self.mask_function = lambda q_ids, kv_ids: (q_ids > kv_ids) | (kv_ids == 0)

    arrays = operands()
    dense = np.tril(np.ones((T, T), bool), -1)
    dense[:, 0] = True
    want = reference([original_mask.NumpyMask(dense)] * N)(**arrays)
    check_close(ours([Strict((T, T))] * N)(**arrays), want)


# Residuals --------------------------------------------------------------------------------------------------


def test_lse_and_its_gradient() -> None:
    """Natural logarithm, sink included; the original refuses to differentiate it, its reference does not."""
    arrays = operands(sinks=True)
    options = {"save_residuals": True, "attn_logits_soft_cap": 3.0}
    got = results(ours(MASKS["alternating"](our_mask), **options), arrays)
    check_close(got, results(reference(MASKS["alternating"](original_mask), **options), arrays))
    assert got[0][1][0].dtype == jnp.float32


@pytest.mark.parametrize("name", [None, "context"])
def test_residual_checkpoint_name(name: str | None) -> None:
    """A remat policy that saves the name leaves one forward; any other runs it again."""
    kernel = ours(MASKS["causal"](our_mask), residual_checkpoint_name=name)
    arrays = operands()

    def count(saved: str) -> int:
        policy = jax.checkpoint_policies.save_only_these_names(saved)
        f = jax.checkpoint(lambda a: kernel(**a).sum(), policy=policy)
        return len(forwards(jax.jit(jax.grad(f)), arrays))

    assert count("another") == 2
    assert count("context") == (1 if name == "context" else 2)


# As real code calls it --------------------------------------------------------------------------------------


def test_vmap_over_a_batch() -> None:
    arrays = jax.tree.map(lambda *x: jnp.stack(x), *(operands(seed, sinks=True) for seed in range(3)))
    ids = our_kernel.SegmentIds(*(jnp.stack(x) for x in zip(*map(segments, range(3)), strict=True)))
    sinks = arrays.pop("sinks")[0]
    kernel = ours(MASKS["chunked"](our_mask))
    theirs = reference(MASKS["chunked"](original_mask))
    batched = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))
    got = results(lambda q, k, v: batched(q, k, v, ids, sinks), arrays)
    batched = jax.vmap(theirs, in_axes=(0, 0, 0, 0, None))
    check_close(
        got, results(lambda q, k, v: batched(q, k, v, original_kernel.SegmentIds(*ids), sinks), arrays)
    )
    without = jax.vmap(kernel, in_axes=(0, 0, 0, None, None))(*(arrays[n] for n in "qkv"), None, None)
    assert without.shape == got[0].shape


@pytest.mark.parametrize("name", ["causal", "random", "chunked", "reordered_causal"])
def test_kernel_is_a_pytree(name: str) -> None:
    kernel = ours(MASKS[name](our_mask))
    leaves, tree = jax.tree.flatten(kernel)
    again = jax.tree.unflatten(tree, leaves)
    passed = jax.jit(lambda kernel, a: kernel(**a))(again, operands())
    check_close(passed, kernel(**operands()))
    assert hash(tree) == hash(jax.tree.structure(again))


@pytest.mark.parametrize("check", check_names("splash_sharded.py"))
def test_shard_map(check: str) -> None:
    failure = checks("splash_sharded.py", devices=4)[check]
    assert failure is None, failure


def test_interpret_evaluates_by_einsums() -> None:
    kernel = ours(MASKS["local"](our_mask), interpret=True)
    arrays = operands()
    assert not forwards(lambda a: kernel(**a), arrays)
    check_close(jax.jit(lambda a: kernel(**a))(arrays), reference(MASKS["local"](original_mask))(**arrays))
    # What only the einsums have: forward mode.
    f = lambda q: kernel(q, arrays["k"], arrays["v"])  # noqa: E731
    tangent = jax.jit(lambda q: jax.jvp(f, (q,), (q,))[1])(arrays["q"])
    assert np.all(np.isfinite(tangent))


def test_our_references() -> None:
    arrays = operands(sinks=True)
    masks = MASKS["random"](our_mask)
    options = {"save_residuals": True, "attn_logits_soft_cap": 3.0}
    f = our_kernel.make_masked_mha_reference(our_mask.MultiHeadMask(masks))
    got = jax.jit(lambda a: f(**a, **options))(arrays)
    check_close(got, reference(MASKS["random"](original_mask), **options)(**arrays))
    arrays |= {name: arrays[name][0].astype(jnp.bfloat16) for name in ("k", "v")}
    f = our_kernel.make_masked_mqa_reference(our_mask.MultiHeadMask(masks))
    got = jax.jit(lambda a: f(**a))(arrays)
    want = reference(MASKS["random"](original_mask), is_mqa=True)(**arrays)
    assert got.dtype == want.dtype == jnp.float32
    check_close(got, want)


# tokamax's spelling -----------------------------------------------------------------------------------------

tokamax = tokamax_splash_attention.splash_attention_kernel


@pytest.mark.parametrize("is_mqa", [False, True], ids=["mha", "mqa"])
def test_tokamax_spelling(is_mqa: bool) -> None:
    arrays = operands(sinks=True)
    if is_mqa:
        arrays |= {name: arrays[name][0] for name in ("k", "v")}
    config = tokamax.SplashConfig(
        block_q=T, block_kv=T, attn_logits_soft_cap=3.0, residual_checkpoint_name="context"
    )
    make = tokamax.make_splash_mqa_single_device if is_mqa else tokamax.make_splash_mha_single_device
    kernel = make(our_mask.ChunkedCausalMask((T, T), 24), config=config)
    options = {"is_mqa": is_mqa, "attn_logits_soft_cap": 3.0, "save_residuals": True}
    want = results(reference([original_mask.ChunkedCausalMask((T, T), 24)] * N, **options), arrays)

    (out, stats), grads = results(functools.partial(kernel, save_residuals=True), arrays)
    check_close(((out, (stats["logsumexp"],)), grads), want)
    assert isinstance(kernel(**arrays), jax.Array)
    with pytest.raises(NotImplementedError, match="max_logits"):
        stats["max_logits"]
    with pytest.raises(KeyError):
        stats["other"]


def test_tokamax_dynamic_and_numpy_masks() -> None:
    dense = random_masks(our_mask)[0].array
    arrays = operands()
    want = reference([original_mask.NumpyMask(dense)] * N)(**arrays)
    check_close(tokamax.make_splash_mha_single_device(dense)(**arrays), want)
    f = jax.jit(lambda mask, a: tokamax.make_dynamic_splash_mha(mask)(**a))
    check_close(f(jnp.asarray(dense), arrays), want)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_logit_const": 20.0}, NotImplementedError, "true maximum"),
        ({"use_fused_bwd_kernel": False}, ValueError, "use_fused_bwd_kernel"),
        ({"dq_reduction_steps": 2}, ValueError, "dq_reduction_steps"),
    ],
)
def test_tokamax_config_refusals(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tokamax.SplashConfig(block_q=T, block_kv=T, **options)


def test_tokamax_refusals() -> None:
    full = our_mask.FullMask((T, T))
    with pytest.raises(NotImplementedError, match="max_logit_value"):
        tokamax.make_splash_mha_single_device(full)(**operands(), max_logit_value=jnp.ones(()))
    with pytest.raises(ValueError, match="qk_diag_skip"):
        tokamax.make_splash_mha_single_device(full, config=tokamax.SplashConfig(T, T, qk_diag_skip=True))
    with pytest.raises(ValueError, match="one mask"):
        tokamax.make_splash_mha_single_device(our_mask.MultiHeadMask([full]))
    with pytest.raises(ValueError, match="both or neither"):
        tokamax.make_dynamic_splash_mha(jnp.ones((T, T), bool), mask_spec=jax.sharding.PartitionSpec("q"))


# Refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "options", "error", "message"),
    [
        (our_mask.CausalMask((T, T)), {}, ValueError, "MultiHeadMask"),
        (original_mask.MultiHeadMask([original_mask.CausalMask((T, T))]), {}, ValueError, "of this library"),
        (np.ones((T, T), bool), {}, ValueError, "MultiHeadMask"),
        (np.ones((N, T, T), np.float32), {}, ValueError, "bool"),
        (jnp.ones((N, T, T), jnp.float32), {}, ValueError, "mask != 0"),
        (np.ones((N, T, T), bool), {"mask_value": -1.0}, NotImplementedError, "mask_value"),
        (np.ones((N, T, T), bool), {"head_shards": 3}, ValueError, "head_shards"),
        (np.ones((N, T, T), bool), {"q_seq_shards": 3}, ValueError, "q_seq_shards"),
    ],
)
def test_refusals_of_the_makers(
    mask: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        our_kernel.make_splash_mha(mask, **{"head_shards": 1, "q_seq_shards": 1, **options})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (N, T - 1, H)}, "lengths of q and k"),
        ({"k": (K, T + 1, H), "v": (K, T + 1, HV)}, "lengths of q and k"),
        ({"q": (2 * N, T, H)}, "expected 4 heads"),
        ({"k": (3, T, H), "v": (3, T, HV)}, "divides q's 4"),
        ({"k": (T, H)}, r"k: expected \[kv_heads, S, H\]"),
        ({"q": (1, N, T, H)}, "vmap over a batch"),
        ({"sinks": (K,)}, "sinks"),
    ],
)
def test_refusals_of_the_kernel(change: dict[str, tuple[int, ...]], message: str) -> None:
    arrays = operands() | {name: jnp.zeros(shape) for name, shape in change.items()}
    with pytest.raises(ValueError, match=message):
        ours(MASKS["alternating"](our_mask))(**arrays)


def test_refused_segment_ids_and_key_rank() -> None:
    kernel = ours(MASKS["causal"](our_mask))
    with pytest.raises(ValueError, match=r"segment_ids.kv: expected \[128\]"):
        kernel(**operands(), segment_ids=our_kernel.SegmentIds(jnp.zeros(T, int), jnp.zeros(T - 1, int)))
    with pytest.raises(ValueError, match="multi-query"):
        ours(MASKS["causal"](our_mask), is_mqa=True)(**operands())


def test_refused_masks() -> None:
    full = our_mask.FullMask((T, T))
    with pytest.raises(NotImplementedError, match="`&`"):
        bool(full)
    for bad in (
        lambda: full & our_mask.FullMask((T, T + 1)),
        lambda: full | our_mask.FullMask((T + 1, T)),
        lambda: our_mask.MultiHeadMask([]),
        lambda: our_mask.MultiHeadMask([our_mask.MultiHeadMask([full])]),
        lambda: our_mask.MultiHeadMask([full, our_mask.FullMask((T, 1))]),
        lambda: our_mask.NumpyMask(np.ones((T, T))),
        lambda: our_mask.ChunkedCausalMask((T, T), 0),
        lambda: our_mask.CausalMask((T, T), shard_count=3),
    ):
        with pytest.raises(ValueError, match="Mask"):
            bad()
    wrong = our_mask.CausalMask((T, T))
    wrong.q_sequence = np.arange(T - 1)
    with pytest.raises(ValueError, match="q_sequence"):
        ours([wrong] * N)
    with pytest.raises(NotImplementedError, match="__hash__"):
        hash(our_mask._ComputableMask((T, T), lambda q, k: q >= k))

"""Promise 6: every transformation of JAX, on the native kernels and on the reference."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_fmha
from jax_fmha import SegmentIds
from support import calls, check_close, check_equal, check_names, checks, each_implementation, equations

B, T, S, N, K, H, Hv = 2, 5, 7, 4, 2, 8, 6
FLOATS = ("query", "key", "value", "bias", "sinks")


def draw(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "query": rng.standard_normal((B, T, N, H), np.float32),
        "key": rng.standard_normal((B, S, K, H), np.float32),
        "value": rng.standard_normal((B, S, K, Hv), np.float32),
        "bias": rng.standard_normal((1, N, T, S), np.float32),
        "mask": rng.random((B, 1, T, S)) < 0.8,
        "segments_q": rng.integers(0, 2, (B, T)).astype(np.int32),
        "segments_kv": rng.integers(0, 2, (B, S)).astype(np.int32),
        "query_seq_lengths": rng.integers(1, T + 1, B).astype(np.int32),
        "key_value_seq_lengths": rng.integers(1, S + 1, B).astype(np.int32),
        "query_offset": rng.integers(0, 3, B).astype(np.int32),
        "sinks": rng.standard_normal(N, np.float32),
    }


def call(x: dict[str, Any], implementation: str | None = None) -> Any:
    """(out, lse) with every operand of `draw` in use."""
    x = dict(x)
    ids = SegmentIds(x.pop("segments_q"), x.pop("segments_kv"))
    return jax_fmha.attention(
        **x, segment_ids=ids, is_causal=True, return_lse=True, implementation=implementation
    )


def loss(primals: dict[str, Any], rest: dict[str, Any], implementation: str | None = None) -> Any:
    out, lse = call({**primals, **rest}, implementation)
    return (out * jnp.cos(out)).sum() + jnp.sin(lse).sum()


def split(x: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return {n: x[n] for n in FLOATS}, {n: a for n, a in x.items() if n not in FLOATS}


# Shapes are always those of `draw`: compiled once for all tests.
single_call = jax.jit(call)
single_grad = jax.jit(jax.grad(loss))


def simple(q: Any, k: Any, v: Any, implementation: str | None = None) -> Any:
    return jax_fmha.attention(q, k, v, is_causal=True, implementation=implementation)


def simple_operands(seed: int = 0, **sizes: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    t, s = sizes.get("T", T), sizes.get("S", S)
    return [rng.standard_normal(shape, np.float32) for shape in ((B, t, N, H), (B, s, K, H), (B, s, K, Hv))]


@each_implementation
def test_jit(implementation: str | None):
    x = draw()
    f = functools.partial(call, implementation=implementation)
    check_close(single_call(x) if implementation is None else jax.jit(f)(x), call(x))


@each_implementation
def test_grad_under_jit(implementation: str | None):
    primals, rest = split(draw())
    f = functools.partial(loss, implementation=implementation)
    check_close(jax.jit(jax.grad(f))(primals, rest), jax.grad(loss)(primals, rest))


def stacked(names: tuple[str, ...], axes: tuple[int, ...], size: int = 3) -> tuple[dict, dict, list[dict]]:
    """Operands of which `names` are mapped at `axes` (modulo their rank), in_axes, and the single calls."""
    base = draw()
    draws = [draw(1 + i) for i in range(size)]
    singles = [{**base, **{n: draws[i][n] for n in names}} for i in range(size)]
    in_axes = dict.fromkeys(base)
    mapped = dict(base)
    for name, axis in zip(names, axes, strict=True):
        in_axes[name] = axis % (base[name].ndim + 1)
        if axis < 0:
            in_axes[name] -= base[name].ndim + 1
        mapped[name] = np.stack([single[name] for single in singles], in_axes[name])
    return mapped, in_axes, singles


def check_vmap(names: tuple[str, ...], axes: tuple[int, ...], implementation: str | None = None) -> None:
    mapped, in_axes, singles = stacked(names, axes)
    f = functools.partial(call, implementation=implementation)
    got = jax.jit(jax.vmap(f, in_axes=(in_axes,)))(mapped)
    want = jax.tree.map(lambda *xs: np.stack(xs), *(single_call(x) for x in singles))
    check_close(got, want)

    primals, rest = split(mapped)
    axes_in = split(in_axes)
    grad = jax.grad(functools.partial(loss, implementation=implementation))
    got = jax.jit(jax.vmap(grad, in_axes=axes_in))(primals, rest)
    want = jax.tree.map(lambda *xs: np.stack(xs), *(single_grad(*split(x)) for x in singles))
    check_close(got, want)


@pytest.mark.parametrize("names", [c for r in (1, 2, 3) for c in itertools.combinations(FLOATS[:3], r)])
def test_vmap_of_query_key_value(names: tuple[str, ...]):
    check_vmap(names, tuple(range(len(names))))


@pytest.mark.parametrize("name", [n for n in draw() if n not in FLOATS[:3]])
def test_vmap_of_one_other_operand(name: str):
    check_vmap((name,), (-1,))


@given(st.data())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_vmap_of_any_subset_at_any_axes(data: Any):
    names = tuple(sorted(data.draw(st.sets(st.sampled_from(list(draw())), min_size=1))))
    axes = tuple(data.draw(st.integers(-2, 4)) for _ in names)
    check_vmap(names, axes)


@pytest.mark.parametrize(
    "names", [("query",), ("key", "value", "segments_kv"), ("bias", "query_seq_lengths")]
)
def test_vmap_of_the_reference(names: tuple[str, ...]):
    check_vmap(names, (1, 0, 0)[: len(names)], "xla")


def test_vmap_out_axes_and_axis_size():
    q, k, v = simple_operands()
    got = jax.vmap(simple, in_axes=(None, None, None), out_axes=1, axis_size=3)(q, k, v)
    check_close(got, np.stack([simple(q, k, v)] * 3, 1))


def test_grad_of_vmap():
    mapped, in_axes, singles = stacked(("query", "segments_kv", "sinks"), (2, 0, 1))
    primals, rest = split(mapped)
    axes = split(in_axes)
    got = jax.grad(lambda p: jax.vmap(loss, in_axes=axes)(p, rest).sum())(primals)
    single = [single_grad(*split(x)) for x in singles]
    for name, grad in got.items():
        parts = [g[name] for g in single]
        check_close(grad, np.sum(parts, 0) if axes[0][name] is None else np.stack(parts, axes[0][name]))


def test_nested_vmap():
    q, k, v = simple_operands()
    qs = np.stack([np.stack([q, q + 1, q - 1]), np.stack([q * 2, q * 3, q])], axis=1)  # [3, 2, ...]
    ks = np.stack([k, k + 1])
    inner = jax.vmap(simple, in_axes=(0, None, None))
    got = jax.vmap(inner, in_axes=(1, 0, None))(qs, ks, v)
    want = np.stack([np.stack([simple(qs[i, j], ks[j], v) for i in range(3)]) for j in range(2)])
    check_close(got, want)
    grad = jax.grad(lambda v: jnp.sin(jax.vmap(inner, in_axes=(1, 0, None))(qs, ks, v)).sum())(v)
    parts = [
        jax.grad(lambda v, i=i, j=j: jnp.sin(simple(qs[i, j], ks[j], v)).sum())(v)
        for i in range(3)
        for j in range(2)
    ]
    check_close(grad, np.sum(parts, 0))


def test_vmap_of_an_unbatched_call():
    q, k, v = simple_operands()
    check_close(jax.vmap(simple)(q, k, v), simple(q, k, v))


def test_vmap_does_not_copy_shared_operands():
    """Folding: the program has no array of the size of a broadcast key or value."""
    q = jax.ShapeDtypeStruct((64, 1, 3, 2, 8), np.float32)
    kv = jax.ShapeDtypeStruct((1, 500, 2, 8), np.float32)
    f = jax.vmap(functools.partial(jax_fmha.attention), in_axes=(0, None, None))
    text = jax.jit(f).lower(q, kv, kv).compile().as_text()
    assert "[64,1,500" not in text
    assert "[64,500" not in text


# Rematerialisation ----------------------------------------------------------------------------------------------------


def two_layers(policy: Any) -> Any:
    def layer(q: Any, k: Any, v: Any) -> Any:
        return jnp.sin(jax_fmha.attention(jnp.sin(q), k, v))

    remat = jax.checkpoint(layer, policy=policy)
    return lambda q, k, v: remat(remat(q, k, v), k, v).sum()


@pytest.mark.parametrize(
    ("policy", "forwards"),
    [
        (jax.checkpoint_policies.save_only_these_names(*jax_fmha.CHECKPOINT_NAMES), 2),
        (jax.checkpoint_policies.nothing_saveable, 4),
    ],
    ids=["out_and_lse_saved", "nothing_saved"],
)
def test_remat_runs_the_forward_again_only_if_its_results_are_not_saved(policy: Any, forwards: int):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 4, 2, 8), np.float32) for _ in range(3))
    gradient = jax.grad(two_layers(policy), argnums=(0, 1, 2))
    # Counted before XLA, which may merge equal calls.
    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(gradient)(q, k, v).jaxpr)]
    assert names.count("jax_fmha_forward") == forwards
    assert names.count("jax_fmha_backward") == 2
    want = jax.grad(two_layers(jax.checkpoint_policies.everything_saveable), argnums=(0, 1, 2))(q, k, v)
    check_close(jax.jit(gradient)(q, k, v), want)


def test_without_remat_the_forward_runs_once():
    compiled = jax.jit(jax.grad(lambda q, k, v: simple(q, k, v).sum())).lower(*simple_operands()).compile()
    assert calls(compiled) == {"forward": 1, "backward": 1}


# Control flow ---------------------------------------------------------------------------------------------------------


@each_implementation
def test_scan_over_layers(implementation: str | None):
    q, k, v = simple_operands(T=S)
    v = k
    weights = np.random.default_rng(1).standard_normal((3, H)).astype(np.float32)

    def layer(x: Any, w: Any) -> Any:
        return simple(x * w, k, v, implementation), None

    def scanned(weights: Any) -> Any:
        return jax.lax.scan(layer, q, weights)[0].sum()

    def unrolled(weights: Any) -> Any:
        x = q
        for w in weights:
            x, _ = layer(x, w)
        return x.sum()

    check_close(jax.grad(scanned)(weights), jax.grad(unrolled)(weights))


def test_while_and_cond():
    q, k, v = simple_operands()
    v = k

    def repeat(q: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, simple(c[1], k, v)), (0, q))[1]

    check_close(jax.jit(repeat)(q), simple(simple(simple(q, k, v), k, v), k, v))
    f = lambda flag, q: jax.lax.cond(flag, lambda q: simple(q, k, v), lambda q: q, q).sum()  # noqa: E731
    check_close(jax.jit(jax.grad(f, 1))(True, q), jax.grad(lambda q: simple(q, k, v).sum())(q))
    check_close(jax.jit(jax.grad(f, 1))(False, q), np.ones_like(q))


# Ahead of time --------------------------------------------------------------------------------------------------------


def test_eval_shape():
    x = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), draw())
    out, lse = jax.eval_shape(call, x)
    assert (out.shape, out.dtype) == ((B, T, N, Hv), np.float32)
    assert (lse.shape, lse.dtype) == ((B, N, T), np.float32)
    grads = jax.eval_shape(jax.grad(loss), *split(x))
    assert {n: g.shape for n, g in grads.items()} == {n: x[n].shape for n in FLOATS}


CUSTOM_CALLS = [
    jax.export.DisabledSafetyCheck.custom_call(f"jax_fmha_{name}") for name in ("forward", "backward")
]


def test_export():
    primals, rest = split(draw())
    exported = jax.export.export(jax.jit(jax.grad(loss)), disabled_checks=CUSTOM_CALLS)(primals, rest)
    check_close(exported.call(primals, rest), single_grad(primals, rest))


def test_serialized_export_with_derivative():
    pytest.importorskip("flatbuffers", reason="jax serializes with flatbuffers")
    q, k, v = simple_operands()
    exported = jax.export.export(jax.jit(simple), disabled_checks=CUSTOM_CALLS)(q, k, v)
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    got = jax.grad(lambda q: again.call(q, k, v).sum())(q)
    check_close(got, jax.grad(lambda q: simple(q, k, v).sum())(q))


def test_donation():
    q, k, v = simple_operands()
    v = k
    want = np.asarray(simple(q, k, v))
    f = jax.jit(lambda q, k, v: simple(q, k, v), donate_argnums=0)
    donated = jnp.asarray(q)
    out = f(donated, k, v)
    assert donated.is_deleted()
    check_close(out, want)
    grads = jax.jit(jax.grad(lambda q: simple(q, k, v).sum()), donate_argnums=0)(jnp.asarray(q))
    check_close(grads, jax.grad(lambda q: simple(q, k, v).sum())(q))


def test_concurrent_calls():
    """Many threads through one program and through different ones."""
    inputs = [simple_operands(seed, T=33 + seed, S=50) for seed in range(6)]
    gradient = jax.jit(jax.grad(lambda q, k, v: simple(q, k, v).sum(), argnums=(0, 1, 2)))
    want = [jax.tree.map(np.asarray, gradient(*x)) for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda i: jax.tree.map(np.asarray, gradient(*inputs[i % 6])), range(60)))
    for i, result in enumerate(got):
        check_equal(result, want[i % 6])


# Derivatives that the native kernels do not have ----------------------------------------------------------------------

ONES = np.ones((B, T, N, H), np.float32)
REFUSED = {
    "jvp": lambda f, q: jax.jvp(f, (q,), (ONES,)),
    "jit_of_jvp": lambda f, q: jax.jit(lambda q: jax.jvp(f, (q,), (ONES,)))(q),
    "jacfwd": lambda f, q: jax.jacfwd(f)(q),
    "linearize": lambda f, q: jax.linearize(f, q)[1](ONES),
    "hessian": lambda f, q: jax.hessian(lambda q: f(q).sum())(q),
    "grad_of_grad": lambda f, q: jax.grad(lambda q: jax.grad(lambda q: (f(q) ** 2).sum())(q).sum())(q),
    "jvp_of_grad": lambda f, q: jax.jvp(jax.grad(lambda q: (f(q) ** 2).sum()), (q,), (ONES,)),
}


@pytest.mark.parametrize("way", REFUSED)
def test_forward_mode_and_second_order_name_the_remedy(way: str):
    q, k, v = simple_operands()
    with pytest.raises(NotImplementedError, match='implementation="xla"'):
        REFUSED[way](lambda q: simple(q, k, v), q)


@pytest.mark.parametrize("way", [w for w in REFUSED if w not in ("jacfwd", "hessian")])
def test_the_reference_has_them(way: str):
    q, k, v = simple_operands()
    f = lambda q: simple(q, k, v, "xla")  # noqa: E731
    for leaf in jax.tree.leaves(jax.jit(lambda q: REFUSED[way](f, q))(q)):
        assert np.isfinite(leaf).all()


def test_forward_mode_of_the_reference():
    """<jvp, cotangent> = <tangent, vjp>, on every differentiable operand, isolation included."""
    primals, rest = split(draw())
    tangents = {n: a for n, a in draw(5).items() if n in FLOATS}
    f = lambda p: call({**p, **rest}, "xla")  # noqa: E731
    (out, lse), (out_t, lse_t) = jax.jit(lambda p, t: jax.jvp(f, (p,), (t,)))(primals, tangents)
    live = np.isfinite(lse)
    cotangents = np.cos(out), np.where(live, np.sin(np.where(live, lse, 0)), 0).astype(np.float32)
    (grads,) = jax.jit(lambda p, ct: jax.vjp(f, p)[1](ct))(primals, cotangents)
    left = (out_t * cotangents[0]).sum() + np.where(live, lse_t * cotangents[1], 0).sum()
    right = sum((grads[n] * tangents[n]).sum() for n in FLOATS)
    np.testing.assert_allclose(left, right, rtol=1e-4)


def test_second_order_of_the_reference():
    """The derivative of the gradient along a direction against its central difference, in float64."""
    with jax.enable_x64(True):
        primals, rest = split(draw())
        primals = {n: a.astype(np.float64) for n, a in primals.items()}
        direction = {n: a.astype(np.float64) for n, a in draw(7).items() if n in FLOATS}
        gradient = jax.grad(lambda p: loss(p, rest, "xla"))
        _, got = jax.jit(lambda p, t: jax.jvp(gradient, (p,), (t,)))(primals, direction)
        step = 1e-5
        jitted = jax.jit(gradient)
        ahead, behind = (
            jitted({n: a + sign * step * direction[n] for n, a in primals.items()}) for sign in (1, -1)
        )
        for name, x in got.items():
            np.testing.assert_allclose(x, (ahead[name] - behind[name]) / (2 * step), rtol=1e-6, atol=1e-7)


# Sharding -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", check_names("sharding.py"))
def test_sharding(check: str):
    """On 8 devices in a fresh process; see tests/programs/sharding.py."""
    failure = checks("sharding.py", devices=8)[check]
    assert failure is None, failure

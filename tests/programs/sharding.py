"""Batch and heads split over 8 devices, in every way that JAX has; sequences refused. Run by test_promise_06_*."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checklist import main
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fmha import SegmentIds, attention

B, T, S, N, K, H, Hv = 4, 12, 16, 8, 4, 8, 6
MESH = (4, 2), ("data", "model")
HEADS = P("data", None, "model")  # of query, key, value and out
SPECS = {
    "query": HEADS,
    "key": HEADS,
    "value": HEADS,
    "bias": P(None, "model"),
    "mask": P("data"),
    "segments_q": P("data"),
    "segments_kv": P("data"),
    "lengths": P("data"),
    "sinks": P("model"),
}


def operands() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "query": rng.standard_normal((B, T, N, H), np.float32),
        "key": rng.standard_normal((B, S, K, H), np.float32),
        "value": rng.standard_normal((B, S, K, Hv), np.float32),
        "bias": rng.standard_normal((1, N, T, S), np.float32),
        "mask": rng.random((B, 1, T, S)) < 0.8,
        "segments_q": np.sort(rng.integers(0, 3, (B, T)).astype(np.int32)),
        "segments_kv": np.sort(rng.integers(0, 3, (B, S)).astype(np.int32)),
        "lengths": np.array([S, 3, S - 1, 0], np.int32),
        "sinks": rng.standard_normal(N, np.float32),
    }


def call(x: dict[str, Any], *, implementation: str | None = None) -> Any:
    return attention(
        x["query"],
        x["key"],
        x["value"],
        x["bias"],
        x["mask"],
        is_causal=True,
        segment_ids=SegmentIds(x["segments_q"], x["segments_kv"]),
        key_value_seq_lengths=x["lengths"],
        sinks=x["sinks"],
        return_lse=True,
        implementation=implementation,
    )


def loss(primals: dict[str, Any], rest: dict[str, Any], f: Any = call) -> Any:
    out, lse = f({**primals, **rest})
    return (out * jnp.cos(out)).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0).sum()


def split(x: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    floats = ("query", "key", "value", "bias", "sinks")
    return {n: a for n, a in x.items() if n in floats}, {n: a for n, a in x.items() if n not in floats}


@functools.cache
def expected() -> Any:
    x = operands()
    return call(x), jax.grad(loss)(*split(x))


def agree(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)


def mesh(kind: Any) -> Any:
    return jax.make_mesh(*MESH, axis_types=(kind,) * 2)


def placed(over: Any, specs: dict[str, Any] = SPECS) -> dict[str, Any]:
    return {n: jax.device_put(a, NamedSharding(over, specs[n])) for n, a in operands().items()}


def no_collective_gather(compiled: Any) -> None:
    text = compiled.as_text()
    assert "jax_fmha" in text
    for word in ("all-gather", "all-to-all", "collective-permute"):
        assert word not in text, f"{word} in the compiled program"


def check_jit_forward():
    over = mesh(AxisType.Auto)
    x = placed(over)
    compiled = jax.jit(call).lower(x).compile()
    no_collective_gather(compiled)
    out, lse = compiled(x)
    agree((out, lse), expected()[0])
    assert out.sharding.is_equivalent_to(NamedSharding(over, HEADS), 4), out.sharding
    assert lse.sharding.is_equivalent_to(NamedSharding(over, P("data", "model")), 3), lse.sharding
    assert out.addressable_shards[0].data.shape == (B // 4, T, N // 2, Hv)


def check_jit_gradient():
    over = mesh(AxisType.Auto)
    x = split(placed(over))
    compiled = jax.jit(jax.grad(loss)).lower(*x).compile()
    no_collective_gather(compiled)
    grads = compiled(*x)
    agree(grads, expected()[1])
    for name in ("query", "key", "value"):
        assert grads[name].sharding.is_equivalent_to(NamedSharding(over, HEADS), 4), grads[name].sharding


def check_jit_batch_over_both_axes():
    over = mesh(AxisType.Auto)
    x = {n: np.concatenate([a, a]) if n not in ("bias", "sinks") else a for n, a in operands().items()}
    both = P(("data", "model"))
    x = {
        n: jax.device_put(a, NamedSharding(over, both if n not in ("bias", "sinks") else P()))
        for n, a in x.items()
    }
    compiled = jax.jit(jax.grad(loss)).lower(*split(x)).compile()
    no_collective_gather(compiled)
    grads, want = compiled(*split(x)), expected()[1]
    agree(
        {n: grads[n][B:] for n in ("query", "key", "value")}, {n: want[n] for n in ("query", "key", "value")}
    )
    agree({n: grads[n] for n in ("bias", "sinks")}, {n: 2 * want[n] for n in ("bias", "sinks")})


def check_jit_operands_on_one_device():
    """Sharded query, everything else uncommitted: placed as the operation needs it."""
    over = mesh(AxisType.Auto)
    x = operands()
    x["query"] = jax.device_put(x["query"], NamedSharding(over, HEADS))
    agree(jax.jit(call)(x), expected()[0])


def check_jit_heads_that_do_not_divide():
    """Two devices cannot share one key/value head by heads of it: right nevertheless."""
    over = mesh(AxisType.Auto)
    rng = np.random.default_rng(1)
    q = rng.standard_normal((B, T, 6, H), np.float32)
    k, v = (rng.standard_normal((B, S, 1, H), np.float32) for _ in range(2))
    want = attention(q, k, v)
    q = jax.device_put(q, NamedSharding(over, HEADS))
    k, v = (jax.device_put(x, NamedSharding(over, P("data"))) for x in (k, v))
    agree(jax.jit(attention)(q, k, v), want)


def check_jit_vmap():
    over = mesh(AxisType.Auto)
    x = {n: np.stack([a, a]) for n, a in operands().items()}
    x = {n: jax.device_put(a, NamedSharding(over, P(None, *SPECS[n]))) for n, a in x.items()}
    compiled = jax.jit(jax.vmap(call)).lower(x).compile()
    no_collective_gather(compiled)
    out, lse = compiled(x)
    agree((out[1], lse[1]), expected()[0])


def check_shard_map():
    over = mesh(AxisType.Auto)
    f = jax.shard_map(call, mesh=over, in_specs=(SPECS,), out_specs=(HEADS, P("data", "model")))
    x = operands()
    agree(jax.jit(f)(x), expected()[0])
    grads = jax.jit(jax.grad(functools.partial(loss, f=f)))(*split(x))
    agree(grads, expected()[1])


def check_shard_map_gradient_inside():
    """grad of the operation inside shard_map: shared operands are summed over the mesh."""
    over = mesh(AxisType.Auto)
    primals, rest = split(operands())
    specs = split(SPECS)
    f = jax.shard_map(jax.grad(loss), mesh=over, in_specs=specs, out_specs=specs[0])
    agree(jax.jit(f)(primals, rest), expected()[1])


def check_shard_map_manual_over_one_axis():
    over = mesh(AxisType.Auto)
    data = {n: P("data") if "data" in spec else P() for n, spec in SPECS.items()}
    f = jax.shard_map(
        call, mesh=over, in_specs=(data,), out_specs=(P("data"), P("data")), axis_names={"data"}
    )
    with pytest.raises(NotImplementedError, match="manual over all mesh axes"):
        jax.jit(f)(placed(over))


def check_explicit_mesh():
    over = mesh(AxisType.Explicit)
    with jax.set_mesh(over):
        x = {n: jax.device_put(a, SPECS[n]) for n, a in operands().items()}
        compiled = jax.jit(call).lower(x).compile()
        no_collective_gather(compiled)
        out, lse = jax.jit(call)(x)
        assert jax.typeof(out).sharding.spec == P("data", None, "model", None), jax.typeof(out)
        assert jax.typeof(lse).sharding.spec == P("data", "model", None), jax.typeof(lse)
        agree((out, lse), expected()[0])


def check_explicit_mesh_gradient():
    over = mesh(AxisType.Explicit)
    with jax.set_mesh(over):
        x = {n: jax.device_put(a, SPECS[n]) for n, a in operands().items()}
        primals, rest = split(x)
        compiled = jax.jit(jax.grad(loss)).lower(primals, rest).compile()
        no_collective_gather(compiled)
        grads = jax.jit(jax.grad(loss))(primals, rest)
        for name, grad in grads.items():
            assert jax.typeof(grad).sharding == jax.typeof(primals[name]).sharding, (name, jax.typeof(grad))
        agree(grads, expected()[1])


def refused(f: Any, error: Any = ValueError) -> None:
    try:
        f()
    except error as caught:
        message = str(caught)
    else:
        raise AssertionError("a sharded sequence was not refused")
    for part in (
        "sharded over mesh axes ('model',)",
        "expected it whole on each device",
        "Shard batch or heads",
    ):
        assert part in message, message
    assert any(name in message for name in ("query", "key", "value")), message


def check_sharded_query_sequence_is_refused():
    over = mesh(AxisType.Explicit)
    with jax.set_mesh(over):
        q, k, v = (jax.device_put(operands()[n], P("data")) for n in ("query", "key", "value"))
        q = jax.device_put(q, P("data", "model"))
        refused(lambda: jax.jit(attention)(q, k, v))


def check_sharded_key_sequence_is_refused():
    over = mesh(AxisType.Explicit)
    with jax.set_mesh(over):
        q, k, v = (jax.device_put(operands()[n], P("data")) for n in ("query", "key", "value"))
        k, v = (jax.device_put(x, P("data", "model")) for x in (k, v))
        refused(lambda: jax.jit(attention)(q, k, v))


def check_sharded_head_dim_is_refused():
    over = mesh(AxisType.Explicit)
    with jax.set_mesh(over):
        q, k, v = (jax.device_put(operands()[n], P("data")) for n in ("query", "key", "value"))
        q = jax.device_put(q, P("data", None, None, "model"))
        refused(lambda: jax.jit(attention)(q, k, v))


def check_auto_mesh_refuses_a_sharded_sequence():
    over = mesh(AxisType.Auto)
    x = operands()
    q, k, v = (
        jax.device_put(x[n], NamedSharding(over, P("data", "model"))) for n in ("query", "key", "value")
    )
    # What XLA partitions is known while it compiles, and arrives as XLA's own error.
    refused(lambda: jax.jit(attention).lower(q, k, v).compile(), jax.errors.JaxRuntimeError)


def check_xla_explicit_mesh_gradient():
    """The reference takes part in sharding types as well."""
    over = mesh(AxisType.Explicit)
    f = functools.partial(call, implementation="xla")
    with jax.set_mesh(over):
        x = {n: jax.device_put(a, SPECS[n]) for n, a in operands().items()}
        primals, rest = split(x)
        grads = jax.jit(jax.grad(functools.partial(loss, f=f)))(primals, rest)
        agree(grads, expected()[1])


def check_xla_shard_map():
    over = mesh(AxisType.Auto)
    f = jax.shard_map(
        functools.partial(call, implementation="xla"),
        mesh=over,
        in_specs=(SPECS,),
        out_specs=(HEADS, P("data", "model")),
    )
    primals, rest = split(operands())
    agree(jax.jit(jax.grad(functools.partial(loss, f=f)))(primals, rest), expected()[1])


if __name__ == "__main__":
    assert jax.device_count() == 8
    main(dict(globals()))

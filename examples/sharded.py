"""Sharding over batch and heads: give the operands a sharding, call under jit; no communication is needed.

Runs anywhere: the eight devices are eight parts of the CPU.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fmha import attention

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
sharding = NamedSharding(mesh, P("data", None, "model", None))  # [batch, sequence, heads, head_dim]

batch, seqlen, query_heads, kv_heads, head_dim = 8, 128, 8, 4, 32
keys = jax.random.split(jax.random.key(0), 3)
q = jax.random.normal(keys[0], (batch, seqlen, query_heads, head_dim))
k = jax.random.normal(keys[1], (batch, seqlen, kv_heads, head_dim))
v = jax.random.normal(keys[2], (batch, seqlen, kv_heads, head_dim))


def grads(q, k, v):
    return jax.grad(lambda *qkv: jnp.sum(attention(*qkv, is_causal=True) ** 2), argnums=(0, 1, 2))(q, k, v)


operands = [jax.device_put(x, sharding) for x in (q, k, v)]
compiled = jax.jit(grads).lower(*operands).compile()
communication = [op for op in ("all-gather", "all-reduce", "all-to-all") if op in compiled.as_text()]
assert not communication, communication

for name, x, expected in zip(("dq", "dk", "dv"), compiled(*operands), grads(q, k, v), strict=True):
    shard = x.addressable_shards[0].data.shape
    print(f"{name} {x.shape}: {len(x.addressable_shards)} shards of {shard}")
    assert x.sharding.is_equivalent_to(sharding, x.ndim)
    assert jnp.allclose(jax.device_get(x), expected, atol=1e-4)
print("forward and backward compiled without all-gather, all-reduce or all-to-all")

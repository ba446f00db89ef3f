"""A decoder in the style of TPU training code, with the attention of either library by a flag.

Packed sequences with segment ids, alternating local and global layers, a soft cap on the logits, grouped
key/value heads, layers that are rematerialised but for the residuals named "context", and the kernel inside
`shard_map(vmap(...))`. The two libraries differ in one import, `load`.

    python examples/port_tpu_model.py                       # both, and the largest differences
    python examples/port_tpu_model.py --attention jax_fmha  # ours alone
    python examples/port_tpu_model.py --attention pallas    # the original alone, interpreted unless on a TPU
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def load(library: str) -> Any:
    """The import that a port changes."""
    if library == "jax_fmha":
        from jax_fmha.tpu import splash_attention
    else:
        from jax.experimental.pallas.ops.tpu import splash_attention
    return splash_attention


@dataclasses.dataclass(frozen=True)
class Config:
    batch: int = 2
    length: int = 256
    vocabulary: int = 101
    features: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    window: int = 48
    soft_cap: float = 20.0
    num_layers: int = 2


Parameters = dict[str, Any]


def initialize(config: Config) -> Parameters:
    """float32 parameters, the same ones every time."""
    random = np.random.default_rng(0)
    c = config
    shapes = {
        "query": (c.features, c.num_heads, c.head_dim),
        "key": (c.features, c.num_kv_heads, c.head_dim),
        "value": (c.features, c.num_kv_heads, c.head_dim),
        "out": (c.num_heads, c.head_dim, c.features),
        "up": (c.features, 4 * c.features),
        "down": (4 * c.features, c.features),
    }

    def draw(shape: tuple[int, ...]) -> jax.Array:
        fan_in = np.prod(shape[:-1]) if shape[-1] == c.features else shape[0]
        return jnp.asarray(random.standard_normal(shape) / np.sqrt(fan_in), jnp.float32)

    return {
        "embedding": draw((c.vocabulary, c.features)),
        "layers": [{name: draw(shape) for name, shape in shapes.items()} for _ in range(c.num_layers)],
    }


def packed_batch(config: Config) -> tuple[jax.Array, jax.Array]:
    """(tokens, segment ids) int32 `[batch, length]`: several documents a row, padding with id 0 at the end."""
    random = np.random.default_rng(1)
    shape = (config.batch, config.length)
    tokens = random.integers(0, config.vocabulary, shape)
    ids = np.cumsum(random.random(shape) < 3 / config.length, axis=1) + 1
    ids[:, -config.length // 10 :] = 0
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(ids, jnp.int32)


def make_attention(library: str, config: Config, mesh: jax.sharding.Mesh, *, is_local: bool) -> Any:
    """A function of query, key, value `[batch, heads, length, head_dim]` and segment ids, for one kind of layer."""
    splash = load(library)
    shape = (config.length, config.length)
    mask = splash.LocalMask(shape, (config.window - 1, 0), 0) if is_local else splash.CausalMask(shape)
    blocks = splash.splash_attention_kernel.BlockSizes(
        block_q=128, block_kv=128, block_q_dkv=128, block_kv_dkv=128, use_fused_bwd_kernel=True
    )
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * config.num_heads),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=config.soft_cap,
        residual_checkpoint_name="context",
        # Off a TPU, Pallas TPU kernels need the interpreter. Ours run as they are.
        interpret=library == "pallas" and jax.default_backend() != "tpu",
    )
    kernel_spec = kernel.manual_sharding_spec(NamedSharding(mesh, P(None, None)))
    rows = P("data")

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(kernel_spec, rows, rows, rows, splash.splash_attention_kernel.SegmentIds(rows, rows)),
        out_specs=rows,
        check_vma=False,
    )
    def sharded(kernel: Any, query: Any, key: Any, value: Any, segment_ids: Any) -> Any:
        return jax.vmap(kernel)(query, key, value, segment_ids)

    def attention(query: Any, key: Any, value: Any, ids: Any) -> Any:
        query = query / np.sqrt(config.head_dim).astype(query.dtype)  # splash kernels do not scale
        return sharded(kernel, query, key, value, splash.splash_attention_kernel.SegmentIds(ids, ids))

    return attention


def normalize(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def make_loss(library: str, config: Config, mesh: jax.sharding.Mesh) -> Any:
    """Mean next-token cross entropy, a function of parameters, tokens and segment ids."""
    kinds = [make_attention(library, config, mesh, is_local=is_local) for is_local in (True, False)]

    def layer(attention: Any, p: Parameters, x: jax.Array, ids: jax.Array) -> jax.Array:
        h = normalize(x)
        query, key, value = (jnp.einsum("btf,fnh->bnth", h, p[n]) for n in ("query", "key", "value"))
        x = x + jnp.einsum("bnth,nhf->btf", attention(query, key, value, ids), p["out"])
        return x + jax.nn.gelu(normalize(x) @ p["up"]) @ p["down"]

    policy = jax.checkpoint_policies.save_only_these_names("context")

    def loss(parameters: Parameters, tokens: jax.Array, ids: jax.Array) -> jax.Array:
        x = parameters["embedding"][tokens]
        for i, p in enumerate(parameters["layers"]):
            x = jax.checkpoint(functools.partial(layer, kinds[i % 2]), policy=policy)(p, x, ids)
        logits = normalize(x) @ parameters["embedding"].T
        log_p = jax.nn.log_softmax(logits[:, :-1])
        picked = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
        counted = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] != 0)
        return -jnp.sum(picked * counted) / jnp.sum(counted)

    return loss


def evaluate(library: str, config: Config, mesh: jax.sharding.Mesh) -> tuple[float, Parameters]:
    """(loss, gradients) of one step."""
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(make_loss(library, config, mesh)))
        value, grads = step(initialize(config), *packed_batch(config))
    return float(value), jax.device_get(grads)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attention", choices=["both", "jax_fmha", "pallas"], default="both")
    parser.add_argument("--length", type=int, default=Config.length, help="tokens a row; 128s for pallas")
    arguments = parser.parse_args()

    config = Config(length=arguments.length)
    devices = jax.devices()[: 2 if jax.device_count() >= 2 else 1]  # they divide the batch of 2
    mesh = jax.make_mesh(
        (len(devices),), ("data",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,)
    )
    libraries = ["jax_fmha", "pallas"] if arguments.attention == "both" else [arguments.attention]
    results = {}
    for library in libraries:
        results[library] = evaluate(library, config, mesh)
        norm = np.sqrt(sum(np.sum(g * g) for g in jax.tree.leaves(results[library][1])))
        print(f"{library:10}  loss {results[library][0]:.6f}  gradient norm {norm:.6f}")
    if len(results) == 2:
        (a, da), (b, db) = results.values()
        pairs = zip(jax.tree.leaves(da), jax.tree.leaves(db), strict=True)
        largest = max(float(np.abs(x - y).max()) for x, y in pairs)
        print(f"largest difference: loss {abs(a - b):.2e}, gradients {largest:.2e}")
        assert abs(a - b) < 1e-5 * abs(b)
        assert largest < 1e-5


if __name__ == "__main__":
    main()

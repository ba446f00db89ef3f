"""One small call of each kernel, forward and backward, for compute-sanitizer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fmha import SegmentIds, TileMask, attention

T, S, N, K = 200, 330, 2, 1

OPTIONS: dict[str, dict[str, Any]] = {
    "every key": {},
    "an interval of keys": {"is_causal": True, "query_offset": S - T, "key_value_seq_lengths": [300]},
    "segments": {"segment_ids": SegmentIds([[i // 50 for i in range(T)]], [[j // 70 for j in range(S)]])},
    "any keys": {"mask": [[j % 3 > 0 for j in range(S)]] * T, "logits_soft_cap": 20.0},
    "blocks of keys": {"mask": [[i // 70 != j // 110 for j in range(S)] for i in range(T)]},
    "tiles of keys": {"mask": TileMask.from_array(np.tri(T, S, 40, dtype=bool)[None], (64, 64))},
    "bias of pairs": {"bias": np.ones((N, T, S))},
    "bias of keys": {"bias": np.ones((1, 1, S))},
}
DETERMINISTIC = ("segments", "blocks of keys")


def main() -> None:
    for head_dim in (64, 128):
        shapes = [(1, T, N, head_dim), (1, S, K, head_dim), (1, S, K, head_dim), (1, T, N, head_dim)]
        q, k, v, dout = (
            jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes)
        )
        for name, options in OPTIONS.items():
            options = jax.tree.map(jnp.asarray, options, is_leaf=lambda x: isinstance(x, list))
            options["is_causal"] = name == "an interval of keys"
            options["deterministic"] = name in DETERMINISTIC
            bias = options.pop("bias", None)

            def gradients(q: Any, k: Any, v: Any, bias: Any, dout: Any, options: Any = options) -> Any:
                return jax.vjp(lambda *x: attention(*x, **options), q, k, v, bias)[1](dout)

            bias = None if bias is None else bias.astype(jnp.bfloat16)
            jax.block_until_ready(jax.jit(gradients)(q, k, v, bias, dout))
            print(f"{name}, head_dim {head_dim}", flush=True)


if __name__ == "__main__":
    main()

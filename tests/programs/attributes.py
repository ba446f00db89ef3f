"""First calls of a process with odd but right argument types, and raw custom calls with wrong ones.

After a rightly typed call in a process an equal but wrongly typed one can succeed, so each kind starts fresh: the
kind is the program's argument.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

import jax_fmha

KINDS = {
    "numpy_bool": {"is_causal": np.True_, "deterministic": np.False_},
    "numpy_int32": {"is_causal": True, "local_window_size": (np.int32(3), np.int32(1))},
    "numpy_int64": {"is_causal": True, "local_window_size": np.int64(3)},
    "list_window": {"is_causal": True, "local_window_size": [3, None]},
    "numpy_scalars": {
        "scale": np.float64(0.5),
        "logits_soft_cap": np.float16(2),
        "query_offset": np.int16(1),
    },
    "python_scalars": {"scale": 1, "logits_soft_cap": 2, "query_offset": 1, "is_causal": True},
    "insists": {"implementation": "cpu", "is_causal": True},
}
WRONG = {
    "raw_int_for_bool": {"is_causal": np.int32(1)},
    "raw_int32_for_int64": {"window_left": np.int32(3)},
    "raw_float_for_int64": {"window_right": 3.0},
    "raw_missing": {"deterministic": None},
    "raw_extra": {"unknown": True},
}


def operands() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32) for shape in ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))]


def run(kind: str) -> None:
    q, k, v = operands()
    options = KINDS[kind]
    got = jax.grad(lambda q: jax_fmha.attention(q, k, v, **options).sum())(q)
    options = options | {"implementation": "xla"}
    want = jax.jit(jax.grad(lambda q: jax_fmha.attention(q, k, v, **options).sum()))(q)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def run_raw(kind: str) -> None:
    attributes = {
        "is_causal": True,
        "window_left": 1 << 40,
        "window_right": 1 << 40,
        "deterministic": False,
        "implementation": "",
    }
    attributes |= WRONG[kind]
    attributes = {name: x for name, x in attributes.items() if x is not None}
    q, k, v = operands()
    absent = jnp.zeros((0,), jnp.float32)
    arguments = [q, k, v, *[absent] * 4, np.full((1,), 0.5, np.float32), *[absent] * 9]
    results = [
        jax.ShapeDtypeStruct((2, 5, 4, 8), jnp.float32),
        jax.ShapeDtypeStruct((2, 4, 5), jnp.float32),
        jax.ShapeDtypeStruct((1 << 24,), jnp.uint8),
    ]
    try:
        jax.block_until_ready(jax.ffi.ffi_call("jax_fmha_forward", results)(*arguments, **attributes))
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
    else:
        raise AssertionError("accepted")
    assert "ttribute" in message or "Wrong scalar data type" in message, message


if __name__ == "__main__":
    (asked,) = sys.argv[1:]
    run(asked) if asked in KINDS else run_raw(asked)

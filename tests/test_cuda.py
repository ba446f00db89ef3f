"""CUDA as far as a machine without a device can tell: choice, refusals, lowering, the library. See also tests/gpu."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_fmha
from jax_fmha import SegmentIds, TileMask, _core, attention, explain
from jax_fmha._problem import Options, describe

SPEC = jax.ShapeDtypeStruct
KERNELS = ("sm90_forward", "sm90_backward")
BLACKWELL_KERNELS = ("sm100_forward", "sm100_backward")
SEGMENTS = SegmentIds(SPEC((2, 256), jnp.int32), SPEC((2, 320), jnp.int32))
# Four query heads' tiles of 128 x 128, five of them partial.
TILES = TileMask(SPEC((1, 4, 2, 3), jnp.int32), SPEC((1, 5, 128, 16), jnp.uint8))
LIBRARY = Path(jax_fmha.__file__).with_name("libjax_fmha_cuda.so")


def qkv(head_dim: int = 128, head_dim_v: int | None = None, dtype: Any = jnp.bfloat16) -> list[Any]:
    head_dim_v = head_dim_v or head_dim
    return [
        SPEC((2, 256, 4, head_dim), dtype),
        SPEC((2, 320, 2, head_dim), dtype),
        SPEC((2, 320, 2, head_dim_v), dtype),
    ]


def hopper(*args: Any, **kwargs: Any) -> Any:
    return explain(*args, **kwargs, platform="cuda", compute_capability="9.0")


def blackwell(*args: Any, **kwargs: Any) -> Any:
    return explain(*args, **kwargs, platform="cuda", compute_capability="10.0")


def lowered(f: Any, *args: Any) -> str:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 136, 192, 256])
def test_hopper_takes_16_bits(head_dim: int, dtype: Any):
    assert hopper(*qkv(head_dim, dtype=dtype), is_causal=True).kernel == KERNELS


@pytest.mark.parametrize(
    "options",
    [
        {"key_value_seq_lengths": SPEC((2,), jnp.int32)},
        {"segment_ids": SEGMENTS},
        {"mask": SPEC((2, 1, 256, 320), bool)},
        {"mask": TILES, "segment_ids": SEGMENTS},
        {"bias": SPEC((1, 4, 1, 320), jnp.bfloat16)},
        {"segment_ids": SEGMENTS, "mask": SPEC((256, 320), bool), "deterministic": True},
        {"bias": SPEC((2, 4, 256, 320), jnp.float32), "deterministic": True},
        {"local_window_size": (64, 0), "query_offset": 64},
        {"sinks": SPEC((4,), jnp.float32), "logits_soft_cap": 20.0, "return_lse": True},
    ],
    ids=[
        "lengths",
        "segments",
        "mask",
        "tiles",
        "bias",
        "ordered segments",
        "ordered bias",
        "window",
        "sinks",
    ],
)
def test_every_option_is_taken(options: dict[str, Any]):
    assert hopper(*qkv(), **options).kernel == KERNELS
    assert blackwell(*qkv(), **options).kernel == BLACKWELL_KERNELS


@pytest.mark.parametrize(
    ("operands", "reason"),
    [
        (qkv(dtype=jnp.float32), "dtype float32"),
        (qkv(60), "head_dim 60: only multiples of 8 up to 256"),
        (qkv(264), "head_dim 264"),
        (qkv(64, 60), "value's head_dim 60"),
    ],
)
def test_hopper_refuses_with_a_reason(operands: list[Any], reason: str):
    explanation = hopper(*operands)
    assert explanation.kernel == (None, None)
    assert all(reason in explanation.refusals[name] for name in KERNELS)
    with pytest.raises(NotImplementedError, match=rf"(?s)sm90_forward: .*{reason}.*implementation=\"xla\""):
        lowered(attention, *operands)


def test_sums_of_a_shared_bias_are_not_ordered():
    bias = SPEC((1, 4, 256, 320), jnp.bfloat16)
    for explanation, (forward, backward) in (
        (hopper(*qkv(), bias, deterministic=True), KERNELS),
        (blackwell(*qkv(), bias, deterministic=True), BLACKWELL_KERNELS),
    ):
        assert explanation.kernel == (forward, None)
        assert "gradient of bias that is summed over a dimension" in explanation.refusals[backward]


@pytest.mark.parametrize("capability", ["8.0", 8.9, 12.0])
def test_other_devices_are_refused(capability: Any):
    explanation = explain(*qkv(), platform="cuda", compute_capability=capability)
    assert explanation.kernel == (None, None)
    assert all("9.0 (Hopper) is needed" in explanation.refusals[name] for name in KERNELS)
    assert all("10.0 or 10.3 (Blackwell" in explanation.refusals[name] for name in BLACKWELL_KERNELS)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("capability", ["10.0", 10.3])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 8), (64, 64), (96, 96), (128, 128), (192, 128)])
def test_blackwell_takes_16_bits(head_dim: int, head_dim_v: int, capability: Any, dtype: Any):
    explanation = explain(
        *qkv(head_dim, head_dim_v, dtype), is_causal=True, platform="cuda", compute_capability=capability
    )
    assert explanation.kernel == BLACKWELL_KERNELS
    assert all("9.0 (Hopper) is needed" in explanation.refusals[name] for name in KERNELS)


@pytest.mark.parametrize(
    ("operands", "reason"),
    [
        (qkv(dtype=jnp.float32), "dtype float32"),
        (qkv(264), "head_dim 264"),
        (qkv(64, 60), "value's head_dim 60"),
    ],
)
def test_blackwell_refuses_with_a_reason(operands: list[Any], reason: str):
    explanation = explain(*operands, platform="cuda", compute_capability="10.0")
    assert explanation.kernel == (None, None)
    assert all(reason in explanation.refusals[name] for name in BLACKWELL_KERNELS)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "reason"),
    [
        (256, 256, "head_dim 256: only multiples of 8 up to 192"),
        (200, 128, "head_dim 200: only multiples of 8 up to 192"),
        (192, 192, "value's head_dim 192: only multiples of 8 up to 128"),
    ],
)
def test_blackwell_has_no_backward_of_large_heads(head_dim: int, head_dim_v: int, reason: str):
    explanation = blackwell(*qkv(head_dim, head_dim_v))
    assert explanation.kernel == (BLACKWELL_KERNELS[0], None)
    assert reason in explanation.refusals[BLACKWELL_KERNELS[1]]


def test_blackwell_12_has_no_tensor_memory():
    explanation = explain(*qkv(), platform="cuda", compute_capability="12.0")
    assert all("has no tensor memory" in explanation.refusals[name] for name in BLACKWELL_KERNELS)


def test_blackwell_lowers_without_a_device():
    def loss(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, implementation="sm100").astype(jnp.float32).sum()

    text = lowered(jax.grad(loss, (0, 1, 2)), *qkv())
    assert text.count("@jax_fmha_forward(") == 1
    assert text.count("@jax_fmha_backward(") == 1


def test_an_installation_without_kernels_says_how_to_get_them():
    operands = dict(zip("qkv", qkv(), strict=True)) | {"scale": SPEC((1,), jnp.float32)}
    problem = describe(operands, Options(), backward=False)
    name, refusals = _core.select(problem, _core.Device("cuda", 90, False, 1))
    assert name == ""
    assert "-C cmake.define.JAX_FMHA_CUDA=ON" in dict(refusals)["sm90_forward"]


def test_lowers_without_a_device():
    """For a machine that is not here: neither the library nor a device is asked for."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, is_causal=True).astype(jnp.float32).sum()

    text = lowered(jax.grad(loss, (0, 1, 2)), *qkv())
    assert text.count("@jax_fmha_forward(") == 1
    assert text.count("@jax_fmha_backward(") == 1


def test_handlers_stand_ready_for_cuda():
    """Registered when the package is imported, so that an exported program finds them."""
    assert set(_core.targets()) == {"cpu", "CUDA"}
    assert set(_core.targets()["CUDA"]) == {"jax_fmha_forward", "jax_fmha_backward"}


def test_installation_knows_whether_it_has_the_library():
    assert _core.has_cuda_kernels() == LIBRARY.exists()


@pytest.mark.skipif(not LIBRARY.exists(), reason="built without CUDA kernels")
def test_library_loads_without_a_device():
    assert ctypes.CDLL(str(LIBRARY)).jax_fmha_run_on_cuda
    needed = LIBRARY.read_bytes()
    assert b"libcudart.so" not in needed
    assert b"libpython" not in needed
    assert len(needed) < 60 * 2**20

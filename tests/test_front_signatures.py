"""The fronts against the installed originals, by inspection: names, order, kinds and defaults of arguments."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from typing import Any

import flax.linen
import flax.nnx
import jax
import pytest
from jax.experimental.pallas.ops.tpu import flash_attention as original_flash
from jax.experimental.pallas.ops.tpu import splash_attention as original_splash

import jax_fmha
import jax_fmha.flax
from jax_fmha.tpu import flash_attention, splash_attention, tokamax_splash_attention

Parameter = tuple[str, Any, Any]


def plain(default: Any) -> Any:
    """Defaults compare across packages by value; enumeration members by name."""
    return default.name if isinstance(default, enum.Enum) else default


def parameters(function: Any) -> list[Parameter]:
    signature = inspect.signature(function)
    return [(p.name, p.kind, plain(p.default)) for p in signature.parameters.values()]


def fields(cls: Any) -> list[tuple[str, Any]]:
    return [(f.name, plain(f.default)) for f in dataclasses.fields(cls)]


FLASH = ("flash_attention", "mha_reference", "mha_reference_bwd")
MAKERS = (
    "make_splash_mha",
    "make_splash_mqa",
    "make_splash_mha_single_device",
    "make_splash_mqa_single_device",
    "make_masked_mha_reference",
    "make_masked_mqa_reference",
)
MASKS = (
    "CausalMask",
    "ChunkedCausalMask",
    "FullMask",
    "LocalMask",
    "LogicalAnd",
    "LogicalOr",
    "MultiHeadMask",
    "NumpyMask",
    "_ComputableMask",
    "make_causal_mask",
    "make_chunk_attention_mask",
    "make_local_attention_mask",
    "make_random_mask",
)


def test_jax_nn() -> None:
    assert parameters(jax_fmha.dot_product_attention) == parameters(jax.nn.dot_product_attention)


@pytest.mark.parametrize("name", FLASH)
def test_flash_functions(name: str) -> None:
    assert parameters(getattr(flash_attention, name)) == parameters(getattr(original_flash, name))


def test_flash_block_sizes() -> None:
    assert fields(flash_attention.BlockSizes) == fields(original_flash.BlockSizes)
    ours, theirs = (m.BlockSizes.get_default(1, 2, 3, 4, 5) for m in (flash_attention, original_flash))
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
    assert parameters(ours.get_default) == parameters(theirs.get_default)
    assert ours.has_backward_blocks
    assert theirs.has_backward_blocks
    partial = {"block_q": 128, "block_k_major": 256, "block_k": 128, "block_b": 1}
    assert not flash_attention.BlockSizes(**partial).has_backward_blocks
    for module in (flash_attention, original_flash):
        with pytest.raises(ValueError, match="block_k"):
            module.BlockSizes(**{**partial, "block_k": 96})


def test_default_mask_values() -> None:
    assert flash_attention.DEFAULT_MASK_VALUE == original_flash.DEFAULT_MASK_VALUE
    kernel = splash_attention.splash_attention_kernel
    assert kernel.DEFAULT_MASK_VALUE == original_splash.splash_attention_kernel.DEFAULT_MASK_VALUE


@pytest.mark.parametrize("module", [flash_attention, splash_attention], ids=["flash", "splash"])
def test_segment_ids(module: Any) -> None:
    original = original_flash if module is flash_attention else original_splash
    assert module.SegmentIds._fields == original.SegmentIds._fields == ("q", "kv")


def test_splash_exports_what_the_original_exports() -> None:
    theirs = {name for name in dir(original_splash) if not name.startswith("_")}
    # The tables of the TPU schedule are no interface.
    assert theirs - set(dir(splash_attention)) <= {"splash_attention_mask_info"}


@pytest.mark.parametrize("name", MAKERS)
def test_splash_makers(name: str) -> None:
    assert parameters(getattr(splash_attention, name)) == parameters(getattr(original_splash, name))


@pytest.mark.parametrize("name", MASKS)
def test_splash_masks(name: str) -> None:
    ours, theirs = (m.splash_attention_mask for m in (splash_attention, original_splash))
    assert parameters(getattr(ours, name)) == parameters(getattr(theirs, name))


def test_splash_block_sizes() -> None:
    ours, theirs = splash_attention.BlockSizes, original_splash.BlockSizes
    assert fields(ours) == fields(theirs)
    for arguments in ({}, {"block_q_dkv": 1, "block_kv_dkv": 2, "use_fused_bwd_kernel": True}):
        a, b = (cls(block_q=8, block_kv=16, **arguments) for cls in (ours, theirs))
        assert dataclasses.asdict(a) == dataclasses.asdict(b)
        assert a.has_backward_blocks == b.has_backward_blocks
    assert dataclasses.asdict(ours.get_default()) == dataclasses.asdict(theirs.get_default())
    for cls in (ours, theirs):
        with pytest.raises(ValueError, match="fused"):
            cls(block_q=8, block_kv=8, block_q_dq=8, use_fused_bwd_kernel=True)
    layouts = [(m.name, m.value) for m in splash_attention.QKVLayout]
    assert layouts == [(m.name, m.value) for m in original_splash.QKVLayout]


def test_splash_kernel_call() -> None:
    """The original's kernel passes its arguments on to a function that also takes the mask and the options."""
    inner = parameters(original_splash.splash_attention_kernel._splash_attention)
    theirs = [(name, default) for name, kind, default in inner if kind != inspect.Parameter.KEYWORD_ONLY]
    ours = [
        (name, default) for name, _, default in parameters(splash_attention.SplashAttentionKernel.__call__)
    ]
    assert ours[1:] == [p for p in theirs if not p[0].endswith("_mask_info")]
    original = original_splash.splash_attention_kernel.SplashAttentionKernel
    assert parameters(splash_attention.SplashAttentionKernel.manual_sharding_spec) == parameters(
        original.manual_sharding_spec
    )


# tokamax at commit 783ea95; it is no dependency of the tests.
SPLASH_CONFIG = (
    "block_q block_kv block_kv_compute block_q_dkv block_kv_dkv block_kv_dkv_compute block_q_dq block_kv_dq "
    "use_fused_bwd_kernel num_stacked_q_heads q_layout k_layout v_layout fwd_cost_estimate bwd_cost_estimate "
    "residual_checkpoint_name attn_logits_soft_cap fuse_reciprocal use_base2_exp max_logit_const interpret "
    "dq_reduction_steps use_experimental_scheduler qk_diag_skip qk_diag_grid"
)
TOKAMAX_MAKER = (
    "mask config is_mqa save_residuals mask_value downcast_smem_data partial_mask_blocks_dtype q_seq_shards"
)
TOKAMAX_DYNAMIC_MAKER = (
    "mask mesh mask_spec config is_mqa save_residuals mask_value downcast_smem_data partial_mask_blocks_dtype"
)


def test_tokamax_names() -> None:
    ours = tokamax_splash_attention.splash_attention_kernel
    assert " ".join(f.name for f in dataclasses.fields(ours.SplashConfig)) == SPLASH_CONFIG
    for kind in ("mha", "mqa"):
        for suffix in ("", "_single_device"):
            maker = getattr(ours, f"make_splash_{kind}{suffix}")
            assert " ".join(inspect.signature(maker).parameters) == TOKAMAX_MAKER
        maker = getattr(ours, f"make_dynamic_splash_{kind}")
        assert " ".join(inspect.signature(maker).parameters) == TOKAMAX_DYNAMIC_MAKER


@pytest.mark.parametrize("original", [flax.linen, flax.nnx], ids=["linen", "nnx"])
def test_flax(original: Any) -> None:
    ours = {name: default for name, _, default in parameters(jax_fmha.flax.attention_fn)}
    theirs = {name: default for name, _, default in parameters(original.dot_product_attention)}
    theirs.pop("promote_dtype", None)  # a function of nnx there, None here
    assert theirs == {name: ours[name] for name in theirs}
    # By position, too, as far as linen and nnx agree with each other.
    count = list(theirs).index("module") + 1
    assert list(ours)[:count] == list(theirs)[:count]

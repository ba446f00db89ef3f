"""No argument of the TPU fronts is accepted and ignored: each one makes another program, is refused, or is a hint.

Hints shape the kernels of the TPU and mean nothing for the numbers. They are checked, they are listed in
docs/porting.md, and the program with a hint is the program without it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import flash_attention as original_flash
from jax.experimental.pallas.ops.tpu import splash_attention as original_splash

from jax_fmha.tpu import flash_attention as flash
from jax_fmha.tpu.splash_attention import splash_attention_kernel as splash
from jax_fmha.tpu.splash_attention import splash_attention_mask as masks
from jax_fmha.tpu.tokamax_splash_attention import splash_attention_kernel as tokamax

N, T, H = 2, 256, 8
SEQ_MINOR = splash.QKVLayout.SEQ_MINOR

# Values other than the default, by argument. The fields of a config stand beside the arguments that hold it.
FLASH_HINTS = {
    "block_q": 64,
    "block_k_major": 256,
    "block_k": 64,
    "block_b": 2,
    "block_q_major_dkv": 256,
    "block_k_major_dkv": 256,
    "block_k_dkv": 64,
    "block_q_dkv": 64,
    "block_k_major_dq": 256,
    "block_k_dq": 64,
    "block_q_dq": 64,
}
BLOCK_HINTS = {
    "block_q": 256,
    "block_kv": 256,
    "block_kv_compute": 64,
    "block_q_dkv": 256,
    "block_kv_dkv": 256,
    "block_kv_dkv_compute": 64,
    "block_q_dq": 256,
    "block_kv_dq": 256,
    "q_layout": SEQ_MINOR,
    "k_layout": SEQ_MINOR,
    "v_layout": SEQ_MINOR,
}
SPLASH_HINTS = BLOCK_HINTS | {"downcast_smem_data": False, "use_fused_bwd_kernel": True}
TOKAMAX_HINTS = BLOCK_HINTS | {
    "downcast_smem_data": False,
    "partial_mask_blocks_dtype": np.int32,
    "num_stacked_q_heads": 2,
    "fwd_cost_estimate": object(),
    "bwd_cost_estimate": object(),
    "fuse_reciprocal": False,
    "use_base2_exp": False,
    "dq_reduction_steps": 3,
    "use_experimental_scheduler": True,
    "qk_diag_skip": True,
    "qk_diag_grid": 4,
}
FLASH_EFFECTS = {
    "ab": jnp.ones((1, N, T, T)),
    "segment_ids": flash.SegmentIds(jnp.zeros((1, T), jnp.int32), jnp.zeros((1, T), jnp.int32)),
    "causal": True,
    "sm_scale": 0.5,
}
FLASH_REFUSED = {"debug": True}
SPLASH_EFFECTS = {
    "save_residuals": True,
    "attn_logits_soft_cap": 3.0,
    "head_shards": 2,
    "q_seq_shards": 2,
    "residual_checkpoint_name": "context",
    "interpret": True,
}
SPLASH_REFUSED = {"mask_value": -1.0}
TOKAMAX_EFFECTS = {name: x for name, x in SPLASH_EFFECTS.items() if name != "head_shards"}
TOKAMAX_REFUSED = {"mask_value": -1.0, "max_logit_const": 20.0, "use_fused_bwd_kernel": False}
# What every call gives, and what holds the fields above.
GIVEN = {"q", "k", "v", "mask", "is_mqa", "block_sizes", "config"}


def operands(*batch: int) -> tuple[jax.Array, ...]:
    return (jnp.ones((*batch, N, T, H)),) * 3


def program(attend: Any, *batch: int) -> str:
    """Forward and backward as a program, residual names included."""

    def loss(*arrays: Any) -> Any:
        return sum(x.sum() for x in jax.tree.leaves(attend(*arrays)))

    return str(jax.make_jaxpr(jax.value_and_grad(loss, (0, 1, 2)))(*operands(*batch)))


def split(cls: Any, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields of the config, other options)"""
    names = {f.name for f in dataclasses.fields(cls)}
    return {n: x for n, x in options.items() if n in names}, {
        n: x for n, x in options.items() if n not in names
    }


def flash_program(**options: Any) -> str:
    fields, rest = split(flash.BlockSizes, options)
    sizes = dataclasses.replace(flash.BlockSizes.get_default(1, N, T, T, H), **fields) if fields else None
    return program(functools.partial(flash.flash_attention, block_sizes=sizes, **rest), 1)


def splash_program(**options: Any) -> str:
    fields, rest = split(splash.BlockSizes, options)
    if fields.get("use_fused_bwd_kernel"):
        fields |= {"block_q_dq": None, "block_kv_dq": None}
    sizes = dataclasses.replace(splash.BlockSizes.get_default(), **fields) if fields else None
    mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * N)
    kernel = splash.make_splash_mha(mask, block_sizes=sizes, **{"head_shards": 1, "q_seq_shards": 1, **rest})
    return f"{program(kernel)} {jax.tree.structure(kernel)}"


def tokamax_program(**options: Any) -> str:
    fields, rest = split(tokamax.SplashConfig, options)
    config = dataclasses.replace(tokamax.SplashConfig.get_default(), **fields) if fields else None
    kernel = tokamax.make_splash_mha(masks.CausalMask((T, T)), config=config, **{"q_seq_shards": 1, **rest})
    return f"{program(kernel)} {jax.tree.structure(kernel)}"


FRONTS = {
    "flash": (flash_program, FLASH_HINTS, FLASH_EFFECTS, FLASH_REFUSED),
    "splash": (splash_program, SPLASH_HINTS, SPLASH_EFFECTS, SPLASH_REFUSED),
    "tokamax": (tokamax_program, TOKAMAX_HINTS, TOKAMAX_EFFECTS, TOKAMAX_REFUSED),
}
each_front = pytest.mark.parametrize("front", FRONTS)


def cases(index: int) -> Any:
    found = [(front, name) for front, tables in FRONTS.items() for name in tables[index]]
    return pytest.mark.parametrize(("front", "name"), found)


@each_front
def test_every_argument_is_accounted_for(front: str) -> None:
    function, config = {
        "flash": (flash.flash_attention, flash.BlockSizes),
        "splash": (splash.make_splash_mha, splash.BlockSizes),
        "tokamax": (tokamax.make_splash_mha, tokamax.SplashConfig),
    }[front]
    known = set().union(*FRONTS[front][1:])
    names = {*inspect.signature(function).parameters, *(f.name for f in dataclasses.fields(config))}
    assert names - GIVEN == known


@functools.cache
def default(front: str) -> str:
    return FRONTS[front][0]()


@cases(1)
def test_a_hint_makes_the_same_program(front: str, name: str) -> None:
    make, hints, _, _ = FRONTS[front]
    assert make(**{name: hints[name]}) == default(front)


@cases(2)
def test_an_effect_makes_another_program(front: str, name: str) -> None:
    make, _, effects, _ = FRONTS[front]
    assert make(**{name: effects[name]}) != default(front)


@cases(3)
def test_what_cannot_be_honoured_is_refused(front: str, name: str) -> None:
    make, _, _, refused = FRONTS[front]
    with pytest.raises((NotImplementedError, ValueError), match=f"{name}: expected"):
        make(**{name: refused[name]})


@each_front
def test_the_guide_names_every_argument(front: str) -> None:
    guide = pathlib.Path(__file__).parent.parent.joinpath("docs", "porting.md").read_text()
    for name in set().union(*FRONTS[front][1:]):
        assert f"`{name}" in guide or f"{name}`" in guide, name


# Hints are checked ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: flash_program(block_q=0), "block_q: expected a positive int"),
        (lambda: flash_program(block_k_dq=2.0), "block_k_dq: expected a positive int"),
        (lambda: flash_program(block_k_dkv=96), "block_k_dkv: expected a divisor of block_k_major_dkv=128"),
        (lambda: splash_program(block_kv=None), "block_kv: expected a positive int"),
        (lambda: splash_program(block_kv_compute=96), "block_kv_compute: expected a divisor of block_kv=128"),
        (lambda: splash_program(block_kv_dkv=64), "block_kv_dkv_compute: expected a divisor"),
        (lambda: splash_program(q_layout="minor"), "q_layout: expected a QKVLayout"),
        (
            lambda: tokamax_program(block_kv_compute=96),
            "block_kv_compute: expected a divisor of block_kv=128",
        ),
        (lambda: tokamax_program(v_layout=0), "v_layout: expected a QKVLayout"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_original_refuses_these_tiles_too() -> None:
    """Nested tiles must divide there as well; splash says so when its kernel is called."""
    default = original_flash.BlockSizes.get_default(1, N, T, T, H)
    with pytest.raises(ValueError, match="should divide"):
        dataclasses.replace(default, block_k_dkv=96)
    sizes = dataclasses.replace(original_splash.BlockSizes.get_default(), block_kv_compute=96)
    mask = original_splash.MultiHeadMask([original_splash.CausalMask((T, T))] * N)
    kernel = original_splash.make_splash_mha_single_device(mask, block_sizes=sizes, interpret=True)
    with pytest.raises(ValueError, match="must be a multiple of bkv_compute"):
        kernel(*operands())


@pytest.mark.parametrize("config", [128, original_splash.BlockSizes.get_default()], ids=["int", "original"])
def test_a_config_of_another_kind_is_refused(config: Any) -> None:
    mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * N)
    for make in (
        lambda: flash.flash_attention(*operands(1), block_sizes=config),
        lambda: splash.make_splash_mha_single_device(mask, block_sizes=config),
        lambda: tokamax.make_splash_mha_single_device(masks.CausalMask((T, T)), config=config),
    ):
        with pytest.raises(ValueError, match="Import it from the same module"):
            make()


def test_gradients_need_no_tiles() -> None:
    """The originals refuse a gradient without tile sizes of the backward; here there is nothing to size."""
    assert not splash.BlockSizes(block_q=128, block_kv=128).has_backward_blocks
    assert not flash.BlockSizes(block_q=128, block_k_major=128, block_k=128, block_b=1).has_backward_blocks
    sizes = splash.BlockSizes(block_q=128, block_kv=128)
    mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * N)
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=sizes)
    assert program(kernel) in default("splash")

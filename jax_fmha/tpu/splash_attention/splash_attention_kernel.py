"""`jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel` on our kernels.

Layout `[heads, length, head_dim]` without a batch dimension (vmap over it), no scale (multiply the query),
masks by object. See docs/porting.md for what differs.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fmha.tpu._common import DEFAULT_MASK_VALUE as DEFAULT_MASK_VALUE
from jax_fmha.tpu._common import SegmentIds as SegmentIds
from jax_fmha.tpu._common import check_blocks, check_kind, check_mask_value
from jax_fmha.tpu.splash_attention import _kernel
from jax_fmha.tpu.splash_attention import splash_attention_mask as mask_lib

Array = jax.Array


class QKVLayout(enum.IntEnum):
    """Physical layouts of the TPU kernel's operands: a hint, since operands are read here as they lie."""

    HEAD_DIM_MINOR = enum.auto()
    SEQ_MINOR = enum.auto()


def check_hints(sizes: Any) -> None:
    """Raises ValueError unless tile sizes fit each other and q_layout, k_layout and v_layout are `QKVLayout`s."""
    check_blocks(sizes, [("block_kv", "block_kv_compute"), ("block_kv_dkv", "block_kv_dkv_compute")])
    for name in ("q_layout", "k_layout", "v_layout"):
        layout = getattr(sizes, name)
        if layout not in list(QKVLayout):
            raise ValueError(f"{type(sizes).__name__}: {name}: expected a QKVLayout, got {layout!r}.")


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSizes:
    """Tile sizes and layouts of the TPU kernel: hints without meaning for what is computed, in the original neither.

    They are checked, and our kernels choose their own tiles.
    """

    block_q: int
    block_kv: int
    block_kv_compute: int | None = None

    block_q_dkv: int | None = None
    block_kv_dkv: int | None = None
    block_kv_dkv_compute: int | None = None

    block_q_dq: int | None = None
    block_kv_dq: int | None = None

    use_fused_bwd_kernel: bool = False

    q_layout: QKVLayout = QKVLayout.HEAD_DIM_MINOR
    k_layout: QKVLayout = QKVLayout.HEAD_DIM_MINOR
    v_layout: QKVLayout = QKVLayout.HEAD_DIM_MINOR

    def __post_init__(self) -> None:
        if self.block_kv_compute is None:
            object.__setattr__(self, "block_kv_compute", self.block_kv)
        if self.block_kv_dkv_compute is None:
            object.__setattr__(self, "block_kv_dkv_compute", self.block_kv_dkv)
        check_hints(self)
        if self.use_fused_bwd_kernel and not (self.block_q_dq is None and self.block_kv_dq is None):
            raise ValueError(
                "BlockSizes: block_q_dq and block_kv_dq have no use with use_fused_bwd_kernel=True."
            )

    @property
    def has_backward_blocks(self) -> bool:
        """Whether all tile sizes of the backward are given. Gradients here do not need them."""
        needed = [self.block_q_dkv, self.block_kv_dkv, self.block_kv_dkv_compute]
        if not self.use_fused_bwd_kernel:
            needed += [self.block_q_dq, self.block_kv_dq]
        return None not in needed

    @classmethod
    def get_default(cls) -> BlockSizes:
        """128 everywhere, as the original."""
        sizes: dict[str, Any] = {f.name: 128 for f in dataclasses.fields(cls) if f.name.startswith("block_")}
        return cls(**sizes)


@jax.tree_util.register_pytree_node_class
class SplashAttentionKernel:
    """Attention under one mask per head; made by `make_splash_mha` and its kin.

    A pytree: its leaves are the arrays that the mask needs (none for whole-row causal, local and full masks),
    so it passes through jit and shard_map as an argument.
    """

    def __init__(self, plan: _kernel.Plan, arrays: _kernel.KernelArrays):
        self._plan = plan
        self._arrays = arrays

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        segment_ids: SegmentIds | None = None,
        sinks: Array | None = None,
    ) -> Array | tuple[Array, tuple[Array]]:
        """softmax(q k^T) v under the masks.

        Args:
          q: `[N, T, H]`, already scaled.
          k: `[K, S, H]`, N a multiple of K; `[S, H]` for an mqa kernel.
          v: `[K, S, Hv]`; `[S, Hv]` for an mqa kernel.
          segment_ids: q `[T]` and kv `[S]`; equal ids attend each other, any ids.
          sinks: `[N]`, one logit per query head that takes part in the softmax and has no value.

        Returns:
          out `[N, T, Hv]` in q's dtype; with save_residuals `(out, (lse,))`, lse `[N, T]` float32, natural
          logarithm, sink included, differentiable.

        Raises:
          ValueError: an operand does not fit the others or the mask.
        """
        out, lse = _kernel.apply(self._plan, self._arrays, q, k, v, segment_ids, sinks)
        return (out, (lse,)) if self._plan.save_residuals else out

    def manual_sharding_spec(self, sharding: jax.sharding.NamedSharding) -> SplashAttentionKernel:
        """This kernel with a PartitionSpec in place of each array: the in_spec of shard_map for it.

        Args:
          sharding: two entries in its spec, for the heads and for the query rows.

        Raises:
          ValueError: another spec, or more shards than the kernel was made for.
        """
        if len(sharding.spec) != 2:
            raise ValueError(
                "splash attention: manual_sharding_spec: expected PartitionSpec(heads, q_seq), got "
                f"{sharding.spec}. Use None for a dimension that is not split; key rows cannot be split."
            )
        plan = self._plan
        splits_heads = len(plan.pattern) > 1
        for group, arrays in zip(plan.groups, self._arrays.groups, strict=True):
            if group.mask_heads == "all":
                _kernel.check_shards(plan, sharding, (arrays.tiles.shape[0], plan.q_seq_shards))
        if splits_heads:
            _kernel.check_shards(plan, sharding, (plan.head_shards, plan.q_seq_shards))
        else:
            q_only = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(sharding.spec[1]))
            _kernel.check_shards(plan, q_only, (plan.q_seq_shards,))
        return SplashAttentionKernel(plan, _kernel.sharding_specs(plan, self._arrays, *sharding.spec))

    def tree_flatten(self) -> tuple[tuple[Any], _kernel.Plan]:
        return (self._arrays,), self._plan

    @classmethod
    def tree_unflatten(cls, plan: _kernel.Plan, children: tuple[Any]) -> SplashAttentionKernel:
        return cls(plan, *children)


def _make_splash_attention(
    mask: np.ndarray | jax.Array | mask_lib.MultiHeadMask,
    *,
    block_sizes: BlockSizes | None = None,
    is_mqa: bool,
    save_residuals: bool = False,
    mask_value: float = DEFAULT_MASK_VALUE,
    attn_logits_soft_cap: float | None = None,
    downcast_smem_data: bool = True,
    head_shards: int,
    q_seq_shards: int,
    residual_checkpoint_name: str | None = None,
    interpret: bool = False,
) -> SplashAttentionKernel:
    """Makes the kernel for a mask.

    Args:
      mask: one mask per query head, `[N, T, S]` True keeps: a MultiHeadMask, a bool numpy array, or a bool
        jax.Array, also traced.
      block_sizes: a hint, see `BlockSizes`.
      is_mqa: key and value come without a head dimension.
      save_residuals: the kernel returns `(out, (lse,))`.
      mask_value: any number that no logit comes near; masks select here.
      attn_logits_soft_cap: positive; logits become cap * tanh(logits / cap) before masks.
      downcast_smem_data: a hint about memory of the TPU kernel, without meaning here.
      head_shards: pieces of the head dimension under shard_map.
      q_seq_shards: pieces of the query rows under shard_map.
      residual_checkpoint_name: name of out and lse for `jax.checkpoint_policies`.
      interpret: evaluate by plain einsums, on any platform, in O(T*S) memory.

    Raises:
      ValueError: a mask of another kind or shape, or shards that do not divide it.
      NotImplementedError: a mask_value that does not mask.
    """
    del downcast_smem_data
    check_kind("splash attention", "block_sizes", block_sizes, BlockSizes)
    check_mask_value("splash attention", mask_value)
    return SplashAttentionKernel(
        *_kernel.plan(
            mask,
            head_shards=head_shards,
            q_seq_shards=q_seq_shards,
            is_mqa=is_mqa,
            save_residuals=save_residuals,
            attn_logits_soft_cap=attn_logits_soft_cap,
            residual_checkpoint_name=residual_checkpoint_name,
            interpret=interpret,
        )
    )


make_splash_mha = functools.partial(_make_splash_attention, is_mqa=False)
make_splash_mqa = functools.partial(_make_splash_attention, is_mqa=True)
make_splash_mha_single_device = functools.partial(
    make_splash_mha, is_mqa=False, head_shards=1, q_seq_shards=1
)
make_splash_mqa_single_device = functools.partial(make_splash_mha, is_mqa=True, head_shards=1, q_seq_shards=1)


# References -------------------------------------------------------------------------------------------------


def make_attention_reference(
    mask: mask_lib.Mask | np.ndarray, is_mqa: bool, backward_impl: str = "vanilla", **params: Any
) -> Callable[..., Any]:
    """Plain einsums in float32 and O(T*S) memory under a dense mask, for tests.

    Args:
      mask: `[N, T, S]`, a MultiHeadMask or a bool array.
      is_mqa: key and value come without a head dimension.
      backward_impl: "vanilla", "custom" or "custom_vanilla": how the original orders one and the same
        gradient; all the same here.
      **params: none exist.

    Returns:
      A function of (q, k, v, segment_ids=None, sinks=None, *, mask_value, save_residuals=False,
      attn_logits_soft_cap=None), as a kernel, with a float32 result.
    """
    if backward_impl not in ("vanilla", "custom", "custom_vanilla"):
        raise ValueError(
            f"make_attention_reference: backward_impl: got {backward_impl!r}, see the docstring."
        )
    if params:
        raise TypeError(f"make_attention_reference: unexpected arguments {sorted(params)}")
    dense = jnp.asarray(mask[:, :, :])

    def reference(
        q: Array,
        k: Array,
        v: Array,
        segment_ids: SegmentIds | None = None,
        sinks: Array | None = None,
        *,
        mask_value: float = DEFAULT_MASK_VALUE,
        save_residuals: bool = False,
        attn_logits_soft_cap: float | None = None,
    ) -> Any:
        kernel = _make_splash_attention(
            dense,
            is_mqa=is_mqa,
            save_residuals=save_residuals,
            mask_value=mask_value,
            attn_logits_soft_cap=attn_logits_soft_cap,
            head_shards=1,
            q_seq_shards=1,
            interpret=True,
        )
        q, k, v = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (q, k, v))
        return kernel(q, k, v, segment_ids, sinks)

    return reference


make_masked_mha_reference = functools.partial(make_attention_reference, is_mqa=False)
make_masked_mqa_reference = functools.partial(make_attention_reference, is_mqa=True)

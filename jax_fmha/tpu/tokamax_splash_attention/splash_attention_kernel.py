"""The splash attention spelling of tokamax (`SplashConfig`) on our kernels.

One mask `[T, S]` for all heads, options in a config, `save_residuals` also at the call. Signatures follow
`tokamax/_src/ops/experimental/tpu/splash_attention/splash_attention_kernel.py` of tokamax at commit 783ea95.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jax_fmha.tpu._common import DEFAULT_MASK_VALUE as DEFAULT_MASK_VALUE
from jax_fmha.tpu._common import SegmentIds as SegmentIds
from jax_fmha.tpu._common import check_kind, check_mask_value
from jax_fmha.tpu.splash_attention import _kernel
from jax_fmha.tpu.splash_attention import splash_attention_mask as mask_lib
from jax_fmha.tpu.splash_attention.splash_attention_kernel import QKVLayout as QKVLayout
from jax_fmha.tpu.splash_attention.splash_attention_kernel import check_hints

Array = jax.Array

_NO_MAX_LOGITS = (
    "splash attention: max_logits: not available, the kernels keep the log-sum-exp of a row and not its "
    "maximum. Use "
    '`stats["logsumexp"]`, which is at least the maximum and at most ln(S) above it.'
)
_NO_ESTIMATE = (
    "splash attention: {name}: expected None, got {got!r}. The kernels track the true maximum of each row "
    "and take no estimate; the result is the same without it."
)


@dataclasses.dataclass(frozen=True, slots=True)
class SplashConfig:
    """Options of a kernel in one place.

    With effect: `residual_checkpoint_name`, `attn_logits_soft_cap`, and `interpret` (evaluate by plain
    einsums). `max_logit_const` is refused. All others are hints to the TPU kernel, without meaning for what is
    computed: they are checked, and our kernels choose for themselves.
    """

    block_q: int
    block_kv: int
    block_kv_compute: int | None = None

    block_q_dkv: int | None = None
    block_kv_dkv: int | None = None
    block_kv_dkv_compute: int | None = None

    block_q_dq: int | None = None
    block_kv_dq: int | None = None
    use_fused_bwd_kernel: bool = True
    num_stacked_q_heads: int = 1
    q_layout: QKVLayout = QKVLayout.HEAD_DIM_MINOR
    k_layout: QKVLayout = QKVLayout.HEAD_DIM_MINOR
    v_layout: QKVLayout = QKVLayout.HEAD_DIM_MINOR

    fwd_cost_estimate: Any = None
    bwd_cost_estimate: Any = None

    residual_checkpoint_name: str | None = None
    attn_logits_soft_cap: float | None = None
    fuse_reciprocal: bool = True
    use_base2_exp: bool = True
    max_logit_const: float | None = None
    interpret: bool = False
    dq_reduction_steps: int | None = None
    use_experimental_scheduler: bool = False
    qk_diag_skip: bool = False
    qk_diag_grid: int = 2

    def __post_init__(self) -> None:
        if self.block_kv_compute is None:
            object.__setattr__(self, "block_kv_compute", self.block_kv)
        if self.block_kv_dkv_compute is None:
            object.__setattr__(self, "block_kv_dkv_compute", self.block_kv_dkv)
        check_hints(self)
        if self.dq_reduction_steps not in (None, 3):
            raise ValueError(
                f"SplashConfig: dq_reduction_steps: expected None or 3, got {self.dq_reduction_steps}."
            )
        if not self.use_fused_bwd_kernel:
            raise ValueError("SplashConfig: use_fused_bwd_kernel: expected True, got False.")
        if self.max_logit_const is not None:
            raise NotImplementedError(_NO_ESTIMATE.format(name="max_logit_const", got=self.max_logit_const))

    @property
    def has_backward_blocks(self) -> bool:
        """Whether all tile sizes of the backward are given. Gradients here do not need them."""
        return None not in (self.block_q_dkv, self.block_kv_dkv, self.block_kv_dkv_compute)

    @classmethod
    def get_default(cls) -> SplashConfig:
        """128 everywhere, as tokamax."""
        sizes: dict[str, Any] = {f.name: 128 for f in dataclasses.fields(cls) if f.name.startswith("block_")}
        return cls(**sizes)


@jax.tree_util.register_pytree_with_keys_class
class Residuals(dict):
    """`{"logsumexp": lse}`; asking for "max_logits" gives the reason why it is not there."""

    def __missing__(self, key: str) -> Any:
        if key == "max_logits":
            raise NotImplementedError(_NO_MAX_LOGITS)
        raise KeyError(key)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        return [(jax.tree_util.DictKey(k), v) for k, v in self.items()], tuple(self)

    @classmethod
    def tree_unflatten(cls, keys: tuple[str, ...], values: Any) -> Residuals:
        return cls(zip(keys, values, strict=True))


@jax.tree_util.register_pytree_node_class
class SplashAttentionKernel:
    """Attention under one mask for all heads; a pytree, as `jax_fmha.tpu.splash_attention`'s."""

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
        *,
        save_residuals: bool | None = None,
        max_logit_value: Array | None = None,
    ) -> Array | tuple[Array, Residuals]:
        """softmax(q k^T) v under the mask.

        Args:
          q: `[N, T, H]`, already scaled.
          k: `[K, S, H]`, N a multiple of K; `[S, H]` for an mqa kernel.
          v: `[K, S, Hv]`; `[S, Hv]` for an mqa kernel.
          segment_ids: q `[T]` and kv `[S]`.
          sinks: `[N]`.
          save_residuals: replaces the kernel's own setting unless None.
          max_logit_value: refused: an estimate of the largest logit, which our kernels do not need.

        Returns:
          out `[N, T, Hv]`, or `(out, {"logsumexp": lse [N, T] float32})`, natural logarithm, differentiable.
        """
        if max_logit_value is not None:
            raise NotImplementedError(_NO_ESTIMATE.format(name="max_logit_value", got=max_logit_value))
        out, lse = _kernel.apply(self._plan, self._arrays, q, k, v, segment_ids, sinks)
        wants = self._plan.save_residuals if save_residuals is None else save_residuals
        return (out, Residuals(logsumexp=lse)) if wants else out

    def manual_sharding_spec(self, sharding: jax.sharding.NamedSharding) -> SplashAttentionKernel:
        """This kernel with a PartitionSpec in place of each array: the in_spec of shard_map for it.

        Args:
          sharding: one entry in its spec, for the query rows.
        """
        if len(sharding.spec) != 1:
            raise ValueError(
                "splash attention: manual_sharding_spec: expected PartitionSpec(q_seq), got "
                f"{sharding.spec}. One mask serves all heads; key rows cannot be split."
            )
        _kernel.check_shards(self._plan, sharding, (self._plan.q_seq_shards,))
        return SplashAttentionKernel(
            self._plan, _kernel.sharding_specs(self._plan, self._arrays, None, sharding.spec[0])
        )

    def tree_flatten(self) -> tuple[tuple[Any], _kernel.Plan]:
        return (self._arrays,), self._plan

    @classmethod
    def tree_unflatten(cls, plan: _kernel.Plan, children: tuple[Any]) -> SplashAttentionKernel:
        return cls(plan, *children)


def _kernel_for(
    mask: Any,
    config: SplashConfig | None,
    *,
    is_mqa: bool,
    save_residuals: bool,
    mask_value: float,
    q_seq_shards: int,
) -> SplashAttentionKernel:
    check_mask_value("splash attention", mask_value)
    config = SplashConfig.get_default() if config is None else config
    return SplashAttentionKernel(
        *_kernel.plan(
            mask,
            head_shards=1,
            q_seq_shards=q_seq_shards,
            is_mqa=is_mqa,
            save_residuals=save_residuals,
            attn_logits_soft_cap=config.attn_logits_soft_cap,
            residual_checkpoint_name=config.residual_checkpoint_name,
            interpret=config.interpret,
        )
    )


def _expect_one_mask(mask: Any) -> None:
    if len(mask.shape) != 2:
        raise ValueError(
            f"splash attention: mask: expected one mask [T, S] for all heads, got {tuple(mask.shape)}. "
            "Masks per head are in jax_fmha.tpu.splash_attention."
        )


def _make_splash_attention(
    mask: np.ndarray | mask_lib.Mask,
    *,
    config: SplashConfig | None = None,
    is_mqa: bool,
    save_residuals: bool = False,
    mask_value: float = DEFAULT_MASK_VALUE,
    downcast_smem_data: bool = True,
    partial_mask_blocks_dtype: jax.typing.DTypeLike = np.int8,
    q_seq_shards: int,
) -> SplashAttentionKernel:
    """Makes the kernel for one mask `[T, S]`.

    Args:
      mask: a mask object or a bool numpy array; True keeps.
      config: options.
      is_mqa: key and value come without a head dimension.
      save_residuals: the kernel returns `(out, {"logsumexp": lse})`.
      mask_value: any number that no logit comes near; masks select here.
      downcast_smem_data: a hint about memory of the TPU kernel, without meaning here.
      partial_mask_blocks_dtype: a hint of the same kind.
      q_seq_shards: pieces of the query rows under shard_map.
    """
    del downcast_smem_data, partial_mask_blocks_dtype
    check_kind("splash attention", "config", config, SplashConfig)
    _expect_one_mask(mask)
    if config is not None and config.qk_diag_skip and not isinstance(mask, mask_lib.CausalMask):
        raise ValueError(
            f"splash attention: qk_diag_skip: expected False but for a CausalMask, got {type(mask).__name__}."
        )
    if isinstance(mask, np.ndarray):
        mask = mask_lib.NumpyMask(mask)
    return _kernel_for(
        mask_lib.MultiHeadMask([mask]),
        config,
        is_mqa=is_mqa,
        save_residuals=save_residuals,
        mask_value=mask_value,
        q_seq_shards=q_seq_shards,
    )


def _make_dynamic_splash_attention(
    mask: jax.Array,
    *,
    mesh: jax.sharding.Mesh | None = None,
    mask_spec: jax.sharding.PartitionSpec | None = None,
    config: SplashConfig | None = None,
    is_mqa: bool,
    save_residuals: bool = False,
    mask_value: float = DEFAULT_MASK_VALUE,
    downcast_smem_data: bool = True,
    partial_mask_blocks_dtype: jax.typing.DTypeLike = np.int8,
) -> SplashAttentionKernel | tuple[SplashAttentionKernel, SplashAttentionKernel]:
    """Makes the kernel for a bool jax.Array `[T, S]`, also traced.

    Args:
      mask: True keeps.
      mesh: with mask_spec, the mesh over which the kernel will be shard_mapped.
      mask_spec: one entry, for the query rows; the result then is (kernel, its in_spec).
      config: options.
      is_mqa: key and value come without a head dimension.
      save_residuals: the kernel returns `(out, {"logsumexp": lse})`.
      mask_value: any number that no logit comes near.
      downcast_smem_data: a hint about memory of the TPU kernel, without meaning here.
      partial_mask_blocks_dtype: a hint of the same kind.
    """
    del downcast_smem_data, partial_mask_blocks_dtype
    check_kind("splash attention", "config", config, SplashConfig)
    if (mesh is None) != (mask_spec is None):
        raise ValueError("splash attention: mesh and mask_spec: expected both or neither.")
    _expect_one_mask(mask)
    sharding = None
    shards = 1
    if mesh is not None and mask_spec is not None:
        sharding = jax.sharding.NamedSharding(mesh, mask_spec)
        shards = mask.shape[0] // sharding.shard_shape((mask.shape[0],))[0] if mask.shape[0] else 1
    kernel = _kernel_for(
        mask[None],
        config,
        is_mqa=is_mqa,
        save_residuals=save_residuals,
        mask_value=mask_value,
        q_seq_shards=shards,
    )
    return kernel if sharding is None else (kernel, kernel.manual_sharding_spec(sharding))


make_splash_mha = functools.partial(_make_splash_attention, is_mqa=False)
make_splash_mqa = functools.partial(_make_splash_attention, is_mqa=True)
make_splash_mha_single_device = functools.partial(make_splash_mha, q_seq_shards=1)
make_splash_mqa_single_device = functools.partial(make_splash_mqa, q_seq_shards=1)
make_dynamic_splash_mqa = functools.partial(_make_dynamic_splash_attention, is_mqa=True)
make_dynamic_splash_mha = functools.partial(_make_dynamic_splash_attention, is_mqa=False)

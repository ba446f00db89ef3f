"""`jax.experimental.pallas.ops.tpu.flash_attention` on our kernels: the same names, layouts and meaning.

Layout `[batch, heads, length, head_dim]`, default scale 1.0, bias added before the scale, causal masks
top-left, segment ids by plain equality. Beyond the original: any lengths, grouped key/value heads, a value
head_dim of its own, a bias that broadcasts. A row with nothing to attend gives 0 here, the mean of some
values there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_fmha._attention import run
from jax_fmha._problem import canonical_call, show
from jax_fmha.tpu._common import DEFAULT_MASK_VALUE as DEFAULT_MASK_VALUE
from jax_fmha.tpu._common import SegmentIds as SegmentIds
from jax_fmha.tpu._common import check_blocks, check_kind, check_mask_value, check_segment_ids, promote

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Tile sizes of the TPU kernel: a hint without meaning for what is computed, in the original neither.

    They are checked, and our kernels choose their own tiles.
    """

    block_q: int
    block_k_major: int
    block_k: int
    block_b: int

    block_q_major_dkv: int | None = None
    block_k_major_dkv: int | None = None
    block_k_dkv: int | None = None
    block_q_dkv: int | None = None

    block_k_major_dq: int | None = None
    block_k_dq: int | None = None
    block_q_dq: int | None = None

    def __post_init__(self) -> None:
        check_blocks(
            self,
            [
                ("block_k_major", "block_k"),
                ("block_q_major_dkv", "block_q_dkv"),
                ("block_k_major_dkv", "block_k_dkv"),
                ("block_k_major_dq", "block_k_dq"),
            ],
        )

    @property
    def has_backward_blocks(self) -> bool:
        """Whether all tile sizes of the backward are given. Gradients here do not need them."""
        forward = ("block_q", "block_k_major", "block_k", "block_b")
        return all(
            getattr(self, f.name) is not None for f in dataclasses.fields(self) if f.name not in forward
        )

    @classmethod
    def get_default(
        cls, batch_size: int, num_heads: int, q_seq_len: int, kv_len: int, d_model: int
    ) -> BlockSizes:
        """128 everywhere, for any size, as the original."""
        del batch_size, num_heads, q_seq_len, kv_len, d_model
        return cls(**{f.name: 1 if f.name == "block_b" else 128 for f in dataclasses.fields(cls)})


def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    ab: Array | None = None,
    segment_ids: SegmentIds | None = None,
    *,
    causal: bool = False,
    sm_scale: float = 1.0,
    block_sizes: BlockSizes | None = None,
    debug: bool = False,
) -> Array:
    """softmax((q k^T + ab) * sm_scale) v under the masks.

    Args:
      q: `[B, N, T, H]`.
      k: `[B, K, S, H]`; N a multiple of K.
      v: `[B, K, S, Hv]`.
      ab: additive bias, broadcastable to `[B, N, T, S]` (size 1 or in full); added before the scale.
      segment_ids: q `[B, T]` and kv `[B, S]`; equal ids attend each other.
      causal: row i attends keys up to i.
      sm_scale: 1.0 by default, not 1/sqrt(H).
      block_sizes: a hint, see `BlockSizes`.
      debug: prints the Pallas kernel in the original; refused if set.

    Returns:
      `[B, N, T, Hv]` in q's dtype. Differentiable in q, k, v and ab.

    Raises:
      ValueError: an operand does not fit.
      NotImplementedError: debug, or a call that no kernel takes.
    """
    check_kind("flash_attention", "block_sizes", block_sizes, BlockSizes)
    if debug:
        raise NotImplementedError(
            "flash_attention: debug: expected False, got True. There is no Pallas kernel to print; "
            "jax_fmha.explain tells which kernel runs and why."
        )
    return _attention(q, k, v, ab, segment_ids, causal=causal, sm_scale=sm_scale, implementation=None)


def mha_reference(
    q: Array,
    k: Array,
    v: Array,
    ab: Array | None,
    segment_ids: SegmentIds | None = None,
    causal: bool = False,
    mask_value: float = DEFAULT_MASK_VALUE,
    sm_scale: float = 1.0,
) -> Array:
    """`flash_attention` by plain einsums in O(T*S) memory, for tests. Arguments as there.

    mask_value may be any number that no logit comes near: masks select here.
    """
    check_mask_value("mha_reference", mask_value)
    return _attention(q, k, v, ab, segment_ids, causal=causal, sm_scale=sm_scale, implementation="xla")


def _attention(
    q: Array,
    k: Array,
    v: Array,
    ab: Array | None,
    segment_ids: SegmentIds | None,
    *,
    causal: bool,
    sm_scale: float,
    implementation: Any,
) -> Array:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if jnp.ndim(x) != 4:
            raise ValueError(
                f"flash_attention: {name}: expected [batch, heads, length, head_dim], got {show(x)}. Add or "
                "merge dimensions."
            )
    batch, seqlen_q, seqlen_kv = q.shape[0], q.shape[2], k.shape[2]
    if segment_ids is not None:
        check_segment_ids("flash_attention", segment_ids, (batch, seqlen_q), (batch, seqlen_kv))
    query, key, value = promote(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v)))
    call = canonical_call(
        query,
        key,
        value,
        None if ab is None else _scaled(ab, sm_scale),
        scale=sm_scale,
        is_causal=causal,
        segment_ids=segment_ids,
        implementation=implementation,
    )
    out, _ = run(call)
    return jnp.swapaxes(out, 1, 2).astype(q.dtype)


def _scaled(ab: Array, sm_scale: float) -> Array:
    """The bias that, added after the scale, is `ab` added before it; float32 at least, to round once."""
    if isinstance(sm_scale, (int, float)) and sm_scale == 1:
        return ab
    return ab.astype(jnp.promote_types(ab.dtype, jnp.float32)) * sm_scale


def mha_reference_bwd(
    q: Array,
    k: Array,
    v: Array,
    ab: Array | None,
    segment_ids: SegmentIds | None,
    o: Array,
    l: Array,  # noqa: E741  # the original's name, part of the signature
    m: Array,
    do: Array,
    causal: bool = False,
    mask_value: float = DEFAULT_MASK_VALUE,
    sm_scale: float = 1.0,
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of `mha_reference` from its saved softmax, written out, for tests.

    Args:
      q: `[B, N, T, H]`.
      k: `[B, N, S, H]`.
      v: `[B, N, S, Hv]`.
      ab: `[B, N, T, S]` or None.
      segment_ids: as for `flash_attention`.
      o: the output `[B, N, T, Hv]`.
      l: sum of exp(logit - m) over the allowed keys, `[B, N, T]`.
      m: the number subtracted from the logits, `[B, N, T]`: usually their maximum.
      do: cotangent of o.
      causal: as for `flash_attention`.
      mask_value: as for `mha_reference`.
      sm_scale: any; the original stops at 1.0.

    Returns:
      (dq, dk, dv, dab), the first three in the dtype of q, k, v, the last in float32 or None without ab.
    """
    check_mask_value("mha_reference_bwd", mask_value)
    f32 = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (q, k, v, o, do)]
    qf, kf, vf, of, dof = f32
    logits = jnp.einsum("bnth,bnsh->bnts", qf, kf)
    if ab is not None:
        logits = logits + ab
    allowed = jnp.ones((q.shape[2], k.shape[2]), bool)
    if causal:
        allowed = jnp.tril(allowed)
    if segment_ids is not None:
        q_ids, kv_ids = jnp.asarray(segment_ids.q), jnp.asarray(segment_ids.kv)
        allowed = allowed & (q_ids[:, None, :, None] == kv_ids[:, None, None, :])
    total = jnp.where(l == 0, 1, l)[..., None]  # an empty row has no probabilities to divide
    p = jnp.where(allowed, jnp.exp(logits * sm_scale - m[..., None]) / total, 0)
    delta = jnp.sum(of * dof, axis=-1, keepdims=True)
    ds = p * (jnp.einsum("bnth,bnsh->bnts", dof, vf) - delta) * sm_scale
    dq = jnp.einsum("bnts,bnsh->bnth", ds, kf).astype(q.dtype)
    dk = jnp.einsum("bnts,bnth->bnsh", ds, qf).astype(k.dtype)
    dv = jnp.einsum("bnts,bnth->bnsh", p, dof).astype(v.dtype)
    return dq, dk, dv, None if ab is None else ds

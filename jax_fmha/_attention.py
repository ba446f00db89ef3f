"""The public operation: `attention`, `dot_product_attention` in the clothes of jax.nn, and `explain`."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_fmha import _core, _ffi
from jax_fmha._mask import SegmentIds, TileMask
from jax_fmha._problem import Call, canonical_call, describe, mistake
from jax_fmha._reference import attention_xla
from jax_fmha._vjp import attention_vjp, backward_operands

Array = jax.Array
ArrayLike = jax.typing.ArrayLike
Implementation = Literal["cpu", "sm90", "sm100", "xla"]


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | TileMask | None = None,
    *,
    scale: float | ArrayLike | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | ArrayLike | None = None,
    query_offset: int | ArrayLike = 0,
    query_positions: ArrayLike | None = None,
    key_value_positions: ArrayLike | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    segment_ids: ArrayLike | SegmentIds | None = None,
    sinks: ArrayLike | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, Array]:
    r"""Fused multi-head attention with one meaning on every backend.

    For query row i and key row j of one batch entry, with query head n reading key/value head `n // (N // K)`::

        s[i, j]       = scale * <q_i, k_j> + bias[i, j]
        s[i, j]       = cap * tanh(s[i, j] / cap)                         if logits_soft_cap is given
        allowed[i, j] = lengths, mask, equal segment ids, causal and window by position, all that are given
        lse[i]        = log(sum over allowed j of exp(s[i, j]), plus exp(sink[n]) if sinks are given)
        out[i]        = sum over allowed j of exp(s[i, j] - lse[i]) * v_j

    computed by online softmax (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135): memory is
    O(T + S) beyond the operands, forward and backward. A row with nothing to attend gives out 0 and lse -inf (the
    sink, if there is one) and has gradient 0. Rows that segments or lengths keep apart cannot reach each other, not
    even with NaN or Inf.

    Args:
      query: `[*batch, T, N, H]`, float16, bfloat16, float32 or float64. Any number of batch dimensions, also none.
      key: `[*batch, S, K, H]`, query's dtype. N must be a multiple of K.
      value: `[*batch, S, K, Hv]`, query's dtype. Hv may differ from H.
      bias: float, broadcastable to `[*batch, N, T, S]` (size 1 or in full in each dimension); added after scaling.
      mask: bool, broadcastable like bias; True keeps. Or a `TileMask`: block-sparse, not O(T*S).
      scale: factor of the logits, 1/sqrt(H) by default; may be traced. Not differentiable.
      is_causal: key position <= query position.
      local_window_size: `(left, right)`, query position - left <= key position <= query position + right, both ends
        inclusive, None unbounded; a single int w means (w, w).
      logits_soft_cap: positive; may be traced. Applied after bias, before masks (Gemma 2, arXiv 2408.00118). Not
        differentiable.
      query_offset: position of the first query row: an int, or one per batch entry. 0 aligns causal masks top-left
        as jax.nn does; S - T bottom-right.
      query_positions: ints `[*batch, T]` or `[T]`, in any order; replace row index + query_offset.
      key_value_positions: ints `[*batch, S]` or `[S]`; replace the row index.
      query_seq_lengths: ints `[*batch]`; rows from there on are empty.
      key_value_seq_lengths: ints `[*batch]`; keys from there on are not attended.
      segment_ids: ints `[*batch, T]` or `[T]` for both sides (needs T == S), or `SegmentIds(q, kv)`. Any ids, in any
        order; a query attends keys of its own id.
      sinks: float `[N]`: one logit per query head that takes part in the softmax and has no value
        (gpt-oss; Xiao et al., arXiv 2309.17453).
      return_lse: also return lse.
      deterministic: gradients bitwise equal from run to run. The forward always is.
      implementation: None for the best native kernel of the platform; "cpu", "sm90" or "sm100" to insist on one; or
        "xla" for plain einsums in O(T*S) memory, differentiable in forward mode and to any order.

    Returns:
      out `[*batch, T, N, Hv]` in query's dtype; with `return_lse` a pair `(out, lse)`, lse `[*batch, N, T]` in
      float32 (float64 for float64 operands), natural logarithm, differentiable like out.

    Gradients: query, key, value, bias (summed to its own shape), sinks, through out and lse; once, in reverse mode.
    Residuals are query, key, value, out and lse; out and lse carry the `jax.ad_checkpoint.checkpoint_name`s in
    `jax_fmha.CHECKPOINT_NAMES`.

    Raises:
      ValueError: an operand does not fit, or its sequence or feature dimension is sharded; raised while tracing.
      NotImplementedError: no kernel takes the call on the platform that it is lowered for (each kernel's reason is
        given), or a derivative that the native kernels do not have.
    """
    call = canonical_call(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        query_offset=query_offset,
        query_positions=query_positions,
        key_value_positions=key_value_positions,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
        sinks=sinks,
        deterministic=deterministic,
        implementation=implementation,
    )
    out, lse = run(call)
    return (out, lse) if return_lse else out


def run(call: Call) -> tuple[Array, Array]:
    """(out, lse) of a checked call, in the caller's batch shape."""
    if call.options.implementation == "xla":
        out, lse = attention_xla(call.operands, call.options)
    else:
        out, lse = attention_vjp(call)
    return (out[0], lse[0]) if call.unbatched else (out, lse)


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """`jax.nn.dot_product_attention` on our kernels: same signature, same results.

    Differences, on purpose: a fully masked row gives 0 and lse -inf (jax.nn: the mean of all values), and NaN or Inf
    in rows beyond a sequence length reaches nothing. Besides, value's last dimension may differ from key's.

    Args:
      query: `[B, T, N, H]` or `[T, N, H]`.
      key: `[B, S, K, H]` or `[S, K, H]`.
      value: `[B, S, K, Hv]` or `[S, K, Hv]`.
      bias: float, broadcastable to `[B, N, T, S]`.
      mask: bool, broadcastable to `[B, N, T, S]`; True keeps.
      scale: 1/sqrt(H) by default.
      is_causal: row i attends keys up to i (top-left).
      query_seq_lengths: ints `[B]`; rows from there on give 0.
      key_value_seq_lengths: ints `[B]`.
      local_window_size: `(left, right)`, or one int for both.
      implementation: None and "cudnn" both mean our best kernel; "xla" plain einsums.
      return_residual: also return lse as `[B, T, N]` (or `[T, N]`) in query's dtype, without gradient, as jax.nn does.

    Returns:
      `[B, T, N, Hv]` (or `[T, N, Hv]`) in query's dtype, or a pair with lse.

    Raises:
      ValueError: an operand does not fit.
    """
    if implementation not in (None, "xla", "cudnn"):
        raise mistake(
            "implementation", '"xla", "cudnn" or None', repr(implementation), "See jax_fmha.attention."
        )
    out, lse = attention(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        implementation="xla" if implementation == "xla" else None,
        return_lse=True,
    )
    if not return_residual:
        return out
    residual = jax.lax.stop_gradient(jnp.swapaxes(lse, -1, -2))
    return out, residual.astype(out.dtype)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What would run.

    Attributes:
      kernel: names of the kernels for the forward and for the backward; None where every kernel refuses.
      refusals: {kernel: reason} for every other kernel of both passes.
    """

    kernel: tuple[str | None, str | None]
    refusals: dict[str, str]


def explain(
    *args: Any, platform: str | None = None, compute_capability: str | float | None = None, **kwargs: Any
) -> Explanation:
    """Says which kernels `attention(*args, **kwargs)` would use, on any machine, without running anything.

    Args:
      *args: as for `attention`; arrays or `jax.ShapeDtypeStruct`s.
      platform: "cpu" or "cuda"; the default backend's platform if None.
      compute_capability: of a CUDA device, e.g. "9.0" or 10.3. None asks about this process: its first device and
        the kernels of this installation; without a device, about any.
      **kwargs: as for `attention`.

    Raises:
      ValueError: what `attention` would raise.
    """
    platform = platform or jax.default_backend()
    kwargs.pop("return_lse", None)
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves]
    described: list[Any] = []

    def trace(arrays: list[Any]) -> None:
        remaining = iter(arrays)
        a, kw = jax.tree.unflatten(
            tree, [next(remaining) if array else x for x, array in zip(leaves, is_array, strict=True)]
        )
        call = canonical_call(*a, **kw)
        if call.options.implementation != "xla":
            described.append(call.problem())
            described.append(describe(backward_operands(call), call.options, backward=True))

    jax.eval_shape(trace, [x for x, array in zip(leaves, is_array, strict=True) if array])
    if not described:
        return Explanation(("xla", "xla"), {})
    capability = None if compute_capability is None else _ffi.capability_number(compute_capability)
    device = _ffi.device(platform, capability)
    kernels, refusals = [], {}
    for problem in described:
        name, reasons = _core.select(problem, device)
        kernels.append(name or None)
        refusals.update(reasons)
    return Explanation(tuple(kernels), refusals)

#include "cc/ffi/decode.h"

#include <vector>

namespace jax_fmha::ffi {
namespace {

namespace xffi = ::xla::ffi;

// One row per operand: where its shape goes, where its pointer goes. `_ffi.py` passes them in this
// order.
struct ArgRow {
  Spec Request::* spec;
  Operand Operands::* operand;
};
constexpr ArgRow kArgs[] = {
    {&Request::q, &Operands::q},
    {&Request::k, &Operands::k},
    {&Request::v, &Operands::v},
    {&Request::bias, &Operands::bias},
    {&Request::mask, &Operands::mask},
    {&Request::mask_tiles, &Operands::mask_tiles},
    {&Request::mask_bits, &Operands::mask_bits},
    {&Request::scale, &Operands::scale},
    {&Request::logits_soft_cap, &Operands::logits_soft_cap},
    {&Request::query_offset, &Operands::query_offset},
    {&Request::q_positions, &Operands::q_positions},
    {&Request::kv_positions, &Operands::kv_positions},
    {&Request::q_seq_lengths, &Operands::q_seq_lengths},
    {&Request::kv_seq_lengths, &Operands::kv_seq_lengths},
    {&Request::q_segment_ids, &Operands::q_segment_ids},
    {&Request::kv_segment_ids, &Operands::kv_segment_ids},
    {&Request::sinks, &Operands::sinks},
    // Backward only.
    {&Request::saved_out, &Operands::saved_out},
    {&Request::saved_lse, &Operands::saved_lse},
    {&Request::dout, &Operands::dout},
    {&Request::dlse, &Operands::dlse},
};
constexpr size_t kNumForwardArgs = 17;
constexpr size_t kNumBackwardArgs = std::size(kArgs);

constexpr Result Operands::* kForwardResults[] = {&Operands::out, &Operands::lse};
constexpr Result Operands::* kBackwardResults[] = {&Operands::dq, &Operands::dk, &Operands::dv,
                                                   &Operands::dbias, &Operands::dsinks};

DType FromXla(xffi::DataType type) {
  switch (type) {
    case xffi::PRED:
      return DType::kBool;
    case xffi::U8:
      return DType::kU8;
    case xffi::S32:
      return DType::kS32;
    case xffi::S64:
      return DType::kS64;
    case xffi::F16:
      return DType::kF16;
    case xffi::BF16:
      return DType::kBF16;
    case xffi::F32:
      return DType::kF32;
    case xffi::F64:
      return DType::kF64;
    default:
      return DType::kOther;
  }
}

bool IsAbsent(const xffi::AnyBuffer& buffer) {
  return buffer.dimensions().size() == 1 && buffer.dimensions()[0] == 0;
}

Spec SpecOf(const xffi::AnyBuffer& buffer) {
  if (IsAbsent(buffer)) return {};
  return {FromXla(buffer.element_type()),
          std::vector<int64_t>(buffer.dimensions().begin(), buffer.dimensions().end())};
}

// Strides of an operand over the call's batch dimensions; dimensions that all operands would step
// alike are not merged, since few calls have more than one.
BatchMap MapOf(const std::vector<int64_t>& batch_shape, const std::vector<int64_t>& shape) {
  BatchMap map;
  int64_t entries = 1;
  map.rank = static_cast<int>(batch_shape.size());
  for (int d = map.rank - 1; d >= 0; --d) {
    map.sizes[d] = batch_shape[d];
    map.strides[d] = shape[d] == 1 ? 0 : entries;
    entries *= shape[d];
  }
  return map;
}

ScoreStrides StridesOf(const Spec& spec) {
  if (!spec.present()) return {};
  const size_t rank = spec.shape.size();
  const int64_t heads = spec.shape[rank - 3], rows = spec.shape[rank - 2],
                cols = spec.shape[rank - 1];
  return {heads == 1 ? 0 : rows * cols, rows == 1 ? 0 : cols, cols == 1 ? 0 : int64_t{1},
          heads * rows * cols};
}

}  // namespace

Status Decode(Pass pass, const CallAttributes& attributes, xffi::RemainingArgs args,
              xffi::RemainingRets rets, Call* call) {
  const bool forward = pass == Pass::kForward;
  const size_t num_args = forward ? kNumForwardArgs : kNumBackwardArgs;
  const auto* results = forward ? kForwardResults : kBackwardResults;
  const size_t num_results = forward ? std::size(kForwardResults) : std::size(kBackwardResults);
  if (args.size() != num_args || rets.size() != num_results + 1) {
    return Status::Internal("attention: custom call with a wrong number of buffers");
  }

  Request request;
  request.pass = pass;
  request.attributes = attributes.ToCore();
  std::vector<xffi::AnyBuffer> buffers;
  for (size_t i = 0; i < num_args; ++i) {
    auto buffer = args.get<xffi::AnyBuffer>(i);
    if (!buffer) return Status::Internal("attention: operand is not a buffer");
    buffers.push_back(*buffer);
    request.*kArgs[i].spec = SpecOf(*buffer);
  }
  std::vector<xffi::AnyBuffer> result_buffers;
  for (size_t i = 0; i <= num_results; ++i) {
    auto buffer = rets.get<xffi::AnyBuffer>(i);
    if (!buffer) return Status::Internal("attention: result is not a buffer");
    result_buffers.push_back(**buffer);
  }
  if (!forward) {
    request.dbias = SpecOf(result_buffers[3]);
    request.dsinks = SpecOf(result_buffers[4]);
  }
  if (Status s = Describe(request, &call->problem); !s.ok()) return s;

  const std::vector<int64_t>& batch_shape = call->problem.batch_shape;
  for (size_t i = 0; i < num_args; ++i) {
    const Spec& spec = request.*kArgs[i].spec;
    if (!spec.present()) continue;
    call->operands.*
        kArgs[i].operand = {buffers[i].untyped_data(), spec.dtype, MapOf(batch_shape, spec.shape)};
  }
  for (size_t i = 0; i < num_results; ++i) {
    const Spec spec = SpecOf(result_buffers[i]);
    if (!spec.present()) continue;
    int64_t entries = 1;
    for (size_t d = 0; d < batch_shape.size(); ++d) entries *= spec.shape[d];
    call->operands.*results[i] = {result_buffers[i].untyped_data(), spec.dtype,
                                  MapOf(batch_shape, spec.shape), entries};
  }
  call->operands.bias_strides = StridesOf(request.bias);
  call->operands.mask_strides = StridesOf(request.mask);
  call->workspace = result_buffers[num_results].untyped_data();
  call->workspace_bytes = static_cast<int64_t>(result_buffers[num_results].size_bytes());
  return {};
}

xffi::Error ToError(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return xffi::Error::Success();
    case StatusCode::kInvalidArgument:
      return xffi::Error::InvalidArgument(status.message());
    case StatusCode::kUnimplemented:
      return xffi::Error(xffi::ErrorCode::kUnimplemented, status.message());
    case StatusCode::kInternal:
      break;
  }
  return xffi::Error::Internal(status.message());
}

}  // namespace jax_fmha::ffi

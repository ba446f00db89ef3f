#include "cc/cpu/delta.h"

#include <cmath>
#include <limits>

namespace jax_fmha {
namespace cpu {
namespace {

constexpr double kLog2E = 1.4426950408889634074;

// One query row, all heads. delta [N] comes in as the row sums of out * dout.
template <typename T>
void FinishRow(const BackwardCall<T>& call, int64_t b, int64_t slot, int64_t row, T* delta,
               T* sink_sums) {
  const Problem& problem = call.problem;
  const int64_t num_heads = problem.num_q_heads, seqlen_q = problem.seqlen_q,
                group = call.group_size();
  const T* const lse = call.operands.saved_lse.template Entry<T>(b, num_heads * seqlen_q) + row;
  const T* dlse = nullptr;
  if (call.operands.dlse)
    dlse = call.operands.dlse.template Entry<T>(b, num_heads * seqlen_q) + row;
  const T* sinks = nullptr;
  if (problem.wants_dsinks) sinks = call.operands.sinks.template Entry<T>(b, num_heads);
  for (int64_t n = 0; n < num_heads; ++n) {
    const T row_lse = lse[n * seqlen_q];
    // Nothing to attend, and no sink either: every gradient of the row is 0, whatever the
    // cotangents hold.
    const bool empty = row_lse == -std::numeric_limits<T>::infinity();
    T value = delta[n];
    if (dlse != nullptr) value -= dlse[n * seqlen_q];
    if (empty) value = 0;
    if (sinks != nullptr && !empty) sink_sums[n] -= std::exp(sinks[n] - row_lse) * value;
    const int64_t at =
        (b * problem.num_kv_heads + n / group) * call.query_rows() + slot * group + n % group;
    call.workspace.delta[at] = value;
    call.workspace.lse2[at] =
        empty ? std::numeric_limits<T>::infinity() : row_lse * static_cast<T>(kLog2E);
  }
}

}  // namespace

template <typename T>
void ComputeDelta(const BackwardCall<T>& call) {
  const Problem& problem = call.problem;
  const int64_t num_heads = problem.num_q_heads;
  const int64_t row_bytes = num_heads * problem.head_dim_v * SizeOf(problem.dtype);
  const int64_t pieces = CeilDiv(problem.seqlen_q, kDeltaRows);
  call.ForEach(problem.batch * pieces, [&](int64_t item, int slot_number) {
    const int64_t b = item / pieces, begin = item % pieces * kDeltaRows;
    const Entry entry = call.plan.At(b);
    const char* const out =
        call.operands.saved_out.template Entry<char>(b, problem.seqlen_q * row_bytes);
    const char* const dout =
        call.operands.dout.template Entry<char>(b, problem.seqlen_q * row_bytes);
    T* const delta = call.Slot(slot_number).row_dots;
    T* const sink_sums = call.workspace.sink_sums + item * num_heads;
    if (problem.wants_dsinks) std::fill(sink_sums, sink_sums + num_heads, T(0));
    // Rows past q_length have the last slots.
    const int64_t end = std::min(begin + kDeltaRows, entry.q_length());
    for (int64_t slot = begin; slot < end; ++slot) {
      const int64_t row = entry.QRow(slot);
      call.tile.row_dots(out + row * row_bytes, dout + row * row_bytes, num_heads,
                         problem.head_dim_v, delta);
      FinishRow(call, b, slot, row, delta, sink_sums);
    }
  });
}

template void ComputeDelta(const BackwardCall<float>& call);
template void ComputeDelta(const BackwardCall<double>& call);

}  // namespace cpu
}  // namespace jax_fmha

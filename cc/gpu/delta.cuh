// Before the main backward kernel: delta = rowsum(out * dout) - dlse, and lse in log2 units, per
// row, in padded arrays that bulk copies can load, in the order of RowSlot. Rows that see nothing
// get lse +inf, which makes every probability of theirs 0.
#pragma once

#include <cuda_runtime.h>

#include "cc/gpu/problem_params.cuh"
#include "cc/gpu/row_parts.cuh"
#include "cc/gpu/softmax.cuh"

namespace jax_fmha::gpu {

struct DeltaParams {
  ScoreParams score;
  Operand out, dout, lse, dlse;
  float* delta;  // [batch, N, padded_q]
  float* lse2;   // [batch, N, padded_q]; of a large row only that it is large counts
  int padded_q;
  int* has_large;  // zeroed; set if some |lse2| exceeds kLargeBase
  // Zeroed on the way, while rows are being read: num_zeros pieces, block_zeros by each block.
  uint4* zeros = nullptr;
  int64_t num_zeros = 0;
  int block_zeros = 0;
  uint4* parts = nullptr;  // [batch, N, 2, padded_q]: of lse and of delta, see row_parts.cuh
};

inline constexpr int kDeltaRows = 64;

// Where row i lies: in each 32 rows, those that one thread of an accumulator's quad holds follow
// each other.
__host__ __device__ constexpr int RowSlot(int i) {
  return i / 32 * 32 + i % 8 / 2 * 8 + i % 32 / 8 * 2 + i % 2;
}

// One block per kDeltaRows rows of one head; kLanes lanes read 8 elements each of one row. What is
// left to do with a row's sum, a thread for each row does.
template <typename T, int kLanes>
__global__ void __launch_bounds__(256) Delta(const __grid_constant__ DeltaParams p) {
  const ScoreParams& s = p.score;
  const int blocks = p.padded_q / kDeltaRows;
  const int pair = blockIdx.x / blocks, b = pair / s.num_q_heads, head = pair % s.num_q_heads;
  const int first = blockIdx.x % blocks * kDeltaRows;
  const int q_length = LimitsOf(s, b).q_length;
  const int lane = threadIdx.x % kLanes, column = lane * 8;
  const int64_t row_stride = static_cast<int64_t>(s.num_q_heads) * s.head_dim_v;
  const T* out = static_cast<const T*>(p.out.data) +
                 EntryOf(p.out.batch, b) * s.seqlen_q * row_stride + head * s.head_dim_v + column;
  const T* dout = static_cast<const T*>(p.dout.data) +
                  EntryOf(p.dout.batch, b) * s.seqlen_q * row_stride + head * s.head_dim_v + column;
  // All rows are asked for before the first is looked at.
  constexpr int kRowsAtOnce = 256 / kLanes, kPasses = kDeltaRows / kRowsAtOnce;
  uint4 out_pieces[kPasses] = {}, dout_pieces[kPasses] = {};
#pragma unroll
  for (int n = 0; n < kPasses; ++n) {
    const int i = first + n * kRowsAtOnce + threadIdx.x / kLanes;
    if (i < q_length && column < s.head_dim_v) {
      out_pieces[n] = *reinterpret_cast<const uint4*>(out + i * row_stride);
      dout_pieces[n] = *reinterpret_cast<const uint4*>(dout + i * row_stride);
    }
  }
  const bool has_row = threadIdx.x < kDeltaRows;  // this thread finishes one
  const int row = first + threadIdx.x;
  const int64_t row_at = static_cast<int64_t>(head) * s.seqlen_q + row, q_rows = s.seqlen_q;
  float lse = kInf, dlse = 0.f;
  if (has_row && row < s.seqlen_q) {
    lse = static_cast<const float*>(
        p.lse.data)[EntryOf(p.lse.batch, b) * s.num_q_heads * q_rows + row_at];
    if (p.dlse.data != nullptr) {
      dlse = static_cast<const float*>(
          p.dlse.data)[EntryOf(p.dlse.batch, b) * s.num_q_heads * q_rows + row_at];
    }
  }
  const int64_t zeros_first = static_cast<int64_t>(blockIdx.x) * p.block_zeros;
  const int64_t zeros_end = min(zeros_first + p.block_zeros, p.num_zeros);
  for (int64_t at = zeros_first + threadIdx.x; at < zeros_end; at += 256) {
    p.zeros[at] = make_uint4(0, 0, 0, 0);
  }
  __shared__ float sums[kDeltaRows];
  __shared__ bool are_zero[kDeltaRows];  // all of out's row; asked for only where there are sinks
#pragma unroll
  for (int n = 0; n < kPasses; ++n) {
    const int i = n * kRowsAtOnce + threadIdx.x / kLanes;
    float sum = 0.f;
    const T* a = reinterpret_cast<const T*>(&out_pieces[n]);
    const T* c = reinterpret_cast<const T*>(&dout_pieces[n]);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += static_cast<float>(a[e]) * static_cast<float>(c[e]);
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (lane == 0) sums[i] = sum;
    if (s.sinks.data != nullptr) {
      const uint4 x = out_pieces[n];
      uint32_t bits = x.x | x.y | x.z | x.w;
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2)
        bits |= __shfl_xor_sync(0xffffffff, bits, step);
      if (lane == 0) are_zero[i] = (bits & 0x7fff7fffu) == 0;
    }
  }
  __syncthreads();
  if (!has_row) return;

  float sum = sums[threadIdx.x];
  if (row < s.seqlen_q) {
    // A row without keys is 0 whatever its sink, also where its cotangent is NaN.
    if (s.sinks.data != nullptr && are_zero[threadIdx.x] &&
        lse == ReadFloat(s.sinks, EntryOf(s.sinks.batch, b) * s.num_q_heads + head)) {
      sum = 0.f;
    }
    // A row without lse has no gradient, whatever its cotangent.
    if (lse != -kInf) sum -= dlse;
    if (row >= q_length || lse == -kInf) lse = kInf;
  }
  float lse2 = lse * kLog2e;
  if (p.parts != nullptr) {
    constexpr float kLimit = kPartsLimit<T>;
    const float scale = ScaleOf(s, b);
    // Where scores are transformed before lse applies, and in large rows, they start from 0.
    float start = 0.f;
    if (!IsTransformed(s, scale)) {
      start = -lse / scale;
      // Where parts cannot hold it, the row counts as large.
      if (lse < kInf && fabsf(start) > kLimit) lse2 = 2.f * kLargeBase;
      if (fabsf(lse2) > kLargeBase) start = lse < kInf ? 0.f : -kLimit;
    }
    uint4* parts = p.parts + static_cast<int64_t>(2 * pair) * p.padded_q + row;
    parts[0] = PartsOf<T>(start);
    parts[p.padded_q] = PartsOf<T>(-sum);
  }
  const int64_t at = static_cast<int64_t>(pair) * p.padded_q + RowSlot(row);
  p.delta[at] = sum;
  p.lse2[at] = lse2;
  if (lse < kInf && fabsf(lse2) > kLargeBase) *p.has_large = 1;
}

// dsink = -sum of exp(sink - lse) * delta over the rows of the head, and over the batch entries
// that share the sink.
struct SinkParams {
  ScoreParams score;
  Operand lse;
  const float* delta;
  int padded_q;
  BatchMap to;
  float* dsinks;
};

__global__ void __launch_bounds__(256) SinkGradient(const __grid_constant__ SinkParams p);

}  // namespace jax_fmha::gpu

// Recomputes forward rows that a NaN of another segment may have reached.
//
// The main kernel lets rows of several segments share key tiles; a foreign row has probability
// exactly 0, which is harmless unless its value is NaN or Inf. Such a leak always shows as NaN, so
// the main kernel lists the 16-row strips of mixed tiles that hold one, and this kernel computes
// their rows again from the keys that each may see. Without a NaN the list is empty.
#pragma once

#include <cuda_runtime.h>

#include "cc/gpu/problem_params.cuh"
#include "cc/gpu/softmax.cuh"

namespace jax_fmha::gpu {

struct RepairList {
  int* count;  // zeroed
  Strip* strips;
};

struct RepairParams {
  ScoreParams score;
  BatchMap q_map, k_map, v_map;
  const void *q, *k, *v;
  void* out;
  float* lse;
  RepairList list;
};

// One warp per row; each lane scores one key of 32, then holds every 32nd column of the output.
template <typename T>
__global__ void __launch_bounds__(32 * kStripRows)
    RepairForward(const __grid_constant__ RepairParams p) {
  const ScoreParams& s = p.score;
  const int lane = threadIdx.x % 32;
  constexpr int kMaxColumns = 256 / 32;
  for (int item = blockIdx.x; item < *p.list.count; item += gridDim.x) {
    const Strip strip = p.list.strips[item];
    const int i = strip.row + threadIdx.x / 32;
    if (i >= s.seqlen_q) continue;
    const EntryLimits limits = LimitsOf(s, strip.batch);
    const int2 keys = RowInterval(s, limits, strip.batch, i);
    const ElementRules rules = RulesOf(s, strip.batch, strip.head, true);
    const float scale = ScaleOf(s, strip.batch);
    const float cap = CapOf(s, strip.batch);
    const int kv_head = strip.head / s.group_size;
    const T* q = static_cast<const T*>(p.q) +
                 ((EntryOf(p.q_map, strip.batch) * s.seqlen_q + i) * s.num_q_heads + strip.head) *
                     s.head_dim;
    const T* k =
        static_cast<const T*>(p.k) +
        (EntryOf(p.k_map, strip.batch) * s.seqlen_kv * s.num_kv_heads + kv_head) * s.head_dim;
    const T* v =
        static_cast<const T*>(p.v) +
        (EntryOf(p.v_map, strip.batch) * s.seqlen_kv * s.num_kv_heads + kv_head) * s.head_dim_v;
    const int64_t k_row = static_cast<int64_t>(s.num_kv_heads) * s.head_dim,
                  v_row = static_cast<int64_t>(s.num_kv_heads) * s.head_dim_v;
    float top = -kInf, sum = 0.f, out[kMaxColumns] = {};
    for (int first = keys.x; first < keys.y; first += 32) {
      const int j = first + lane;
      const bool keep = j < keys.y && Keep(s, rules, i, j);
      float score = -kInf;
      if (keep) {
        score = 0.f;
        for (int d = 0; d < s.head_dim; ++d)
          score += static_cast<float>(q[d]) * static_cast<float>(k[j * k_row + d]);
        score *= scale;
        if (s.bias.data != nullptr) score += Bias(s, rules, i, j);
        if (s.logits_soft_cap.data != nullptr) score = cap * tanhf(score / cap);
      }
      float new_top = score;
      for (int step = 16; step > 0; step /= 2)
        new_top = fmaxf(new_top, __shfl_xor_sync(0xffffffff, new_top, step));
      new_top = fmaxf(new_top, top);
      const float base = new_top == -kInf ? 0.f : new_top;
      const float rescale = expf(top - base);
      const float weight = keep ? expf(score - base) : 0.f;
      top = new_top;
      sum = sum * rescale + weight;
      for (int c = 0; c < kMaxColumns; ++c) out[c] *= rescale;
      for (unsigned kept = __ballot_sync(0xffffffff, keep); kept != 0; kept &= kept - 1) {
        const int source = __ffs(kept) - 1;
        const float w = __shfl_sync(0xffffffff, weight, source);
        const T* row = v + (first + source) * v_row;
        for (int c = 0; c < kMaxColumns; ++c) {
          if (lane + 32 * c < s.head_dim_v) out[c] += w * static_cast<float>(row[lane + 32 * c]);
        }
      }
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    const bool is_empty = sum == 0.f;
    if (s.sinks.data != nullptr) {
      const float sink =
          ReadFloat(s.sinks, EntryOf(s.sinks.batch, strip.batch) * s.num_q_heads + strip.head);
      const float new_top = fmaxf(top, sink);
      if (new_top != -kInf) {
        const float rescale = expf(top - new_top);
        for (int c = 0; c < kMaxColumns; ++c) out[c] *= rescale;
        sum = sum * rescale + expf(sink - new_top);
        top = new_top;
      }
    }
    T* to = static_cast<T*>(p.out) +
            ((static_cast<int64_t>(strip.batch) * s.seqlen_q + i) * s.num_q_heads + strip.head) *
                s.head_dim_v;
    for (int c = 0; c < kMaxColumns; ++c) {
      if (lane + 32 * c < s.head_dim_v)
        to[lane + 32 * c] = static_cast<T>(is_empty ? 0.f : out[c] / sum);
    }
    if (lane == 0) {
      p.lse[(static_cast<int64_t>(strip.batch) * s.num_q_heads + strip.head) * s.seqlen_q + i] =
          sum == 0.f ? -kInf : top + logf(sum);
    }
  }
}

}  // namespace jax_fmha::gpu

// Recomputes gradient rows that a NaN of another segment may have reached; see repair.cuh for why.
//
// Only the keys have a plan of segments here. Rows compare ids with those of all keys in their
// reach.
#pragma once

#include "cc/gpu/delta.cuh"
#include "cc/gpu/repair.cuh"

namespace jax_fmha::gpu {

struct RepairBackwardParams {
  ScoreParams score;
  SegmentPlan kv_plan;
  BatchMap q_map, k_map, v_map, dout_map;
  const void *q, *k, *v, *dout;
  Operand lse;
  const float* delta;
  int padded_q;
  void *dq, *dk, *dv;
  RepairList dq_list, dkv_list;  // (batch, query head, row) and (batch, kv head, key)
};

template <typename T>
struct BackwardRows {
  const T *q, *k, *v, *dout;  // row 0 of one query head and its kv head
  int64_t q_row, k_row, v_row, dout_row;
  const float *lse, *delta;
  float scale, cap;

  __device__ BackwardRows(const RepairBackwardParams& p, int b, int head) {
    const ScoreParams& s = p.score;
    const int kv_head = head / s.group_size;
    q_row = static_cast<int64_t>(s.num_q_heads) * s.head_dim;
    k_row = static_cast<int64_t>(s.num_kv_heads) * s.head_dim;
    v_row = static_cast<int64_t>(s.num_kv_heads) * s.head_dim_v;
    dout_row = static_cast<int64_t>(s.num_q_heads) * s.head_dim_v;
    q = static_cast<const T*>(p.q) + EntryOf(p.q_map, b) * s.seqlen_q * q_row + head * s.head_dim;
    k = static_cast<const T*>(p.k) + EntryOf(p.k_map, b) * s.seqlen_kv * k_row +
        kv_head * s.head_dim;
    v = static_cast<const T*>(p.v) + EntryOf(p.v_map, b) * s.seqlen_kv * v_row +
        kv_head * s.head_dim_v;
    dout = static_cast<const T*>(p.dout) + EntryOf(p.dout_map, b) * s.seqlen_q * dout_row +
           head * s.head_dim_v;
    lse = static_cast<const float*>(p.lse.data) +
          (EntryOf(p.lse.batch, b) * s.num_q_heads + head) * s.seqlen_q;
    delta = p.delta + (static_cast<int64_t>(b) * s.num_q_heads + head) * p.padded_q;
    scale = ScaleOf(s, b);
    cap = CapOf(s, b);
  }

  // Probability and score gradient of one allowed pair.
  __device__ float2 Pair(const ScoreParams& s, const ElementRules& rules, int i, int j) const {
    float score = 0.f, dp = 0.f, slope = 1.f;
    for (int d = 0; d < s.head_dim; ++d) {
      score += static_cast<float>(q[i * q_row + d]) * static_cast<float>(k[j * k_row + d]);
    }
    for (int d = 0; d < s.head_dim_v; ++d) {
      dp += static_cast<float>(dout[i * dout_row + d]) * static_cast<float>(v[j * v_row + d]);
    }
    score *= scale;
    if (s.bias.data != nullptr) score += Bias(s, rules, i, j);
    if (s.logits_soft_cap.data != nullptr) {
      const float t = tanhf(score / cap);
      score = cap * t;
      slope = 1.f - t * t;
    }
    const float probability = lse[i] == -kInf ? 0.f : expf(score - lse[i]);
    return make_float2(probability, probability * (dp - delta[RowSlot(i)]) * slope);
  }
};

inline constexpr int kRepairColumns = 256 / 32;

// One warp per row: lanes score 32 pairs, then hold every 32nd column.
template <typename T>
__global__ void __launch_bounds__(32 * kStripRows)
    RepairDq(const __grid_constant__ RepairBackwardParams p) {
  const ScoreParams& s = p.score;
  const int lane = threadIdx.x % 32;
  for (int item = blockIdx.x; item < *p.dq_list.count; item += gridDim.x) {
    const Strip strip = p.dq_list.strips[item];
    const int i = strip.row + threadIdx.x / 32;
    if (i >= s.seqlen_q) continue;
    const BackwardRows<T> rows(p, strip.batch, strip.head);
    const int2 keys = RowInterval(s, LimitsOf(s, strip.batch), strip.batch, i);
    const ElementRules rules = RulesOf(s, strip.batch, strip.head, true);
    float dq[kRepairColumns] = {};
    for (int first = keys.x; first < keys.y; first += 32) {
      const int j = first + lane;
      const bool keep = j < keys.y && Keep(s, rules, i, j);
      const float ds = keep ? rows.Pair(s, rules, i, j).y : 0.f;
      for (unsigned kept = __ballot_sync(0xffffffff, keep); kept != 0; kept &= kept - 1) {
        const int source = __ffs(kept) - 1;
        const float weight = __shfl_sync(0xffffffff, ds, source);
        for (int c = 0; c < kRepairColumns; ++c) {
          const int d = lane + 32 * c;
          if (d < s.head_dim)
            dq[c] += weight * static_cast<float>(rows.k[(first + source) * rows.k_row + d]);
        }
      }
    }
    T* to = static_cast<T*>(p.dq) +
            ((static_cast<int64_t>(strip.batch) * s.seqlen_q + i) * s.num_q_heads + strip.head) *
                s.head_dim;
    for (int c = 0; c < kRepairColumns; ++c) {
      if (lane + 32 * c < s.head_dim) to[lane + 32 * c] = static_cast<T>(dq[c] * rows.scale);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(32 * kStripRows)
    RepairDkv(const __grid_constant__ RepairBackwardParams p) {
  const ScoreParams& s = p.score;
  const int lane = threadIdx.x % 32;
  for (int item = blockIdx.x; item < *p.dkv_list.count; item += gridDim.x) {
    const Strip strip = p.dkv_list.strips[item];
    const int j = strip.row + threadIdx.x / 32;
    if (j >= s.seqlen_kv) continue;
    const int b = strip.batch;
    const EntryLimits limits = LimitsOf(s, b);
    const int2 queries = p.kv_plan.rows[b * PlanStride(s.seqlen_kv) + j];
    float dk[kRepairColumns] = {}, dv[kRepairColumns] = {}, scale = 0.f;
    for (int head = strip.head * s.group_size; head < (strip.head + 1) * s.group_size; ++head) {
      const BackwardRows<T> rows(p, b, head);
      const ElementRules rules = RulesOf(s, b, head, true);
      scale = rows.scale;
      for (int first = queries.x; first < queries.y; first += 32) {
        const int i = first + lane;
        bool keep = i < queries.y && i < limits.q_length;
        if (keep) {
          const int2 keys = RowInterval(s, limits, b, i);
          keep = j >= keys.x && j < keys.y && Keep(s, rules, i, j);
        }
        const float2 pair = keep ? rows.Pair(s, rules, i, j) : make_float2(0.f, 0.f);
        for (unsigned kept = __ballot_sync(0xffffffff, keep); kept != 0; kept &= kept - 1) {
          const int source = __ffs(kept) - 1;
          const float probability = __shfl_sync(0xffffffff, pair.x, source);
          const float ds = __shfl_sync(0xffffffff, pair.y, source);
          for (int c = 0; c < kRepairColumns; ++c) {
            const int d = lane + 32 * c;
            if (d < s.head_dim)
              dk[c] += ds * static_cast<float>(rows.q[(first + source) * rows.q_row + d]);
            if (d < s.head_dim_v) {
              dv[c] +=
                  probability * static_cast<float>(rows.dout[(first + source) * rows.dout_row + d]);
            }
          }
        }
      }
    }
    const int64_t row = (static_cast<int64_t>(b) * s.seqlen_kv + j) * s.num_kv_heads + strip.head;
    for (int c = 0; c < kRepairColumns; ++c) {
      const int d = lane + 32 * c;
      if (d < s.head_dim)
        static_cast<T*>(p.dk)[row * s.head_dim + d] = static_cast<T>(dk[c] * scale);
      if (d < s.head_dim_v) static_cast<T*>(p.dv)[row * s.head_dim_v + d] = static_cast<T>(dv[c]);
    }
  }
}

}  // namespace jax_fmha::gpu

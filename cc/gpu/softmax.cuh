// Online softmax over one warpgroup's accumulator: 64 rows by N columns, of which a thread holds
// two rows.
//
// Register n8 * 4 + r * 2 + c holds row 8 r + lane / 4 (of the warp's 16) and column 8 n8 + 2 (lane
// % 4) + c.
#pragma once

#include <cstdint>

namespace jax_fmha::gpu {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kInf = __builtin_huge_valf();

// An exponential is 2^(factor * s - base), one fused operation that inherits the rounding of its
// base. Rows whose |base| exceeds this take differences of scores instead.
inline constexpr float kLargeBase = 1 << 14;

__device__ __forceinline__ float QuadMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ __forceinline__ float QuadSum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float Tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// max: running maximum of the scores as they come (unscaled); sum: this thread's share of the row
// sum.
struct RowStats {
  float max[2] = {-kInf, -kInf};
  float sum[2] = {0.f, 0.f};
};

// Turns scores into exp2(factor * (s - max)) in place and updates the statistics; `rescale[r]` is
// what earlier sums and outputs of row r must be multiplied with. `factor` is positive.
template <int kRegs>
__device__ __forceinline__ void OnlineSoftmax(float (&s)[kRegs], float factor, RowStats& stats,
                                              float (&rescale)[2]) {
  float base[2], before[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = s[r * 2];
#pragma unroll
    for (int i = 0; i < kRegs / 4; ++i) {
      top = fmaxf(top, s[i * 4 + r * 2]);
      top = fmaxf(top, s[i * 4 + r * 2 + 1]);
    }
    before[r] = stats.max[r];
    stats.max[r] = fmaxf(QuadMax(top), before[r]);
    base[r] = stats.max[r] == -kInf ? 0.f : __fmul_rn(stats.max[r], factor);
    // Rounded like the base: a maximum that stays gives exactly 1, whatever its size.
    rescale[r] = Exp2(__fmul_rn(before[r], factor) - base[r]);
  }
  if (__any_sync(0xffffffff, fmaxf(fabsf(base[0]), fabsf(base[1])) > kLargeBase)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (fabsf(base[r]) <= kLargeBase) continue;
      base[r] = 0.f;
      rescale[r] = Exp2((before[r] - stats.max[r]) * factor);
#pragma unroll
      for (int i = 0; i < kRegs / 4; ++i) {
        s[i * 4 + r * 2] -= stats.max[r];
        s[i * 4 + r * 2 + 1] -= stats.max[r];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sums[2] = {stats.sum[r] * rescale[r], 0.f};  // two chains of additions
#pragma unroll
    for (int i = 0; i < kRegs / 4; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s[i * 4 + r * 2 + c];
        x = Exp2(x * factor - base[r]);
        sums[c] += x;
      }
    }
    stats.sum[r] = sums[0] + sums[1];
  }
}

}  // namespace jax_fmha::gpu

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

template <typename Element>
__device__ __forceinline__ uint32_t PackPair(float first, float second) {
  struct alignas(4) {
    Element first, second;
  } pair = {static_cast<Element>(first), static_cast<Element>(second)};
  return reinterpret_cast<const uint32_t&>(pair);
}

// A row's exponentials are taken against its base, 2^(factor * s - base). max: the score that the
// base was worked out from; sum: this thread's share of the row sum.
struct RowStats {
  float max[2] = {-kInf, -kInf};
  float sum[2] = {0.f, 0.f};
  float base[2] = {0.f, 0.f};
  bool is_steady = false;  // in all of the warp: bases may stay
};

// Turns scores into exponentials against the running maximum in place and updates the statistics;
// `rescale[r]` is what earlier sums and outputs of row r must be multiplied with. `factor` is
// positive.
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
  const bool has_large = __any_sync(0xffffffff, fmaxf(fabsf(base[0]), fabsf(base[1])) > kLargeBase);
  const bool has_empty = __any_sync(0xffffffff, fminf(stats.max[0], stats.max[1]) == -kInf);
  stats.is_steady = !has_large && !has_empty;
  if (has_large) {
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
    stats.base[r] = base[r];
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

// What a thread's exponentials against a base that stays may add up to: half of the range of F16.
inline constexpr float kSteadyLimit = 1 << 15;

// Exponentials of row kRow against the base that it has, as pairs of 16-bit elements: no maximum,
// and nothing to rescale. Gives this thread's share of their sum. A base below the running maximum
// is as good as the maximum itself, as long as no exponential is larger than 16-bit elements and
// sums hold well: use them only if every sum of the warp is IsSteady.
template <typename Element, int kRow, int kRegs>
__device__ __forceinline__ float SteadyExponentials(const float (&s)[kRegs], float factor,
                                                    float base, uint32_t (&pairs)[kRegs / 4]) {
  float sums[2];  // two chains of additions
#pragma unroll
  for (int i = 0; i < kRegs / 4; ++i) {
    float x[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      x[c] = Exp2(s[i * 4 + kRow * 2 + c] * factor - base);
      sums[c] = i == 0 ? x[c] : sums[c] + x[c];
    }
    pairs[i] = PackPair<Element>(x[0], x[1]);
  }
  return sums[0] + sums[1];
}

// Of all of a warp's threads.
__device__ __forceinline__ bool IsSteady(float sum) {
  return __all_sync(0xffffffff, sum <= kSteadyLimit);
}

}  // namespace jax_fmha::gpu

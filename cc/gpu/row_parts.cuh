// Statistics of query rows as an operand of a product: S^T = k q^T starts from -lse / scale and
// dP^T = v dout^T from -delta by one more instruction each, instead of loads by every thread.
//
// Three 16-bit parts, each with a weight, add up to a float32 value: bfloat16 has its range, and
// weights of float16 give it one. The parts of a row fill 16 bytes, half a row of the operand.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cc/gpu/softmax.cuh"

namespace cutlass {
struct half_t;
}

namespace jax_fmha::gpu {

// 2^0 for bfloat16; 2^12, 2^0 and 2^-12 for float16.
template <typename Element>
inline constexpr float kPartWeight = std::is_same_v<Element, cutlass::half_t> ? 4096.f : 1.f;

// Largest value that parts hold.
template <typename Element>
inline constexpr float kPartsLimit = std::is_same_v<Element, cutlass::half_t> ? 0x1p27f : 0x1p126f;

// The parts of x, and 0.
template <typename Element>
__device__ __forceinline__ uint4 PartsOf(float x) {
  constexpr float kWeight = kPartWeight<Element>;
  float parts[3];
  float weight = kWeight;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    parts[i] = static_cast<float>(static_cast<Element>(x / weight));
    // Infinity and NaN are a part, and nothing is left of them.
    x = fabsf(parts[i]) < kInf ? x - parts[i] * weight : 0.f;
    weight /= kWeight;
  }
  return make_uint4(PackPair<Element>(parts[0], parts[1]), PackPair<Element>(parts[2], 0.f), 0, 0);
}

// The weights as this lane holds them of the other operand, in which every row is the same: two of
// the first 8 columns of 16. The last 8 are 0.
template <typename Element>
__device__ __forceinline__ uint32_t PartWeights() {
  constexpr float kWeight = kPartWeight<Element>;
  const int lane = threadIdx.x % 4;
  return lane == 0   ? PackPair<Element>(kWeight, 1.f)
         : lane == 1 ? PackPair<Element>(1.f / kWeight, 0.f)
                     : 0;
}

}  // namespace jax_fmha::gpu

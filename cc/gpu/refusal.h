// What the kernels of every architecture refuse alike.
#pragma once

#include <string>
#include <tuple>

#include "cc/core/kernel.h"
#include "cc/gpu/plan.h"

namespace jax_fmha::gpu {

inline std::string PlatformRefusal(const Device& device) {
  if (device.platform != Platform::kCuda) return "the platform is not CUDA";
  if (!device.has_cuda_kernels) return kNoCudaKernels;
  return {};
}

// "<needed> is needed, the device has <its compute capability>"
inline std::string CapabilityRefusal(const char* needed, const Device& device) {
  return "compute capability " + std::string(needed) + " is needed, the device has " +
         std::to_string(device.compute_capability / 10) + "." +
         std::to_string(device.compute_capability % 10);
}

inline std::string ProblemRefusal(const Problem& p, int max_head_dim, int max_head_dim_v) {
  if (p.dtype != DType::kBF16 && p.dtype != DType::kF16) {
    return std::string("dtype ") + Name(p.dtype) +
           ": only bfloat16 and float16; cast query, key and value";
  }
  for (const auto& [name, head_dim, largest] :
       {std::tuple{"head_dim", p.head_dim, max_head_dim},
        std::tuple{"value's head_dim", p.head_dim_v, max_head_dim_v}}) {
    if (head_dim < 8 || head_dim > largest || head_dim % 8 != 0) {
      return std::string(name) + " " + std::to_string(head_dim) + ": only multiples of 8 up to " +
             std::to_string(largest);
    }
  }
  constexpr int64_t kMaxTiles = int64_t{1} << 29;
  if (p.seqlen_q > kMaxSeqlen || p.seqlen_kv > kMaxSeqlen) return "a sequence longer than 2^29";
  // Tiles are counted in an int; 64 rows is the smallest tile of any kernel.
  const int64_t longest = p.seqlen_q > p.seqlen_kv ? p.seqlen_q : p.seqlen_kv;
  if (p.batch * p.num_q_heads > kMaxTiles ||
      p.batch * p.num_q_heads * CeilDiv(longest, 64) > kMaxTiles) {
    return "more than 2^29 tiles of work";
  }
  if (p.has_bias && p.bias_dtype == DType::kF64) return "bias in float64: cast it to float32";
  return {};
}

// dq is added in turns, dk and dv by one block each; dbias by whoever comes.
inline std::string BackwardRefusal(const Problem& p) {
  if (p.deterministic && p.wants_dbias &&
      BiasGradientSize(p) != p.batch * p.num_q_heads * p.seqlen_q * p.seqlen_kv) {
    return "deterministic=True with a gradient of bias that is summed over a dimension: sums are "
           "taken in the order in which blocks finish";
  }
  return {};
}

}  // namespace jax_fmha::gpu

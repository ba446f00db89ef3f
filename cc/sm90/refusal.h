// What forward and backward refuse alike.
#pragma once

#include <string>
#include <utility>

#include "cc/core/kernel.h"

namespace jax_fmha::sm90 {

inline std::string SharedRefusal(const Problem& p, const Device& device) {
  if (device.platform != Platform::kCuda) return "the platform is not CUDA";
  if (!device.has_cuda_kernels) {
    return "this installation has no CUDA kernels; reinstall jax-fmha from source with "
           "-C cmake.define.JAX_FMHA_CUDA=ON";
  }
  if (device.compute_capability != 0 && device.compute_capability != 90) {
    return "compute capability 9.0 (Hopper) is needed, the device has " +
           std::to_string(device.compute_capability / 10) + "." +
           std::to_string(device.compute_capability % 10);
  }
  if (p.dtype != DType::kBF16 && p.dtype != DType::kF16) {
    return std::string("dtype ") + Name(p.dtype) +
           ": only bfloat16 and float16; cast query, key and value";
  }
  for (const auto& [name, head_dim] :
       {std::pair{"head_dim", p.head_dim}, std::pair{"value's head_dim", p.head_dim_v}}) {
    if (head_dim < 8 || head_dim > 256 || head_dim % 8 != 0) {
      return std::string(name) + " " + std::to_string(head_dim) + ": only multiples of 8 up to 256";
    }
  }
  constexpr int64_t kMaxSeqlen = int64_t{1} << 29, kMaxTiles = int64_t{1} << 29;
  if (p.seqlen_q > kMaxSeqlen || p.seqlen_kv > kMaxSeqlen) return "a sequence longer than 2^29";
  // Tiles are counted in an int; 64 rows is the smallest tile of any kernel.
  if (p.batch * p.num_q_heads > kMaxTiles ||
      p.batch * p.num_q_heads * CeilDiv(p.seqlen_q > p.seqlen_kv ? p.seqlen_q : p.seqlen_kv, 64) >
          kMaxTiles) {
    return "more than 2^29 tiles of work";
  }
  if (p.has_tile_mask) return "a tile mask: pass a dense bool mask";
  if (p.has_bias && p.bias_dtype == DType::kF64) return "bias in float64: cast it to float32";
  return {};
}

}  // namespace jax_fmha::sm90

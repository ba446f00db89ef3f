// What the Blackwell kernels refuse alike.
#pragma once

#include <string>

#include "cc/gpu/refusal.h"

namespace jax_fmha::sm100 {

inline std::string SharedRefusal(const Problem& p, const Device& device, int max_head_dim,
                                 int max_head_dim_v) {
  if (std::string reason = gpu::PlatformRefusal(device); !reason.empty()) return reason;
  const int capability = device.compute_capability;
  if (capability != 0 && capability != 100 && capability != 103) {
    return gpu::CapabilityRefusal("10.0 or 10.3 (Blackwell with tcgen05)", device) +
           (capability / 10 == 12 ? ", which has no tensor memory" : "");
  }
  return gpu::ProblemRefusal(p, max_head_dim, max_head_dim_v);
}

}  // namespace jax_fmha::sm100

// What forward and backward refuse alike.
#pragma once

#include <string>

#include "cc/gpu/refusal.h"

namespace jax_fmha::sm90 {

inline std::string SharedRefusal(const Problem& p, const Device& device) {
  if (std::string reason = gpu::PlatformRefusal(device); !reason.empty()) return reason;
  if (device.compute_capability != 0 && device.compute_capability != 90)
    return gpu::CapabilityRefusal("9.0 (Hopper)", device);
  return gpu::ProblemRefusal(p, 256, 256);
}

}  // namespace jax_fmha::sm90

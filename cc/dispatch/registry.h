// The ordered list of kernels and the choice among them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cc/core/kernel.h"

namespace jax_fmha {

struct Selection {
  const Kernel* kernel = nullptr;                             // null when every kernel refuses
  std::vector<std::pair<std::string, std::string>> refusals;  // (kernel, reason), in list order
};

// The first kernel of the list that takes the problem on the device. Every other kernel of the same
// pass is listed with its reason, those behind the chosen one included.
Selection Select(const Problem& problem, const Device& device);

// Unimplemented, naming each kernel's reason.
Status NoKernel(const Selection& selection);

}  // namespace jax_fmha

// The Blackwell kernels, for the registry.
#pragma once

#include "cc/core/kernel.h"

namespace jax_fmha {

extern const Kernel kSm100Forward;
extern const Kernel kSm100Backward;

}  // namespace jax_fmha

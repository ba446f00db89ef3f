// The Hopper kernels, for the registry.
#pragma once

#include "cc/core/kernel.h"

namespace jax_fmha {

extern const Kernel kSm90Forward;
extern const Kernel kSm90Backward;

}  // namespace jax_fmha

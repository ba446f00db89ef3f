// The Blackwell kernels, for the registry.
#pragma once

#include "cc/core/kernel.h"

namespace jax_fmha {

extern const Kernel kSm100Forward;

}  // namespace jax_fmha

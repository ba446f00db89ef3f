// The forward of a call without keys.
#pragma once

#include "cc/core/kernel.h"

namespace jax_fmha::gpu {

// Writes out (0) and lse (-inf or the sink).
Status LaunchEmptyForward(const Problem& problem, const Operands& operands, const Launch& launch);

}  // namespace jax_fmha::gpu

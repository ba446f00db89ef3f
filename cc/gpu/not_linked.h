// Stands in for the CUDA part where only the host logic is linked: such a program answers questions
// about the kernels and runs none.
#pragma once

#include "cc/core/status.h"

namespace jax_fmha::gpu {

Status NotLinked();

}  // namespace jax_fmha::gpu

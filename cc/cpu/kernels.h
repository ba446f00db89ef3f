// The CPU kernels, for the registry.
#pragma once

#include "cc/core/kernel.h"

namespace jax_fmha {

extern const Kernel kCpuForward;  // any problem
extern const Kernel
    kCpuDecode;  // few query columns per key/value head: limited by reading k and v once
extern const Kernel kCpuBackward;  // any problem

}  // namespace jax_fmha

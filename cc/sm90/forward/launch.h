// One function per row of instances.def, in object files that nvcc builds: see unit.cu.in.
#pragma once

#include "cc/core/kernel.h"
#include "cc/sm90/forward/config.h"

namespace jax_fmha::sm90 {

template <DType kDType, ForwardMode kMode, int kHeadDim, int kHeadDimV>
Status LaunchForward(const Problem& problem, const Operands& operands, const Launch& launch);

}  // namespace jax_fmha::sm90

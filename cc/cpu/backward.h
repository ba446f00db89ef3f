// The backward on one instruction set. kCpuBackward takes the best that the machine has; tests take
// them all.
#pragma once

#include "cc/core/kernel.h"
#include "cc/cpu/isa.h"

namespace jax_fmha {
namespace cpu {

Status RunBackward(Isa isa, const Problem& problem, const Operands& operands, const Launch& launch);

}  // namespace cpu
}  // namespace jax_fmha

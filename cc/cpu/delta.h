// The step before the main one: delta = rowsum(out * dout) - dlse and the lse per query row, in the
// order in which the main step walks the rows; and what each piece of rows adds to dsinks.
#pragma once

#include "cc/cpu/backward_call.h"

namespace jax_fmha {
namespace cpu {

template <typename T>
void ComputeDelta(const BackwardCall<T>& call);

}  // namespace cpu
}  // namespace jax_fmha

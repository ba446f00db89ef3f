// The step after the main one: what several units of work have summed for the same element is added
// up, in a fixed order, and rounded to the result's type.
#pragma once

#include "cc/cpu/backward_call.h"

namespace jax_fmha {
namespace cpu {

// dq where the keys were split, dbias where it has partial sums or another type, dsinks.
template <typename T>
void ConvertResults(const BackwardCall<T>& call);

}  // namespace cpu
}  // namespace jax_fmha

#include "cc/gpu/not_linked.h"

#include "cc/gpu/empty_backward.h"
#include "cc/gpu/empty_forward.h"

namespace jax_fmha::gpu {

Status NotLinked() { return Status::Internal("attention: the CUDA kernels are another library's"); }

Status LaunchEmptyForward(const Problem&, const Operands&, const Launch&) { return NotLinked(); }
Status LaunchEmptyBackward(const Problem&, const Operands&, const Launch&) { return NotLinked(); }

}  // namespace jax_fmha::gpu

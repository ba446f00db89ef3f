// Stands in for the CUDA part where only the host logic is linked: such a program answers questions
// about the Hopper kernels and runs none.
#include "cc/gpu/not_linked.h"
#include "cc/sm90/backward/launch.h"
#include "cc/sm90/forward/launch.h"

namespace jax_fmha::sm90 {

#define FORWARD_INSTANCE(dtype, mode, head_dim, head_dim_v)                    \
  template <>                                                                  \
  Status LaunchForward<DType::dtype, ForwardMode::mode, head_dim, head_dim_v>( \
      const Problem&, const Operands&, const Launch&) {                        \
    return gpu::NotLinked();                                                   \
  }
#include "cc/sm90/forward/instances.def"
#undef FORWARD_INSTANCE

#define BACKWARD_INSTANCE(dtype, mode, head_dim, head_dim_v)                    \
  template <>                                                                   \
  Status LaunchBackward<DType::dtype, ForwardMode::mode, head_dim, head_dim_v>( \
      const Problem&, const Operands&, const Launch&) {                         \
    return gpu::NotLinked();                                                    \
  }
#include "cc/sm90/backward/instances.def"
#undef BACKWARD_INSTANCE

}  // namespace jax_fmha::sm90

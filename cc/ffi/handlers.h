// The custom calls, as symbols for registration.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jax_fmha::ffi {

XLA_FFI_Error* CpuForward(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CpuBackward(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaForward(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaBackward(XLA_FFI_CallFrame* call_frame);

}  // namespace jax_fmha::ffi

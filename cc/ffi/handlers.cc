#include "cc/ffi/handlers.h"

#include "cc/dispatch/registry.h"
#include "cc/ffi/cuda_library.h"
#include "cc/ffi/decode.h"
#include "cc/ffi/workers.h"

namespace jax_fmha::ffi {
namespace {

namespace xffi = ::xla::ffi;

// decode -> validate -> select -> run. The workspace was asked for at lowering, for the device it
// was lowered on.
template <Pass kPass>
xffi::Error OnCpu(xffi::ThreadPool pool, CallAttributes attributes, xffi::RemainingArgs args,
                  xffi::RemainingRets rets) {
  Call call;
  if (Status s = Decode(kPass, attributes, args, rets, &call); !s.ok()) return ToError(s);
  XlaWorkers workers(pool);
  Device device;
  device.num_workers = workers.num_slots();
  const Selection selection = Select(call.problem, device);
  if (selection.kernel == nullptr) return ToError(NoKernel(selection));
  Launch launch;
  launch.workers = &workers;
  launch.workspace = call.workspace;
  launch.workspace_bytes = call.workspace_bytes;
  return ToError(selection.kernel->run(call.problem, call.operands, launch));
}

// The same walk; the CUDA library selects, since it can ask the device. XLA has made the stream's
// device current.
template <Pass kPass>
xffi::Error OnCuda(void* stream, CallAttributes attributes, xffi::RemainingArgs args,
                   xffi::RemainingRets rets) {
  Call call;
  if (Status s = Decode(kPass, attributes, args, rets, &call); !s.ok()) return ToError(s);
  Status status;
  RunOnCuda* run = LoadCudaLibrary(&status);
  if (run == nullptr) return ToError(status);
  Launch launch;
  launch.stream = stream;
  launch.workspace = call.workspace;
  launch.workspace_bytes = call.workspace_bytes;
  run(call.problem, call.operands, launch, &status);
  return ToError(status);
}

template <Pass kPass>
XLA_FFI_Error* CpuHandler(XLA_FFI_CallFrame* call_frame) {
  static const auto* handler = xffi::Ffi::Bind()
                                   .Ctx<xffi::ThreadPool>()
                                   .Attrs<CallAttributes>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .To(OnCpu<kPass>)
                                   .release();
  return handler->Call(call_frame);
}

// Launches and asynchronous fills alone, with all memory XLA's: a call can be captured.
template <Pass kPass>
XLA_FFI_Error* CudaHandler(XLA_FFI_CallFrame* call_frame) {
  static const auto* handler = xffi::Ffi::Bind()
                                   .Ctx<xffi::PlatformStream<void*>>()
                                   .Attrs<CallAttributes>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .To(OnCuda<kPass>, {xffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(call_frame);
}

}  // namespace

XLA_FFI_Error* CpuForward(XLA_FFI_CallFrame* call_frame) {
  return CpuHandler<Pass::kForward>(call_frame);
}
XLA_FFI_Error* CpuBackward(XLA_FFI_CallFrame* call_frame) {
  return CpuHandler<Pass::kBackward>(call_frame);
}
XLA_FFI_Error* CudaForward(XLA_FFI_CallFrame* call_frame) {
  return CudaHandler<Pass::kForward>(call_frame);
}
XLA_FFI_Error* CudaBackward(XLA_FFI_CallFrame* call_frame) {
  return CudaHandler<Pass::kBackward>(call_frame);
}

}  // namespace jax_fmha::ffi

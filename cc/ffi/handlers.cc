#include "cc/ffi/handlers.h"

#include "cc/dispatch/registry.h"
#include "cc/ffi/decode.h"
#include "cc/ffi/workers.h"

namespace jax_fmha::ffi {
namespace {

namespace xffi = ::xla::ffi;

// decode -> validate -> select -> run. The workspace was asked for at lowering, for the device it
// was lowered on.
Status Run(Pass pass, const CallAttributes& attributes, xffi::RemainingArgs args,
           xffi::RemainingRets rets, const Device& device, Launch launch) {
  Call call;
  if (Status s = Decode(pass, attributes, args, rets, &call); !s.ok()) return s;
  const Selection selection = Select(call.problem, device);
  if (selection.kernel == nullptr) return NoKernel(selection);
  launch.workspace = call.workspace;
  launch.workspace_bytes = call.workspace_bytes;
  return selection.kernel->run(call.problem, call.operands, launch);
}

template <Pass kPass>
xffi::Error OnCpu(xffi::ThreadPool pool, CallAttributes attributes, xffi::RemainingArgs args,
                  xffi::RemainingRets rets) {
  XlaWorkers workers(pool);
  Device device;
  device.num_workers = workers.num_slots();
  Launch launch;
  launch.workers = &workers;
  return ToError(Run(kPass, attributes, args, rets, device, launch));
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

}  // namespace

XLA_FFI_Error* CpuForward(XLA_FFI_CallFrame* call_frame) {
  return CpuHandler<Pass::kForward>(call_frame);
}
XLA_FFI_Error* CpuBackward(XLA_FFI_CallFrame* call_frame) {
  return CpuHandler<Pass::kBackward>(call_frame);
}

}  // namespace jax_fmha::ffi

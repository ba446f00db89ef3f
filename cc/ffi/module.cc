// The Python extension: registration capsules, and the trace-time questions (validate, select,
// workspace).
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <unordered_map>

#include "cc/core/problem.h"
#include "cc/dispatch/registry.h"
#include "cc/ffi/cuda_library.h"
#include "cc/ffi/handlers.h"

namespace nb = nanobind;

namespace jax_fmha {
namespace {

void Raise(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return;
    case StatusCode::kInvalidArgument:
      throw nb::value_error(status.message().c_str());
    case StatusCode::kUnimplemented:
      PyErr_SetString(PyExc_NotImplementedError, status.message().c_str());
      throw nb::python_error();
    case StatusCode::kInternal:
      throw std::runtime_error(status.message());
  }
}

DType FromName(const std::string& name) {
  for (DType dtype : {DType::kBool, DType::kU8, DType::kS32, DType::kS64, DType::kF16, DType::kBF16,
                      DType::kF32, DType::kF64}) {
    if (name == Name(dtype)) return dtype;
  }
  return DType::kOther;
}

const std::unordered_map<std::string, Spec Request::*>& SpecsByName() {
  static const auto* specs = new std::unordered_map<std::string, Spec Request::*>{
      {"q", &Request::q},
      {"k", &Request::k},
      {"v", &Request::v},
      {"bias", &Request::bias},
      {"mask", &Request::mask},
      {"mask_tiles", &Request::mask_tiles},
      {"mask_bits", &Request::mask_bits},
      {"scale", &Request::scale},
      {"logits_soft_cap", &Request::logits_soft_cap},
      {"query_offset", &Request::query_offset},
      {"q_positions", &Request::q_positions},
      {"kv_positions", &Request::kv_positions},
      {"q_seq_lengths", &Request::q_seq_lengths},
      {"kv_seq_lengths", &Request::kv_seq_lengths},
      {"q_segment_ids", &Request::q_segment_ids},
      {"kv_segment_ids", &Request::kv_segment_ids},
      {"sinks", &Request::sinks},
      {"saved_out", &Request::saved_out},
      {"saved_lse", &Request::saved_lse},
      {"dout", &Request::dout},
      {"dlse", &Request::dlse},
      {"dbias", &Request::dbias},
      {"dsinks", &Request::dsinks}};
  return *specs;
}

// specs: {operand name: (shape, dtype name)}; attributes as in the custom call.
Problem DescribeFrom(bool backward, nb::dict specs, nb::dict attributes) {
  Request request;
  request.pass = backward ? Pass::kBackward : Pass::kForward;
  for (auto [key, value] : specs) {
    auto [shape, dtype] = nb::cast<std::pair<std::vector<int64_t>, std::string>>(value);
    const auto spec = SpecsByName().find(nb::cast<std::string>(key));
    if (spec == SpecsByName().end()) throw nb::key_error(nb::cast<std::string>(key).c_str());
    request.*spec->second = {FromName(dtype), std::move(shape)};
  }
  request.attributes = {
      nb::cast<bool>(attributes["is_causal"]), nb::cast<int64_t>(attributes["window_left"]),
      nb::cast<int64_t>(attributes["window_right"]), nb::cast<bool>(attributes["deterministic"]),
      nb::cast<std::string>(attributes["implementation"])};
  Problem problem;
  Raise(Describe(request, &problem));
  return problem;
}

Device DeviceFrom(const std::string& platform, int compute_capability, bool has_cuda_kernels,
                  int num_workers) {
  if (platform != "cpu" && platform != "cuda") {
    PyErr_SetString(PyExc_NotImplementedError, ("attention: no kernel for platform \"" + platform +
                                                "\"; implementation=\"xla\" runs everywhere.")
                                                   .c_str());
    throw nb::python_error();
  }
  return {platform == "cpu" ? Platform::kCpu : Platform::kCuda, compute_capability,
          has_cuda_kernels, num_workers};
}

}  // namespace
}  // namespace jax_fmha

NB_MODULE(_core, m) {
  using namespace jax_fmha;
  using Reasons = std::vector<std::pair<std::string, std::string>>;

  m.attr("UNBOUNDED") = kUnbounded;
  m.attr("MAX_BATCH_RANK") = kMaxBatchRank;

  nb::class_<Problem>(m, "Problem");
  m.def("describe", &DescribeFrom, nb::arg("backward"), nb::arg("specs"), nb::arg("attributes"),
        "Checks a call by shapes and types alone. Raises ValueError on the caller's mistake.");
  nb::class_<Device>(m, "Device")
      .def(
          "__init__",
          [](Device* self, const std::string& platform, int compute_capability,
             bool has_cuda_kernels, int num_workers) {
            new (self)
                Device(DeviceFrom(platform, compute_capability, has_cuda_kernels, num_workers));
          },
          nb::arg("platform"), nb::arg("compute_capability"), nb::arg("has_cuda_kernels"),
          nb::arg("num_workers"));
  m.def(
      "select",
      [](const Problem& problem, const Device& device) {
        const Selection s = Select(problem, device);
        return std::pair<std::string, Reasons>(s.kernel ? s.kernel->name : "", s.refusals);
      },
      nb::arg("problem"), nb::arg("device"),
      "(name of the kernel that would run or \"\", [(other kernel, reason)]).");
  m.def(
      "workspace_bytes",
      [](const Problem& problem, const Device& device) {
        const Selection s = Select(problem, device);
        if (s.kernel == nullptr) Raise(NoKernel(s));
        return s.kernel->workspace_bytes(problem, device);
      },
      nb::arg("problem"), nb::arg("device"),
      "Bytes of workspace. Raises NotImplementedError with every kernel's reason if none takes the "
      "problem.");
  m.def("has_cuda_kernels", &ffi::HasCudaLibrary,
        "Whether this installation was built with the CUDA kernels.");
  m.def(
      "targets",
      [] {
        auto capsule = [](auto* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); };
        nb::dict cpu, cuda, targets;
        cpu["jax_fmha_forward"] = capsule(&ffi::CpuForward);
        cpu["jax_fmha_backward"] = capsule(&ffi::CpuBackward);
        cuda["jax_fmha_forward"] = capsule(&ffi::CudaForward);
        cuda["jax_fmha_backward"] = capsule(&ffi::CudaBackward);
        targets["cpu"] = cpu;
        targets["CUDA"] = cuda;
        return targets;
      },
      "{platform: {custom call target: capsule}}.");
}

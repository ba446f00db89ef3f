// A kernel is a record: its name, what it takes, how much workspace it wants, and how to run it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cc/core/operands.h"
#include "cc/core/problem.h"
#include "cc/core/status.h"

namespace jax_fmha {

enum class Platform : int32_t { kCpu, kCuda };

// Where a call would run. Asked about on any machine, so plain facts only.
struct Device {
  Platform platform = Platform::kCpu;
  int compute_capability = 0;    // CUDA: 10 * major + minor; 0 if a program is made for any device
  bool has_cuda_kernels = true;  // CUDA: false if this installation was built without them
  int num_workers = 1;           // CPU: threads that may run tasks at once
};

// Why has_cuda_kernels == false refuses, and what to do.
inline constexpr char kNoCudaKernels[] =
    "this installation has no CUDA kernels; reinstall jax-fmha from source with "
    "-C cmake.define.JAX_FMHA_CUDA=ON";

// A pool that belongs to the caller (XLA). Tasks of one Run may run at the same time, each under a
// slot number that no other running task of this Run holds; Run returns when all are done.
class Workers {
 public:
  virtual ~Workers() = default;
  virtual int num_slots() const = 0;
  virtual void Run(int64_t num_tasks, const std::function<void(int64_t task, int slot)>& body) = 0;
};

struct Launch {
  Workers* workers = nullptr;  // CPU
  void* stream = nullptr;      // CUDA: cudaStream_t
  void* workspace =
      nullptr;  // of at least workspace_bytes(problem, device), 64-byte aligned on the CPU
  int64_t workspace_bytes = 0;
};

struct Kernel {
  const char* name;
  const char* implementation;  // "cpu", "sm90", "sm100": what the caller may ask for
  Pass pass;
  // Empty when the kernel takes the problem on that device, else the reason why not.
  std::string (*refusal)(const Problem& problem, const Device& device);
  int64_t (*workspace_bytes)(const Problem& problem, const Device& device);
  Status (*run)(const Problem& problem, const Operands& operands, const Launch& launch);
};

}  // namespace jax_fmha

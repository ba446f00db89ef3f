// XLA's own CPU thread pool as Workers.
#pragma once

#include "cc/core/kernel.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fmha::ffi {

class XlaWorkers final : public Workers {
 public:
  explicit XlaWorkers(xla::ffi::ThreadPool pool);
  int num_slots() const override { return num_slots_; }
  void Run(int64_t num_tasks, const std::function<void(int64_t task, int slot)>& body) override;

 private:
  xla::ffi::ThreadPool pool_;
  int num_slots_;
};

}  // namespace jax_fmha::ffi

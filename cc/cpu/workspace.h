// Scratch: arrays carved out of the launch's one buffer, and tasks limited to the slots that it was
// sized for.
#pragma once

#include <cstdint>

#include "cc/core/kernel.h"
#include "cc/core/types.h"

namespace jax_fmha {
namespace cpu {

// Without a base it only counts, so that one function both sizes the workspace and lays it out.
class Arena {
 public:
  explicit Arena(void* base = nullptr) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* Take(int64_t count) {
    char* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += RoundUp(count * static_cast<int64_t>(sizeof(T)), kAlignment);
    return reinterpret_cast<T*>(piece);
  }
  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kAlignment = 64;
  char* base_;
  int64_t used_ = 0;
};

// The number of slots, at most `num_slots`, that a workspace of `bytes` was sized for. A program
// may run on a machine with more or fewer threads than the one that it was compiled on.
// `bytes_for(slots)` grows with slots.
template <typename BytesFor>
int SlotsThatFit(int num_slots, int64_t bytes, const BytesFor& bytes_for) {
  while (num_slots > 0 && bytes_for(num_slots) > bytes) --num_slots;
  return num_slots;
}

// Runs the tasks on at most `num_slots` slots, so that body(task, slot) may use slot as an index
// into scratch. Where the pool has more slots, task i becomes a share of all tasks.
template <typename Body>
void RunOnSlots(Workers* workers, int num_slots, int64_t num_tasks, const Body& body) {
  if (workers->num_slots() <= num_slots) {
    workers->Run(num_tasks, body);
    return;
  }
  workers->Run(num_slots, [&](int64_t share, int) {
    for (int64_t task = share; task < num_tasks; task += num_slots)
      body(task, static_cast<int>(share));
  });
}

}  // namespace cpu
}  // namespace jax_fmha

#include "cc/ffi/workers.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace jax_fmha::ffi {
namespace {

// Shared by the caller and its helpers. A helper that the pool starts late, after all tasks are
// taken, still finds it alive and leaves at once, so the caller never waits for the pool to become
// free (it may be a pool thread).
struct Shared {
  explicit Shared(int64_t n) : num_tasks(n) {}

  const int64_t num_tasks;
  std::atomic<int64_t> next{0};
  std::atomic<int> next_slot{1};  // slot 0 is the caller's
  std::mutex mutex;
  std::condition_variable idle;
  int running = 0;
  bool closed = false;

  // False when the caller has left already.
  bool Enter() {
    std::lock_guard<std::mutex> lock(mutex);
    if (closed) return false;
    ++running;
    return true;
  }
  void Leave() {
    std::lock_guard<std::mutex> lock(mutex);
    if (--running == 0) idle.notify_all();
  }
  void Close() {
    std::unique_lock<std::mutex> lock(mutex);
    closed = true;
    idle.wait(lock, [this] { return running == 0; });
  }
};

void TakeTasks(Shared& shared, int slot, const std::function<void(int64_t, int)>& body) {
  for (int64_t task; (task = shared.next.fetch_add(1)) < shared.num_tasks;) body(task, slot);
}

}  // namespace

XlaWorkers::XlaWorkers(xla::ffi::ThreadPool pool)
    : pool_(pool), num_slots_(static_cast<int>(std::max<int64_t>(1, pool.num_threads()))) {}

void XlaWorkers::Run(int64_t num_tasks, const std::function<void(int64_t, int)>& body) {
  const int helpers = static_cast<int>(std::min<int64_t>(num_slots_, num_tasks)) - 1;
  if (helpers <= 0) {
    for (int64_t task = 0; task < num_tasks; ++task) body(task, 0);
    return;
  }
  auto shared = std::make_shared<Shared>(num_tasks);
  for (int i = 0; i < helpers; ++i) {
    // `body` outlives every helper that Enter lets in.
    pool_.Schedule([shared, &body] {
      if (!shared->Enter()) return;
      TakeTasks(*shared, shared->next_slot.fetch_add(1), body);
      shared->Leave();
    });
  }
  TakeTasks(*shared, 0, body);
  shared->Close();
}

}  // namespace jax_fmha::ffi

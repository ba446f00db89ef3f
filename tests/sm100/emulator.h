// What host, device and the rewriter agree on. rewrite.py spells the offsets that are asserted here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sm100 {

constexpr int kLanes = 128, kColumns = 512;  // tensor memory of one thread block
constexpr int kWarps = 32;
constexpr int kQueues = 4;        // warps of a block that may issue tensor core work
constexpr int kQueueLength = 96;  // operations in flight per warp; more run at once
constexpr int kMaxReports = 256;

// NaNs that no arithmetic yields, so that reading them tells what went wrong.
constexpr uint32_t kUnwritten = 0x7fc0dead;  // allocated, never written
constexpr uint32_t kPending = 0x7fc0beef;    // stored, but not waited for

// When the work of one warp's queue is done.
enum Mode : uint32_t {
  kEager,     // as soon as the warp is next converged
  kDeferred,  // not before the warp has nothing else to do, and only up to its last commit
  kRandom,    // at any time between the two
};

enum Code : uint32_t {
  kNone,
  kBadInstructionDescriptor,
  kBadMatrixDescriptor,
  kOutsideSharedMemory,
  kOutsideTensorMemory,
  kNotAllocated,
  kWrongLanes,
  kReadUnwritten,
  kReadPending,
  kBadAlloc,
  kAllocAfterRelinquish,
  kBadDealloc,
  kDeallocWhilePending,
  kHang,
  kUnsupported,
  kTooManyQueues,
  // Found by the host after the launch.
  kLeak,
  kNeverCompleted,
};

enum Fault : uint32_t {
  kNoFault,
  kDrop,         // the instruction is not there
  kEarly,        // commit: the barrier is told at once
  kTwice,        // arrive: the barrier is told twice
  kHalve,        // expect_tx: half the bytes
  kAdd,          // tensor memory address, coordinate, or bytes
  kInstruction,  // mma: bits of the instruction descriptor
  kA,            // mma: bits of A's descriptor or address
  kB,            // mma: bits of B's descriptor
  kD,            // mma: tensor memory address of D
  kAccumulate,   // mma: accumulates where it should not, or the other way round
  kParity,       // try_wait: the other phase
};

struct Report {
  uint32_t code, site, block, thread;
  uint32_t a, b, c, unused;
};

struct Control {
  uint64_t ctas;     // Cta[grid]
  uint64_t reports;  // Report[kMaxReports] in host memory, readable after a trap
  uint32_t num_reports;
  uint32_t fault, fault_site;
  uint32_t delayed_warps;  // bit w: warp w of each block sleeps before what other warps may wait for
  uint64_t fault_value;
  uint32_t delay;  // longest sleep in ns, a power of two less one
  uint32_t mode;
  uint32_t seed;
  uint32_t num_threads;  // per block
  uint64_t timeout;      // ns without progress after which a wait is a hang
  uint64_t last_progress;
  uint64_t given_up;  // when a hang was found: from then on no wait waits, so that the kernel ends
};
static_assert(offsetof(Control, reports) == 8 && offsetof(Control, num_reports) == 16 &&
              offsetof(Control, fault) == 20 && offsetof(Control, fault_site) == 24 &&
              offsetof(Control, delayed_warps) == 28 && offsetof(Control, fault_value) == 32 &&
              offsetof(Control, delay) == 40);

struct Operation {
  enum Kind : uint32_t { kMma, kCommit, kCopy, kShift };
  uint32_t kind, site;
  uint64_t a, b;       // mma: A (descriptor or tensor memory address) and B; copy: source
  uint32_t d;          // tensor memory address; commit: barrier
  uint32_t idesc;      // copy: shape
  uint32_t flags;      // see rewrite.py
  uint32_t scale;      // mma: D is divided by 2^scale; commit: multicast mask
  uint32_t lanes[8];   // mma: lanes of D that stay as they are
  uint32_t unused[6];
};
static_assert(sizeof(Operation) == 96);

struct Queue {
  uint32_t lock, warp, head, tail, commits;
  uint32_t unused[3];
  Operation operations[kQueueLength];
  float operand[256 * 32];  // B, widened
};

struct Wait {
  uint64_t since;
  uint32_t site, reported;
};

struct Cta {
  uint32_t allocated;  // bit c: columns [32 c, 32 c + 32)
  uint32_t relinquished, num_queues, unused0;
  uint32_t queue_of_warp[kWarps];  // 1 + queue, 0 for none
  uint32_t alloc_site, pair_allocations, unused[2];
  Wait waits[kWarps];
  uint32_t padding[1024 - 4 - kWarps - 4 - 4 * kWarps];
  uint32_t tmem[kColumns * kLanes];  // a column's lanes lie side by side, so that warps read in one go
  Queue queues[kQueues];
};
static_assert(offsetof(Cta, allocated) == 0 && offsetof(Cta, tmem) == 4096);

// Bytes of a Cta that are zeroed before a launch, and those of a Queue.
constexpr size_t kCtaHeader = offsetof(Cta, tmem), kQueueHeader = offsetof(Queue, operations);

}  // namespace sm100

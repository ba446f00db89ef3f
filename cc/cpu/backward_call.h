// What the three steps of a backward share: how the work is cut, and where everything lies in the
// workspace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cc/core/kernel.h"
#include "cc/cpu/backward_tile.h"
#include "cc/cpu/plan.h"
#include "cc/cpu/workspace.h"

namespace jax_fmha {
namespace cpu {

// The batch dimensions, split in those that a result keeps and those that it sums over.
class BatchSplit {
 public:
  // `result_shape` starts with the batch dimensions, 1 where they are summed; empty keeps them all.
  BatchSplit(const std::vector<int64_t>& batch_shape, const std::vector<int64_t>& result_shape);

  int64_t kept() const { return kept_.count; }
  int64_t summed() const { return summed_.count; }
  // The batch entry of one kept and one summed index.
  int64_t At(int64_t kept, int64_t summed) const { return kept_.At(kept) + summed_.At(summed); }

 private:
  struct Dims {
    int rank = 0;
    int64_t sizes[kMaxBatchRank];
    int64_t strides[kMaxBatchRank];
    int64_t count = 1;
    int64_t At(int64_t index) const;
  };
  Dims kept_, summed_;
};

// How the gradient of the bias is gathered.
enum class BiasSums {
  kNone,
  // One sum per element, added to by a single unit of work. That unit owns all batch entries and
  // heads that share the element, so that nothing of size T * S is kept besides the result.
  kOwned,
  // Broadcast over rows or keys, hence small: one partial sum per unit, added up in the end.
  kPartial,
};

// The cut of the work into units. A unit walks the key tiles of its split for all its batch entries
// and heads; it owns their dk and dv, and a slab of dq that nobody else adds to. More splits than
// one keep the slots busy when there are few heads, and cost a slab each.
struct BackwardUnits {
  BackwardUnits(const Problem& problem, int num_slots);

  BiasSums bias_sums;
  int64_t dbias_heads, dbias_rows, dbias_cols;  // sizes, 1 where broadcast
  BatchSplit batch;  // an owner's batch entries are those that share its bias sums
  int64_t heads_per_unit;
  int64_t head_units;
  int64_t num_splits;
  // Tiles are cut where key rows are multiples of the block, since the owner's batch entries have
  // different groups.
  bool cut_by_row;

  int64_t count() const { return batch.kept() * head_units * num_splits; }
  int64_t dbias_entry() const { return dbias_heads * dbias_rows * dbias_cols; }
};

// Query rows that one step of delta works on, and the partial sums of dsinks are taken over.
inline constexpr int64_t kDeltaRows = 128;

// R = T * G, the query rows of a key/value head; a group of a plan has at most as many.

// The scratch of one slot: the matrices, and what a tile and a block are described with.
template <typename T>
struct BackwardSlot {
  BackwardScratch<T> matrices;
  T* q;                    // [R][staged_h] a group's rows, staged
  T* dout;                 // [R][staged_hv]
  int64_t* key_rows;       // [kBackwardBlockKv]
  int64_t* key_positions;  // [kBackwardBlockKv]
  int64_t* rows;           // [kBackwardBlockQ]
  int64_t* heads;          // [kBackwardBlockQ]
  int64_t* positions;      // [kBackwardBlockQ]
  uint8_t* mask;           // [kBackwardBlockQ][kBackwardBlockKv]
  Interval* intervals;     // [blocks of R] positions of a block
  T* row_dots;             // [N]

  BackwardSlot(const Problem& problem, Arena* arena);
};

template <typename T>
struct BackwardWorkspace {
  BackwardWorkspace(const Problem& problem, const BackwardUnits& units, void* base, int num_slots);

  int64_t staged_h, staged_hv;
  void* plan;
  T* lse2;       // [B][K][R]
  T* delta;      // [B][K][R]
  T* sink_sums;  // [B][CeilDiv(T, kDeltaRows)][N]
  T* slabs;      // [B][K][num_splits][R][staged_h], or with one split [slots][R][staged_h]
  T* bias_sums;  // kOwned: as dbias, unless dbias itself takes the sums. kPartial: see
                 // BackwardCall::BiasPartial
  char* slots;   // [slots] of a BackwardSlot's arrays
  int64_t slot_bytes;
  int64_t bytes;
};

// Everything about one call.
template <typename T>
struct BackwardCall {
  const Problem& problem;
  const Operands& operands;
  Workers* workers;
  int num_slots;
  const BackwardFunctions<T>& tile;
  BackwardUnits units;
  BackwardWorkspace<T> workspace;
  Plan plan;

  int64_t group_size() const { return problem.group_size(); }
  int64_t query_rows() const { return problem.seqlen_q * group_size(); }

  BackwardSlot<T> Slot(int slot) const {
    Arena arena(workspace.slots + slot * workspace.slot_bytes);
    return BackwardSlot<T>(problem, &arena);
  }
  // Everything that the tiles of a key/value head share, with the bias sums of one split.
  BackwardHead<T> HeadOf(int64_t b, int64_t kv_head, int64_t split) const;
  ScoreView<T*> BiasSumsOf(int64_t b, int64_t kv_head, int64_t split) const;
  // Names the query rows [first, first + count) of a batch entry in slot.rows and slot.heads.
  void ListQueryRows(const Entry& entry, int64_t first, int64_t count,
                     const BackwardSlot<T>& slot) const;

  // The sums that kOwned adds to.
  T* OwnedBiasSums() const {
    return operands.dbias.dtype == kAccumulator ? static_cast<T*>(operands.dbias.data)
                                                : workspace.bias_sums;
  }
  // kPartial: units of different kv heads share a slice, in which each has its own heads, unless
  // the bias has one head for all of them.
  int64_t BiasSlices() const { return units.dbias_heads == 1 ? problem.num_kv_heads : 1; }
  int64_t num_bias_partials() const { return BiasSlices() * units.num_splits; }  // of a batch entry
  T* BiasPartial(int64_t b, int64_t partial) const {
    return workspace.bias_sums + (b * num_bias_partials() + partial) * units.dbias_entry();
  }

  // Runs body(item, slot) for all items, many of them in a task when there are very many.
  template <typename Body>
  void ForEach(int64_t count, const Body& body) const {
    const int64_t per_task = std::max<int64_t>(1, count / (64 * num_slots));
    RunOnSlots(workers, num_slots, CeilDiv(count, per_task), [&](int64_t task, int slot) {
      const int64_t end = std::min((task + 1) * per_task, count);
      for (int64_t item = task * per_task; item < end; ++item) body(item, slot);
    });
  }

  static constexpr DType kAccumulator = sizeof(T) == sizeof(double) ? DType::kF64 : DType::kF32;
};

}  // namespace cpu
}  // namespace jax_fmha

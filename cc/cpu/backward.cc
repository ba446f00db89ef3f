// The backward: delta, then the main step, then what remains to be added up and rounded.
//
// The main step is key-stationary. A unit of work walks its tiles of keys; for each tile it walks
// the blocks of query rows that see it, and both S and dP are computed once: five products per
// pair. dk and dv of the tile and the slab of dq belong to the unit, so nothing is atomic and every
// sum has one order.
#include "cc/cpu/backward.h"

#include <cstring>

#include "cc/cpu/backward_call.h"
#include "cc/cpu/convert.h"
#include "cc/cpu/delta.h"
#include "cc/cpu/kernels.h"
#include "cc/cpu/tile_mask.h"

namespace jax_fmha {
namespace cpu {
namespace {

// ---- masks ----

// How much of a tile the dense mask keeps; its bytes go to slot.mask. `mask` is the first head's of
// the group.
template <typename T>
Cover StageMask(const ScoreView<const uint8_t*>& mask, const KeyTile& keys, int64_t count,
                const BackwardSlot<T>& slot) {
  const bool dense = mask.col == 1 && keys.rows[keys.count - 1] - keys.rows[0] == keys.count - 1;
  const uint8_t* previous = nullptr;
  uint8_t any = 0, all = 1;
  for (int64_t r = 0; r < count; ++r) {
    const uint8_t* const from = mask.data + slot.heads[r] * mask.head + slot.rows[r] * mask.row;
    uint8_t* const to = slot.mask + r * kBackwardBlockKv;
    if (from == previous) {  // heads or rows that share the mask
      std::memcpy(to, to - kBackwardBlockKv, kBackwardBlockKv);
      continue;
    }
    previous = from;
    if (dense) {
      std::memcpy(to, from + keys.rows[0], keys.count);
    } else {
      for (int64_t c = 0; c < keys.count; ++c) to[c] = from[keys.rows[c] * mask.col];
    }
    for (int64_t c = 0; c < keys.count; ++c) {
      any |= to[c];
      all &= to[c] != 0;
    }
  }
  return !any ? Cover::kNone : all ? Cover::kAll : Cover::kSome;
}

// The same for a tile mask; `first_head` is the group's. Bits are read only where classes do not
// tell.
template <typename T>
Cover StageTileMask(const TileMask& mask, int64_t first_head, const KeyTile& keys, int64_t count,
                    const BackwardSlot<T>& slot) {
  const bool dense = keys.rows[keys.count - 1] - keys.rows[0] == keys.count - 1;
  const KeyRows key_rows{dense ? nullptr : keys.rows, keys.rows[0], keys.count};
  bool none = true, all = true;
  int64_t previous = -1;
  for (int64_t r = 0; r < count; ++r) {
    const int64_t head = first_head + slot.heads[r];
    const int64_t row_class = mask.ClassOf(head, slot.rows[r]);
    if (row_class == previous) continue;
    previous = row_class;
    const Cover cover = mask.Classify(head, slot.rows[r], key_rows);
    none &= cover == Cover::kNone;
    all &= cover == Cover::kAll;
  }
  if (none) return Cover::kNone;
  if (all) return Cover::kAll;
  for (int64_t r = 0; r < count; ++r) {
    mask.Read(first_head + slot.heads[r], slot.rows[r], key_rows, slot.mask + r * kBackwardBlockKv);
  }
  return Cover::kSome;
}

// ---- the main step ----

// One batch entry and kv head, for the tiles of one split.
template <typename T>
class HeadPass {
 public:
  HeadPass(const BackwardCall<T>& call, int64_t b, int64_t kv_head, int64_t split, int slot_number)
      : call_(call),
        slot_(call.Slot(slot_number)),
        entry_(call.plan.At(b)),
        positions_(call.problem, call.operands, b),
        band_(BandOf(call.problem)),
        head_(call.HeadOf(b, kv_head, split)),
        b_(b),
        kv_head_(kv_head),
        split_(split),
        group_size_(call.group_size()) {
    const int64_t head_index = b * call.problem.num_kv_heads + kv_head, rows = call.query_rows();
    const int64_t num_splits = call.units.num_splits;
    lse2_ = call.workspace.lse2 + head_index * rows;
    delta_ = call.workspace.delta + head_index * rows;
    slab_ =
        call.workspace.slabs + (num_splits > 1 ? head_index * num_splits + split : slot_number) *
                                   rows * call.workspace.staged_h;
    const Operands& x = call.operands;
    if (x.mask) {
      const ScoreStrides& s = x.mask_strides;
      mask_ = {x.mask.template Entry<uint8_t>(b, s.entry) + kv_head * group_size_ * s.head,
               DType::kBool, s.head, s.row, s.col};
    }
  }

  void Run() {
    for (int64_t i = 0; i < entry_.num_groups(); ++i) RunGroup(entry_.group(i));
  }

 private:
  bool only_split() const { return call_.units.num_splits == 1; }

  void RunGroup(const Group& group) {
    const int64_t first = group.q_begin * group_size_, rows = group.q_count * group_size_;
    T* const slab = slab_ + (only_split() ? 0 : first * head_.staged_h);
    std::fill(slab, slab + rows * head_.staged_h, T(0));
    if (rows == 0) {
      if (split_ == 0) ZeroKeys(group);
      return;
    }
    staged_ = false;
    if (group.kv_count > 0) RunTiles(group, slab);
    if (only_split()) StoreQueries(first, rows, slab);
  }

  // Keys that no query row may attend.
  void ZeroKeys(const Group& group) {
    const DType dtype = call_.problem.dtype;
    for (int64_t i = 0; i < group.kv_count; ++i) {
      const int64_t row = entry_.KvRow(group.kv_begin + i);
      ZeroRow(head_.dk, row * head_.k_stride, head_.head_dim, dtype);
      ZeroRow(head_.dv, row * head_.v_stride, head_.head_dim_v, dtype);
    }
  }
  static void ZeroRow(void* data, int64_t at, int64_t width, DType dtype) {
    std::memset(static_cast<char*>(data) + at * SizeOf(dtype), 0, width * SizeOf(dtype));
  }

  // ---- positions ----

  int64_t QPosition(int64_t row) const { return positions_.Q(entry_.QRow(row / group_size_)); }

  // The range of positions of every block of a group's rows.
  void MeasurePositions(int64_t first, int64_t rows) {
    if (!call_.problem.uses_positions()) return;
    const int64_t size = BlockSize(rows);
    for (int64_t begin = 0; begin < rows; begin += size) {
      const int64_t last = std::min(begin + size, rows) - 1;
      Interval interval;
      interval.Include(QPosition(first + begin));
      interval.Include(QPosition(first + last));
      if (!positions_.q_ascending()) {
        for (int64_t row = begin; row < last; row += group_size_)
          interval.Include(QPosition(first + row));
      }
      slot_.intervals[begin / size] = interval;
    }
  }

  void StageQueries(int64_t first, int64_t rows) {
    for (int64_t block = 0; block < rows; block += kBackwardBlockQ) {
      const int64_t count = std::min(kBackwardBlockQ, rows - block);
      call_.ListQueryRows(entry_, first + block, count, slot_);
      call_.tile.stage_queries(head_, count, slot_.rows, slot_.heads,
                               slot_.q + block * head_.staged_h,
                               slot_.dout + block * head_.staged_hv);
    }
    MeasurePositions(first, rows);
    staged_ = true;
  }

  // Even blocks, so that no block is left with a few rows.
  static int64_t BlockSize(int64_t rows) {
    return RoundUp(CeilDiv(rows, CeilDiv(rows, kBackwardBlockQ)), 12);
  }

  // ---- tiles ----

  void RunTiles(const Group& group, T* slab) {
    const int64_t end = group.kv_begin + group.kv_count;
    const int64_t tiles = CeilDiv(group.kv_count, kBackwardBlockKv);
    const int64_t size = RoundUp(CeilDiv(group.kv_count, tiles), 16);
    for (int64_t begin = group.kv_begin, next; begin < end; begin = next) {
      next = call_.units.cut_by_row ? EndOfRowBlock(begin, end) : std::min(begin + size, end);
      const int64_t ordinal =
          call_.units.cut_by_row ? entry_.KvRow(begin) / kBackwardBlockKv : tile_++;
      if (Owns(ordinal)) RunTile(group, begin, next - begin, slab);
    }
  }

  // Dealt back and forth: under a causal mask, early tiles are seen by more rows.
  bool Owns(int64_t tile) const {
    const int64_t n = call_.units.num_splits, turn = tile % (2 * n);
    return (turn < n ? turn : 2 * n - 1 - turn) == split_;
  }

  int64_t EndOfRowBlock(int64_t begin, int64_t end) const {
    const int64_t block = entry_.KvRow(begin) / kBackwardBlockKv;
    int64_t next = begin + 1;
    while (next < end && entry_.KvRow(next) / kBackwardBlockKv == block) ++next;
    return next;
  }

  void RunTile(const Group& group, int64_t begin, int64_t count, T* slab) {
    Interval interval;
    for (int64_t c = 0; c < count; ++c) {
      slot_.key_rows[c] = entry_.KvRow(begin + c);
      slot_.key_positions[c] = positions_.Kv(slot_.key_rows[c]);
      interval.Include(slot_.key_positions[c]);
    }
    const KeyTile keys = {count, slot_.key_rows, slot_.key_positions};
    const int64_t first = group.q_begin * group_size_, rows = group.q_count * group_size_,
                  size = BlockSize(rows);
    if (!staged_) StageQueries(first, rows);
    call_.tile.load_keys(head_, keys, slot_.matrices);
    for (int64_t block = 0; block < rows; block += size) {
      Cover cover = Cover::kAll;
      if (call_.problem.uses_positions())
        cover = CoverOf(band_, slot_.intervals[block / size], interval);
      if (cover == Cover::kNone) continue;
      RunBlock(keys, first, block, std::min(size, rows - block), cover, slab);
    }
    call_.tile.store_keys(head_, keys, slot_.matrices);
  }

  // Rows [begin, begin + count) of the group whose first row is `first`.
  void RunBlock(const KeyTile& keys, int64_t first, int64_t begin, int64_t count, Cover cover,
                T* slab) {
    call_.ListQueryRows(entry_, first + begin, count, slot_);
    QueryBlock<T> block = {};
    block.count = count;
    block.q = slot_.q + begin * head_.staged_h;
    block.dout = slot_.dout + begin * head_.staged_hv;
    block.rows = slot_.rows;
    block.heads = slot_.heads;
    block.lse2 = lse2_ + first + begin;
    block.delta = delta_ + first + begin;
    block.dq = slab + begin * head_.staged_h;
    if (mask_.data != nullptr) {
      const Cover kept = StageMask(mask_, keys, count, slot_);
      if (kept == Cover::kNone) return;
      if (kept == Cover::kSome) block.mask = slot_.mask;
    }
    if (call_.problem.has_tile_mask) {
      const Cover kept = StageTileMask(TileMask(call_.problem, call_.operands, b_),
                                       kv_head_ * group_size_, keys, count, slot_);
      if (kept == Cover::kNone) return;
      if (kept == Cover::kSome) block.mask = slot_.mask;
    }
    if (cover == Cover::kSome) {
      for (int64_t r = 0; r < count; ++r) slot_.positions[r] = positions_.Q(slot_.rows[r]);
      block.position = slot_.positions;
    }
    call_.tile.query_block(head_, keys, block, slot_.matrices);
  }

  void StoreQueries(int64_t first, int64_t rows, T* slab) {
    for (int64_t block = 0; block < rows; block += kBackwardBlockQ) {
      const int64_t count = std::min(kBackwardBlockQ, rows - block);
      call_.ListQueryRows(entry_, first + block, count, slot_);
      call_.tile.store_queries(head_, count, slot_.rows, slot_.heads, slab + block * head_.staged_h,
                               0, 1);
    }
  }

  const BackwardCall<T>& call_;
  const BackwardSlot<T> slot_;
  const Entry entry_;
  const Positions positions_;
  const Band band_;
  const BackwardHead<T> head_;
  const int64_t b_;
  const int64_t kv_head_;
  const int64_t split_;
  const int64_t group_size_;
  const T* lse2_;   // [R]
  const T* delta_;  // [R]
  T* slab_;         // [R][C]
  ScoreView<const uint8_t*> mask_;
  int64_t tile_ = 0;     // ordinal of the next tile
  bool staged_ = false;  // whether slot_ holds the rows of the current group
};

// Partial sums start at zero; so do the heads of a partial that nobody else clears.
template <typename T>
void ClearPartial(const BackwardCall<T>& call, int64_t b, int64_t kv_head, int64_t split) {
  const ScoreView<T*> sums = call.BiasSumsOf(b, kv_head, split);
  const int64_t heads = call.units.dbias_heads == 1 ? 1 : call.group_size();
  const int64_t size = heads * call.units.dbias_rows * call.units.dbias_cols;
  std::fill(sums.data, sums.data + size, T(0));
}

template <typename T>
void RunUnit(const BackwardCall<T>& call, int64_t unit, int slot) {
  const BackwardUnits& units = call.units;
  const int64_t split = unit % units.num_splits, rest = unit / units.num_splits;
  const int64_t first_head = rest % units.head_units * units.heads_per_unit,
                owner = rest / units.head_units;
  for (int64_t member = 0; member < units.batch.summed(); ++member) {
    const int64_t b = units.batch.At(owner, member);
    for (int64_t kv_head = first_head; kv_head < first_head + units.heads_per_unit; ++kv_head) {
      if (units.bias_sums == BiasSums::kPartial) ClearPartial(call, b, kv_head, split);
      HeadPass<T>(call, b, kv_head, split, slot).Run();
    }
  }
}

// Sums that units add to start at zero, also where no pair is allowed.
template <typename T>
void ClearOwnedSums(const BackwardCall<T>& call) {
  constexpr int64_t kChunk = 1 << 16;
  const int64_t size = call.units.batch.kept() * call.units.dbias_entry();
  T* const sums = call.OwnedBiasSums();
  call.ForEach(CeilDiv(size, kChunk), [&](int64_t chunk, int) {
    std::fill(sums + chunk * kChunk, sums + std::min((chunk + 1) * kChunk, size), T(0));
  });
}

template <typename T>
Status Run(const BackwardFunctions<T>& tile, const Problem& problem, const Operands& operands,
           const Launch& launch) {
  const auto workspace = [&](int slots, void* base) {
    return BackwardWorkspace<T>(problem, BackwardUnits(problem, slots), base, slots);
  };
  const int slots = SlotsThatFit(launch.workers->num_slots(), launch.workspace_bytes,
                                 [&](int n) { return workspace(n, nullptr).bytes; });
  if (slots == 0) return Status::Internal("cpu_backward: the workspace is smaller than one slot's");
  const BackwardWorkspace<T> space = workspace(slots, launch.workspace);
  BackwardCall<T> call = {problem,        operands,
                          launch.workers, slots,
                          tile,           BackwardUnits(problem, slots),
                          space,          Plan(problem, operands, space.plan, slots)};
  call.plan.Build(launch.workers);
  if (call.units.bias_sums == BiasSums::kOwned) ClearOwnedSums(call);
  ComputeDelta(call);
  call.ForEach(call.units.count(), [&](int64_t unit, int slot) { RunUnit(call, unit, slot); });
  ConvertResults(call);
  return Status();
}

const BackwardTable& TableOf(Isa isa) {
  switch (isa) {
#define JAX_FMHA_CASE(Name, space) \
  case Isa::k##Name:               \
    return space::kBackward;
    JAX_FMHA_FOR_EACH_ISA(JAX_FMHA_CASE)
#undef JAX_FMHA_CASE
  }
  return TableOf(kAllIsas[0]);
}

std::string Refusal(const Problem& problem, const Device& device) {
  if (device.platform != Platform::kCpu) return "runs on the CPU only";
  switch (problem.dtype) {
    case DType::kF16:
    case DType::kBF16:
    case DType::kF32:
    case DType::kF64:
      return "";
    default:
      return std::string("takes float16, bfloat16, float32 and float64, not ") +
             Name(problem.dtype);
  }
}

int64_t WorkspaceBytes(const Problem& problem, const Device& device) {
  const int slots = std::max(1, device.num_workers);
  const BackwardUnits units(problem, slots);
  return problem.dtype == DType::kF64
             ? BackwardWorkspace<double>(problem, units, nullptr, slots).bytes
             : BackwardWorkspace<float>(problem, units, nullptr, slots).bytes;
}

Status RunOnBest(const Problem& problem, const Operands& operands, const Launch& launch) {
  return RunBackward(BestIsa(), problem, operands, launch);
}

}  // namespace

Status RunBackward(Isa isa, const Problem& problem, const Operands& operands,
                   const Launch& launch) {
  const BackwardTable& table = TableOf(isa);
  switch (problem.dtype) {
    case DType::kF64:
      return Run(table.f64, problem, operands, launch);
    case DType::kF32:
      return Run(table.f32, problem, operands, launch);
    case DType::kBF16:
      return Run(table.bf16, problem, operands, launch);
    case DType::kF16:
      return Run(table.f16, problem, operands, launch);
    default:
      return Status::Internal("cpu_backward: ran on a type that it refuses");
  }
}

}  // namespace cpu

const Kernel kCpuBackward = {"cpu_backward",      "cpu",         Pass::kBackward, cpu::Refusal,
                             cpu::WorkspaceBytes, cpu::RunOnBest};

}  // namespace jax_fmha

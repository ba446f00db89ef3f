// The forward: which panels of query columns meet which blocks of keys, and in which task.
//
//   unit     a tile of query slots of one batch entry and one or a few key/value heads, times a
//   share of the keys when
//            there are too few tiles to keep the machine busy; units are independent, so results do
//            not depend on the threads
//   chunk    the part of a unit that lies in one group (see plan.h)
//   block    Tiling::block_kv or fewer keys, staged once for all panels of a chunk, and kept: the
//            thread's next tiles see the same keys
#include <algorithm>
#include <cmath>
#include <limits>

#include "cc/cpu/forward.h"
#include "cc/cpu/forward_tile.h"
#include "cc/cpu/kernels.h"
#include "cc/cpu/plan.h"
#include "cc/cpu/tile_mask.h"
#include "cc/cpu/workspace.h"

namespace jax_fmha {
namespace cpu {
namespace {

constexpr double kLog2E = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

// Half of the smaller L2 caches in use: packed queries and their accumulators stay there while keys
// pass by.
constexpr int64_t kTileBytes = 256 * 1024;
constexpr int64_t kBlockBytes = 160 * 1024;
constexpr int64_t kMaxTileColumns = 256;
constexpr int64_t kMinTileColumns = 64;
constexpr int64_t kMaxBlockKv = 192;
constexpr int64_t kMinBlockKv = 32;
// Staged blocks that a thread keeps: those of a head, or the first of them. A thread's part of a
// third cache.
constexpr int64_t kKeptBytes = 4 * 1024 * 1024;
// Enough units for the threads of a large machine; not a function of the machine, so that every
// machine adds up in the same order.
constexpr int64_t kEnoughUnits = 64;
constexpr int64_t kFewUnits = 16;  // from here on, splitting the keys costs more than it gains
constexpr int64_t kMinKeysPerSplit = 1024;
// Where rows are read as stored, memory is what counts. A block of keys is walked head by head over
// this much of a token, so that it is read nearly in order, and the keys are split finer.
constexpr int64_t kTokenBytes = 4096;
constexpr int64_t kStoredBlockKv = 32;
constexpr int64_t kMinStoredKeysPerSplit = 256;
constexpr int64_t kFlopsPerTask = int64_t{1} << 21;
constexpr int64_t kTasksPerSlot = 8;  // at least, for an even end

template <typename T>
const ForwardTile<T>& TileOf(const ForwardTables& tables);
template <>
const ForwardTile<float>& TileOf<float>(const ForwardTables& tables) {
  return *tables.f32;
}
template <>
const ForwardTile<double>& TileOf<double>(const ForwardTables& tables) {
  return *tables.f64;
}

// Sizes that follow from the problem and the instruction set alone.
struct Tiling {
  int panel;       // columns of a panel
  int64_t group;   // query heads per key/value head
  int64_t rows;    // query rows of a tile
  int64_t tiles;   // per batch entry and key/value head
  int64_t splits;  // shares of the keys
  int64_t block_kv;
  int64_t kept_blocks;    // staged blocks that a thread keeps; 0 where keys are read as stored
  int64_t staged_keys;    // elements of a staged block of keys
  int64_t v_stride;       // from one strip of staged values to the next
  int64_t staged_values;  // elements of a staged block of values
  int64_t max_panels;     // of a chunk
  int64_t unit_panels;  // of a unit, whose chunks each round up to whole panels; only when the keys
                        // are split
  int64_t heads;        // key/value heads of a unit
  int64_t head_blocks;  // such sets of heads
  int64_t units;        // batch entries * head_blocks * tiles
};

template <typename T>
Tiling TilingOf(const Problem& p, const ForwardTile<T>& tile) {
  constexpr int64_t element = sizeof(T);
  const int panel = tile.panel;
  const bool staged = tile.stage_values[StorageOf(p.dtype)] != nullptr;
  Tiling t;
  t.panel = panel;
  t.group = p.group_size();
  const int64_t width = std::max<int64_t>(p.head_dim + p.head_dim_v, 1);
  t.heads = 1;
  if (!staged) {
    const int64_t fit = kTokenBytes / std::max<int64_t>(p.head_dim * SizeOf(p.dtype), 1);
    t.heads = std::clamp<int64_t>(fit, 1, std::max<int64_t>(p.num_kv_heads, 1));
  }
  t.head_blocks = CeilDiv(p.num_kv_heads, t.heads);
  const int64_t sets = p.batch * t.head_blocks;
  const int64_t all_columns = p.seqlen_q * t.group;

  int64_t columns = std::min(kMaxTileColumns, kTileBytes / (width * element));
  while (columns > kMinTileColumns && sets * CeilDiv(all_columns, columns) < kFewUnits)
    columns /= 2;
  t.rows = std::max<int64_t>(1, std::max<int64_t>(columns, panel) / t.group);
  t.tiles = CeilDiv(p.seqlen_q, t.rows);
  t.units = sets * t.tiles;

  const int64_t wanted = t.units == 0 || t.units >= kFewUnits ? 1 : kEnoughUnits / t.units;
  const int64_t possible = p.seqlen_kv / (staged ? kMinKeysPerSplit : kMinStoredKeysPerSplit);
  t.splits = p.has_segment_ids ? 1 : std::clamp<int64_t>(possible, 1, wanted);

  const int64_t fit = kBlockBytes / (width * element) / 48 * 48;
  t.block_kv = staged ? std::clamp(fit, kMinBlockKv, kMaxBlockKv) : kStoredBlockKv;
  t.staged_keys = RoundUp(t.block_kv, tile.strip) * p.head_dim + tile.panel;
  t.v_stride = t.block_kv * tile.strip + tile.panel;
  t.staged_values = CeilDiv(p.head_dim_v, tile.strip) * t.v_stride;
  const int64_t kept = kKeptBytes / ((t.staged_keys + t.staged_values) * element);
  const int64_t blocks = t.tiles > 1 && t.splits == 1 ? CeilDiv(p.seqlen_kv, t.block_kv) : 1;
  t.kept_blocks = staged ? std::max<int64_t>(std::min(kept, blocks), 1) : 0;
  t.max_panels = CeilDiv(std::min(t.rows, p.seqlen_q) * t.group, panel);
  // A unit has one chunk, or up to three where a group ends within reach of its cuts.
  const int64_t unit_rows = t.tiles == 1 ? p.seqlen_q : t.rows * 3 / 2;
  const int64_t extra_chunks = t.tiles == 1 && !p.has_seq_lengths ? 0 : 2;
  t.unit_panels = t.heads * (CeilDiv(unit_rows * t.group, panel) + extra_chunks);
  return t;
}

// What one thread works with.
template <typename T>
struct Scratch {
  T* q;  // [heads][max_panels][head_dim][panel]
  T* o;  // [heads][max_panels][head_dim_v][panel]
  T* m;  // [heads][max_panels][panel]
  T* l;  // [heads][max_panels][panel]
  // Staged, [kept_blocks] of each: keys as [block_kv / strip][head_dim][strip] and a vector more,
  // values in strips of [block_kv][strip] and a vector more.
  T* k;
  T* v;
  int64_t* kept;             // [kept_blocks] the block held: see KeptName
  T* scores;                 // [block_kv][panel]
  T* bias;                   // [block_kv][panel]
  T* bias_columns;           // [block_kv][panel]
  LaneInt<T>* mask;          // [block_kv][panel]
  uint8_t* mask_bytes;       // [panel][block_kv]
  LaneInt<T>* key_position;  // [block_kv], readable in whole vectors from any key on
  LaneInt<T>* lowest;        // [panel]
  LaneInt<T>* highest;       // [panel]
  int64_t* q_position;       // [max_panels][panel]
  int64_t* kv_position;      // [block_kv]
  Interval* q_interval;      // [max_panels]
  int64_t* offsets;          // [panel]
  T* sinks;                  // [panel]

  Scratch(const Problem& p, const Tiling& t, Arena* arena) {
    const int64_t columns = t.max_panels * t.panel;
    const int64_t block = t.block_kv * t.panel;
    q = arena->Take<T>(t.heads * columns * p.head_dim);
    o = arena->Take<T>(t.heads * columns * p.head_dim_v);
    m = arena->Take<T>(t.heads * columns);
    l = arena->Take<T>(t.heads * columns);
    k = arena->Take<T>(t.kept_blocks * t.staged_keys);
    v = arena->Take<T>(t.kept_blocks * t.staged_values);
    kept = arena->Take<int64_t>(t.kept_blocks);
    scores = arena->Take<T>(block);
    bias = arena->Take<T>(p.has_bias ? block : 0);
    bias_columns = arena->Take<T>(p.has_bias ? block : 0);
    mask = arena->Take<LaneInt<T>>(p.has_mask || p.has_tile_mask ? block : 0);
    mask_bytes = arena->Take<uint8_t>(p.has_tile_mask ? block : 0);
    key_position = arena->Take<LaneInt<T>>(t.block_kv + 64);
    lowest = arena->Take<LaneInt<T>>(t.panel);
    highest = arena->Take<LaneInt<T>>(t.panel);
    q_position = arena->Take<int64_t>(columns);
    kv_position = arena->Take<int64_t>(t.block_kv);
    q_interval = arena->Take<Interval>(t.max_panels);
    offsets = arena->Take<int64_t>(t.panel);
    sinks = arena->Take<T>(t.panel);
  }
};

template <typename T>
struct Layout {
  void* plan;
  char* slots;  // [num_slots][slot_bytes]
  int64_t slot_bytes;
  T* split_o;   // [units][splits][unit_panels][head_dim_v][panel], only with several splits
  T* split_ml;  // [units][splits][2][unit_panels][panel]
  int64_t bytes;

  Layout(const Problem& p, const Tiling& t, void* workspace, int num_slots) {
    Arena slot;
    Scratch<T>(p, t, &slot);
    slot_bytes = slot.used();
    const int64_t partial = t.splits > 1 ? t.units * t.splits * t.unit_panels * t.panel : 0;
    Arena arena(workspace);
    plan = arena.Take<char>(Plan::WorkspaceBytes(p, num_slots));
    split_o = arena.Take<T>(partial * p.head_dim_v);
    split_ml = arena.Take<T>(partial * 2);
    slots = arena.Take<char>(num_slots * slot_bytes);
    bytes = arena.used();
  }
};

template <typename T>
class Forward {
 public:
  Forward(const Problem& problem, const Operands& operands, const Launch& launch, int num_slots,
          const ForwardTile<T>& tile)
      : p_(problem),
        x_(operands),
        tile_(tile),
        t_(TilingOf(problem, tile)),
        layout_(problem, t_, launch.workspace, num_slots),
        plan_(problem, operands, layout_.plan, num_slots),
        workers_(launch.workers),
        num_slots_(num_slots),
        band_(BandOf(problem)),
        storage_(StorageOf(problem.dtype)),
        element_(SizeOf(problem.dtype)),
        kept_blocks_(KeptBlocks()) {}

  void Run() {
    plan_.Build(workers_);
    for (int slot = 0; slot < num_slots_; ++slot) {
      const Scratch<T> scratch = ScratchOf(slot);
      std::fill(scratch.kept, scratch.kept + t_.kept_blocks, -1);
    }
    RunUnits(t_.units * t_.splits,
             [&](int64_t unit, Scratch<T>* scratch) { AttendUnit(unit, scratch); });
    if (t_.splits > 1) {
      RunUnits(t_.units, [&](int64_t unit, Scratch<T>* scratch) { CombineUnit(unit, scratch); });
    }
  }

 private:
  // A tile of query slots.
  struct Unit {
    int64_t b;
    int64_t head, num_heads;  // first key/value head, and their number
    int64_t begin, end;
    Entry entry;
  };
  struct Chunk {
    int64_t begin, count;      // query slots
    int64_t columns, panels;   // per head
    int64_t kv_begin, kv_end;  // key slots
  };
  // A chunk's panels and what is known of the keys at hand.
  struct Block {
    int64_t begin, count;  // key slots to attend
    int64_t staged_count;  // and to stage: those of the next tiles, too
    int64_t next_count;    // key slots of the block that follows
    Interval positions;
    bool ascending;
    int64_t kept;  // where its keys are staged, or -1: not yet
  };

  Scratch<T> ScratchOf(int slot) const {
    Arena arena(layout_.slots + slot * layout_.slot_bytes);
    return Scratch<T>(p_, t_, &arena);
  }

  // Tiles of a head that are handed out together.
  int64_t TilesPerTask() const {
    return std::min(t_.tiles, t_.units / (kTasksPerSlot * num_slots_));
  }
  // Blocks that a thread keeps. One where a thread attends with about one tile of a head: blocks
  // that follow each other in one place stay in the second cache.
  int64_t KeptBlocks() const {
    const bool again = TilesPerTask() > 1 || t_.tiles >= 2 * num_slots_;
    return again ? t_.kept_blocks : std::min<int64_t>(t_.kept_blocks, 1);
  }

  template <typename Body>
  void RunUnits(int64_t units, const Body& body) {
    // Tiny units are handed out together, and those of a head as far as that leaves enough tasks.
    const int64_t keys = std::max<int64_t>(std::min<int64_t>(p_.seqlen_kv, 64), 1);
    const int64_t flops =
        2 * t_.heads * t_.rows * t_.group * keys * (p_.head_dim + p_.head_dim_v) + 4096;
    const int64_t share = CeilDiv(units, kEnoughUnits);
    const int64_t tiny = std::clamp<int64_t>(kFlopsPerTask / flops, 1, std::max<int64_t>(share, 1));
    const int64_t units_per_task = std::max(tiny, TilesPerTask());
    RunOnSlots(workers_, num_slots_, CeilDiv(units, units_per_task), [&](int64_t task, int slot) {
      Scratch<T> scratch = ScratchOf(slot);
      const int64_t end = std::min((task + 1) * units_per_task, units);
      for (int64_t unit = task * units_per_task; unit < end; ++unit) body(unit, &scratch);
    });
  }

  Unit UnitAt(int64_t number) const {
    Unit unit;
    const int64_t tile = t_.tiles - 1 - number % t_.tiles;  // causal: the longest first
    unit.head = number / t_.tiles % t_.head_blocks * t_.heads;
    unit.num_heads = std::min(t_.heads, p_.num_kv_heads - unit.head);
    unit.b = number / t_.tiles / t_.head_blocks;
    unit.entry = plan_.At(unit.b);
    unit.begin = CutQ(unit.entry, p_.seqlen_q, t_.rows, tile);
    unit.end = CutQ(unit.entry, p_.seqlen_q, t_.rows, tile + 1);
    return unit;
  }

  // Calls body(chunk, panels of the chunks before it) for the chunks of a unit.
  template <typename Body>
  void ForChunks(const Unit& unit, const Body& body) {
    int64_t panels = 0;
    for (int64_t slot = unit.begin; slot < unit.end;) {
      const Group& group = unit.entry.group(unit.entry.GroupOfQ(slot));
      const int64_t left = std::min(group.q_begin + group.q_count, unit.end) - slot;
      Chunk chunk;
      chunk.begin = slot;
      chunk.count = CeilDiv(left, CeilDiv(left, t_.rows));
      chunk.columns = chunk.count * t_.group;
      chunk.panels = CeilDiv(chunk.columns, t_.panel);
      chunk.kv_begin = group.kv_begin;
      chunk.kv_end = group.kv_begin + group.kv_count;
      body(chunk, panels);
      slot += chunk.count;
      panels += chunk.panels * unit.num_heads;
    }
  }

  PanelState<T> SplitState(int64_t unit, int64_t split, int64_t panel) const {
    const int64_t at = unit * t_.splits + split;
    T* ml = layout_.split_ml + (at * 2 * t_.unit_panels + panel) * t_.panel;
    return {layout_.split_o + (at * t_.unit_panels + panel) * p_.head_dim_v * t_.panel, ml,
            ml + t_.unit_panels * t_.panel};
  }
  PanelState<T> Advance(const PanelState<T>& state, int64_t panels) const {
    const int64_t columns = panels * t_.panel;
    return {state.o + columns * p_.head_dim_v, state.m + columns, state.l + columns};
  }

  void AttendUnit(int64_t number, Scratch<T>* scratch) {
    const int64_t split = number % t_.splits;
    const Unit unit = UnitAt(number / t_.splits);
    ForChunks(unit, [&](const Chunk& chunk, int64_t first_panel) {
      if (t_.splits == 1) {
        const PanelState<T> state{scratch->o, scratch->m, scratch->l};
        AttendChunk(unit, chunk, split, state, scratch);
        FinishChunk(unit, chunk, state, scratch);
      } else {
        AttendChunk(unit, chunk, split, SplitState(number / t_.splits, split, first_panel),
                    scratch);
      }
    });
  }

  void CombineUnit(int64_t number, Scratch<T>* scratch) {
    const Unit unit = UnitAt(number);
    ForChunks(unit, [&](const Chunk& chunk, int64_t first_panel) {
      const PanelState<T> state = SplitState(number, 0, first_panel);
      for (int64_t split = 1; split < t_.splits; ++split) {
        const PanelState<T> other = SplitState(number, split, first_panel);
        for (int64_t panel = 0; panel < chunk.panels * unit.num_heads; ++panel) {
          const int64_t columns =
              std::min<int64_t>(t_.panel, chunk.columns - panel % chunk.panels * t_.panel);
          tile_.merge(Advance(other, panel), p_.head_dim_v, columns, Advance(state, panel));
        }
      }
      FinishChunk(unit, chunk, state, scratch);
    });
  }

  // ---- a chunk ----

  // Attends to one share of the keys that the chunk may see.
  void AttendChunk(const Unit& unit, const Chunk& chunk, int64_t split, const PanelState<T>& state,
                   Scratch<T>* s) {
    const int64_t columns = unit.num_heads * chunk.panels * t_.panel;
    std::fill(state.m, state.m + columns, -std::numeric_limits<T>::infinity());
    std::fill(state.l, state.l + columns, T(0));
    std::fill(state.o, state.o + columns * p_.head_dim_v, T(0));
    if (chunk.kv_begin == chunk.kv_end) return;

    for (int64_t i = 0; i < unit.num_heads; ++i) PackQ(unit, chunk, i, s);
    const Positions positions(p_, x_, unit.b);
    Interval q_interval;
    if (p_.uses_positions()) q_interval = FindQPositions(unit, chunk, positions, s);
    int64_t begin = chunk.kv_begin, end = chunk.kv_end;
    if (p_.uses_positions() && positions.kv_ascending())
      NarrowKeys(unit, q_interval, positions, &begin, &end);
    // Every tile has the same blocks, so that a block serves all of them.
    begin -= (begin - chunk.kv_begin) % t_.block_kv;
    const int64_t blocks = CeilDiv(end - begin, t_.block_kv);
    const int64_t last = begin + blocks * (split + 1) / t_.splits * t_.block_kv;
    begin += blocks * split / t_.splits * t_.block_kv;
    end = std::min(end, last);
    while (begin < end) {
      Block block{};
      block.begin = begin;
      block.staged_count = BlockKeys(unit, begin, chunk.kv_end - begin);
      block.count = std::min(block.staged_count, end - begin);
      block.ascending = true;
      if (p_.uses_positions()) FindKvPositions(unit, positions, s, &block);
      block.next_count = std::min(t_.block_kv, end - begin - block.count);
      if (!p_.uses_positions() || CoverOf(band_, q_interval, block.positions) != Cover::kNone) {
        for (int64_t i = 0; i < unit.num_heads; ++i) {
          block.kept = -1;
          for (int64_t panel = 0; panel < chunk.panels; ++panel) {
            AttendPanel(unit, chunk, i, panel, &block, Advance(state, i * chunk.panels + panel), s);
          }
        }
      }
      begin += block.count;
    }
  }

  // How many of `keys` key slots make the next block. Blocks end where tiles of a mask do: a block
  // that reached into a neighbour would be attended for the neighbour's sake.
  int64_t BlockKeys(const Unit& unit, int64_t slot, int64_t keys) const {
    const int64_t count = std::min(t_.block_kv, keys);
    if (!p_.has_tile_mask || !unit.entry.KvContiguous(slot, count)) return count;
    const int64_t period = std::max(t_.block_kv / p_.tile_cols, int64_t{1}) * p_.tile_cols;
    const int64_t piece = CeilDiv(period, CeilDiv(period, t_.block_kv));
    const int64_t done = unit.entry.KvRow(slot) % period;
    return std::min({count, piece - done % piece, period - done});
  }

  RowSet QRows(const Unit& unit, int64_t slot, int64_t count, const void* base,
               int64_t width) const {
    const int64_t* index =
        unit.entry.QContiguous(slot, count) ? nullptr : unit.entry.q_index() + slot;
    return {base, p_.num_q_heads * width, index, unit.entry.QRow(slot)};
  }

  RowSet KvRows(const Unit& unit, int64_t head, int64_t slot, int64_t count, const Operand& x,
                int64_t width) const {
    const char* entry = x.Entry<char>(unit.b, p_.seqlen_kv * p_.num_kv_heads * width * element_);
    return {entry + head * width * element_, p_.num_kv_heads * width, KeyIndex(unit, slot, count),
            unit.entry.KvRow(slot)};
  }
  const int64_t* KeyIndex(const Unit& unit, int64_t slot, int64_t count) const {
    return unit.entry.KvContiguous(slot, count) ? nullptr : unit.entry.kv_index() + slot;
  }

  // The columns of the unit's head i.
  void PackQ(const Unit& unit, const Chunk& chunk, int64_t i, Scratch<T>* s) {
    const int64_t width = p_.head_dim;
    const char* entry = x_.q.Entry<char>(unit.b, p_.seqlen_q * p_.num_q_heads * width * element_);
    const RowSet rows = QRows(unit, chunk.begin, chunk.count,
                              entry + (unit.head + i) * t_.group * width * element_, width);
    const T factor = static_cast<T>(x_.scale.Float(unit.b) * kLog2E);
    tile_.pack_q[storage_](rows, t_.group, chunk.columns, width, factor,
                           s->q + i * chunk.panels * t_.panel * width);
  }

  // ---- positions ----

  // Positions of the columns, and the interval of every panel and of the whole chunk. Columns that
  // only fill the last panel repeat the last position.
  Interval FindQPositions(const Unit& unit, const Chunk& chunk, const Positions& positions,
                          Scratch<T>* s) {
    Interval all;
    for (int64_t panel = 0; panel < chunk.panels; ++panel) {
      Interval interval;
      for (int64_t c = panel * t_.panel; c < (panel + 1) * t_.panel; ++c) {
        const int64_t row = std::min(c, chunk.columns - 1) / t_.group;
        s->q_position[c] = positions.Q(unit.entry.QRow(chunk.begin + row));
        interval.Include(s->q_position[c]);
      }
      s->q_interval[panel] = interval;
      all.Include(interval.min);
      all.Include(interval.max);
    }
    return all;
  }

  // Key slots that some query of the interval may attend, where key positions ascend.
  void NarrowKeys(const Unit& unit, const Interval& q, const Positions& positions, int64_t* begin,
                  int64_t* end) {
    const auto first_at_least = [&](int64_t position) {
      int64_t low = *begin, high = *end;
      while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        positions.Kv(unit.entry.KvRow(middle)) < position ? low = middle + 1 : high = middle;
      }
      return low;
    };
    const int64_t first = first_at_least(q.min + band_.lo);
    *end = first_at_least(q.max + band_.hi + 1);
    *begin = std::min(first, *end);
  }

  // Reads the positions of a block's keys, relative ones in 32 bits; cuts the block where those
  // would not be exact.
  void FindKvPositions(const Unit& unit, const Positions& positions, Scratch<T>* s, Block* block) {
    constexpr int64_t kReach = (int64_t{1} << 31) - 2;
    int64_t n = 0;
    for (; n < block->count; ++n) {
      const int64_t position = positions.Kv(unit.entry.KvRow(block->begin + n));
      Interval grown = block->positions;
      grown.Include(position);
      if (grown.max - grown.min > kReach) break;
      block->ascending &= n == 0 || position >= s->kv_position[n - 1];
      block->positions = grown;
      s->kv_position[n] = position;
    }
    block->count = n;
    for (int64_t j = 0; j < n; ++j) {
      s->key_position[j] = static_cast<LaneInt<T>>(s->kv_position[j] - block->positions.min);
    }
  }

  // ---- one panel against one block ----

  void AttendPanel(const Unit& unit, const Chunk& chunk, int64_t i, int64_t panel, Block* block,
                   const PanelState<T>& state, Scratch<T>* s) {
    const int64_t head = unit.head + i;
    int64_t begin = 0, end = block->count;
    Cover cover = Cover::kAll;
    if (p_.uses_positions()) {
      const Interval& q = s->q_interval[panel];
      cover = CoverOf(band_, q, block->positions);
      if (cover == Cover::kNone) return;
      if (cover == Cover::kSome && block->ascending) {
        const int64_t* at = s->kv_position;
        begin = std::lower_bound(at, at + end, q.min + band_.lo) - at;
        end = std::upper_bound(at + begin, at + end, q.max + band_.hi) - at;
        if (begin == end) return;
        begin -= begin % tile_.strip;
      }
    }
    const int64_t columns = std::min<int64_t>(t_.panel, chunk.columns - panel * t_.panel);
    PanelBlock<T> b{};
    b.keys = end - begin;
    if (p_.has_mask || p_.has_tile_mask) {
      const MaskKind kind = p_.has_mask
                                ? StageMask(unit, chunk, head, panel, *block, begin, b.keys, s)
                                : StageTileMask(unit, chunk, head, panel, *block, begin, b.keys, s);
      if (kind == MaskKind::kNone) return;
      if (kind == MaskKind::kSome) b.mask = s->mask;
    }
    if (p_.has_bias) {
      const int64_t element = SizeOf(p_.bias_dtype);
      const ScoreOperand bias = Select(unit, chunk, head, panel, *block, begin, b.keys, x_.bias,
                                       x_.bias_strides, element, s->offsets);
      tile_.stage_bias[StorageOf(p_.bias_dtype)](bias, s->bias_columns, s->bias);
      b.bias = s->bias;
    }
    if (cover == Cover::kSome) {
      BoundColumns(s->q_position + panel * t_.panel, block->positions.min, s);
      b.key_position = s->key_position + begin;
      b.lowest = s->lowest;
      b.highest = s->highest;
    }
    b.k_rows = KvRows(unit, head, block->begin + begin, b.keys, x_.k, p_.head_dim);
    b.v_rows = KvRows(unit, head, block->begin + begin, b.keys, x_.v, p_.head_dim_v);
    if (block->kept < 0 && t_.kept_blocks > 0) StageBlock(unit, chunk, head, block, s);
    b.columns = columns;
    b.head_dim = p_.head_dim;
    b.head_dim_v = p_.head_dim_v;
    b.q = s->q + (i * chunk.panels + panel) * t_.panel * p_.head_dim;
    b.has_soft_cap = p_.has_logits_soft_cap;
    if (b.has_soft_cap) b.soft_cap = static_cast<T>(x_.logits_soft_cap.Float(unit.b) * kLog2E);
    b.scores = s->scores;
    if (t_.kept_blocks > 0) {
      b.k = s->k + block->kept * t_.staged_keys + begin * p_.head_dim;
      b.v = s->v + block->kept * t_.staged_values + begin * tile_.strip;
      b.v_stride = t_.v_stride;
      b.next_k = Next(unit, chunk, head, panel, *block, x_.k, p_.head_dim, s->k, t_.staged_keys, s);
      b.next_v =
          Next(unit, chunk, head, panel, *block, x_.v, p_.head_dim_v, s->v, t_.staged_values, s);
    }
    tile_.attend[storage_](b, state);
  }

  MaskKind StageMask(const Unit& unit, const Chunk& chunk, int64_t kv_head, int64_t panel,
                     const Block& block, int64_t begin, int64_t keys, Scratch<T>* s) const {
    const ScoreOperand mask = Select(unit, chunk, kv_head, panel, block, begin, keys, x_.mask,
                                     x_.mask_strides, 1, s->offsets);
    return tile_.stage_mask(mask, s->mask);
  }

  MaskKind StageTileMask(const Unit& unit, const Chunk& chunk, int64_t kv_head, int64_t panel,
                         const Block& block, int64_t begin, int64_t keys, Scratch<T>* s) const {
    const TileMask mask(p_, x_, unit.b);
    const int64_t first_slot = block.begin + begin;
    const KeyRows key_rows{KeyIndex(unit, first_slot, keys), unit.entry.KvRow(first_slot), keys};
    const int64_t columns = std::min<int64_t>(t_.panel, chunk.columns - panel * t_.panel);
    const auto row_of = [&](int64_t c) {
      return unit.entry.QRow(chunk.begin + (panel * t_.panel + c) / t_.group);
    };
    const auto head_of = [&](int64_t c) {
      return kv_head * t_.group + (panel * t_.panel + c) % t_.group;
    };

    bool none = true, all = true;
    int64_t previous = -1;
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t row_class = mask.ClassOf(head_of(c), row_of(c));
      if (row_class == previous) continue;
      previous = row_class;
      const Cover cover = mask.Classify(head_of(c), row_of(c), key_rows);
      none &= cover == Cover::kNone;
      all &= cover == Cover::kAll;
    }
    if (none) return MaskKind::kNone;
    if (all) return MaskKind::kAll;

    ScoreOperand bytes{};
    for (int64_t c = 0; c < columns; ++c) {
      s->offsets[c] = c * keys;
      mask.Read(head_of(c), row_of(c), key_rows, s->mask_bytes + c * keys);
    }
    bytes.base = s->mask_bytes;
    bytes.offsets = s->offsets;
    bytes.columns = columns;
    bytes.key_stride = 1;
    bytes.keys = keys;
    return tile_.stage_mask(bytes, s->mask);
  }

  // Where a block is kept. What does not fit takes turns in the last place.
  int64_t KeptAt(const Chunk& chunk, int64_t begin) const {
    return std::min((begin - chunk.kv_begin) / t_.block_kv, kept_blocks_ - 1);
  }
  // A number for a block, which the slot of its first key tells.
  int64_t KeptName(const Unit& unit, int64_t head, int64_t begin) const {
    return (unit.b * p_.num_kv_heads + head) * p_.seqlen_kv + begin;
  }

  // Staged when the first panel needs it, for a mask may leave none, unless an earlier tile did.
  void StageBlock(const Unit& unit, const Chunk& chunk, int64_t head, Block* block, Scratch<T>* s) {
    block->kept = KeptAt(chunk, block->begin);
    const int64_t name = KeptName(unit, head, block->begin);
    if (s->kept[block->kept] == name) return;
    s->kept[block->kept] = name;
    const int64_t count = block->staged_count;
    tile_.stage_keys[storage_](KvRows(unit, head, block->begin, count, x_.k, p_.head_dim), count,
                               p_.head_dim, s->k + block->kept * t_.staged_keys);
    tile_.stage_values[storage_](KvRows(unit, head, block->begin, count, x_.v, p_.head_dim_v),
                                 count, p_.head_dim_v, s->v + block->kept * t_.staged_values,
                                 t_.v_stride);
  }

  // This panel's share of what the next block is read from: the block where it is kept, of `size`
  // elements at `staged`, or rows of k or v that are to be staged.
  Ahead Next(const Unit& unit, const Chunk& chunk, int64_t head, int64_t panel, const Block& block,
             const Operand& x, int64_t width, const T* staged, int64_t size, Scratch<T>* s) const {
    if (block.next_count == 0) return {};
    const auto share = [&](int64_t count, int64_t i) { return count * i / chunk.panels; };
    const int64_t next = block.begin + block.count, at = KeptAt(chunk, next);
    if (s->kept[at] == KeptName(unit, head, next)) {
      constexpr int64_t kLine = 64;
      const int64_t lines = size * sizeof(T) / kLine;
      const int64_t first = share(lines, panel), last = share(lines, panel + 1);
      return {reinterpret_cast<const char*>(staged + at * size) + first * kLine, kLine, kLine,
              last - first};
    }
    const int64_t begin = next + share(block.next_count, panel),
                  end = next + share(block.next_count, panel + 1);
    if (begin == end || !unit.entry.KvContiguous(begin, end - begin)) return {};
    const RowSet rows = KvRows(unit, head, begin, end - begin, x, width);
    const int64_t stride = rows.stride * element_;
    return {static_cast<const char*>(rows.base) + rows.first * stride, stride, width * element_,
            end - begin};
  }

  // The key positions that every column may attend, relative to `base`.
  void BoundColumns(const int64_t* q_position, int64_t base, Scratch<T>* s) {
    for (int64_t c = 0; c < t_.panel; ++c) {
      s->lowest[c] = Relative(q_position[c] + band_.lo, base);
      s->highest[c] = Relative(q_position[c] + band_.hi, base);
    }
  }

  ScoreOperand Select(const Unit& unit, const Chunk& chunk, int64_t kv_head, int64_t panel,
                      const Block& block, int64_t begin, int64_t keys, const Operand& x,
                      const ScoreStrides& strides, int64_t element, int64_t* offsets) const {
    ScoreOperand out;
    out.base = x.Entry<char>(unit.b, strides.entry * element);
    out.columns = std::min<int64_t>(t_.panel, chunk.columns - panel * t_.panel);
    out.same_offsets = true;
    for (int64_t i = 0; i < out.columns; ++i) {
      const int64_t column = panel * t_.panel + i;
      const int64_t row = unit.entry.QRow(chunk.begin + column / t_.group);
      const int64_t head = kv_head * t_.group + column % t_.group;
      offsets[i] = head * strides.head + row * strides.row;
      out.same_offsets &= offsets[i] == offsets[0];
    }
    out.offsets = offsets;
    out.key_index = KeyIndex(unit, block.begin + begin, keys);
    out.first_key = unit.entry.KvRow(block.begin + begin);
    out.key_stride = strides.col;
    out.keys = keys;
    return out;
  }

  // ---- results ----

  void FinishChunk(const Unit& unit, const Chunk& chunk, const PanelState<T>& state,
                   Scratch<T>* s) {
    const int64_t width = p_.head_dim_v;
    char* entry = x_.out.Entry<char>(unit.b, p_.seqlen_q * p_.num_q_heads * width * element_);
    for (int64_t i = 0; i < unit.num_heads; ++i) {
      const int64_t q_head = (unit.head + i) * t_.group;
      const RowSet rows =
          QRows(unit, chunk.begin, chunk.count, entry + q_head * width * element_, width);
      for (int64_t panel = 0; panel < chunk.panels; ++panel) {
        const int64_t first = panel * t_.panel;
        const int64_t columns = std::min<int64_t>(t_.panel, chunk.columns - first);
        if (p_.has_sinks) ReadSinks(unit, q_head, first, s->sinks);
        const PanelState<T> at = Advance(state, i * chunk.panels + panel);
        tile_.finish[storage_](at, p_.has_sinks ? s->sinks : nullptr, width, rows, t_.group, first,
                               columns);
        WriteLse(unit, chunk, q_head, first, columns, at);
      }
    }
  }

  // The sinks of a panel's columns, from `first` on; `q_head` is the first head of the group.
  void ReadSinks(const Unit& unit, int64_t q_head, int64_t first, T* sinks) const {
    const T* entry = x_.sinks.Entry<T>(unit.b, p_.num_q_heads) + q_head;
    for (int64_t c = 0; c < t_.panel; ++c)
      sinks[c] = entry[(first + c) % t_.group] * static_cast<T>(kLog2E);
  }

  void WriteLse(const Unit& unit, const Chunk& chunk, int64_t q_head, int64_t first,
                int64_t columns, const PanelState<T>& state) {
    T* entry = x_.lse.Entry<T>(unit.b, p_.num_q_heads * p_.seqlen_q) + q_head * p_.seqlen_q;
    int64_t slot = chunk.begin + first / t_.group, head = first % t_.group;
    for (int64_t c = 0; c < columns; ++c) {
      // Where nothing was attended, m is -inf and l is 0: their sum is -inf.
      entry[head * p_.seqlen_q + unit.entry.QRow(slot)] =
          static_cast<T>(state.m[c] * kLn2) + std::log(state.l[c]);
      if (++head == t_.group) head = 0, ++slot;
    }
  }

  const Problem& p_;
  const Operands& x_;
  const ForwardTile<T>& tile_;
  const Tiling t_;
  const Layout<T> layout_;
  Plan plan_;
  Workers* workers_;
  int num_slots_;
  Band band_;
  int storage_;
  int64_t element_;
  int64_t kept_blocks_;
};

template <typename T>
int64_t BytesFor(const Problem& problem, const ForwardTables& tables, int num_slots) {
  return Layout<T>(problem, TilingOf(problem, TileOf<T>(tables)), nullptr, num_slots).bytes;
}

template <typename T>
Status RunAs(const Problem& problem, const Operands& operands, const Launch& launch,
             const ForwardTables& tables) {
  const int slots = SlotsThatFit(launch.workers->num_slots(), launch.workspace_bytes,
                                 [&](int n) { return BytesFor<T>(problem, tables, n); });
  if (slots == 0)
    return Status::Internal("The CPU kernel needs a larger workspace than it was given.");
  Forward<T>(problem, operands, launch, slots, TileOf<T>(tables)).Run();
  return Status();
}

ForwardTables TablesOf(Isa isa) {
  switch (isa) {
#define JAX_FMHA_CASE(Name, space) \
  case Isa::k##Name:               \
    return {&space::kForwardF32, &space::kForwardF64};
    JAX_FMHA_FOR_EACH_ISA(JAX_FMHA_CASE)
#undef JAX_FMHA_CASE
  }
  return {};
}

// An exported program may meet any machine: the workspace fits every instruction set.
int64_t WorkspaceBytes(const Problem& problem, const Device& device) {
  int64_t bytes = 0;
  for (Isa isa : kAllIsas)
    bytes = std::max(bytes, ForwardWorkspaceBytes(problem, device.num_workers, isa));
  return bytes;
}

Status RunOnBest(const Problem& problem, const Operands& operands, const Launch& launch) {
  return RunForward(problem, operands, launch, BestIsa());
}

}  // namespace

std::string RefusalOnCpu(const Problem& problem, const Device& device) {
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

int64_t TablesWorkspaceBytes(const Problem& problem, int num_slots, const ForwardTables& tables) {
  return problem.dtype == DType::kF64 ? BytesFor<double>(problem, tables, num_slots)
                                      : BytesFor<float>(problem, tables, num_slots);
}

Status RunTables(const Problem& problem, const Operands& operands, const Launch& launch,
                 const ForwardTables& tables) {
  return problem.dtype == DType::kF64 ? RunAs<double>(problem, operands, launch, tables)
                                      : RunAs<float>(problem, operands, launch, tables);
}

int64_t ForwardWorkspaceBytes(const Problem& problem, int num_slots, Isa isa) {
  return TablesWorkspaceBytes(problem, num_slots, TablesOf(isa));
}

Status RunForward(const Problem& problem, const Operands& operands, const Launch& launch, Isa isa) {
  return RunTables(problem, operands, launch, TablesOf(isa));
}

}  // namespace cpu

extern const Kernel kCpuForward = {
    "cpu_forward", "cpu", Pass::kForward, cpu::RefusalOnCpu, cpu::WorkspaceBytes, cpu::RunOnBest};

}  // namespace jax_fmha

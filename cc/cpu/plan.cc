#include "cc/cpu/plan.h"

#include <algorithm>

#include "cc/cpu/workspace.h"

namespace jax_fmha {
namespace cpu {
namespace {

// The group i with begin(i) <= slot that is last: groups that hold no slots share the start of the
// next one.
template <typename Begin>
int64_t LastStartingAtOrBefore(int64_t num_groups, int64_t slot, const Begin& begin) {
  int64_t low = 0, high = num_groups;  // begin(low) <= slot < begin(high)
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (begin(middle) <= slot ? low : high) = middle;
  }
  return low;
}

// `begin` and `end` are the slots of the group around the even cut.
int64_t SnapTo(int64_t cut, int64_t begin, int64_t end, int64_t reach) {
  if (cut - begin <= end - cut) return cut - begin < reach ? begin : cut;
  return end - cut < reach ? end : cut;
}

int64_t Length(const Operand& lengths, int64_t b, int64_t rows) {
  if (!lengths) return rows;
  return std::min(std::max<int64_t>(lengths.Int(b, 1, 0), 0), rows);
}

}  // namespace

int64_t Entry::GroupOfQ(int64_t slot) const {
  return LastStartingAtOrBefore(num_groups_, slot, [&](int64_t i) { return group(i).q_begin; });
}

int64_t Entry::GroupOfKv(int64_t slot) const {
  return LastStartingAtOrBefore(num_groups_, slot, [&](int64_t i) { return group(i).kv_begin; });
}

int64_t CutQ(const Entry& entry, int64_t slots, int64_t size, int64_t piece) {
  const int64_t cut = piece * size;
  if (cut <= 0 || cut >= slots) return std::min(std::max<int64_t>(cut, 0), slots);
  const Group& group = entry.group(entry.GroupOfQ(cut));
  return SnapTo(cut, group.q_begin, group.q_begin + group.q_count, CeilDiv(size, 4));
}

int64_t CutKv(const Entry& entry, int64_t slots, int64_t size, int64_t piece) {
  const int64_t cut = piece * size;
  if (cut <= 0 || cut >= slots) return std::min(std::max<int64_t>(cut, 0), slots);
  const Group& group = entry.group(entry.GroupOfKv(cut));
  return SnapTo(cut, group.kv_begin, group.kv_begin + group.kv_count, CeilDiv(size, 4));
}

// ---- segments ----

// Consecutive rows with one segment id.
struct Plan::Run {
  int64_t id;
  int64_t begin;
  int64_t count;
};

// Where the arrays of a plan lie in its workspace.
struct Plan::Layout {
  Group* groups;
  int64_t* num_groups;
  int64_t* q_index;
  int64_t* kv_index;
  Run* runs;
  int64_t bytes;

  Layout(const Problem& problem, void* workspace, int num_slots) {
    const int64_t batch = problem.has_segment_ids ? problem.batch : 0;
    const int64_t rows = problem.seqlen_q + problem.seqlen_kv;
    Arena arena(workspace);
    groups = arena.Take<Group>(batch * (rows + 2));
    num_groups = arena.Take<int64_t>(batch);
    q_index = arena.Take<int64_t>(batch * problem.seqlen_q);
    kv_index = arena.Take<int64_t>(batch * problem.seqlen_kv);
    runs = arena.Take<Run>(problem.has_segment_ids ? num_slots * rows : 0);
    bytes = arena.used();
  }
};

int64_t Plan::WorkspaceBytes(const Problem& problem, int num_slots) {
  return Layout(problem, nullptr, num_slots).bytes;
}

Plan::Plan(const Problem& problem, const Operands& operands, void* workspace, int num_slots)
    : problem_(problem), operands_(operands), num_slots_(num_slots) {
  const Layout layout(problem, workspace, num_slots);
  groups_ = layout.groups;
  num_groups_ = layout.num_groups;
  q_index_ = layout.q_index;
  kv_index_ = layout.kv_index;
  runs_ = layout.runs;
}

void Plan::Build(Workers* workers) {
  if (!problem_.has_segment_ids) return;
  const int64_t rows = problem_.seqlen_q + problem_.seqlen_kv;
  // Enough entries in a task that handing it out costs little.
  const int64_t entries_per_task = std::max<int64_t>(1, 4096 / std::max<int64_t>(rows, 1));
  const int64_t num_tasks = CeilDiv(problem_.batch, entries_per_task);
  RunOnSlots(workers, num_slots_, num_tasks, [&](int64_t task, int slot) {
    Run* q_runs = runs_ + slot * rows;
    Run* kv_runs = q_runs + problem_.seqlen_q;
    const int64_t end = std::min((task + 1) * entries_per_task, problem_.batch);
    for (int64_t b = task * entries_per_task; b < end; ++b) BuildEntry(b, q_runs, kv_runs);
  });
}

namespace {

// Runs of rows [0, length), ordered by id and then by row. Returns their number.
template <typename Run>
int64_t SortedRuns(const Operand& ids, int64_t b, int64_t rows, int64_t length, Run* runs) {
  int64_t n = 0;
  bool sorted = true;
  for (int64_t i = 0; i < length; ++i) {
    const int64_t id = ids.Int(b, rows, i);
    if (n > 0 && runs[n - 1].id == id) {
      ++runs[n - 1].count;
      continue;
    }
    sorted = sorted && (n == 0 || runs[n - 1].id < id);
    runs[n++] = Run{id, i, 1};
  }
  if (!sorted) {
    std::sort(runs, runs + n, [](const Run& x, const Run& y) {
      return x.id != y.id ? x.id < y.id : x.begin < y.begin;
    });
  }
  return n;
}

// Lists the rows of the leading runs with this id from `slot` on. Returns the slot after them.
template <typename Run>
int64_t ListRows(const Run*& run, const Run* end, int64_t id, int64_t slot, int64_t* index) {
  for (; run != end && run->id == id; ++run) {
    for (int64_t i = 0; i < run->count; ++i) index[slot++] = run->begin + i;
  }
  return slot;
}

}  // namespace

void Plan::BuildEntry(int64_t b, Run* q_runs, Run* kv_runs) {
  const int64_t seqlen_q = problem_.seqlen_q, seqlen_kv = problem_.seqlen_kv;
  const int64_t q_length = Length(operands_.q_seq_lengths, b, seqlen_q);
  const int64_t kv_length = Length(operands_.kv_seq_lengths, b, seqlen_kv);
  const Run* q = q_runs;
  const Run* kv = kv_runs;
  const Run* q_end = q + SortedRuns(operands_.q_segment_ids, b, seqlen_q, q_length, q_runs);
  const Run* kv_end = kv + SortedRuns(operands_.kv_segment_ids, b, seqlen_kv, kv_length, kv_runs);

  Group* groups = groups_ + b * (seqlen_q + seqlen_kv + 2);
  int64_t* q_index = q_index_ + b * seqlen_q;
  int64_t* kv_index = kv_index_ + b * seqlen_kv;
  int64_t n = 0, q_slot = 0, kv_slot = 0;
  while (q != q_end || kv != kv_end) {
    const bool q_leads = kv == kv_end || (q != q_end && q->id <= kv->id);
    const int64_t id = q_leads ? q->id : kv->id;
    Group& group = groups[n++];
    group.q_begin = q_slot;
    group.kv_begin = kv_slot;
    q_slot = ListRows(q, q_end, id, q_slot, q_index);
    kv_slot = ListRows(kv, kv_end, id, kv_slot, kv_index);
    group.q_count = q_slot - group.q_begin;
    group.kv_count = kv_slot - group.kv_begin;
  }
  if (q_length < seqlen_q) groups[n++] = Group{q_slot, seqlen_q - q_length, kv_slot, 0};
  if (kv_length < seqlen_kv) groups[n++] = Group{seqlen_q, 0, kv_slot, seqlen_kv - kv_length};
  for (int64_t i = q_length; i < seqlen_q; ++i) q_index[i] = i;
  for (int64_t j = kv_length; j < seqlen_kv; ++j) kv_index[j] = j;
  num_groups_[b] = n;
}

Entry Plan::At(int64_t b) const {
  const int64_t seqlen_q = problem_.seqlen_q, seqlen_kv = problem_.seqlen_kv;
  Entry entry;
  entry.q_length_ = Length(operands_.q_seq_lengths, b, seqlen_q);
  entry.kv_length_ = Length(operands_.kv_seq_lengths, b, seqlen_kv);
  if (problem_.has_segment_ids) {
    entry.num_groups_ = num_groups_[b];
    entry.listed_ = groups_ + b * (seqlen_q + seqlen_kv + 2);
    entry.q_index_ = q_index_ + b * seqlen_q;
    entry.kv_index_ = kv_index_ + b * seqlen_kv;
    return entry;
  }
  const int64_t q_length = entry.q_length_, kv_length = entry.kv_length_;
  entry.own_[0] = Group{0, q_length, 0, kv_length};
  entry.own_[1] = Group{q_length, seqlen_q - q_length, kv_length, 0};
  entry.own_[2] = Group{seqlen_q, 0, kv_length, seqlen_kv - kv_length};
  entry.num_groups_ = 3;
  return entry;
}

// ---- positions ----

Band BandOf(const Problem& problem) {
  Band band;
  if (problem.window_left < kUnbounded) band.lo = -problem.window_left;
  if (problem.window_right < kUnbounded) band.hi = problem.window_right;
  if (problem.is_causal) band.hi = std::min<int64_t>(band.hi, 0);
  return band;
}

Positions::Positions(const Problem& problem, const Operands& operands, int64_t b)
    : operands_(&operands),
      b_(b),
      seqlen_q_(problem.seqlen_q),
      seqlen_kv_(problem.seqlen_kv),
      has_q_(operands.q_positions),
      has_kv_(operands.kv_positions) {
  if (operands.query_offset) offset_ = Saturate(operands.query_offset.Int(b, 1, 0));
}

}  // namespace cpu
}  // namespace jax_fmha

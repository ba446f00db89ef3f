#include "cc/cpu/backward_call.h"

#include <cmath>

namespace jax_fmha {
namespace cpu {
namespace {

// The fewest splits that leave at most an eighth of the slots' time idle. Each split costs a slab
// of dq, hence the bound.
int64_t NumSplits(int64_t units, int64_t num_tiles, int num_slots) {
  constexpr int64_t kMostSplits = 16;
  const int64_t most = std::max<int64_t>(1, std::min(num_tiles, kMostSplits));
  for (int64_t splits = 1; splits < most; ++splits) {
    const int64_t busy = units * splits;
    if (8 * (RoundUp(busy, num_slots) - busy) <= busy) return splits;
  }
  return most;
}

}  // namespace

// ---- batch dimensions ----

int64_t BatchSplit::Dims::At(int64_t index) const {
  if (rank == 1) return index * strides[0];
  int64_t entry = 0;
  for (int d = rank - 1; d >= 0; --d) {
    entry += index % sizes[d] * strides[d];
    index /= sizes[d];
  }
  return entry;
}

BatchSplit::BatchSplit(const std::vector<int64_t>& batch_shape,
                       const std::vector<int64_t>& result_shape) {
  int64_t stride = 1;
  for (int64_t size : batch_shape) stride *= size;
  for (size_t d = 0; d < batch_shape.size(); ++d) {
    const int64_t size = batch_shape[d];
    stride = size == 0 ? 0 : stride / size;
    const bool sums = !result_shape.empty() && result_shape[d] == 1;
    Dims& dims = sums ? summed_ : kept_;
    dims.sizes[dims.rank] = size;
    dims.strides[dims.rank++] = stride;
    dims.count *= size;
  }
}

// ---- units ----

BackwardUnits::BackwardUnits(const Problem& problem, int num_slots)
    : bias_sums(BiasSums::kNone),
      dbias_heads(1),
      dbias_rows(1),
      dbias_cols(1),
      batch(problem.batch_shape, {}) {
  if (problem.wants_dbias) {
    const std::vector<int64_t>& shape = problem.dbias_shape;
    const size_t rank = shape.size();
    dbias_heads = shape[rank - 3];
    dbias_rows = shape[rank - 2];
    dbias_cols = shape[rank - 1];
    bias_sums = dbias_rows > 1 && dbias_cols > 1 ? BiasSums::kOwned : BiasSums::kPartial;
  }
  const bool owned = bias_sums == BiasSums::kOwned;
  if (owned) batch = BatchSplit(problem.batch_shape, problem.dbias_shape);
  heads_per_unit = owned && dbias_heads == 1 ? problem.num_kv_heads : 1;
  head_units = heads_per_unit == 0 ? 0 : problem.num_kv_heads / heads_per_unit;
  num_splits =
      NumSplits(batch.kept() * head_units, CeilDiv(problem.seqlen_kv, kBackwardBlockKv), num_slots);
  cut_by_row = owned && num_splits > 1 && batch.summed() > 1;
}

// ---- workspace ----

template <typename T>
BackwardSlot<T>::BackwardSlot(const Problem& problem, Arena* arena) {
  constexpr int64_t kQ = kBackwardBlockQ, kKv = kBackwardBlockKv;
  const int64_t h = problem.head_dim, hv = problem.head_dim_v;
  const int64_t num_rows = problem.seqlen_q * problem.group_size();
  const int64_t staged_h = StagedStride<T>(h), staged_hv = StagedStride<T>(hv);
  matrices.k = arena->Take<T>(kKv * staged_h);
  matrices.kt = arena->Take<T>(kKv * h);
  matrices.vt = arena->Take<T>(kKv * hv);
  matrices.dk = arena->Take<T>(kKv * staged_h);
  matrices.dv = arena->Take<T>(kKv * staged_hv);
  matrices.q = arena->Take<T>(kQ * staged_h);
  matrices.dout = arena->Take<T>(kQ * staged_hv);
  matrices.p = arena->Take<T>(kQ * kScoreStride<T>);
  matrices.ds = arena->Take<T>(kQ * kScoreStride<T>);
  q = arena->Take<T>(num_rows * staged_h);
  dout = arena->Take<T>(num_rows * staged_hv);
  key_rows = arena->Take<int64_t>(kKv);
  key_positions = arena->Take<int64_t>(kKv);
  rows = arena->Take<int64_t>(kQ);
  heads = arena->Take<int64_t>(kQ);
  positions = arena->Take<int64_t>(kQ);
  mask = arena->Take<uint8_t>(kQ * kKv);
  intervals = arena->Take<Interval>(CeilDiv(num_rows, kQ));
  row_dots = arena->Take<T>(problem.num_q_heads);
}

template <typename T>
BackwardWorkspace<T>::BackwardWorkspace(const Problem& problem, const BackwardUnits& units,
                                        void* base, int num_slots)
    : staged_h(StagedStride<T>(problem.head_dim)), staged_hv(StagedStride<T>(problem.head_dim_v)) {
  const int64_t rows = problem.seqlen_q * problem.group_size();
  const int64_t heads = problem.batch * problem.num_kv_heads;
  const int64_t pieces = problem.batch * CeilDiv(problem.seqlen_q, kDeltaRows);
  int64_t sums = 0;
  if (units.bias_sums == BiasSums::kPartial) {
    sums = problem.batch * (units.dbias_heads == 1 ? problem.num_kv_heads : 1) * units.num_splits;
  } else if (units.bias_sums == BiasSums::kOwned &&
             problem.bias_dtype != BackwardCall<T>::kAccumulator) {
    sums = units.batch.kept();
  }
  Arena arena(base);
  plan = arena.Take<char>(Plan::WorkspaceBytes(problem, num_slots));
  lse2 = arena.Take<T>(heads * rows);
  delta = arena.Take<T>(heads * rows);
  sink_sums = arena.Take<T>(problem.wants_dsinks ? pieces * problem.num_q_heads : 0);
  slabs = arena.Take<T>((units.num_splits > 1 ? heads * units.num_splits : num_slots) * rows *
                        staged_h);
  bias_sums = arena.Take<T>(sums * units.dbias_entry());
  Arena one_slot;
  BackwardSlot<T>(problem, &one_slot);
  slot_bytes = one_slot.used();
  slots = arena.Take<char>(num_slots * slot_bytes);
  bytes = arena.used();
}

// ---- one call ----

template <typename T>
BackwardHead<T> BackwardCall<T>::HeadOf(int64_t b, int64_t kv_head, int64_t split) const {
  const Problem& p = problem;
  const Operands& x = operands;
  const int64_t group = group_size(), size = SizeOf(p.dtype), first_head = kv_head * group;
  // Element `at` of batch entry b.
  const auto in = [&](const Operand& operand, int64_t entry_size, int64_t at) -> const void* {
    return operand.template Entry<char>(b, entry_size * size) + at * size;
  };
  const auto out = [&](const Result& result, int64_t entry_size, int64_t at) -> void* {
    return result.template Entry<char>(b, entry_size * size) + at * size;
  };
  BackwardHead<T> head = {};
  head.q_stride = p.num_q_heads * p.head_dim;
  head.k_stride = p.num_kv_heads * p.head_dim;
  head.v_stride = p.num_kv_heads * p.head_dim_v;
  head.dout_stride = p.num_q_heads * p.head_dim_v;
  head.q = in(x.q, p.seqlen_q * head.q_stride, first_head * p.head_dim);
  head.k = in(x.k, p.seqlen_kv * head.k_stride, kv_head * p.head_dim);
  head.v = in(x.v, p.seqlen_kv * head.v_stride, kv_head * p.head_dim_v);
  head.dout = in(x.dout, p.seqlen_q * head.dout_stride, first_head * p.head_dim_v);
  head.dq = out(x.dq, p.seqlen_q * head.q_stride, first_head * p.head_dim);
  head.dk = out(x.dk, p.seqlen_kv * head.k_stride, kv_head * p.head_dim);
  head.dv = out(x.dv, p.seqlen_kv * head.v_stride, kv_head * p.head_dim_v);
  head.head_dim = p.head_dim;
  head.head_dim_v = p.head_dim_v;
  head.staged_h = workspace.staged_h;
  head.staged_hv = workspace.staged_hv;
  head.scale =
      static_cast<T>(x.scale ? x.scale.Float(b) : 1 / std::sqrt(static_cast<double>(p.head_dim)));
  head.has_soft_cap = static_cast<bool>(x.logits_soft_cap);
  if (head.has_soft_cap) head.soft_cap = static_cast<T>(x.logits_soft_cap.Float(b));
  const Band band = BandOf(p);
  head.band_lo = band.lo;
  head.band_hi = band.hi;
  if (x.bias) {
    const ScoreStrides& s = x.bias_strides;
    const char* const data = x.bias.template Entry<char>(b, s.entry * SizeOf(x.bias.dtype));
    head.bias = {data + first_head * s.head * SizeOf(x.bias.dtype), x.bias.dtype, s.head, s.row,
                 s.col};
  }
  if (units.bias_sums != BiasSums::kNone) head.dbias = BiasSumsOf(b, kv_head, split);
  return head;
}

template <typename T>
ScoreView<T*> BackwardCall<T>::BiasSumsOf(int64_t b, int64_t kv_head, int64_t split) const {
  const int64_t rows = units.dbias_rows, cols = units.dbias_cols;
  ScoreView<T*> view;
  view.head = units.dbias_heads > 1 ? rows * cols : 0;
  view.row = rows > 1 ? cols : 0;
  view.col = cols > 1 ? 1 : 0;
  if (units.bias_sums == BiasSums::kOwned) {
    view.data = OwnedBiasSums() + operands.dbias.batch(b) * units.dbias_entry();
  } else {
    view.data = BiasPartial(b, (BiasSlices() > 1 ? kv_head * units.num_splits : 0) + split);
  }
  view.data += kv_head * group_size() * view.head;
  return view;
}

template <typename T>
void BackwardCall<T>::ListQueryRows(const Entry& entry, int64_t first, int64_t count,
                                    const BackwardSlot<T>& slot) const {
  const int64_t group = group_size();
  int64_t query_slot = first / group, head = first % group;
  for (int64_t i = 0; i < count; ++i) {
    slot.rows[i] = entry.QRow(query_slot);
    slot.heads[i] = head;
    if (++head == group) head = 0, ++query_slot;
  }
}

template struct BackwardCall<float>;
template struct BackwardCall<double>;
template struct BackwardSlot<float>;
template struct BackwardSlot<double>;
template struct BackwardWorkspace<float>;
template struct BackwardWorkspace<double>;

}  // namespace cpu
}  // namespace jax_fmha

#include "cc/cpu/convert.h"

namespace jax_fmha {
namespace cpu {
namespace {

// Adds the slabs of the key splits and rounds.
template <typename T>
void ConvertQueries(const BackwardCall<T>& call) {
  const int64_t rows = call.query_rows(), num_splits = call.units.num_splits;
  const int64_t blocks = CeilDiv(rows, kBackwardBlockQ), kv_heads = call.problem.num_kv_heads;
  const int64_t slab_size = rows * call.workspace.staged_h;
  call.ForEach(call.problem.batch * kv_heads * blocks, [&](int64_t item, int slot_number) {
    const int64_t first = item % blocks * kBackwardBlockQ, head = item / blocks,
                  b = head / kv_heads;
    const int64_t count = std::min(kBackwardBlockQ, rows - first);
    const BackwardSlot<T> slot = call.Slot(slot_number);
    call.ListQueryRows(call.plan.At(b), first, count, slot);
    T* const slab =
        call.workspace.slabs + head * num_splits * slab_size + first * call.workspace.staged_h;
    call.tile.store_queries(call.HeadOf(b, head % kv_heads, 0), count, slot.rows, slot.heads, slab,
                            slab_size, num_splits);
  });
}

// Adds what the units of all batch entries that share an element have summed, if anything is to be
// added, and rounds.
template <typename T>
void ConvertBias(const BackwardCall<T>& call) {
  constexpr int64_t kChunk = 512;
  const Result& dbias = call.operands.dbias;
  const bool partial = call.units.bias_sums == BiasSums::kPartial;
  const BatchSplit batch(call.problem.batch_shape, call.problem.dbias_shape);
  const int64_t entry = call.units.dbias_entry(), chunks = CeilDiv(entry, kChunk);
  call.ForEach(batch.kept() * chunks, [&](int64_t item, int) {
    const int64_t owner = item / chunks, first = item % chunks * kChunk,
                  count = std::min(kChunk, entry - first);
    const int64_t at = dbias.batch(batch.At(owner, 0)) * entry + first;
    T sums[kChunk] = {};
    for (int64_t member = 0; partial && member < batch.summed(); ++member) {
      for (int64_t i = 0; i < call.num_bias_partials(); ++i) {
        const T* const more = call.BiasPartial(batch.At(owner, member), i) + first;
        for (int64_t e = 0; e < count; ++e) sums[e] += more[e];
      }
    }
    call.tile.round(partial ? sums : call.OwnedBiasSums() + at, count, dbias.dtype,
                    static_cast<char*>(dbias.data) + at * SizeOf(dbias.dtype));
  });
}

template <typename T>
void ConvertSinks(const BackwardCall<T>& call) {
  const Result& dsinks = call.operands.dsinks;
  const BatchSplit batch(call.problem.batch_shape, call.problem.dsinks_shape);
  const int64_t pieces = CeilDiv(call.problem.seqlen_q, kDeltaRows),
                num_heads = call.problem.num_q_heads;
  call.ForEach(batch.kept(), [&](int64_t owner, int) {
    T* const to = dsinks.Entry<T>(batch.At(owner, 0), num_heads);
    std::fill(to, to + num_heads, T(0));
    for (int64_t member = 0; member < batch.summed(); ++member) {
      const T* more = call.workspace.sink_sums + batch.At(owner, member) * pieces * num_heads;
      for (int64_t piece = 0; piece < pieces; ++piece, more += num_heads) {
        for (int64_t n = 0; n < num_heads; ++n) to[n] += more[n];
      }
    }
  });
}

}  // namespace

template <typename T>
void ConvertResults(const BackwardCall<T>& call) {
  const bool summed_in_place = call.units.bias_sums == BiasSums::kOwned &&
                               call.operands.dbias.dtype == BackwardCall<T>::kAccumulator;
  if (call.units.num_splits > 1) ConvertQueries(call);
  if (call.problem.wants_dbias && !summed_in_place) ConvertBias(call);
  if (call.problem.wants_dsinks) ConvertSinks(call);
}

template void ConvertResults(const BackwardCall<float>& call);
template void ConvertResults(const BackwardCall<double>& call);

}  // namespace cpu
}  // namespace jax_fmha

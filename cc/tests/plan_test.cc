// The schedule by segments, lengths and positions, against every pair of rows.
#include "cc/cpu/plan.h"

#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "cc/tests/check.h"

namespace jax_fmha {
namespace cpu {
namespace {

class InlineWorkers final : public Workers {
 public:
  explicit InlineWorkers(int num_slots) : num_slots_(num_slots) {}
  int num_slots() const override { return num_slots_; }
  void Run(int64_t num_tasks, const std::function<void(int64_t task, int slot)>& body) override {
    for (int64_t task = 0; task < num_tasks; ++task) {
      body(task, static_cast<int>(task % num_slots_));
    }
  }

 private:
  int num_slots_;
};

BatchMap InFull(int64_t batch) {
  BatchMap map;
  map.rank = 1;
  map.sizes[0] = batch;
  map.strides[0] = 1;
  return map;
}

// Segment ids as callers have them: sorted runs, runs in any order, or shuffled, of any values.
std::vector<int32_t> RandomIds(std::mt19937& random, int64_t length, int kind) {
  std::vector<int32_t> ids(length);
  const int distinct = 1 + static_cast<int>(random() % 6);
  int32_t id = -static_cast<int32_t>(random() % 3);
  for (int32_t& x : ids) {
    if (kind == 2) {
      id = static_cast<int32_t>(random() % distinct) - 1;
    } else if (random() % 4 == 0) {
      id = kind == 0 ? id + 1 : static_cast<int32_t>(random() % distinct) - 1;
    }
    x = id;
  }
  return ids;
}

void CheckEntry(const Entry& entry, int64_t T, int64_t S,
                const std::function<bool(int64_t, int64_t)>& allowed) {
  // The groups tile both sides in order, and every row has exactly one slot.
  int64_t q = 0, kv = 0;
  std::vector<int64_t> q_group(T, -1), kv_group(S, -1);
  for (int64_t g = 0; g < entry.num_groups(); ++g) {
    const Group& group = entry.group(g);
    CHECK(group.q_begin == q && group.kv_begin == kv && group.q_count >= 0 && group.kv_count >= 0);
    int64_t last = -1;
    for (int64_t slot = q; slot < q + group.q_count; ++slot) {
      const int64_t row = entry.QRow(slot);
      CHECK(row > last && row < T && q_group[row] == -1 && entry.GroupOfQ(slot) == g);
      q_group[last = row] = g;
    }
    last = -1;
    for (int64_t slot = kv; slot < kv + group.kv_count; ++slot) {
      const int64_t row = entry.KvRow(slot);
      CHECK(row > last && row < S && kv_group[row] == -1 && entry.GroupOfKv(slot) == g);
      kv_group[last = row] = g;
    }
    if (group.q_count > 0) {
      const int64_t span = entry.QRow(q + group.q_count - 1) - entry.QRow(q) + 1;
      CHECK(entry.QContiguous(q, group.q_count) == (span == group.q_count));
    }
    q += group.q_count;
    kv += group.kv_count;
  }
  CHECK(q == T && kv == S);
  for (int64_t i = 0; i < T; ++i) {
    for (int64_t j = 0; j < S; ++j) CHECK((q_group[i] == kv_group[j]) == allowed(i, j));
  }
}

void CheckCuts(const Entry& entry, int64_t T, int64_t S) {
  for (int64_t size : {1, 2, 5, 16}) {
    for (const bool is_q : {true, false}) {
      const int64_t slots = is_q ? T : S;
      const auto cut = is_q ? CutQ : CutKv;
      const int64_t pieces = CeilDiv(slots, size);
      CHECK(pieces == 0 ||
            (cut(entry, slots, size, 0) == 0 && cut(entry, slots, size, pieces) == slots));
      for (int64_t i = 0; i < pieces; ++i) {
        const int64_t count = cut(entry, slots, size, i + 1) - cut(entry, slots, size, i);
        CHECK(count >= 0 && (size == 1 ? count <= 1 : 2 * count < 3 * size));
      }
    }
  }
}

void TestGroups() {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    const int64_t B = 1 + random() % 3, T = random() % 40, S = random() % 40;
    const bool segments = random() % 4 != 0, q_lengths = random() % 2, kv_lengths = random() % 2;
    Problem problem;
    problem.dtype = DType::kF32;
    problem.batch_shape = {B};
    problem.batch = B;
    problem.seqlen_q = T;
    problem.seqlen_kv = S;
    problem.num_q_heads = problem.num_kv_heads = 1;
    problem.head_dim = problem.head_dim_v = 4;
    problem.has_segment_ids = segments;
    problem.has_seq_lengths = q_lengths || kv_lengths;

    std::vector<int32_t> q_ids, kv_ids, q_length, kv_length;
    const int kind = static_cast<int>(random() % 3);
    for (int64_t b = 0; b < B; ++b) {
      for (int32_t id : RandomIds(random, T, kind)) q_ids.push_back(id);
      for (int32_t id : RandomIds(random, S, kind)) kv_ids.push_back(id);
      // Lengths below 0 and beyond the arrays are what clamping is for.
      q_length.push_back(static_cast<int32_t>(random() % (T + 4)) - 1);
      kv_length.push_back(static_cast<int32_t>(random() % (S + 4)) - 1);
    }
    Operands operands;
    // An empty vector's data() may be null, and a null operand is an absent one.
    q_ids.reserve(1), kv_ids.reserve(1);
    if (segments) {
      operands.q_segment_ids = {q_ids.data(), DType::kS32, InFull(B)};
      operands.kv_segment_ids = {kv_ids.data(), DType::kS32, InFull(B)};
    }
    if (q_lengths) operands.q_seq_lengths = {q_length.data(), DType::kS32, InFull(B)};
    if (kv_lengths) operands.kv_seq_lengths = {kv_length.data(), DType::kS32, InFull(B)};

    const int slots = 1 + static_cast<int>(random() % 3);
    std::vector<int64_t> workspace(CeilDiv(Plan::WorkspaceBytes(problem, slots), 8) + 8);
    auto address = reinterpret_cast<uintptr_t>(workspace.data());
    Plan plan(problem, operands, reinterpret_cast<void*>(RoundUp(address, 64)), slots);
    InlineWorkers workers(slots);
    plan.Build(&workers);
    for (int64_t b = 0; b < B; ++b) {
      const Entry entry = plan.At(b);
      CheckEntry(entry, T, S, [&](int64_t i, int64_t j) {
        return (!q_lengths || i < q_length[b]) && (!kv_lengths || j < kv_length[b]) &&
               (!segments || q_ids[b * T + i] == kv_ids[b * S + j]);
      });
      CheckCuts(entry, T, S);
    }
  }
}

void TestBand() {
  for (int causal = 0; causal < 2; ++causal) {
    for (int64_t left : {-kUnbounded, int64_t{-2}, int64_t{0}, int64_t{3}, kUnbounded}) {
      for (int64_t right : {-kUnbounded, int64_t{-1}, int64_t{0}, int64_t{2}, kUnbounded}) {
        Problem problem;
        problem.is_causal = causal;
        problem.window_left = left;
        problem.window_right = right;
        const Band band = BandOf(problem);
        for (int64_t q = 0; q < 6; ++q) {
          for (int64_t kv = 0; kv < 12; ++kv) {
            const bool want = (!causal || kv <= q) && (left == kUnbounded || q - left <= kv) &&
                              (right == kUnbounded || kv <= q + right);
            CHECK((band.lo <= kv - q && kv - q <= band.hi) == want);
          }
        }
      }
    }
  }
}

void TestCover() {
  std::mt19937 random(11);
  for (int round = 0; round < 20000; ++round) {
    Band band;
    if (random() % 2) band.lo = static_cast<int64_t>(random() % 12) - 6;
    if (random() % 2) band.hi = static_cast<int64_t>(random() % 12) - 6;
    const int64_t q0 = random() % 8, q1 = q0 + random() % 5;
    const int64_t kv0 = random() % 8, kv1 = kv0 + random() % 5;
    Interval q, kv;
    int64_t allowed = 0, pairs = 0;
    for (int64_t i = q0; i <= q1; ++i) q.Include(i);
    for (int64_t j = kv0; j <= kv1; ++j) kv.Include(j);
    CHECK(q.min == q0 && q.max == q1);
    for (int64_t i = q0; i <= q1; ++i) {
      for (int64_t j = kv0; j <= kv1; ++j) {
        ++pairs;
        allowed += band.lo <= j - i && j - i <= band.hi;
      }
    }
    const Cover cover = CoverOf(band, q, kv);
    // "None" and "all" are promises; "some" is always allowed, but must be the answer when it is
    // the truth.
    if (cover == Cover::kNone) CHECK(allowed == 0);
    if (cover == Cover::kAll) CHECK(allowed == pairs);
    if (allowed > 0 && allowed < pairs) CHECK(cover == Cover::kSome);
    if (allowed == pairs && band.lo <= band.hi) CHECK(cover == Cover::kAll);
  }
}

void TestPositions() {
  const int64_t far[] = {INT64_MIN, INT64_MAX, -5};
  const int32_t offset[] = {-3};
  Problem problem;
  problem.batch_shape = {1};
  problem.seqlen_q = 3;
  problem.seqlen_kv = 3;
  problem.is_causal = true;
  problem.has_positions = problem.has_query_offset = true;
  Operands operands;
  operands.kv_positions = {far, DType::kS64, InFull(1)};
  operands.query_offset = {offset, DType::kS32, InFull(1)};
  const Positions positions(problem, operands, 0);
  CHECK(positions.q_ascending() && !positions.kv_ascending());
  CHECK(positions.Q(2) == -1 && positions.Kv(2) == -5);
  CHECK(positions.Kv(0) == -(int64_t{1} << 60) && positions.Kv(1) == int64_t{1} << 60);
  CHECK(Relative(int64_t{1} << 40, 0) == INT32_MAX && Relative(0, int64_t{1} << 40) == INT32_MIN);
  CHECK(Relative(7, 10) == -3);
}

}  // namespace
}  // namespace cpu
}  // namespace jax_fmha

int main() {
  jax_fmha::cpu::TestGroups();
  jax_fmha::cpu::TestBand();
  jax_fmha::cpu::TestCover();
  jax_fmha::cpu::TestPositions();
  std::puts("plan_test: ok");
  return 0;
}

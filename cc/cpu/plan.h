// Which query rows may meet which keys: segments, lengths and positions, worked out once per call.
//
// Rows are addressed by slot. Slots [0, T) are the query rows of a batch entry ordered by segment
// id, rows past q_length last; slots [0, S) are the keys in the same way. A group is a range of
// query slots with the range of key slots that it may attend by segment and length. The groups of
// an entry cover [0, T) and [0, S) without overlap, in ascending order, so that every row belongs
// to exactly one group; either side of a group may be empty. Within a group, rows ascend.
// Everything else (position, mask) is decided inside a group.
#pragma once

#include <cstdint>

#include "cc/core/kernel.h"
#include "cc/core/operands.h"
#include "cc/core/problem.h"

namespace jax_fmha {
namespace cpu {

struct Group {
  int64_t q_begin = 0;
  int64_t q_count = 0;
  int64_t kv_begin = 0;
  int64_t kv_count = 0;
};

// The groups of one batch entry.
class Entry {
 public:
  int64_t num_groups() const { return num_groups_; }
  const Group& group(int64_t i) const { return listed_ == nullptr ? own_[i] : listed_[i]; }

  // The group that holds a query slot in [0, T), or a key slot in [0, S).
  int64_t GroupOfQ(int64_t slot) const;
  int64_t GroupOfKv(int64_t slot) const;

  // The row at a slot.
  int64_t QRow(int64_t slot) const { return q_index_ == nullptr ? slot : q_index_[slot]; }
  int64_t KvRow(int64_t slot) const { return kv_index_ == nullptr ? slot : kv_index_[slot]; }

  // Rows by slot, or null when a slot is its own row.
  const int64_t* q_index() const { return q_index_; }
  const int64_t* kv_index() const { return kv_index_; }

  // Whether the rows of `count` > 0 slots of one group follow each other in memory.
  bool QContiguous(int64_t slot, int64_t count) const {
    return QRow(slot + count - 1) - QRow(slot) == count - 1;
  }
  bool KvContiguous(int64_t slot, int64_t count) const {
    return KvRow(slot + count - 1) - KvRow(slot) == count - 1;
  }

  int64_t q_length() const { return q_length_; }    // min(query_seq_lengths, T)
  int64_t kv_length() const { return kv_length_; }  // min(key_value_seq_lengths, S)

 private:
  friend class Plan;
  int64_t num_groups_ = 0;
  const Group* listed_ = nullptr;
  const int64_t* q_index_ = nullptr;
  const int64_t* kv_index_ = nullptr;
  int64_t q_length_ = 0;
  int64_t kv_length_ = 0;
  Group own_[3];
};

// Cuts the slots of an entry, [0, slots), into pieces of about `size`; piece i is [Cut(i), Cut(i +
// 1)) for i < CeilDiv(slots, size), and may be empty. A cut moves to the start of a group that is
// near, so that few groups are shared by two pieces; a piece is shorter than 3/2 size.
int64_t CutQ(const Entry& entry, int64_t slots, int64_t size, int64_t piece);
int64_t CutKv(const Entry& entry, int64_t slots, int64_t size, int64_t piece);

// O(T + S) integers per batch entry, and only for problems with segments.
class Plan {
 public:
  static int64_t WorkspaceBytes(const Problem& problem, int num_slots);

  Plan(const Problem& problem, const Operands& operands, void* workspace, int num_slots);

  // Sorts the rows of every batch entry by segment; to be called before At. Nothing to do without
  // segments.
  void Build(Workers* workers);

  Entry At(int64_t b) const;

 private:
  struct Run;
  struct Layout;
  void BuildEntry(int64_t b, Run* q_runs, Run* kv_runs);

  const Problem& problem_;
  const Operands& operands_;
  int num_slots_;
  Group* groups_ = nullptr;        // [B][T + S + 2]
  int64_t* num_groups_ = nullptr;  // [B]
  int64_t* q_index_ = nullptr;     // [B][T]
  int64_t* kv_index_ = nullptr;    // [B][S]
  Run* runs_ = nullptr;            // [num_slots][T + S]
};

// ---- positions ----

// The pairs that causal and window allow: lo <= kpos - qpos <= hi.
struct Band {
  static constexpr int64_t kEverything = int64_t{1} << 62;
  int64_t lo = -kEverything;
  int64_t hi = kEverything;
};
Band BandOf(const Problem& problem);

// Positions of one batch entry. Saturated at +-2^60, so that their differences are always exact.
class Positions {
 public:
  Positions(const Problem& problem, const Operands& operands, int64_t b);

  int64_t Q(int64_t row) const {
    return has_q_ ? Saturate(operands_->q_positions.Int(b_, seqlen_q_, row)) : row + offset_;
  }
  int64_t Kv(int64_t row) const {
    return has_kv_ ? Saturate(operands_->kv_positions.Int(b_, seqlen_kv_, row)) : row;
  }
  // Positions that are not given ascend with the rows, hence with the slots of a group.
  bool q_ascending() const { return !has_q_; }
  bool kv_ascending() const { return !has_kv_; }

 private:
  static int64_t Saturate(int64_t x) {
    constexpr int64_t kLimit = int64_t{1} << 60;
    return x < -kLimit ? -kLimit : x > kLimit ? kLimit : x;
  }
  const Operands* operands_;
  int64_t b_;
  int64_t seqlen_q_;
  int64_t seqlen_kv_;
  bool has_q_;
  bool has_kv_;
  int64_t offset_ = 0;
};

struct Interval {
  int64_t min = INT64_MAX;
  int64_t max = INT64_MIN;
  void Include(int64_t x) {
    if (x < min) min = x;
    if (x > max) max = x;
  }
};

// How many of the pairs between some query positions and some key positions a band allows.
enum class Cover { kNone, kSome, kAll };
inline Cover CoverOf(const Band& band, const Interval& q, const Interval& kv) {
  if (kv.max - q.min < band.lo || kv.min - q.max > band.hi) return Cover::kNone;
  if (kv.min - q.max >= band.lo && kv.max - q.min <= band.hi) return Cover::kAll;
  return Cover::kSome;
}

// x - base in 32 bits. Exact in comparisons with values within 2^31 - 2 of base.
inline int32_t Relative(int64_t x, int64_t base) {
  const int64_t d = x - base;
  return static_cast<int32_t>(d < INT32_MIN ? INT32_MIN : d > INT32_MAX ? INT32_MAX : d);
}

}  // namespace cpu
}  // namespace jax_fmha

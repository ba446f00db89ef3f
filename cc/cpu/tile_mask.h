// The tile mask of one batch entry: which pairs it keeps, read tile by tile.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cc/core/operands.h"
#include "cc/core/problem.h"
#include "cc/cpu/plan.h"

namespace jax_fmha {
namespace cpu {

// Key rows that follow each other, or are listed.
struct KeyRows {
  const int64_t* index;  // or null: first + j
  int64_t first;
  int64_t count;
  int64_t At(int64_t j) const { return index == nullptr ? first + j : index[j]; }
};

class TileMask {
 public:
  TileMask(const Problem& problem, const Operands& operands, int64_t b)
      : rows_(problem.tile_rows),
        cols_(problem.tile_cols),
        grid_rows_(CeilDiv(problem.seqlen_q, rows_)),
        grid_cols_(CeilDiv(problem.seqlen_kv, cols_)),
        one_head_(problem.num_mask_heads == 1) {
    tiles_ =
        operands.mask_tiles.Entry<int32_t>(b, problem.num_mask_heads * grid_rows_ * grid_cols_);
    bits_ = operands.mask_bits.Entry<uint8_t>(b, problem.num_partial_tiles * rows_ * (cols_ / 8));
  }

  // How much a query row keeps of some keys, by the classes of the tiles alone: kSome says no more
  // than that a partial tile or several classes are met.
  Cover Classify(int64_t head, int64_t row, const KeyRows& keys) const {
    bool any = false, all = true;
    ForTiles(head, row, keys, [&](int32_t tile, int64_t, int64_t) {
      any |= tile != kEmpty;
      all &= tile == kFull;
    });
    return !any ? Cover::kNone : all ? Cover::kAll : Cover::kSome;
  }
  // Rows with the same number classify alike.
  int64_t ClassOf(int64_t head, int64_t row) const {
    return (one_head_ ? 0 : head) * grid_rows_ + row / rows_;
  }

  // Writes 1 for each key that the row keeps, 0 for the others.
  void Read(int64_t head, int64_t row, const KeyRows& keys, uint8_t* to) const {
    ForTiles(head, row, keys, [&](int32_t tile, int64_t begin, int64_t end) {
      if (tile == kEmpty || tile == kFull) {
        std::fill(to + begin, to + end, static_cast<uint8_t>(tile));
        return;
      }
      const uint8_t* const line =
          bits_ + ((tile - kFirstPartial) * rows_ + row % rows_) * (cols_ / 8);
      for (int64_t j = begin; j < end; ++j) {
        const int64_t col = keys.At(j) % cols_;
        to[j] = line[col / 8] >> (col % 8) & 1;
      }
    });
  }

 private:
  static constexpr int32_t kEmpty = 0, kFull = 1, kFirstPartial = 2;

  // Calls body(tile, begin, end) for the runs [begin, end) of keys that lie in one tile.
  template <typename Body>
  void ForTiles(int64_t head, int64_t row, const KeyRows& keys, const Body& body) const {
    const int32_t* const line = tiles_ + ClassOf(head, row) * grid_cols_;
    for (int64_t begin = 0, end; begin < keys.count; begin = end) {
      const int64_t col = keys.At(begin) / cols_;
      if (keys.index == nullptr) {
        end = std::min(keys.count, (col + 1) * cols_ - keys.first);
      } else {
        for (end = begin + 1; end < keys.count && keys.index[end] / cols_ == col;) ++end;
      }
      body(line[col], begin, end);
    }
  }

  int64_t rows_, cols_, grid_rows_, grid_cols_;
  bool one_head_;
  const int32_t* tiles_;
  const uint8_t* bits_;
};

}  // namespace cpu
}  // namespace jax_fmha

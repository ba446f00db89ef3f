// Tensor maps (TMA descriptors) that span mapped memory only, which Blackwell asks for: unlike
// Hopper's, none reaches in front of its operand.
//
// An operand is [entries, rows, heads, head_dim]. A plain map loads any box_rows rows and fills
// what lies past the operand with zeros. A masked map describes the rows twice, by an offset and by
// a masking dimension of box_rows rows, and so ends a box at any row of the operand from box_rows
// on.
#pragma once

#include "cc/gpu/tma.h"

namespace jax_fmha::sm100 {

// A masked map needs at least box_rows rows; with fewer it is left as it is, for nothing will use
// it.
inline Status EncodeRows(const gpu::RowTensor& x, int box_rows, int box_cols, bool is_masked,
                         CUtensorMap* map) {
  if (is_masked && x.rows < box_rows) return {};
  const auto size = static_cast<cuuint64_t>(SizeOf(x.dtype));
  const cuuint64_t head = x.head_dim * size, row = x.heads * head, entry = x.rows * row;
  const auto rows = static_cast<cuuint64_t>(x.rows), mask = static_cast<cuuint64_t>(box_rows);
  // column, (masking row,) row, head, entry
  const cuuint64_t plain_dims[4] = {static_cast<cuuint64_t>(x.head_dim), rows,
                                    static_cast<cuuint64_t>(x.heads),
                                    static_cast<cuuint64_t>(x.entries)};
  const cuuint64_t masked_dims[5] = {plain_dims[0], mask, rows - mask + 1, plain_dims[2],
                                     plain_dims[3]};
  const cuuint64_t plain_strides[3] = {row, head, entry};
  const cuuint64_t masked_strides[4] = {row, row, head, entry};
  const auto cols = static_cast<cuuint32_t>(box_cols), height = static_cast<cuuint32_t>(box_rows);
  const cuuint32_t plain_box[4] = {cols, height, 1, 1}, masked_box[5] = {cols, height, 1, 1, 1};
  return gpu::EncodeTensorMap(
      x.dtype, is_masked ? 5 : 4, x.data, is_masked ? masked_dims : plain_dims,
      is_masked ? masked_strides : plain_strides, is_masked ? masked_box : plain_box, map);
}

// Maps that load any rows of an operand and zeros behind them, since 0 * NaN is NaN: see load.cuh.
struct RowMaps {
  CUtensorMap tile;
  CUtensorMap masked;   // ends at any row from box_rows on
  CUtensorMap rows[2];  // 8 rows and 1 row at a time, for tiles that end before
};

inline Status EncodeRowMaps(const gpu::RowTensor& x, int box_rows, int box_cols, RowMaps* maps) {
  const struct {
    int box_rows;
    bool is_masked;
    CUtensorMap* map;
  } all[] = {{box_rows, false, &maps->tile},
             {box_rows, true, &maps->masked},
             {8, false, &maps->rows[0]},
             {1, false, &maps->rows[1]}};
  for (const auto& [rows, is_masked, map] : all) {
    if (Status s = EncodeRows(x, rows, box_cols, is_masked, map); !s.ok()) return s;
  }
  return {};
}

}  // namespace jax_fmha::sm100

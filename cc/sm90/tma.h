// Tensor maps (TMA descriptors) whose row dimension is described twice, so that a box of rows can
// be clipped anywhere.
//
// An operand [entries, rows, heads, head_dim] becomes five dimensions: column, masking row, offset
// row, head, entry. The box spans `box_rows` masking rows, and that dimension is exactly box_rows
// long: a box whose last wanted row is `first + valid - 1` is addressed by masking row box_rows -
// valid and offset row first + valid, and what lies past the masking dimension is zero-filled
// (loads). The base is moved back by box_rows rows to make the indices cancel, so a descriptor may
// span memory that is not ours; on Hopper only rows that a box really touches must be mapped.
#pragma once

#include "cc/gpu/tma.h"

namespace jax_fmha::sm90 {

inline Status EncodeRows(const gpu::RowTensor& x, int box_rows, int box_cols, CUtensorMap* map) {
  const cuuint64_t row = x.heads * x.head_dim * SizeOf(x.dtype);
  const cuuint64_t dims[5] = {static_cast<cuuint64_t>(x.head_dim),
                              static_cast<cuuint64_t>(box_rows),
                              static_cast<cuuint64_t>(x.rows + 1), static_cast<cuuint64_t>(x.heads),
                              static_cast<cuuint64_t>(x.entries)};
  const cuuint64_t strides[4] = {row, row, x.head_dim * static_cast<cuuint64_t>(SizeOf(x.dtype)),
                                 row * x.rows};
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(box_cols), static_cast<cuuint32_t>(box_rows),
                             1, 1, 1};
  const auto* base = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(x.data) - box_rows * row);
  return gpu::EncodeTensorMap(x.dtype, 5, base, dims, strides, box, map);
}

}  // namespace jax_fmha::sm90

// How a flat batch index finds an operand's own entry, against nested loops.
#include "cc/core/operands.h"

#include <cstdint>
#include <cstdio>
#include <vector>

#include "cc/tests/check.h"

namespace jax_fmha {
namespace {

// Bit d of `shared` gives the operand size 1 in batch dimension d. The map is built as the custom
// call builds it.
BatchMap MakeMap(const std::vector<int64_t>& sizes, unsigned shared) {
  BatchMap map;
  map.rank = static_cast<int>(sizes.size());
  int64_t entries = 1;
  for (int d = map.rank - 1; d >= 0; --d) {
    map.sizes[d] = sizes[d];
    map.strides[d] = (shared >> d) & 1 ? 0 : entries;
    if (map.strides[d]) entries *= sizes[d];
  }
  return map;
}

void TestBatchMap() {
  for (const std::vector<int64_t>& sizes :
       std::vector<std::vector<int64_t>>{{1}, {5}, {2, 3}, {3, 1, 4}, {2, 3, 2, 5}}) {
    for (unsigned shared = 0; shared < (1u << sizes.size()); ++shared) {
      const BatchMap map = MakeMap(sizes, shared);
      std::vector<int64_t> index(sizes.size(), 0);  // the multi-index of flat index b, counted up
      int64_t total = 1;
      for (int64_t size : sizes) total *= size;
      for (int64_t b = 0; b < total; ++b) {
        int64_t want = 0;
        for (size_t d = 0; d < sizes.size(); ++d) {
          const bool is_shared = (shared >> d) & 1;
          want = want * (is_shared ? 1 : sizes[d]) + (is_shared ? 0 : index[d]);
        }
        CHECK(map(b) == want);
        for (size_t d = sizes.size(); d-- > 0;) {
          if (++index[d] < sizes[d]) break;
          index[d] = 0;
        }
      }
    }
  }
}

void TestBatchMapBeyond32Bits() {
  const int64_t entries = int64_t{1} << 33;
  CHECK(MakeMap({entries}, 0)(entries - 1) == entries - 1);
  CHECK(MakeMap({2, entries}, 0b01)(2 * entries - 1) == entries - 1);
  CHECK(MakeMap({2, entries}, 0b10)(2 * entries - 1) == 1);
}

void TestElements() {
  const int32_t small[] = {1, 2, 3, 4, 5, 6};
  const int64_t large[] = {1, 2, int64_t{1} << 40, 4, 5, 6};
  Operand ints{small, DType::kS32, MakeMap({2}, 0)};
  CHECK(ints.Int(1, 3, 2) == 6);
  ints = {large, DType::kS64, MakeMap({2}, 1)};
  CHECK(ints.Int(1, 3, 2) == int64_t{1} << 40);

  const float single[] = {0.5f, 0.25f};
  const double twice[] = {0.5, 0.1};
  CHECK((Operand{single, DType::kF32, MakeMap({2}, 0)}.Float(1) == 0.25));
  CHECK((Operand{twice, DType::kF64, MakeMap({2}, 0)}.Float(1) == 0.1));
  CHECK((Operand{single, DType::kF32, MakeMap({2}, 0)}.Entry<float>(1, 1) == single + 1));

  float written[6] = {};
  CHECK((Result{written, DType::kF32, MakeMap({2}, 0), 2}.Entry<float>(1, 3) == written + 3));
  CHECK(!Operand() && !Result());
}

void TestTypes() {
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    CHECK(AccumulatorOf(dtype) == DType::kF32);
  }
  CHECK(AccumulatorOf(DType::kF64) == DType::kF64);
  CHECK(SizeOf(DType::kBool) == 1 && SizeOf(DType::kBF16) == 2 && SizeOf(DType::kF64) == 8);
  CHECK(SizeOf(DType::kAbsent) == 0 && SizeOf(DType::kOther) == 0);
  for (int64_t a = 0; a < 40; ++a) {
    for (int64_t b = 1; b < 9; ++b) {
      CHECK(CeilDiv(a, b) * b >= a && (CeilDiv(a, b) - 1) * b < a);
      CHECK(RoundUp(a, b) % b == 0 && RoundUp(a, b) >= a && RoundUp(a, b) - a < b);
    }
  }
}

}  // namespace
}  // namespace jax_fmha

int main() {
  jax_fmha::TestBatchMap();
  jax_fmha::TestBatchMapBeyond32Bits();
  jax_fmha::TestElements();
  jax_fmha::TestTypes();
  std::puts("operands_test: ok");
  return 0;
}

// Checks for plain C++ tests. A failed CHECK ends the program with exit code 1; a failed EXPECT is
// counted, so that a test over many cases can say which of them failed, and Summary turns the count
// into an exit code.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace jax_fmha {
namespace test {

struct Counts {
  long checks = 0;
  long failures = 0;
};
inline Counts& counts() {
  static Counts counts;
  return counts;
}

inline bool Expect(bool ok, const char* expression, const char* file, int line) {
  ++counts().checks;
  if (!ok && ++counts().failures <= 20) std::printf("%s:%d: failed: %s\n", file, line, expression);
  return ok;
}

inline bool Check(bool ok, const char* expression, const char* file, int line) {
  if (!Expect(ok, expression, file, line)) std::exit(1);
  return true;
}

inline int Summary(const char* name) {
  std::printf("%s: %ld checks, %ld failures\n", name, counts().checks, counts().failures);
  return counts().failures == 0 ? 0 : 1;
}

}  // namespace test
}  // namespace jax_fmha

#define CHECK(...) \
  ::jax_fmha::test::Check(static_cast<bool>(__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)
#define EXPECT(...) \
  ::jax_fmha::test::Expect(static_cast<bool>(__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)

// Prints the instruction sets that this machine can run, as a list of CMake (see CMakeLists.txt).
#include <cstdio>

#include "cc/cpu/isa.cc"

int main() {
  const char* separator = "";
  for (jax_fmha::cpu::Isa isa : jax_fmha::cpu::kAllIsas) {
    if (!jax_fmha::cpu::CanRun(isa)) continue;
    std::printf("%s%s", separator, jax_fmha::cpu::Name(isa));
    separator = ";";
  }
}

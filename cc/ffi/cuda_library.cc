#include "cc/ffi/cuda_library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <string>

namespace jax_fmha::ffi {
namespace {

struct Library {
  RunOnCuda* run = nullptr;
  std::string reason;
};

std::string Path() {
  Dl_info self;
  if (dladdr(reinterpret_cast<const void*>(&HasCudaLibrary), &self) == 0) return {};
  std::string path = self.dli_fname;
  return path.substr(0, path.rfind('/') + 1) + "libjax_fmha_cuda.so";
}

Library Load() {
  Library library;
  if (!HasCudaLibrary()) {
    library.reason = kNoCudaKernels;
    return library;
  }
  void* handle = dlopen(Path().c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle != nullptr) {
    library.run = reinterpret_cast<RunOnCuda*>(dlsym(handle, kRunOnCudaSymbol));
  }
  if (library.run == nullptr) library.reason = dlerror();
  return library;
}

}  // namespace

bool HasCudaLibrary() { return access(Path().c_str(), R_OK) == 0; }

RunOnCuda* LoadCudaLibrary(Status* status) {
  static const Library* library = new Library(Load());
  if (library->run == nullptr) *status = Status::Internal("attention: " + library->reason);
  return library->run;
}

}  // namespace jax_fmha::ffi

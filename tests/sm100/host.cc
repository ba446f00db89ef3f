// The host half of the emulator: linked in front of the CUDA runtime's launches with --wrap. Before a launch it
// tells the device what to do, afterwards it collects what was reported. Set by environment variables:
//   SM100_MODE     eager (default), deferred or random
//   SM100_DELAY    WARPS:NS: warps whose bit is set sleep up to NS nanoseconds, 4 ms at most, before what others may
//                  wait for
//   SM100_FAULT    KIND:SITE[:VALUE]: a planted fault, kinds as in emulator.h
//   SM100_TIMEOUT  milliseconds without progress after which a wait is a hang (default 400)
//   SM100_ALLOW    codes of findings that are expected, separated by commas
//   SM100_BATCH    a file of lines KIND SITE VALUE: the first launch is made once for each of these faults, from the
//                  same memory every time; a line `batch N OUTCOME` says what came of it
// A program with other findings exits with status 86.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <unistd.h>
#include <vector>

#include "emulator.h"

extern "C" {
cudaError_t __real_cudaMalloc(void**, size_t);
cudaError_t __real_cudaFree(void*);
}

namespace {

using namespace sm100;

const char* const kCodes[] = {"none",          "instruction-descriptor", "matrix-descriptor", "outside-shared-memory",
                              "outside-tensor-memory", "not-allocated",  "wrong-lanes",       "read-unwritten",
                              "read-pending",  "bad-alloc",              "alloc-after-relinquish", "bad-dealloc",
                              "dealloc-while-pending", "hang",           "unsupported",       "too-many-queues",
                              "leak",          "never-completed"};

#define CHECK(call)                                                                              \
  do {                                                                                           \
    if (const cudaError_t error = (call); error != cudaSuccess) {                                \
      std::fprintf(stderr, "sm100: %s: %s\n", #call, cudaGetErrorString(error));                 \
      std::fflush(stdout);                                                                       \
      _exit(87);                                                                                 \
    }                                                                                            \
  } while (0)

template <typename F>
F Driver(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion(name, &found, 12060, cudaEnableDefault, &result) != cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    std::fprintf(stderr, "sm100: the driver has no %s\n", name);
    _exit(87);
  }
  return reinterpret_cast<F>(found);
}

struct Emulator {
  std::map<uint32_t, std::string> sites;
  std::set<std::string> kernels, allowed;
  std::set<std::string> seen;  // findings, printed once each
  std::map<void*, size_t> allocations;  // of the program
  std::string first_finding;
  Report* reports = nullptr;
  char* ctas = nullptr;
  size_t num_ctas = 0;
  Control control{};
  int num_findings = 0, num_launches = 0;
  cudaStream_t stream = nullptr;
  const char* name = "";  // of the kernel last asked about

  Emulator() {
    char path[4096];
    const ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
    std::ifstream file(std::string(path, length > 0 ? length : 0) + ".sites");
    for (std::string line; std::getline(file, line);) {
      std::istringstream fields(line);
      std::string number, kernel, op, place;
      std::getline(fields, number, '\t');
      std::getline(fields, kernel, '\t');
      std::getline(fields, op, '\t');
      std::getline(fields, place, '\t');
      kernels.insert(kernel);
      sites[std::stoul(number)] = op + " at " + place;
    }
    control.timeout = 400000000;
    if (const char* x = std::getenv("SM100_MODE")) {
      control.mode = std::strcmp(x, "deferred") == 0 ? kDeferred : std::strcmp(x, "random") == 0 ? kRandom : kEager;
    }
    if (const char* x = std::getenv("SM100_TIMEOUT")) control.timeout = std::strtoull(x, nullptr, 0) * 1000000;
    if (const char* x = std::getenv("SM100_SEED")) control.seed = std::strtoul(x, nullptr, 0);
    if (const char* x = std::getenv("SM100_DELAY")) {
      char* end;
      control.delayed_warps = std::strtoul(x, &end, 0);
      const uint64_t longest = std::strtoull(end + 1, nullptr, 0);
      while (control.delay < longest && control.delay < (1u << 21)) control.delay = control.delay * 2 + 1;
    }
    if (const char* x = std::getenv("SM100_FAULT")) {
      char* end;
      control.fault = std::strtoul(x, &end, 0);
      control.fault_site = std::strtoul(end + 1, &end, 0);
      if (*end == ':') control.fault_value = std::strtoull(end + 1, nullptr, 0);
    }
    if (const char* x = std::getenv("SM100_ALLOW")) {
      std::istringstream codes(x);
      for (std::string code; std::getline(codes, code, ',');) allowed.insert(code);
    }
    CHECK(cudaHostAlloc(reinterpret_cast<void**>(&reports), kMaxReports * sizeof(Report), cudaHostAllocMapped));
    std::memset(reports, 0, kMaxReports * sizeof(Report));
  }

  void Find(const Report& r) {
    const std::string code = kCodes[r.code], where = sites[r.site];
    const bool is_allowed = allowed.count(code) > 0;
    if (!is_allowed) ++num_findings;
    if (!is_allowed && first_finding.empty()) first_finding = code;
    if (!seen.insert(code + where + (r.code == kHang ? std::to_string(r.thread / 32) : "")).second) return;
    std::fprintf(stderr, "sm100: %s%s: block %u warp %u (0x%x 0x%x 0x%x): site %u: %s\n", code.c_str(),
                 is_allowed ? " (expected)" : "", r.block, r.thread / 32, r.a, r.b, r.c, r.site, where.c_str());
  }

  void Collect() {
    for (int i = 0; i < kMaxReports; ++i) {
      if (reports[i].code != kNone) Find(reports[i]);
      reports[i] = {};
    }
  }

  bool Knows(CUkernel kernel) {
    static const auto get_name = Driver<CUresult (*)(const char**, CUkernel)>("cuKernelGetName");
    return get_name(&name, kernel) == CUDA_SUCCESS && kernels.count(name) > 0;
  }

  void Prepare(CUkernel kernel, dim3 grid, dim3 block, cudaStream_t s) {
    static const auto get_library = Driver<CUresult (*)(CUlibrary*, CUkernel)>("cuKernelGetLibrary");
    static const auto get_global =
        Driver<CUresult (*)(CUdeviceptr*, size_t*, CUlibrary, const char*)>("cuLibraryGetGlobal");
    if (block.y != 1 || block.z != 1) {
      std::fprintf(stderr, "sm100: %s: only one-dimensional blocks are known\n", name);
      _exit(87);
    }
    CUlibrary library;
    CUdeviceptr at;
    size_t bytes;
    if (get_library(&library, kernel) != CUDA_SUCCESS ||
        get_global(&at, &bytes, library, "sm100_control") != CUDA_SUCCESS || bytes != sizeof(Control)) {
      std::fprintf(stderr, "sm100: %s has no emulator\n", name);
      _exit(87);
    }
    stream = s;
    const size_t count = static_cast<size_t>(grid.x) * grid.y * grid.z;
    if (count > num_ctas) {
      CHECK(cudaDeviceSynchronize());
      CHECK(__real_cudaFree(ctas));
      CHECK(__real_cudaMalloc(reinterpret_cast<void**>(&ctas), count * sizeof(Cta)));
      num_ctas = count;
    }
    CHECK(cudaMemset2DAsync(ctas, sizeof(Cta), 0, kCtaHeader, count, s));
    for (int q = 0; q < kQueues; ++q) {
      CHECK(cudaMemset2DAsync(ctas + offsetof(Cta, queues) + q * sizeof(Queue), sizeof(Cta), 0, kQueueHeader, count, s));
    }
    control.ctas = reinterpret_cast<uint64_t>(ctas);
    control.reports = reinterpret_cast<uint64_t>(reports);
    control.num_threads = block.x;
    CHECK(cudaMemcpyAsync(reinterpret_cast<void*>(at), &control, sizeof(control), cudaMemcpyHostToDevice, s));
    CHECK(cudaStreamSynchronize(s));
    ++num_launches;
  }

  // Launches with every fault of the batch. Memory is put back before each launch, and what a launch without a fault
  // changes in it is the result that the others are compared with.
  template <class Launch>
  void Batch(const char* path, CUkernel kernel, dim3 grid, dim3 block, cudaStream_t s, const Launch& launch) {
    std::vector<std::vector<char>> before, expected;
    auto read = [&](std::vector<std::vector<char>>& to) {
      to.clear();
      for (const auto& [data, bytes] : allocations) {
        to.emplace_back(bytes);
        CHECK(cudaMemcpy(to.back().data(), data, bytes, cudaMemcpyDeviceToHost));
      }
    };
    auto run = [&] {
      Prepare(kernel, grid, block, s);
      return Finish(launch(), grid);
    };
    CHECK(cudaDeviceSynchronize());
    read(before);
    const Control plain = control;
    control.fault = kNoFault;
    CHECK(run());
    read(expected);
    std::vector<size_t> changed;
    for (size_t i = 0; i < before.size(); ++i) {
      if (before[i] != expected[i]) changed.push_back(i);
    }
    std::ifstream file(path);
    int number = 0;
    for (uint64_t kind, site, value; file >> kind >> site >> value; ++number) {
      size_t i = 0;
      for (const auto& [data, bytes] : allocations) {
        CHECK(cudaMemcpy(data, before[i++].data(), bytes, cudaMemcpyHostToDevice));
      }
      control.fault = static_cast<uint32_t>(kind);
      control.fault_site = static_cast<uint32_t>(site);
      control.fault_value = value;
      first_finding.clear();
      const cudaError_t error = run();
      std::string outcome = first_finding;
      if (error != cudaSuccess && outcome.empty()) outcome = "failed";
      if (error == cudaSuccess && outcome.empty()) {
        outcome = "passed";
        for (const size_t c : changed) {
          auto at = allocations.begin();
          std::advance(at, c);
          std::vector<char> now(at->second);
          CHECK(cudaMemcpy(now.data(), at->first, at->second, cudaMemcpyDeviceToHost));
          if (now != expected[c]) outcome = "wrong result";
        }
      }
      std::printf("batch %d %s\n", number, outcome.c_str());
      std::fflush(stdout);
      if (error != cudaSuccess) _exit(88);  // the context is lost; the caller goes on behind this one
    }
    control = plain;
    _exit(0);
  }

  cudaError_t Finish(cudaError_t launched, dim3 grid) {
    if (launched != cudaSuccess) return launched;
    const cudaError_t error = cudaStreamSynchronize(stream);
    Collect();
    if (error != cudaSuccess) return error;
    const size_t count = static_cast<size_t>(grid.x) * grid.y * grid.z;
    std::vector<uint32_t> headers(count * 64);
    CHECK(cudaMemcpy2D(headers.data(), 256, ctas, sizeof(Cta), 256, count, cudaMemcpyDeviceToHost));
    std::vector<uint32_t> queues(count * 8);
    for (size_t i = 0; i < count; ++i) {
      const uint32_t* header = headers.data() + i * 64;
      if (header[0] != 0) {
        Find({kLeak, header[offsetof(Cta, alloc_site) / 4], static_cast<uint32_t>(i), 0, header[0], 0, 0, 0});
      }
    }
    for (int q = 0; q < kQueues; ++q) {
      CHECK(cudaMemcpy2D(queues.data(), 32, ctas + offsetof(Cta, queues) + q * sizeof(Queue), sizeof(Cta), 32, count,
                         cudaMemcpyDeviceToHost));
      for (size_t i = 0; i < count; ++i) {
        const uint32_t *queue = queues.data() + i * 8, head = queue[2], tail = queue[3];
        if (head == tail) continue;
        Operation op;
        CHECK(cudaMemcpy(&op,
                         ctas + i * sizeof(Cta) + offsetof(Cta, queues) + q * sizeof(Queue) +
                             offsetof(Queue, operations) + head % kQueueLength * sizeof(Operation),
                         sizeof(op), cudaMemcpyDeviceToHost));
        Find({kNeverCompleted, op.site, static_cast<uint32_t>(i), queue[1] * 32, tail - head, 0, 0, 0});
      }
    }
    return cudaSuccess;
  }
};

Emulator* instance = nullptr;

void AtExit() {
  instance->Collect();
  if (instance->num_findings > 0) {
    std::fprintf(stderr, "sm100: %d findings in %d launches\n", instance->num_findings, instance->num_launches);
  } else {
    std::fprintf(stderr, "sm100: no finding in %d launches\n", instance->num_launches);
  }
  std::fflush(nullptr);
  if (instance->num_findings > 0) _exit(86);
}

Emulator& Get() {
  if (instance == nullptr) {
    instance = new Emulator;
    std::atexit(AtExit);
  }
  return *instance;
}

CUkernel KernelOf(const void* function) {
  cudaKernel_t kernel = nullptr;
  CHECK(cudaGetKernel(&kernel, function));
  return kernel;
}

// A launch, or a batch of them.
template <class Launch>
cudaError_t Emulate(CUkernel kernel, dim3 grid, dim3 block, cudaStream_t stream, const Launch& launch) {
  Emulator& emulator = Get();
  if (!emulator.Knows(kernel)) return launch();
  if (const char* path = std::getenv("SM100_BATCH")) emulator.Batch(path, kernel, grid, block, stream, launch);
  emulator.Prepare(kernel, grid, block, stream);
  return emulator.Finish(launch(), grid);
}

}  // namespace

extern "C" {

cudaError_t __wrap_cudaMalloc(void** data, size_t bytes) {
  const cudaError_t error = __real_cudaMalloc(data, bytes);
  if (error == cudaSuccess && bytes > 0) Get().allocations[*data] = bytes;
  return error;
}

cudaError_t __wrap_cudaFree(void* data) {
  Get().allocations.erase(data);
  return __real_cudaFree(data);
}

cudaError_t __real_cudaGetDeviceProperties(cudaDeviceProp*, int);
cudaError_t __wrap_cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  const cudaError_t error = __real_cudaGetDeviceProperties(properties, device);
  properties->major = 10;
  properties->minor = 0;
  return error;
}

cudaError_t __real_cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t);
cudaError_t __wrap_cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                                    cudaStream_t stream) {
  return Emulate(KernelOf(function), grid, block, stream,
                 [=] { return __real_cudaLaunchKernel(function, grid, block, arguments, shared, stream); });
}

cudaError_t __real___cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t);
cudaError_t __wrap___cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                                      cudaStream_t stream) {
  return Emulate(kernel, grid, block, stream,
                 [=] { return __real___cudaLaunchKernel(kernel, grid, block, arguments, shared, stream); });
}

cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**);
cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  return Emulate(KernelOf(function), config->gridDim, config->blockDim, config->stream,
                 [=] { return __real_cudaLaunchKernelExC(config, function, arguments); });
}

}  // extern "C"

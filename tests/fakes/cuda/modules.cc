// cuModule* and cuLaunchKernel: which kernels there are, the PTX says; what they do, a library for
// the host (kernel_shim.h).
#include "tests/fakes/cuda/modules.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "tests/fakes/cuda/address_space.h"
#include "tests/fakes/cuda/kernel_abi.h"
#include "tests/fakes/cuda/streams.h"

namespace gradsync::fake_cuda {
namespace {

using Params = std::vector<std::vector<char>>;

// PTX ISA, "Kernel and Function Directives": .entry NAME.
std::set<std::string> Entries(const std::string& ptx) {
  constexpr char kName[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_$%";
  std::set<std::string> entries;
  for (size_t at = ptx.find(".entry"); at != std::string::npos; at = ptx.find(".entry", at)) {
    at = ptx.find_first_of(kName, at + 6);
    if (at == std::string::npos) break;
    const size_t end = ptx.find_first_not_of(kName, at);
    entries.insert(ptx.substr(at, end == std::string::npos ? end : end - at));
  }
  return entries;
}

// Never closed: what runs in a stream may be in it.
void* Kernels() {
  static void* const library = [] {
    const char* path = std::getenv("GRADSYNC_FAKE_CUDA_KERNELS");
    void* opened = path == nullptr ? nullptr : dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (opened == nullptr) {
      std::fprintf(stderr, "fake CUDA: no kernels: %s\n",
                   path == nullptr ? "GRADSYNC_FAKE_CUDA_KERNELS is not set" : dlerror());
    }
    return opened;
  }();
  return library;
}

bool LoadKernel(const std::string& name, Function* function) {
  void* library = Kernels();
  if (library == nullptr) return false;
  function->run = reinterpret_cast<FakeKernel>(dlsym(library, ("fakeKernel_" + name).c_str()));
  function->params =
      static_cast<const FakeKernelParams*>(dlsym(library, ("fakeKernelParams_" + name).c_str()));
  if (function->run != nullptr && function->params != nullptr) return true;
  std::fprintf(stderr, "fake CUDA: GRADSYNC_FAKE_CUDA_KERNELS has no %s\n", name.c_str());
  return false;
}

// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
bool WithinLimits(const unsigned (&grid)[3], const unsigned (&block)[3], unsigned shared) {
  for (int i = 0; i < 3; ++i) {
    if (grid[i] == 0 || block[i] == 0) return false;
  }
  return grid[0] <= 2147483647U && grid[1] <= 65535 && grid[2] <= 65535 && block[0] <= 1024 &&
         block[1] <= 1024 && block[2] <= 64 && block[0] * block[1] * block[2] <= 1024 &&
         shared <= 48 * 1024;
}

void* KernelAddress(void* stream, const void* device_address, bool write) {
  const Lock lock(Process::Get().mutex);
  return LookUp(lock, reinterpret_cast<CUdeviceptr>(device_address), 1,
                static_cast<Stream*>(stream)->context->ordinal,
                write ? Use::kKernelWrite : Use::kKernelRead);
}

CUresult Run(const Function& function, Params params, const FakeKernelLaunch& shape,
             Stream& stream) {
  std::vector<void*> pointers;
  for (auto& param : params) pointers.push_back(param.data());
  FakeKernelLaunch launch = shape;
  launch.params = pointers.data();
  launch.address = KernelAddress;
  launch.context = &stream;
  return function.run(&launch) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

}  // namespace

void DestroyModulesOf(const Lock&, Context* context) {
  Process& process = Process::Get();
  std::erase_if(process.functions,
                [&](const auto& item) { return item.second->context == context; });
  std::erase_if(process.modules, [&](const auto& item) { return item.second->context == context; });
}

extern "C" {

// Only PTX: the stand-in has no code for any real device.
FAKE_CUDA_API CUresult cuModuleLoadData(CUmodule* handle, const void* image) {
  FAKE_CUDA_ENTER("cuModuleLoadData");
  Process& process = Process::Get();
  const Lock lock(process.mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  if (handle == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  constexpr unsigned char kFatbin[] = {0x50, 0xed, 0x55, 0xba};
  if (std::memcmp(image,
                  "\x7f"
                  "ELF",
                  4) == 0 ||
      std::memcmp(image, kFatbin, 4) == 0) {
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  }
  const std::string ptx = static_cast<const char*>(image);
  // PTX ISA, "PTX Module Directives": .version first, then .target.
  const size_t version = ptx.find(".version");
  if (version == std::string::npos || ptx.find(".target", version) == std::string::npos) {
    return CUDA_ERROR_INVALID_PTX;
  }
  auto module = std::make_shared<Module>();
  module->context = context;
  module->entries = Entries(ptx);
  *handle = process.NextHandle<CUmodule>();
  process.modules[*handle] = std::move(module);
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuModuleUnload(CUmodule handle) {
  FAKE_CUDA_ENTER("cuModuleUnload");
  Process& process = Process::Get();
  const Lock lock(process.mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  if (process.modules.erase(handle) == 0) return CUDA_ERROR_INVALID_HANDLE;
  std::erase_if(process.functions, [&](const auto& item) { return item.second->module == handle; });
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuModuleGetFunction(CUfunction* handle, CUmodule module, const char* name) {
  FAKE_CUDA_ENTER("cuModuleGetFunction");
  Process& process = Process::Get();
  const Lock lock(process.mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  if (handle == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto found = process.modules.find(module);
  if (found == process.modules.end()) return CUDA_ERROR_INVALID_HANDLE;
  auto function = std::make_shared<Function>();
  // "If no function of that name exists, cuModuleGetFunction() returns CUDA_ERROR_NOT_FOUND."
  if (found->second->entries.count(name) == 0 || !LoadKernel(name, function.get())) {
    return CUDA_ERROR_NOT_FOUND;
  }
  function->context = found->second->context;
  function->module = module;
  *handle = process.NextHandle<CUfunction>();
  process.functions[*handle] = std::move(function);
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y,
                                      unsigned grid_z, unsigned block_x, unsigned block_y,
                                      unsigned block_z, unsigned shared, CUstream stream_handle,
                                      void** params, void** extra) {
  FAKE_CUDA_ENTER("cuLaunchKernel");
  Process& process = Process::Get();
  const Lock lock(process.mutex);
  std::shared_ptr<Stream> stream;
  FAKE_CUDA_CHECK(CurrentStream(lock, stream_handle, &stream));
  const auto found = process.functions.find(handle);
  if (found == process.functions.end()) return CUDA_ERROR_INVALID_HANDLE;
  const std::shared_ptr<Function> function = found->second;
  // CUDA C++ Programming Guide, "Stream and Event Behavior": a launch fails in a stream that is not
  // of the current device.
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  if (stream->context != context || function->context != context) return CUDA_ERROR_INVALID_HANDLE;
  if (extra != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  FakeKernelLaunch shape{};
  const unsigned grid[3] = {grid_x, grid_y, grid_z};
  const unsigned block[3] = {block_x, block_y, block_z};
  const size_t count = function->params->count;
  if (!WithinLimits(grid, block, shared) || (count != 0 && params == nullptr)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::memcpy(shape.grid, grid, sizeof(grid));
  std::memcpy(shape.block, block, sizeof(block));
  // Driver API, cuLaunchKernel: the number and sizes of the parameters come from the kernel, and
  // their values are copied by the call.
  Params copies;
  for (size_t i = 0; i < count; ++i) {
    const char* param = static_cast<const char*>(params[i]);
    copies.emplace_back(param, param + function->params->sizes[i]);
  }
  Work work;
  work.run = [function, copies = std::move(copies), shape](Stream& self) {
    return Run(*function, copies, shape, self);
  };
  Enqueue(lock, stream, std::move(work));
  return CUDA_SUCCESS;
}

// The function runs even if work before it was dropped? No: Driver API, cuLaunchHostFunc, "will not
// be called in the event of an error in the CUDA context".
FAKE_CUDA_API CUresult cuLaunchHostFunc(CUstream stream_handle, CUhostFn function, void* data) {
  FAKE_CUDA_ENTER("cuLaunchHostFunc");
  const Lock lock(Process::Get().mutex);
  std::shared_ptr<Stream> stream;
  FAKE_CUDA_CHECK(CurrentStream(lock, stream_handle, &stream));
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Work work;
  work.run = [function, data](Stream&) {
    in_host_function = true;
    function(data);
    in_host_function = false;
    return CUDA_SUCCESS;
  };
  Enqueue(lock, stream, std::move(work));
  return CUDA_SUCCESS;
}

}  // extern "C"

}  // namespace gradsync::fake_cuda

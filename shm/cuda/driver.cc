#include "shm/cuda/driver.h"

#include <dlfcn.h>

#include <array>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace gradsync {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";

std::string VersionText(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Status TooOld(const std::string& found) {
  return {Code::kUnsupported, "the CUDA driver " + found +
                                  " is too old: gradsync needs one for CUDA " +
                                  VersionText(kCudaVersion) + " or newer; update it"};
}

Status Resolve(decltype(&::cuGetProcAddress) get, const char* name, void** function) {
  CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  const CUresult result = get(name, function, kCudaVersion, CU_GET_PROC_ADDRESS_DEFAULT, &found);
  if (result == CUDA_SUCCESS && *function != nullptr) return OkStatus();
  return TooOld(std::string("(it has no ") + name + ")");
}

Result<CudaDriver> LoadOnce() {
  // Never closed: a driver that has been initialised cannot be unloaded.
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return Unexpected(Code::kUnsupported,
                      std::string("there is no CUDA driver on this machine: ") + dlerror());
  }
  const auto get =
      reinterpret_cast<decltype(&::cuGetProcAddress)>(dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr) return Unexpected(TooOld("(it has no cuGetProcAddress_v2)"));
  CudaDriver driver;
#define GRADSYNC_CUDA_RESOLVE(name) \
  GRADSYNC_RETURN_IF_ERROR(Resolve(get, #name, reinterpret_cast<void**>(&driver.name)));
  GRADSYNC_CUDA_FUNCTIONS(GRADSYNC_CUDA_RESOLVE)
#undef GRADSYNC_CUDA_RESOLVE
  const CUresult initialised = driver.cuInit(0);
  if (initialised == CUDA_ERROR_NO_DEVICE) {
    return Unexpected(Code::kUnsupported,
                      "the CUDA driver finds no device: there is none, or CUDA_VISIBLE_DEVICES "
                      "hides them all, or this process may not open /dev/nvidia*");
  }
  GRADSYNC_RETURN_IF_ERROR(driver.Check(initialised, "cuInit"));
  GRADSYNC_RETURN_IF_ERROR(
      driver.Check(driver.cuDriverGetVersion(&driver.version), "cuDriverGetVersion"));
  if (driver.version < kCudaVersion) return Unexpected(TooOld(VersionText(driver.version)));
  return driver;
}

}  // namespace

int CudaDriver::InstalledVersion() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return 0;
  const auto get =
      reinterpret_cast<decltype(&::cuDriverGetVersion)>(dlsym(library, "cuDriverGetVersion"));
  int found = 0;
  return get != nullptr && get(&found) == CUDA_SUCCESS ? found : 0;
}

Result<const CudaDriver*> CudaDriver::Load() {
  static std::mutex mutex;
  static std::optional<CudaDriver> loaded;
  const std::lock_guard lock(mutex);
  if (!loaded) {
    // What is missing now may be there later: a module of the kernel, a device.
    Result<CudaDriver> driver = LoadOnce();
    if (!driver) return Unexpected(driver.error());
    loaded = *std::move(driver);
  }
  return &*loaded;
}

Status CudaDriver::Check(CUresult result, const char* call) const {
  if (result == CUDA_SUCCESS) return OkStatus();
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(result, &name) != CUDA_SUCCESS) name = "an unknown error";
  if (cuGetErrorString(result, &text) != CUDA_SUCCESS) text = "no text";
  return {result == CUDA_ERROR_OUT_OF_MEMORY ? Code::kOutOfMemory : Code::kInternal,
          std::string(call) + ": " + name + " (" + text + ")"};
}

}  // namespace gradsync

#include <dlfcn.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/cuda_module.h"

namespace gradsync {
namespace {

constexpr char kModuleFile[] = "gradsync_cuda.so";

std::filesystem::path OwnProgram() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error);
}

}  // namespace

std::vector<std::string> CudaModuleCandidates(const std::string& module,
                                              const std::filesystem::path& program) {
  if (!module.empty()) return {module};
  const std::filesystem::path folder = program.parent_path();
  return {folder / kModuleFile, folder.parent_path() / "lib" / "gradsync" / kModuleFile};
}

Result<std::unique_ptr<DeviceEngine>> LoadCudaEngine(const CudaOptions& options) {
  std::string tried;
  for (const std::string& file : CudaModuleCandidates(options.module, OwnProgram())) {
    if (access(file.c_str(), F_OK) != 0) {
      tried += (tried.empty() ? "" : ", ") + file;
      continue;
    }
    void* const module = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (module == nullptr) {
      return Unexpected(Code::kUnsupported,
                        std::string("the GPU module does not load: ") + dlerror());
    }
    const auto make = reinterpret_cast<MakeCudaEngine>(dlsym(module, kCudaModuleEntry));
    if (make == nullptr) {
      return Unexpected(Code::kUnsupported,
                        file + " is no GPU module: it has no " + kCudaModuleEntry);
    }
    std::unique_ptr<DeviceEngine> engine;
    Status error;
    make(options, &engine, &error);
    if (engine == nullptr) return Unexpected(std::move(error));
    return engine;
  }
  return Unexpected(Code::kUnsupported, "there is no GPU module: not " + tried);
}

}  // namespace gradsync

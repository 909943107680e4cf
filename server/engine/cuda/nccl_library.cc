#include "server/engine/cuda/nccl_library.h"

#include <dlfcn.h>

namespace gradsync::cuda {
namespace {

// The first with communicators that do not block (ncclConfig_t).
constexpr int kOldestNccl = NCCL_VERSION(2, 14, 3);

std::string TextOf(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." +
         std::to_string(version % 100);
}

Status Missing(const std::string& file, const std::string& why) {
  return {Code::kUnsupported,
          "NCCL (" + file + ") could not be loaded: " + why + "; install it or pass --nccl"};
}

}  // namespace

Result<std::unique_ptr<const NcclLibrary>> NcclLibrary::Load(const std::string& file) {
  // Never closed: it has threads of its own.
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return Unexpected(Missing(file, dlerror()));
  auto nccl = std::make_unique<NcclLibrary>();
#define GRADSYNC_NCCL_RESOLVE(name)                                        \
  nccl->name = reinterpret_cast<decltype(&::name)>(dlsym(library, #name)); \
  if (nccl->name == nullptr) return Unexpected(Missing(file, "it has no " #name));
  GRADSYNC_NCCL_FUNCTIONS(GRADSYNC_NCCL_RESOLVE)
#undef GRADSYNC_NCCL_RESOLVE
  if (nccl->ncclGetVersion(&nccl->version) != ncclSuccess || nccl->version < kOldestNccl) {
    return Unexpected(Missing(file, "it is version " + nccl->VersionText() + ", and " +
                                        TextOf(kOldestNccl) + " is the oldest that will do"));
  }
  return nccl;
}

std::string NcclLibrary::VersionText() const { return TextOf(version); }

}  // namespace gradsync::cuda

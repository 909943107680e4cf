#include "server/ctl/doctor_gpu_facts.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <system_error>

#include "server/engine/cuda/nccl_library.h"
#include "shm/cuda/driver.h"

namespace gradsync {
namespace {

// /dev/nvidia0 and so on: what the kernel's driver has made, whatever libraries there are.
bool HasDeviceFile() {
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/dev", error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename();
    if (name.starts_with("nvidia") && name.size() > 6 && name[6] >= '0' && name[6] <= '9') {
      return true;
    }
  }
  return false;
}

Result<GpuDevice> LookAtDevice(const CudaDriver& driver, int ordinal) {
  CUdevice device = 0;
  GRADSYNC_RETURN_IF_ERROR(driver.Check(driver.cuDeviceGet(&device, ordinal), "cuDeviceGet"));
  std::array<char, 256> name{};
  GRADSYNC_RETURN_IF_ERROR(
      driver.Check(driver.cuDeviceGetName(name.data(), static_cast<int>(name.size()) - 1, device),
                   "cuDeviceGetName"));
  CUuuid uuid{};
  GRADSYNC_RETURN_IF_ERROR(driver.Check(driver.cuDeviceGetUuid(&uuid, device), "cuDeviceGetUuid"));
  size_t bytes = 0;
  GRADSYNC_RETURN_IF_ERROR(
      driver.Check(driver.cuDeviceTotalMem(&bytes, device), "cuDeviceTotalMem"));
  int waits = 0;
  GRADSYNC_RETURN_IF_ERROR(
      driver.Check(driver.cuDeviceGetAttribute(
                       &waits, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device),
                   "cuDeviceGetAttribute"));
  GpuDevice result{name.data(), {}, bytes, waits != 0};
  static_assert(sizeof(uuid) == sizeof(result.uuid));
  std::memcpy(result.uuid.data(), &uuid, sizeof(uuid));
  return result;
}

Status LookAtDevices(const CudaDriver& driver, GpuFacts* facts) {
  int count = 0;
  GRADSYNC_RETURN_IF_ERROR(driver.Check(driver.cuDeviceGetCount(&count), "cuDeviceGetCount"));
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    Result<GpuDevice> device = LookAtDevice(driver, ordinal);
    if (!device) return device.error();
    facts->devices.push_back(*std::move(device));
  }
  return OkStatus();
}

// Whether kernels of one device may be let at the memory of the other; both by ordinal.
Result<bool> CanReach(const CudaDriver& driver, size_t from, size_t to) {
  std::array<CUdevice, 2> devices{};
  GRADSYNC_RETURN_IF_ERROR(
      driver.Check(driver.cuDeviceGet(&devices[0], static_cast<int>(from)), "cuDeviceGet"));
  GRADSYNC_RETURN_IF_ERROR(
      driver.Check(driver.cuDeviceGet(&devices[1], static_cast<int>(to)), "cuDeviceGet"));
  int can = 0;
  GRADSYNC_RETURN_IF_ERROR(driver.Check(driver.cuDeviceCanAccessPeer(&can, devices[0], devices[1]),
                                        "cuDeviceCanAccessPeer"));
  return can != 0;
}

Status LookAtPeers(const CudaDriver& driver, GpuFacts* facts) {
  for (size_t a = 0; a < facts->devices.size(); ++a) {
    for (size_t b = a + 1; b < facts->devices.size(); ++b) {
      const Result<bool> there = CanReach(driver, a, b);
      if (!there) return there.error();
      const Result<bool> back = CanReach(driver, b, a);
      if (!back) return back.error();
      if (!*there || !*back) facts->apart.emplace_back(a, b);
    }
  }
  return OkStatus();
}

NcclFacts LookAtNccl(const std::string& file) {
  NcclFacts facts;
  const auto nccl = cuda::NcclLibrary::Load(file);
  if (!nccl) {
    facts.loaded = nccl.error();
    return facts;
  }
  facts.version = (*nccl)->VersionText();
  Dl_info info{};
  const bool known = dladdr(reinterpret_cast<const void*>((*nccl)->ncclGetVersion), &info) != 0 &&
                     info.dli_fname != nullptr;
  facts.file = known ? info.dli_fname : file;
  return facts;
}

ModuleFacts LookForModule(const std::string& module, const std::filesystem::path& program) {
  ModuleFacts facts;
  facts.knows_program = !program.empty();
  if (module.empty() && program.empty()) return facts;
  facts.tried = CudaModuleCandidates(module, program);
  const auto found =
      std::find_if(facts.tried.begin(), facts.tried.end(),
                   [](const std::string& file) { return access(file.c_str(), F_OK) == 0; });
  if (found != facts.tried.end()) facts.found = *found;
  return facts;
}

std::string MpsPipeDirectory() {
  const char* directory = std::getenv("CUDA_MPS_PIPE_DIRECTORY");
  return directory == nullptr || *directory == '\0' ? "/tmp/nvidia-mps" : directory;
}

Status LookAtDriver(GpuFacts* facts) {
  facts->needed_version = kCudaVersion;
  facts->driver_version = CudaDriver::InstalledVersion();
  const Result<const CudaDriver*> driver = CudaDriver::Load();
  // The one reason of that code which remains with a driver that is new enough.
  facts->finds_no_device = !driver && driver.error().code() == Code::kUnsupported;
  if (!driver) return driver.error();
  GRADSYNC_RETURN_IF_ERROR(LookAtDevices(**driver, facts));
  return LookAtPeers(**driver, facts);
}

}  // namespace

GpuFacts CollectGpu(const CudaOptions& options, const std::filesystem::path& program) {
  GpuFacts facts;
  facts.has_device_file = HasDeviceFile();
  facts.driver = LookAtDriver(&facts);
  if (!facts.driver.ok()) return facts;
  facts.nccl = LookAtNccl(options.nccl);
  facts.mps = LookForMps(MpsPipeDirectory());
  facts.module = LookForModule(options.module, program);
  return facts;
}

}  // namespace gradsync

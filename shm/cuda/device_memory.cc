#include "shm/cuda/device_memory.h"

#include <string>

namespace gradsync {
namespace {

CUmemAllocationProp PropertiesOn(CUdevice device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

// `failed` with how much memory there is, if that was it. The context must be current.
Status WithFreeMemory(const CudaDriver& driver, Status failed, uint64_t bytes) {
  size_t free = 0;
  size_t all = 0;
  if (failed.code() != Code::kOutOfMemory || driver.cuMemGetInfo(&free, &all) != CUDA_SUCCESS) {
    return failed;
  }
  return {Code::kOutOfMemory, "the GPU has not enough memory: " + std::to_string(bytes) +
                                  " bytes were asked for, and " + std::to_string(free) + " of " +
                                  std::to_string(all) + " are free"};
}

}  // namespace

Result<std::shared_ptr<const PrimaryContext>> PrimaryContext::Retain(const CudaDriver& driver,
                                                                     CUdevice device) {
  CUcontext context = nullptr;
  GRADSYNC_RETURN_IF_ERROR(
      driver.Check(driver.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain"));
  return std::shared_ptr<const PrimaryContext>(new PrimaryContext(driver, device, context));
}

PrimaryContext::~PrimaryContext() { driver_.cuDevicePrimaryCtxRelease(device_); }

MappedDeviceMemory& MappedDeviceMemory::operator=(MappedDeviceMemory&& other) noexcept {
  if (this == &other) return *this;
  Reset();
  context_ = std::move(other.context_);
  other.context_ = nullptr;
  size_ = std::exchange(other.size_, 0);
  handle_ = std::exchange(other.handle_, 0);
  has_handle_ = std::exchange(other.has_handle_, false);
  address_ = std::exchange(other.address_, 0);
  is_mapped_ = std::exchange(other.is_mapped_, false);
  return *this;
}

Result<MappedDeviceMemory> MappedDeviceMemory::Create(std::shared_ptr<const PrimaryContext> context,
                                                      uint64_t bytes) {
  const CudaDriver& driver = context->driver();
  const CurrentContext current(driver, context->get());
  const CUmemAllocationProp properties = PropertiesOn(context->device());
  size_t unit = 0;
  GRADSYNC_RETURN_IF_ERROR(driver.Check(
      driver.cuMemGetAllocationGranularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
      "cuMemGetAllocationGranularity"));
  const uint64_t size = (bytes + unit - 1) / unit * unit;
  MappedDeviceMemory memory;
  memory.context_ = std::move(context);
  const CUresult created = driver.cuMemCreate(&memory.handle_, size, &properties, 0);
  GRADSYNC_RETURN_IF_ERROR(WithFreeMemory(driver, driver.Check(created, "cuMemCreate"), size));
  memory.has_handle_ = true;
  GRADSYNC_RETURN_IF_ERROR(memory.Map(size));
  return memory;
}

Result<MappedDeviceMemory> MappedDeviceMemory::Import(std::shared_ptr<const PrimaryContext> context,
                                                      int fd, uint64_t bytes) {
  const CudaDriver& driver = context->driver();
  const CurrentContext current(driver, context->get());
  MappedDeviceMemory memory;
  memory.context_ = std::move(context);
  // The driver takes a descriptor in the place of a pointer.
  void* const descriptor = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
  GRADSYNC_RETURN_IF_ERROR(
      driver.Check(driver.cuMemImportFromShareableHandle(&memory.handle_, descriptor,
                                                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                   "cuMemImportFromShareableHandle"));
  memory.has_handle_ = true;
  GRADSYNC_RETURN_IF_ERROR(memory.Map(bytes));
  return memory;
}

Status MappedDeviceMemory::Map(uint64_t bytes) {
  const CudaDriver& driver = context_->driver();
  GRADSYNC_RETURN_IF_ERROR(
      driver.Check(driver.cuMemAddressReserve(&address_, bytes, 0, 0, 0), "cuMemAddressReserve"));
  size_ = bytes;
  GRADSYNC_RETURN_IF_ERROR(
      driver.Check(driver.cuMemMap(address_, bytes, 0, handle_, 0), "cuMemMap"));
  is_mapped_ = true;
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = context_->device();
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return driver.Check(driver.cuMemSetAccess(address_, bytes, &access, 1), "cuMemSetAccess");
}

Result<UniqueFd> MappedDeviceMemory::Export() const {
  const CudaDriver& driver = context_->driver();
  const CurrentContext current(driver, context_->get());
  int fd = -1;
  GRADSYNC_RETURN_IF_ERROR(
      driver.Check(driver.cuMemExportToShareableHandle(&fd, handle_,
                                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                   "cuMemExportToShareableHandle"));
  return UniqueFd(fd);
}

void MappedDeviceMemory::Reset() {
  if (context_ == nullptr) return;
  const CudaDriver& driver = context_->driver();
  {
    const CurrentContext current(driver, context_->get());
    // A range that could not be unmapped must not be given away: it is lost, as is its memory.
    const bool is_unmapped = !is_mapped_ || driver.cuMemUnmap(address_, size_) == CUDA_SUCCESS;
    if (address_ != 0 && is_unmapped) driver.cuMemAddressFree(address_, size_);
    if (has_handle_) driver.cuMemRelease(handle_);
  }
  context_ = nullptr;
}

PinnedMemory& PinnedMemory::operator=(PinnedMemory&& other) noexcept {
  if (this == &other) return *this;
  Reset();
  context_ = std::move(other.context_);
  other.context_ = nullptr;
  memory_ = std::exchange(other.memory_, nullptr);
  return *this;
}

Result<PinnedMemory> PinnedMemory::Pin(std::shared_ptr<const PrimaryContext> context, void* memory,
                                       size_t bytes) {
  const CudaDriver& driver = context->driver();
  const CurrentContext current(driver, context->get());
  GRADSYNC_RETURN_IF_ERROR(
      driver.Check(driver.cuMemHostRegister(
                       memory, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
                   "cuMemHostRegister"));
  PinnedMemory pinned;
  pinned.context_ = std::move(context);
  pinned.memory_ = memory;
  return pinned;
}

Result<CUdeviceptr> PinnedMemory::AddressIn(const PrimaryContext& context) const {
  const CudaDriver& driver = context.driver();
  const CurrentContext current(driver, context.get());
  CUdeviceptr address = 0;
  GRADSYNC_RETURN_IF_ERROR(driver.Check(driver.cuMemHostGetDevicePointer(&address, memory_, 0),
                                        "cuMemHostGetDevicePointer"));
  return address;
}

void PinnedMemory::Reset() {
  if (memory_ == nullptr) return;
  {
    const CurrentContext current(context_->driver(), context_->get());
    context_->driver().cuMemHostUnregister(memory_);
  }
  memory_ = nullptr;
  context_ = nullptr;
}

}  // namespace gradsync

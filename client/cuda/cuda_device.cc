#include <cuda.h>

#include <cstring>
#include <string>
#include <utility>

#include "client/core/device.h"
#include "shm/cuda/device_memory.h"
#include "shm/cuda/driver.h"

namespace gradsync {
namespace {

CUdeviceptr ToPointer(const void* address) { return reinterpret_cast<CUdeviceptr>(address); }
std::byte* ToBytes(CUdeviceptr address) {
  return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
}
CUstream ToStream(Stream stream) { return static_cast<CUstream>(stream); }
CUevent ToEvent(DeviceEvent event) { return static_cast<CUevent>(event); }

class CudaMapping : public DeviceMapping {
 public:
  explicit CudaMapping(MappedDeviceMemory memory) : memory_(std::move(memory)) {}
  std::byte* address() const override { return ToBytes(memory_.address()); }
  uint64_t size() const override { return memory_.size(); }

 private:
  const MappedDeviceMemory memory_;
};

class CudaFlags : public PinnedFlags {
 public:
  explicit CudaFlags(PinnedMemory pinned) : pinned_(std::move(pinned)) {}

 private:
  const PinnedMemory pinned_;
};

class CudaDevice : public Device {
 public:
  CudaDevice(uint32_t device, const DeviceUuid& uuid, std::shared_ptr<const PrimaryContext> context)
      : device_(device), uuid_(uuid), driver_(context->driver()), context_(std::move(context)) {}

  uint32_t device() const override { return device_; }
  const DeviceUuid& uuid() const override { return uuid_; }

  Result<std::unique_ptr<DeviceMapping>> Map(UniqueFd fd, uint64_t bytes) override;
  Result<DeviceAllocation> Share(const std::byte* address) override;
  Result<std::unique_ptr<PinnedFlags>> Pin(std::byte* pages, uint64_t bytes) override;

  Status WriteWord(Stream stream, std::atomic<uint64_t>* word, uint64_t value) override {
    return Call("cuStreamWriteValue64", [&] {
      return driver_.cuStreamWriteValue64(ToStream(stream), ToPointer(word), value,
                                          CU_STREAM_WRITE_VALUE_DEFAULT);
    });
  }
  Status WaitForWord(Stream stream, std::atomic<uint64_t>* word, uint64_t value) override {
    return Call("cuStreamWaitValue64", [&] {
      return driver_.cuStreamWaitValue64(ToStream(stream), ToPointer(word), value,
                                         CU_STREAM_WAIT_VALUE_GEQ);
    });
  }
  Status Copy(Stream stream, std::byte* to, const std::byte* from, uint64_t bytes) override {
    return Call("cuMemcpyDtoDAsync", [&] {
      return driver_.cuMemcpyDtoDAsync(ToPointer(to), ToPointer(from), bytes, ToStream(stream));
    });
  }
  Status CheckNotCapturing(Stream stream) override;

  Result<Stream> CreateStream() override;
  void DestroyStream(Stream stream) override {
    static_cast<void>(
        Call("cuStreamDestroy", [&] { return driver_.cuStreamDestroy(ToStream(stream)); }));
  }
  Result<DeviceEvent> CreateEvent() override;
  void DestroyEvent(DeviceEvent event) override {
    static_cast<void>(
        Call("cuEventDestroy", [&] { return driver_.cuEventDestroy(ToEvent(event)); }));
  }
  Status Record(DeviceEvent event, Stream stream) override {
    return Call("cuEventRecord",
                [&] { return driver_.cuEventRecord(ToEvent(event), ToStream(stream)); });
  }
  Status WaitForEvent(Stream stream, DeviceEvent event) override {
    return Call("cuStreamWaitEvent", [&] {
      return driver_.cuStreamWaitEvent(ToStream(stream), ToEvent(event), CU_EVENT_WAIT_DEFAULT);
    });
  }
  Result<bool> IsOver(DeviceEvent event) const override;
  Status Synchronize(Stream stream) override {
    return Call("cuStreamSynchronize",
                [&] { return driver_.cuStreamSynchronize(ToStream(stream)); });
  }
  void SynchronizeAll() override {
    static_cast<void>(Call("cuCtxSynchronize", [&] { return driver_.cuCtxSynchronize(); }));
  }

 private:
  template <typename Function>
  Status Call(const char* name, const Function& function) const {
    const CurrentContext current(driver_, context_->get());
    return driver_.Check(function(), name);
  }
  Status Export(DeviceAllocation* allocation) const;

  const uint32_t device_;
  const DeviceUuid uuid_;
  const CudaDriver& driver_;
  const std::shared_ptr<const PrimaryContext> context_;
};

Result<std::unique_ptr<DeviceMapping>> CudaDevice::Map(UniqueFd fd, uint64_t bytes) {
  Result<MappedDeviceMemory> memory = MappedDeviceMemory::Import(context_, fd.get(), bytes);
  if (!memory) return Unexpected(memory.error());
  return std::unique_ptr<DeviceMapping>(new CudaMapping(*std::move(memory)));
}

Result<std::unique_ptr<PinnedFlags>> CudaDevice::Pin(std::byte* pages, uint64_t bytes) {
  Result<PinnedMemory> pinned = PinnedMemory::Pin(context_, pages, bytes);
  if (!pinned) return Unexpected(pinned.error());
  const Result<CUdeviceptr> address = pinned->AddressIn(*context_);
  if (!address) return Unexpected(address.error());
  if (*address != ToPointer(pages)) {
    return Unexpected(Code::kUnsupported,
                      "this GPU sees the processor's memory under other addresses than the "
                      "processor, which gradsync cannot handle");
  }
  return std::unique_ptr<PinnedFlags>(new CudaFlags(*std::move(pinned)));
}

Result<DeviceAllocation> CudaDevice::Share(const std::byte* address) {
  DeviceAllocation allocation;
  CUdeviceptr base = 0;
  size_t bytes = 0;
  GRADSYNC_RETURN_IF_ERROR(Call("cuMemGetAddressRange", [&] {
    return driver_.cuMemGetAddressRange(&base, &bytes, ToPointer(address));
  }));
  allocation.base = ToBytes(base);
  allocation.bytes = bytes;
  int legacy = 0;
  GRADSYNC_RETURN_IF_ERROR(Call("cuPointerGetAttribute", [&] {
    return driver_.cuPointerGetAttribute(&legacy, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                                         base);
  }));
  if (legacy == 0) {
    GRADSYNC_RETURN_IF_ERROR(Export(&allocation));
    return allocation;
  }
  CUipcMemHandle handle{};
  GRADSYNC_RETURN_IF_ERROR(
      Call("cuIpcGetMemHandle", [&] { return driver_.cuIpcGetMemHandle(&handle, base); }));
  static_assert(sizeof(handle) == sizeof(allocation.legacy));
  std::memcpy(allocation.legacy.data(), &handle, sizeof(handle));
  allocation.hand_over = HandOver::kLegacyHandle;
  return allocation;
}

// Memory of cuMemCreate, such as expandable segments: only if it was made to be exported.
Status CudaDevice::Export(DeviceAllocation* allocation) const {
  CUmemGenericAllocationHandle handle = 0;
  GRADSYNC_RETURN_IF_ERROR(Call("cuMemRetainAllocationHandle", [&] {
    return driver_.cuMemRetainAllocationHandle(&handle, allocation->base);
  }));
  CUmemAllocationProp properties{};
  Status status = Call("cuMemGetAllocationPropertiesFromHandle", [&] {
    return driver_.cuMemGetAllocationPropertiesFromHandle(&properties, handle);
  });
  int fd = -1;
  if (status.ok() &&
      (properties.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0) {
    status = {Code::kUnsupported,
              "the memory was not allocated to be exported (no POSIX descriptor was asked for)"};
  }
  if (status.ok()) {
    status = Call("cuMemExportToShareableHandle", [&] {
      return driver_.cuMemExportToShareableHandle(&fd, handle,
                                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    });
  }
  static_cast<void>(Call("cuMemRelease", [&] { return driver_.cuMemRelease(handle); }));
  GRADSYNC_RETURN_IF_ERROR(status);
  allocation->exported = UniqueFd(fd);
  allocation->hand_over = HandOver::kExportedMemory;
  return OkStatus();
}

Status CudaDevice::CheckNotCapturing(Stream stream) {
  CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
  GRADSYNC_RETURN_IF_ERROR(Call("cuStreamIsCapturing", [&] {
    return driver_.cuStreamIsCapturing(ToStream(stream), &capturing);
  }));
  if (capturing == CU_STREAM_CAPTURE_STATUS_NONE) return OkStatus();
  return {
      Code::kUnsupported,
      "a CUDA graph is being captured on this stream, and gradsync cannot be captured yet: keep "
      "gradient synchronisation out of the graph"};
}

Result<Stream> CudaDevice::CreateStream() {
  int lowest = 0;
  int highest = 0;
  GRADSYNC_RETURN_IF_ERROR(Call("cuCtxGetStreamPriorityRange", [&] {
    return driver_.cuCtxGetStreamPriorityRange(&lowest, &highest);
  }));
  CUstream stream = nullptr;
  GRADSYNC_RETURN_IF_ERROR(Call("cuStreamCreateWithPriority", [&] {
    return driver_.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, highest);
  }));
  return Stream{stream};
}

Result<DeviceEvent> CudaDevice::CreateEvent() {
  CUevent event = nullptr;
  GRADSYNC_RETURN_IF_ERROR(Call(
      "cuEventCreate", [&] { return driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING); }));
  return DeviceEvent{event};
}

Result<bool> CudaDevice::IsOver(DeviceEvent event) const {
  CUresult result = CUDA_SUCCESS;
  {
    const CurrentContext current(driver_, context_->get());
    result = driver_.cuEventQuery(ToEvent(event));
  }
  if (result == CUDA_ERROR_NOT_READY) return false;
  GRADSYNC_RETURN_IF_ERROR(driver_.Check(result, "cuEventQuery"));
  return true;
}

}  // namespace

Result<std::shared_ptr<Device>> OpenDevice(uint32_t device) {
  const Result<const CudaDriver*> driver = CudaDriver::Load();
  if (!driver) return Unexpected(driver.error());
  const CudaDriver& cuda = **driver;
  const int ordinal = static_cast<int>(device) - 1;
  int count = 0;
  GRADSYNC_RETURN_IF_ERROR(cuda.Check(cuda.cuDeviceGetCount(&count), "cuDeviceGetCount"));
  if (ordinal < 0 || ordinal >= count) {
    return Unexpected(Code::kInvalidArgument, "there is no CUDA device " + std::to_string(ordinal) +
                                                  ": this process sees " + std::to_string(count));
  }
  CUdevice handle = 0;
  GRADSYNC_RETURN_IF_ERROR(cuda.Check(cuda.cuDeviceGet(&handle, ordinal), "cuDeviceGet"));
  CUuuid raw{};
  GRADSYNC_RETURN_IF_ERROR(cuda.Check(cuda.cuDeviceGetUuid(&raw, handle), "cuDeviceGetUuid"));
  DeviceUuid uuid{};
  static_assert(sizeof(raw) == sizeof(uuid));
  std::memcpy(uuid.data(), &raw, sizeof(raw));
  Result<std::shared_ptr<const PrimaryContext>> context = PrimaryContext::Retain(cuda, handle);
  if (!context) return Unexpected(context.error());
  return std::shared_ptr<Device>(std::make_shared<CudaDevice>(device, uuid, *std::move(context)));
}

}  // namespace gradsync

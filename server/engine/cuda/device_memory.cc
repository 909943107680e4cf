#include "server/engine/cuda/device_memory.h"

#include <cstring>
#include <string>
#include <utility>

#include "server/engine/cuda/stream.h"
#include "shm/cuda/device_memory.h"

namespace gradsync::cuda {
namespace {

std::byte* Pointer(CUdeviceptr address) { return reinterpret_cast<std::byte*>(address); }

class MappedMemory : public DeviceMemory {
 public:
  MappedMemory(uint32_t device, MappedDeviceMemory memory, HandOver hand_over)
      : device_(device), memory_(std::move(memory)), hand_over_(hand_over) {}

  uint32_t device() const override { return device_; }
  std::byte* address() const override { return Pointer(memory_.address()); }
  uint64_t size() const override { return memory_.size(); }
  HandOver hand_over() const override { return hand_over_; }

 private:
  const uint32_t device_;
  const MappedDeviceMemory memory_;
  const HandOver hand_over_;
};

class LegacyMemory : public DeviceMemory {
 public:
  LegacyMemory(uint32_t device, std::shared_ptr<const PrimaryContext> context, CUdeviceptr address,
               uint64_t size)
      : device_(device), context_(std::move(context)), address_(address), size_(size) {}
  ~LegacyMemory() override {
    const CurrentContext current(context_->driver(), context_->get());
    context_->driver().cuIpcCloseMemHandle(address_);
  }

  uint32_t device() const override { return device_; }
  std::byte* address() const override { return Pointer(address_); }
  uint64_t size() const override { return size_; }
  HandOver hand_over() const override { return HandOver::kLegacyHandle; }

 private:
  const uint32_t device_;
  const std::shared_ptr<const PrimaryContext> context_;
  const CUdeviceptr address_;
  const uint64_t size_;
};

// What another process left in it must not be seen.
Status Clear(const MappedDeviceMemory& memory, std::shared_ptr<const PrimaryContext> context) {
  const CudaDriver& driver = context->driver();
  const CurrentContext current(driver, context->get());
  const Result<Stream> stream = Stream::Create(std::move(context));
  if (!stream) return stream.error();
  GRADSYNC_RETURN_IF_ERROR(
      driver.Check(driver.cuMemsetD8Async(memory.address(), 0, memory.size(), stream->get()),
                   "cuMemsetD8Async"));
  const CUresult cleared = driver.cuStreamSynchronize(stream->get());
  // The memory is given back after an error: not under the stream, if that can be helped.
  if (cleared != CUDA_SUCCESS) driver.cuCtxSynchronize();
  return driver.Check(cleared, "cuStreamSynchronize");
}

Status On(const Device& device, const Status& failed) {
  return {failed.code(), device.text() + ": " + failed.message()};
}

}  // namespace

Result<DeviceEngine::Exported> AllocateOn(Device& device, uint64_t bytes) {
  Result<std::shared_ptr<const PrimaryContext>> context = device.Use();
  if (!context) return Unexpected(std::move(context.error()));
  Result<MappedDeviceMemory> memory = MappedDeviceMemory::Create(*context, bytes);
  if (!memory) return Unexpected(On(device, memory.error()));
  if (const Status cleared = Clear(*memory, *context); !cleared.ok()) {
    return Unexpected(On(device, cleared));
  }
  Result<UniqueFd> fd = memory->Export();
  if (!fd) return Unexpected(On(device, fd.error()));
  return DeviceEngine::Exported{
      std::make_shared<MappedMemory>(device.index(), std::move(*memory), HandOver::kDaemonMemory),
      std::move(*fd)};
}

Result<std::shared_ptr<const DeviceMemory>> ImportExportedOn(Device& device, UniqueFd fd,
                                                             uint64_t bytes) {
  Result<std::shared_ptr<const PrimaryContext>> context = device.Use();
  if (!context) return Unexpected(std::move(context.error()));
  Result<MappedDeviceMemory> memory = MappedDeviceMemory::Import(*context, fd.get(), bytes);
  if (!memory) return Unexpected(On(device, memory.error()));
  return std::make_shared<MappedMemory>(device.index(), std::move(*memory),
                                        HandOver::kExportedMemory);
}

Result<std::shared_ptr<const DeviceMemory>> ImportLegacyOn(Device& device,
                                                           const LegacyHandle& handle,
                                                           uint64_t bytes) {
  Result<std::shared_ptr<const PrimaryContext>> context = device.Use();
  if (!context) return Unexpected(std::move(context.error()));
  const CudaDriver& driver = device.driver();
  const CurrentContext current(driver, (*context)->get());
  CUipcMemHandle ipc{};
  static_assert(sizeof(ipc) == sizeof(handle));
  std::memcpy(&ipc, handle.data(), sizeof(ipc));
  CUdeviceptr address = 0;
  const CUresult opened =
      driver.cuIpcOpenMemHandle(&address, ipc, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  if (opened != CUDA_SUCCESS) {
    return Unexpected(On(device, driver.Check(opened, "cuIpcOpenMemHandle")));
  }
  auto memory = std::make_shared<LegacyMemory>(device.index(), *context, address, bytes);
  // A kernel beyond its end would lose the GPU to everybody.
  CUdeviceptr base = 0;
  size_t size = 0;
  const CUresult asked = driver.cuMemGetAddressRange(&base, &size, address);
  if (asked != CUDA_SUCCESS) {
    return Unexpected(On(device, driver.Check(asked, "cuMemGetAddressRange")));
  }
  if (base != address || size < bytes) {
    return Unexpected(Code::kInvalidArgument, device.text() + ": the memory handed over has " +
                                                  std::to_string(size) + " bytes, and not the " +
                                                  std::to_string(bytes) + " that were named");
  }
  return memory;
}

}  // namespace gradsync::cuda

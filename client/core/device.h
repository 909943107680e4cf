// The GPUs of this process, as the rest of the client sees them: without CUDA. The implementation
// is client/cuda/, over the driver and the primary context that the trainer's framework uses; a
// build without the CUDA toolkit has none.
#ifndef GRADSYNC_CLIENT_CORE_DEVICE_H_
#define GRADSYNC_CLIENT_CORE_DEVICE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "shm/device.h"
#include "shm/status.h"
#include "shm/unique_fd.h"

namespace gradsync {

// Where memory is, as in the C ABI: 0 for the processor's, else 1 + the ordinal of a CUDA device.
inline constexpr uint32_t kCpu = 0;

// A CUstream of the device's primary context; null is its default stream.
using Stream = void*;
using DeviceEvent = void*;  // a CUevent

// Memory of a GPU, mapped into this process until destroyed. Whatever streams still do with it must
// have ended by then.
class DeviceMapping {
 public:
  virtual ~DeviceMapping() = default;
  virtual std::byte* address() const = 0;  // the GPU's: never touched by the processor
  virtual uint64_t size() const = 0;
};

// A flag page that the GPU's streams reach.
class PinnedFlags {
 public:
  virtual ~PinnedFlags() = default;
};

// An allocation of the trainer's, and how the daemon can come to it.
struct DeviceAllocation {
  std::byte* base = nullptr;
  uint64_t bytes = 0;
  HandOver hand_over = HandOver::kLegacyHandle;
  UniqueFd exported;      // kExportedMemory
  LegacyHandle legacy{};  // kLegacyHandle
};

// One GPU. Thread-safe. Only the Synchronize calls wait for it.
class Device {
 public:
  virtual ~Device() = default;
  virtual uint32_t device() const = 0;
  virtual const DeviceUuid& uuid() const = 0;

  virtual Result<std::unique_ptr<DeviceMapping>> Map(UniqueFd fd, uint64_t bytes) = 0;
  // kUnsupported, saying why, for memory that cannot be shared.
  virtual Result<DeviceAllocation> Share(const std::byte* address) = 0;
  // Whole pages, which must stay mapped until the result is gone.
  virtual Result<std::unique_ptr<PinnedFlags>> Pin(std::byte* pages, uint64_t bytes) = 0;

  // In the order of `stream`: writes the word of a pinned page; waits until it is at least `value`.
  virtual Status WriteWord(Stream stream, std::atomic<uint64_t>* word, uint64_t value) = 0;
  virtual Status WaitForWord(Stream stream, std::atomic<uint64_t>* word, uint64_t value) = 0;
  virtual Status Copy(Stream stream, std::byte* to, const std::byte* from, uint64_t bytes) = 0;

  // kUnsupported while a CUDA graph is being captured on the stream.
  virtual Status CheckNotCapturing(Stream stream) = 0;

  virtual Result<Stream> CreateStream() = 0;
  virtual void DestroyStream(Stream stream) = 0;
  virtual Result<DeviceEvent> CreateEvent() = 0;
  virtual void DestroyEvent(DeviceEvent event) = 0;
  virtual Status Record(DeviceEvent event, Stream stream) = 0;
  virtual Status WaitForEvent(Stream stream, DeviceEvent event) = 0;
  virtual Result<bool> IsOver(DeviceEvent event) const = 0;

  // Waits until all that was enqueued on the stream is done.
  virtual Status Synchronize(Stream stream) = 0;
  // The same of every stream of the GPU in this process. For the end of memory that any may use.
  virtual void SynchronizeAll() = 0;
};

// `device` as above, not kCpu. kUnsupported without a driver, or in a build without CUDA;
// kInvalidArgument for a device that is not there.
Result<std::shared_ptr<Device>> OpenDevice(uint32_t device);

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_CORE_DEVICE_H_

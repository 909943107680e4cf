// cuMemcpy* and cuMemset*: they run in a stream as kernels do.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "tests/fakes/cuda/address_space.h"
#include "tests/fakes/cuda/streams.h"

namespace gradsync::fake_cuda {
namespace {

bool IsRegistered(const Lock& lock, const void* host, size_t bytes) {
  const auto address = reinterpret_cast<CUdeviceptr>(host);
  const std::shared_ptr<Space> space = FindSpace(lock, address);
  return space != nullptr && space->kind == Space::Kind::kHost && address >= space->address &&
         bytes <= space->bytes && address - space->address <= space->bytes - bytes;
}

bool IsDeviceMemory(const Lock& lock, const void* host) {
  const std::shared_ptr<Space> space = FindSpace(lock, reinterpret_cast<CUdeviceptr>(host));
  return space != nullptr && space->kind != Space::Kind::kHost;
}

char* LookUpFor(const Stream& stream, CUdeviceptr address, size_t bytes, Use use) {
  const Lock lock(Process::Get().mutex);
  return LookUp(lock, address, bytes, stream.context->ordinal, use);
}

// A copy of one aligned word is done at once, so that a stream may wait for the word meanwhile.
void Copy(char* to, const char* from, size_t bytes) {
  const auto place = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  if (bytes != sizeof(uint64_t) || place % sizeof(uint64_t) != 0) {
    std::memmove(to, from, bytes);
    return;
  }
  const std::atomic_ref<uint64_t> source(*reinterpret_cast<uint64_t*>(const_cast<char*>(from)));
  std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(to))
      .store(source.load(std::memory_order_acquire), std::memory_order_release);
}

// Driver API, "Error Handling", CUDA_ERROR_ILLEGAL_ADDRESS: "This leaves the process in an
// inconsistent state and any further CUDA work will return the same error."
CUresult CopyToDevice(const Stream& stream, CUdeviceptr to, const void* from, size_t bytes) {
  char* target = LookUpFor(stream, to, bytes, Use::kCopyWrite);
  if (target == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
  Copy(target, static_cast<const char*>(from), bytes);
  return CUDA_SUCCESS;
}

CUresult CopyToHost(const Stream& stream, void* to, CUdeviceptr from, size_t bytes) {
  const char* source = LookUpFor(stream, from, bytes, Use::kCopyRead);
  if (source == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
  Copy(static_cast<char*>(to), source, bytes);
  return CUDA_SUCCESS;
}

CUresult CopyOnDevice(const Stream& stream, CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  char* target = LookUpFor(stream, to, bytes, Use::kCopyWrite);
  const char* source = LookUpFor(stream, from, bytes, Use::kCopyRead);
  if (target == nullptr || source == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
  Copy(target, source, bytes);
  return CUDA_SUCCESS;
}

void EnqueueRun(const Lock& lock, const std::shared_ptr<Stream>& stream,
                std::function<CUresult(Stream&)> run) {
  Work work;
  work.run = std::move(run);
  Enqueue(lock, stream, std::move(work));
}

CUresult HostToDevice(CUdeviceptr to, const void* from, size_t bytes, CUstream handle, bool wait) {
  Lock lock(Process::Get().mutex);
  std::shared_ptr<Stream> stream;
  FAKE_CUDA_CHECK(CurrentStream(lock, handle, &stream));
  if (bytes == 0) return CUDA_SUCCESS;
  if (from == nullptr || IsDeviceMemory(lock, from)) return CUDA_ERROR_INVALID_VALUE;
  if (IsRegistered(lock, from, bytes)) {
    EnqueueRun(lock, stream, [=](Stream& self) { return CopyToDevice(self, to, from, bytes); });
  } else {
    // Driver API, "API synchronization behavior": pageable memory is staged before the call
    // returns.
    const auto* begin = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(begin, begin + bytes);
    EnqueueRun(lock, stream,
               [=](Stream& self) { return CopyToDevice(self, to, staged->data(), bytes); });
  }
  return wait ? Synchronize(lock, stream) : CUDA_SUCCESS;
}

CUresult DeviceToHost(void* to, CUdeviceptr from, size_t bytes, CUstream handle, bool wait) {
  Lock lock(Process::Get().mutex);
  std::shared_ptr<Stream> stream;
  FAKE_CUDA_CHECK(CurrentStream(lock, handle, &stream));
  if (bytes == 0) return CUDA_SUCCESS;
  if (to == nullptr || IsDeviceMemory(lock, to)) return CUDA_ERROR_INVALID_VALUE;
  // "For transfers from device memory to pageable host memory, the function will return only once
  // the copy has completed."
  if (!IsRegistered(lock, to, bytes)) wait = true;
  EnqueueRun(lock, stream, [=](Stream& self) { return CopyToHost(self, to, from, bytes); });
  return wait ? Synchronize(lock, stream) : CUDA_SUCCESS;
}

// "For transfers from device memory to device memory, no host-side synchronization is performed",
// whether the call is called asynchronous or not.
CUresult DeviceToDevice(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle) {
  const Lock lock(Process::Get().mutex);
  std::shared_ptr<Stream> stream;
  FAKE_CUDA_CHECK(CurrentStream(lock, handle, &stream));
  if (bytes == 0) return CUDA_SUCCESS;
  EnqueueRun(lock, stream, [=](Stream& self) { return CopyOnDevice(self, to, from, bytes); });
  return CUDA_SUCCESS;
}

// "The synchronous memset functions are asynchronous with respect to the host except when the
// target is pinned host memory": callers must not count on either, so it never waits.
template <typename T>
CUresult Set(CUdeviceptr to, T value, size_t count, CUstream handle) {
  const Lock lock(Process::Get().mutex);
  std::shared_ptr<Stream> stream;
  FAKE_CUDA_CHECK(CurrentStream(lock, handle, &stream));
  if (to % sizeof(T) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (count == 0) return CUDA_SUCCESS;
  EnqueueRun(lock, stream, [=](Stream& self) -> CUresult {
    char* target = LookUpFor(self, to, count * sizeof(T), Use::kCopyWrite);
    if (target == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
    for (size_t i = 0; i < count; ++i) std::memcpy(target + i * sizeof(T), &value, sizeof(T));
    return CUDA_SUCCESS;
  });
  return CUDA_SUCCESS;
}

}  // namespace
extern "C" {

FAKE_CUDA_API CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes,
                                         CUstream stream) {
  FAKE_CUDA_ENTER("cuMemcpyHtoDAsync");
  return HostToDevice(to, from, bytes, stream, false);
}

FAKE_CUDA_API CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes,
                                         CUstream stream) {
  FAKE_CUDA_ENTER("cuMemcpyDtoHAsync");
  return DeviceToHost(to, from, bytes, stream, false);
}

FAKE_CUDA_API CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes,
                                         CUstream stream) {
  FAKE_CUDA_ENTER("cuMemcpyDtoDAsync");
  return DeviceToDevice(to, from, bytes, stream);
}

FAKE_CUDA_API CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  FAKE_CUDA_ENTER("cuMemcpyHtoD");
  return HostToDevice(to, from, bytes, nullptr, true);
}

FAKE_CUDA_API CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  FAKE_CUDA_ENTER("cuMemcpyDtoH");
  return DeviceToHost(to, from, bytes, nullptr, true);
}

FAKE_CUDA_API CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  FAKE_CUDA_ENTER("cuMemcpyDtoD");
  return DeviceToDevice(to, from, bytes, nullptr);
}

FAKE_CUDA_API CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t count) {
  FAKE_CUDA_ENTER("cuMemsetD8");
  return Set(to, value, count, nullptr);
}

FAKE_CUDA_API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count,
                                       CUstream stream) {
  FAKE_CUDA_ENTER("cuMemsetD8Async");
  return Set(to, value, count, stream);
}

FAKE_CUDA_API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count,
                                        CUstream stream) {
  FAKE_CUDA_ENTER("cuMemsetD32Async");
  return Set(to, value, count, stream);
}

}  // extern "C"

}  // namespace gradsync::fake_cuda

#include "server/engine/cuda/device.h"

#include <array>
#include <cstring>
#include <utility>

namespace gradsync::cuda {
namespace {

// As nvidia-smi writes it.
std::string TextOf(const DeviceUuid& uuid) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "GPU-";
  for (size_t i = 0; i < uuid.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kDigits[uuid[i] >> 4];
    text += kDigits[uuid[i] & 15];
  }
  return text;
}

}  // namespace

Result<std::unique_ptr<Device>> Device::Create(const CudaDriver& driver, uint32_t index) {
  CUdevice handle = 0;
  GRADSYNC_RETURN_IF_ERROR(
      driver.Check(driver.cuDeviceGet(&handle, static_cast<int>(index)), "cuDeviceGet"));
  std::unique_ptr<Device> device(new Device(driver, index, handle));
  GRADSYNC_RETURN_IF_ERROR(device->Describe());
  return device;
}

Status Device::Describe() {
  std::array<char, 256> name{};
  GRADSYNC_RETURN_IF_ERROR(driver_.Check(
      driver_.cuDeviceGetName(name.data(), name.size() - 1, device_), "cuDeviceGetName"));
  info_.name = name.data();
  CUuuid uuid{};
  GRADSYNC_RETURN_IF_ERROR(
      driver_.Check(driver_.cuDeviceGetUuid(&uuid, device_), "cuDeviceGetUuid"));
  static_assert(sizeof(uuid) == sizeof(info_.uuid));
  std::memcpy(info_.uuid.data(), &uuid, sizeof(uuid));
  size_t memory = 0;
  GRADSYNC_RETURN_IF_ERROR(
      driver_.Check(driver_.cuDeviceTotalMem(&memory, device_), "cuDeviceTotalMem"));
  info_.memory_bytes = memory;
  GRADSYNC_RETURN_IF_ERROR(
      driver_.Check(driver_.cuDeviceGetAttribute(&multiprocessors_,
                                                 CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device_),
                    "cuDeviceGetAttribute"));
  text_ = "GPU " + std::to_string(index_) + " (" + info_.name + ", " + TextOf(info_.uuid) + ")";
  return OkStatus();
}

Result<std::shared_ptr<const PrimaryContext>> Device::Use() {
  const MutexLock lock(&mutex_);
  if (!lost_.ok()) return Unexpected(lost_);
  if (context_ != nullptr) return context_;
  int has_flags = 0;
  GRADSYNC_RETURN_IF_ERROR(
      driver_.Check(driver_.cuDeviceGetAttribute(
                        &has_flags, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device_),
                    "cuDeviceGetAttribute"));
  if (has_flags == 0) {
    return Unexpected(Code::kUnsupported,
                      text_ +
                          " cannot wait for 64-bit words in its streams (stream memory "
                          "operations), which gradsync needs");
  }
  Result<std::shared_ptr<const PrimaryContext>> context = PrimaryContext::Retain(driver_, device_);
  if (!context) {
    return Unexpected(context.error().code(), text_ + ": " + context.error().message());
  }
  context_ = *context;
  return context_;
}

Status Device::lost() const {
  const MutexLock lock(&mutex_);
  return lost_;
}

void Device::MarkLost(const std::string& why) {
  const MutexLock lock(&mutex_);
  if (!lost_.ok()) return;
  lost_ =
      Status(Code::kInternal,
             text_ + " failed: " + why +
                 "; look for Xid in the kernel log; gradsyncd must be restarted to use it again");
  is_lost_.store(true, std::memory_order_release);
}

bool Device::IsLostFor(CUstream stream) {
  if (is_lost()) return true;
  const Result<std::shared_ptr<const PrimaryContext>> context = Use();
  if (!context) return is_lost();
  const CurrentContext current(driver_, (*context)->get());
  const CUresult state = driver_.cuStreamQuery(stream);
  if (state == CUDA_SUCCESS || state == CUDA_ERROR_NOT_READY) return false;
  MarkLost(driver_.Check(state, "cuStreamQuery").message());
  return true;
}

}  // namespace gradsync::cuda

// cuInit and cuDevice*.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "tests/fakes/cuda/process.h"

namespace gradsync::fake_cuda {
namespace {

bool Known(CUdevice ordinal) {
  return ordinal >= 0 && ordinal < static_cast<int>(Machine::Get().visible().size());
}

int Number(CUdevice ordinal) { return Machine::Get().visible().at(ordinal); }

// CUDA C++ Programming Guide, "Compute Capabilities", 9.0. What the stand-in lacks is 0.
int Attribute(CUdevice_attribute attribute, CUdevice ordinal) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
      return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
      return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
      return 65535;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      return 2048;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return 132;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return 9;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
      return 1980000;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT:
      return 512;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      return Number(ordinal) + 1;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
      return 3;
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED:
      return 1;
    default:
      return 0;
  }
}

}  // namespace
extern "C" {

FAKE_CUDA_API CUresult cuInit(unsigned flags) {
  FAKE_CUDA_CHECK(Inject("cuInit"));
  Process& process = Process::Get();
  const int initialised_by = process.initialised_by;
  // Driver API, cuInit: for each process; a fork of one that has called it cannot become another.
  if (initialised_by != 0 && initialised_by != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const Lock lock(process.mutex);
  if (process.initialised_by != 0) return CUDA_SUCCESS;
  const auto& visible = Machine::Get().visible();
  if (visible.empty()) return CUDA_ERROR_NO_DEVICE;
  for (size_t i = 0; i < visible.size(); ++i) {
    auto context = std::make_unique<Context>();
    context->ordinal = static_cast<int>(i);
    context->device = visible[i];
    process.contexts.push_back(std::move(context));
  }
  process.initialised_by = getpid();
  return CUDA_SUCCESS;
}

// Driver API, "Version Management": needs no cuInit.
FAKE_CUDA_API CUresult cuDriverGetVersion(int* version) {
  FAKE_CUDA_CHECK(Inject("cuDriverGetVersion"));
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = Machine::Get().version();
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuDeviceGetCount(int* count) {
  FAKE_CUDA_ENTER("cuDeviceGetCount");
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = static_cast<int>(Machine::Get().visible().size());
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  FAKE_CUDA_ENTER("cuDeviceGet");
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!Known(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  FAKE_CUDA_ENTER("cuDeviceGetName");
  if (name == nullptr || length <= 0) return CUDA_ERROR_INVALID_VALUE;
  if (!Known(device)) return CUDA_ERROR_INVALID_DEVICE;
  const std::string text = "Fake GPU " + std::to_string(Number(device));
  const size_t copied = std::min(text.size(), static_cast<size_t>(length) - 1);
  std::memcpy(name, text.data(), copied);
  name[copied] = '\0';
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  FAKE_CUDA_ENTER("cuDeviceGetUuid");
  if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!Known(device)) return CUDA_ERROR_INVALID_DEVICE;
  *uuid = Machine::Uuid(Number(device));
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                                            CUdevice device) {
  FAKE_CUDA_ENTER("cuDeviceGetAttribute");
  if (value == nullptr || attribute <= 0 || attribute >= CU_DEVICE_ATTRIBUTE_MAX) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!Known(device)) return CUDA_ERROR_INVALID_DEVICE;
  *value = Attribute(attribute, device);
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) {
  FAKE_CUDA_ENTER("cuDeviceTotalMem");
  if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!Known(device)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = Machine::Get().memory();
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  FAKE_CUDA_ENTER("cuDeviceCanAccessPeer");
  if (can == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!Known(device) || !Known(peer)) return CUDA_ERROR_INVALID_DEVICE;
  *can = device != peer && Machine::Get().peer() ? 1 : 0;
  return CUDA_SUCCESS;
}

}  // extern "C"

}  // namespace gradsync::fake_cuda

// cuPointerGetAttribute: what is known of an address.
#include <cstring>

#include "tests/fakes/cuda/address_space.h"

namespace gradsync::fake_cuda {
namespace {

struct Known {
  Context* context = nullptr;  // null for memory of cuMemMap, which belongs to none
  unsigned type = CU_MEMORYTYPE_DEVICE;
  int ordinal = 0;
  unsigned long long id = 0;
  CUdeviceptr start = 0;  // of the range that the address belongs to
  size_t size = 0;
  CUdeviceptr mapping_start = 0;
  size_t mapping_size = 0;
  bool ipc = false;
  uint64_t handle_types = 0;
};

int OrdinalOfMemory(const Backing& backing, const Context* opened_by) {
  for (const auto& context : Process::Get().contexts) {
    if (context->device == backing.device) return context->ordinal;
  }
  return opened_by == nullptr ? -1 : opened_by->ordinal;
}

bool KnowReservation(Space& space, CUdeviceptr ptr, Known* known) {
  // cuda.h: "not necessarily the address of the mapped region, but ... of the mappable address
  // range".
  known->start = space.base;
  known->size = space.size;
  const MappedRange* range = FindMapped(space, ptr, &known->mapping_start);
  if (range == nullptr) return false;
  known->mapping_size = range->size;
  known->id = range->id;
  known->ordinal = OrdinalOfMemory(*range->backing, nullptr);
  known->handle_types = range->backing->handle_types;
  return true;
}

bool KnowAddress(const Lock& lock, CUdeviceptr ptr, Known* known) {
  const std::shared_ptr<Space> space = FindSpace(lock, ptr);
  if (space == nullptr) return false;
  if (space->kind == Space::Kind::kReservation) return KnowReservation(*space, ptr, known);
  known->context = space->context;
  if (space->kind == Space::Kind::kBlock) {
    const Allocation* allocation = FindAllocation(*space, ptr, &known->start);
    if (allocation == nullptr) return false;
    known->size = allocation->size;
    known->id = allocation->id;
    known->ipc = true;
  } else {
    if (ptr < space->address || ptr - space->address >= space->bytes) return false;
    known->start = space->address;
    known->size = space->bytes;
    known->id = space->id;
  }
  if (space->kind == Space::Kind::kHost) known->type = CU_MEMORYTYPE_HOST;
  known->ordinal = space->backing == nullptr ? space->context->ordinal
                                             : OrdinalOfMemory(*space->backing, space->context);
  known->mapping_start = known->start;
  known->mapping_size = known->size;
  return true;
}

template <typename T>
CUresult Give(void* data, T value) {
  std::memcpy(data, &value, sizeof(value));
  return CUDA_SUCCESS;
}

CUresult Answer(void* data, CUpointer_attribute attribute, CUdeviceptr ptr, const Known& known) {
  const bool host = known.type == CU_MEMORYTYPE_HOST;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return Give(data, known.context == nullptr ? nullptr : known.context->handle());
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return Give(data, known.type);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return Give(data, ptr);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      return host ? Give(data, ptr) : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return Give(data, known.id);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      return Give(data, 0U);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return Give(data, known.ordinal);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      return Give(data, known.ipc ? 1U : 0U);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return Give(data, known.start);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return Give(data, known.size);
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return Give(data, 1U);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      return Give(data, known.handle_types);
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
      return Give(data, known.mapping_size);
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
      return Give(data, known.mapping_start);
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

size_t SizeOf(CUpointer_attribute attribute) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return sizeof(unsigned);
    default:
      return sizeof(uint64_t);
  }
}

}  // namespace
extern "C" {

// Driver API, cuPointerGetAttribute: CUDA_ERROR_INVALID_VALUE for what was "not allocated by,
// mapped by, or registered with a CUcontext".
FAKE_CUDA_API CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute,
                                             CUdeviceptr ptr) {
  FAKE_CUDA_ENTER("cuPointerGetAttribute");
  const Lock lock(Process::Get().mutex);
  Known known;
  if (data == nullptr || !KnowAddress(lock, ptr, &known)) return CUDA_ERROR_INVALID_VALUE;
  return Answer(data, attribute, ptr, known);
}

// "Unlike cuPointerGetAttribute, this function will not return an error when the ptr encountered is
// not a valid CUDA pointer. Instead, the attributes are assigned default NULL values".
FAKE_CUDA_API CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes,
                                              void** data, CUdeviceptr ptr) {
  FAKE_CUDA_ENTER("cuPointerGetAttributes");
  const Lock lock(Process::Get().mutex);
  if (count == 0 || attributes == nullptr || data == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Known known;
  const bool found = KnowAddress(lock, ptr, &known);
  for (unsigned i = 0; i < count; ++i) {
    const CUresult answered =
        found ? Answer(data[i], attributes[i], ptr, known) : CUDA_ERROR_INVALID_VALUE;
    if (answered == CUDA_ERROR_NOT_SUPPORTED) return answered;
    if (answered == CUDA_SUCCESS) continue;
    std::memset(data[i], 0, SizeOf(attributes[i]));
    if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
      const int none = -2;  // CU_DEVICE_INVALID
      std::memcpy(data[i], &none, sizeof(none));
    }
  }
  return CUDA_SUCCESS;
}

}  // extern "C"

}  // namespace gradsync::fake_cuda

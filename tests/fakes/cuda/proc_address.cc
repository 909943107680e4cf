// cuGetProcAddress: the functions by their names and the version of the API that is asked for.
#include <cstring>

#include "tests/fakes/cuda/process.h"

namespace {

struct Symbol {
  const char* name;
  int since;  // the version of the API whose signature this is
  int until;  // the one that gave the name another signature, which the stand-in has not got
  void* function;
};

constexpr int kNever = 1000000;

// The versions are those of cudaTypedefs.h.
#define FAKE_CUDA_SYMBOL(name, since, until) \
  { #name, since, until, reinterpret_cast < void*>(&::name) }
const Symbol kSymbols[] = {
    FAKE_CUDA_SYMBOL(cuInit, 2000, kNever),
    FAKE_CUDA_SYMBOL(cuDriverGetVersion, 2020, kNever),
    FAKE_CUDA_SYMBOL(cuGetErrorName, 6000, kNever),
    FAKE_CUDA_SYMBOL(cuGetErrorString, 6000, kNever),
    FAKE_CUDA_SYMBOL(cuDeviceGetCount, 2000, kNever),
    FAKE_CUDA_SYMBOL(cuDeviceGet, 2000, kNever),
    FAKE_CUDA_SYMBOL(cuDeviceGetName, 2000, kNever),
    FAKE_CUDA_SYMBOL(cuDeviceGetUuid, 11040, kNever),
    FAKE_CUDA_SYMBOL(cuDeviceGetAttribute, 2000, kNever),
    FAKE_CUDA_SYMBOL(cuDeviceTotalMem, 3020, kNever),
    FAKE_CUDA_SYMBOL(cuDeviceCanAccessPeer, 4000, kNever),
    FAKE_CUDA_SYMBOL(cuDevicePrimaryCtxRetain, 7000, kNever),
    FAKE_CUDA_SYMBOL(cuDevicePrimaryCtxRelease, 11000, kNever),
    FAKE_CUDA_SYMBOL(cuDevicePrimaryCtxReset, 11000, kNever),
    FAKE_CUDA_SYMBOL(cuDevicePrimaryCtxGetState, 7000, kNever),
    FAKE_CUDA_SYMBOL(cuCtxGetCurrent, 4000, kNever),
    FAKE_CUDA_SYMBOL(cuCtxSetCurrent, 4000, kNever),
    FAKE_CUDA_SYMBOL(cuCtxPushCurrent, 4000, kNever),
    FAKE_CUDA_SYMBOL(cuCtxPopCurrent, 4000, kNever),
    FAKE_CUDA_SYMBOL(cuCtxGetDevice, 2000, 13000),
    FAKE_CUDA_SYMBOL(cuCtxSynchronize, 2000, 13000),
    FAKE_CUDA_SYMBOL(cuCtxGetStreamPriorityRange, 5050, kNever),
    FAKE_CUDA_SYMBOL(cuCtxEnablePeerAccess, 4000, kNever),
    FAKE_CUDA_SYMBOL(cuMemGetInfo, 3020, kNever),
    FAKE_CUDA_SYMBOL(cuMemAlloc, 3020, kNever),
    FAKE_CUDA_SYMBOL(cuMemFree, 3020, kNever),
    FAKE_CUDA_SYMBOL(cuMemGetAddressRange, 3020, kNever),
    FAKE_CUDA_SYMBOL(cuPointerGetAttribute, 4000, kNever),
    FAKE_CUDA_SYMBOL(cuPointerGetAttributes, 7000, kNever),
    FAKE_CUDA_SYMBOL(cuMemHostRegister, 6050, kNever),
    FAKE_CUDA_SYMBOL(cuMemHostUnregister, 4000, kNever),
    FAKE_CUDA_SYMBOL(cuMemHostGetDevicePointer, 3020, kNever),
    FAKE_CUDA_SYMBOL(cuMemcpyHtoD, 3020, kNever),
    FAKE_CUDA_SYMBOL(cuMemcpyDtoH, 3020, kNever),
    FAKE_CUDA_SYMBOL(cuMemcpyDtoD, 3020, kNever),
    FAKE_CUDA_SYMBOL(cuMemcpyDtoDAsync, 3020, kNever),
    FAKE_CUDA_SYMBOL(cuMemcpyHtoDAsync, 3020, kNever),
    FAKE_CUDA_SYMBOL(cuMemcpyDtoHAsync, 3020, kNever),
    FAKE_CUDA_SYMBOL(cuMemsetD8, 3020, kNever),
    FAKE_CUDA_SYMBOL(cuMemsetD8Async, 3020, kNever),
    FAKE_CUDA_SYMBOL(cuMemsetD32Async, 3020, kNever),
    FAKE_CUDA_SYMBOL(cuMemGetAllocationGranularity, 10020, kNever),
    FAKE_CUDA_SYMBOL(cuMemCreate, 10020, kNever),
    FAKE_CUDA_SYMBOL(cuMemRelease, 10020, kNever),
    FAKE_CUDA_SYMBOL(cuMemAddressReserve, 10020, kNever),
    FAKE_CUDA_SYMBOL(cuMemAddressFree, 10020, kNever),
    FAKE_CUDA_SYMBOL(cuMemMap, 10020, kNever),
    FAKE_CUDA_SYMBOL(cuMemUnmap, 10020, kNever),
    FAKE_CUDA_SYMBOL(cuMemSetAccess, 10020, kNever),
    FAKE_CUDA_SYMBOL(cuMemExportToShareableHandle, 10020, kNever),
    FAKE_CUDA_SYMBOL(cuMemImportFromShareableHandle, 10020, kNever),
    FAKE_CUDA_SYMBOL(cuMemRetainAllocationHandle, 11000, kNever),
    FAKE_CUDA_SYMBOL(cuMemGetAllocationPropertiesFromHandle, 10020, kNever),
    FAKE_CUDA_SYMBOL(cuIpcGetMemHandle, 4010, kNever),
    FAKE_CUDA_SYMBOL(cuIpcOpenMemHandle, 11000, kNever),
    FAKE_CUDA_SYMBOL(cuIpcCloseMemHandle, 4010, kNever),
    FAKE_CUDA_SYMBOL(cuIpcGetEventHandle, 4010, kNever),
    FAKE_CUDA_SYMBOL(cuIpcOpenEventHandle, 4010, kNever),
    FAKE_CUDA_SYMBOL(cuStreamCreate, 2000, kNever),
    FAKE_CUDA_SYMBOL(cuStreamCreateWithPriority, 5050, kNever),
    FAKE_CUDA_SYMBOL(cuStreamDestroy, 4000, kNever),
    FAKE_CUDA_SYMBOL(cuStreamSynchronize, 2000, kNever),
    FAKE_CUDA_SYMBOL(cuStreamQuery, 2000, kNever),
    FAKE_CUDA_SYMBOL(cuStreamGetCtx, 9020, 12050),
    FAKE_CUDA_SYMBOL(cuStreamIsCapturing, 10000, kNever),
    FAKE_CUDA_SYMBOL(cuStreamWaitEvent, 3020, kNever),
    FAKE_CUDA_SYMBOL(cuStreamWaitValue64, 11070, kNever),
    FAKE_CUDA_SYMBOL(cuStreamWriteValue64, 11070, kNever),
    FAKE_CUDA_SYMBOL(cuStreamBatchMemOp, 11070, kNever),
    FAKE_CUDA_SYMBOL(cuEventCreate, 2000, kNever),
    FAKE_CUDA_SYMBOL(cuEventRecord, 2000, kNever),
    FAKE_CUDA_SYMBOL(cuEventQuery, 2000, kNever),
    FAKE_CUDA_SYMBOL(cuEventSynchronize, 2000, kNever),
    FAKE_CUDA_SYMBOL(cuEventElapsedTime, 2000, kNever),
    FAKE_CUDA_SYMBOL(cuEventDestroy, 4000, kNever),
    FAKE_CUDA_SYMBOL(cuModuleLoadData, 2000, kNever),
    FAKE_CUDA_SYMBOL(cuModuleUnload, 2000, kNever),
    FAKE_CUDA_SYMBOL(cuModuleGetFunction, 2000, kNever),
    FAKE_CUDA_SYMBOL(cuLaunchKernel, 4000, kNever),
    FAKE_CUDA_SYMBOL(cuLaunchHostFunc, 10000, kNever),
    FAKE_CUDA_SYMBOL(cuGetProcAddress, 12000, kNever),
};
#undef FAKE_CUDA_SYMBOL

const Symbol* Find(const char* name) {
  for (const Symbol& symbol : kSymbols) {
    if (std::strcmp(symbol.name, name) == 0) return &symbol;
  }
  return nullptr;
}

}  // namespace

extern "C" {

// Driver API, cuGetProcAddress: "If the specified CUDA version is greater than the driver version,
// the API will return CUDA_ERROR_INVALID_VALUE"; CUDA_SUCCESS and NULL for what it has not got, and
// why in `status`.
FAKE_CUDA_API CUresult cuGetProcAddress(const char* name, void** function, int version,
                                        cuuint64_t flags, CUdriverProcAddressQueryResult* status) {
  if (name == nullptr || function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *function = nullptr;
  CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  CUresult result = CUDA_SUCCESS;
  const Symbol* symbol = Find(name);
  constexpr cuuint64_t kStreams =
      CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
  if ((flags & ~kStreams) != 0 || flags == kStreams) {
    result = CUDA_ERROR_INVALID_VALUE;
  } else if (version > gradsync::fake_cuda::Machine::Get().version()) {
    found = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    result = CUDA_ERROR_INVALID_VALUE;
  } else if (symbol != nullptr && version < symbol->since) {
    found = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
  } else if (symbol != nullptr && version < symbol->until) {
    found = CU_GET_PROC_ADDRESS_SUCCESS;
    *function = symbol->function;
  }
  if (status != nullptr) *status = found;
  return result;
}

}  // extern "C"

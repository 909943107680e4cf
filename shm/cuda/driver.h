// The CUDA driver, loaded at run time: a process without one still starts, and one whose framework
// has loaded it already uses the same.
#ifndef GRADSYNC_SHM_CUDA_DRIVER_H_
#define GRADSYNC_SHM_CUDA_DRIVER_H_

#include <cuda.h>

#include <string>

#include "shm/status.h"

namespace gradsync {

// The version of the driver's API that is asked for, and so the oldest driver that will do. It has
// the second version of the stream memory operations (waits beyond 32 bits on every device).
inline constexpr int kCudaVersion = 12000;

// Every entry point that is used, by its name in cuda.h (whose macros choose the version that
// cuGetProcAddress gives for kCudaVersion).
// clang-format off
#define GRADSYNC_CUDA_FUNCTIONS(X) \
  X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetErrorString) \
  X(cuDeviceGetCount) X(cuDeviceGet) X(cuDeviceGetName) X(cuDeviceGetUuid) \
  X(cuDeviceGetAttribute) X(cuDeviceTotalMem) X(cuDeviceCanAccessPeer) \
  X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) X(cuDevicePrimaryCtxGetState) \
  X(cuCtxGetCurrent) X(cuCtxSetCurrent) X(cuCtxPushCurrent) X(cuCtxPopCurrent) X(cuCtxGetDevice) \
  X(cuCtxSynchronize) X(cuCtxGetStreamPriorityRange) X(cuCtxEnablePeerAccess) \
  X(cuMemGetInfo) X(cuMemAlloc) X(cuMemFree) X(cuMemGetAddressRange) X(cuPointerGetAttribute) \
  X(cuMemHostRegister) X(cuMemHostUnregister) X(cuMemHostGetDevicePointer) \
  X(cuMemcpyDtoDAsync) X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync) X(cuMemsetD8Async) \
  X(cuMemGetAllocationGranularity) X(cuMemCreate) X(cuMemRelease) \
  X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess) \
  X(cuMemExportToShareableHandle) X(cuMemImportFromShareableHandle) X(cuMemRetainAllocationHandle) \
  X(cuMemGetAllocationPropertiesFromHandle) \
  X(cuIpcGetMemHandle) X(cuIpcOpenMemHandle) X(cuIpcCloseMemHandle) \
  X(cuStreamCreateWithPriority) X(cuStreamDestroy) X(cuStreamSynchronize) X(cuStreamQuery) \
  X(cuStreamGetCtx) X(cuStreamIsCapturing) X(cuStreamWaitEvent) \
  X(cuStreamWaitValue64) X(cuStreamWriteValue64) X(cuStreamBatchMemOp) \
  X(cuEventCreate) X(cuEventRecord) X(cuEventQuery) X(cuEventSynchronize) \
  X(cuEventElapsedTime) X(cuEventDestroy) X(cuModuleLoadData) \
  X(cuModuleUnload) X(cuModuleGetFunction) X(cuLaunchKernel)
// clang-format on

// The driver's functions. Immutable once loaded; any thread.
struct CudaDriver {
#define GRADSYNC_CUDA_MEMBER(name) decltype(&::name) name = nullptr;
  GRADSYNC_CUDA_FUNCTIONS(GRADSYNC_CUDA_MEMBER)
#undef GRADSYNC_CUDA_MEMBER
  int version = 0;  // the driver's own: 13000 for 13.0

  // The version of the driver that is installed, one too old for Load() included; 0 if there is
  // none. Initialises nothing.
  static int InstalledVersion();

  // Loads and initialises it; once that has worked, later calls return the same. Stays loaded.
  // kUnsupported, saying what is missing, without a driver, with one older than kCudaVersion, or
  // without a device. Not from a fork of a process that had it initialised.
  static Result<const CudaDriver*> Load();

  // OK for CUDA_SUCCESS; else "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (out of memory)": with
  // kOutOfMemory for that, else kInternal.
  Status Check(CUresult result, const char* call) const;
};

// Makes a context current on this thread, for as long as it lives.
class CurrentContext {
 public:
  CurrentContext(const CudaDriver& driver, CUcontext context) : driver_(driver) {
    // Twice: what is given back under it must not stay behind because of one failed call.
    pushed_ = driver_.cuCtxPushCurrent(context) == CUDA_SUCCESS ||
              driver_.cuCtxPushCurrent(context) == CUDA_SUCCESS;
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  ~CurrentContext() {
    CUcontext popped = nullptr;
    if (pushed_) driver_.cuCtxPopCurrent(&popped);
  }

 private:
  const CudaDriver& driver_;
  bool pushed_ = false;
};

}  // namespace gradsync

#endif  // GRADSYNC_SHM_CUDA_DRIVER_H_

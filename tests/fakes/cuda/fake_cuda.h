// What the stand-in for libcuda.so.1 offers beyond the driver's API: to the stand-in for NCCL,
// which is loaded beside it, and to tests. Found by dlsym; the real libcuda has none of it.
#ifndef GRADSYNC_TESTS_FAKES_CUDA_FAKE_CUDA_H_
#define GRADSYNC_TESTS_FAKES_CUDA_FAKE_CUDA_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>

extern "C" {

// Counts one call of an API by its name ("ncclAllReduce"; calls of the driver's count themselves),
// writes it to the trace, and does what is injected at it: delays, kills the process, loses a
// device. Returns what the call must return instead of doing anything, or CUDA_SUCCESS.
CUresult fakeCudaEnter(const char* call);

// Runs `run(argument)` in the order of `stream` and on its thread, as a kernel of this process. It
// may block; `abandoned`, which it must look at while it does, becomes not 0 when the device is
// lost or its context destroyed. Takes no notice of injections.
CUresult fakeCudaLaunch(CUstream stream, void (*run)(void* argument, const volatile int* abandoned),
                        void* argument);

// Where a kernel on `device` (an ordinal) reads and writes `bytes` of device memory. NULL, as a
// real kernel would fault, if they are not mapped, or not accessible from that device.
void* fakeCudaKernelAddress(CUdeviceptr address, size_t bytes, int device);

// The device (an ordinal) of a stream; -1 if there is no such stream.
int fakeCudaStreamDevice(CUstream stream);

// Says on stderr that a rule was broken, with its source, and ends the process.
[[noreturn]] void fakeCudaBreach(const char* rule, const char* source);

// How many allocations, handles, mappings, reservations, imports, registrations, streams, events
// and modules this process holds, not counting those of contexts that failed.
size_t fakeCudaLiveObjects(void);

// Says which, a line for each, in at most `size` bytes with the NUL; returns the length of it all.
size_t fakeCudaDescribeLive(char* text, size_t size);

}  // extern "C"

// Whether what fakeCudaLaunch() runs should end: reads its `abandoned` so that no sanitizer
// objects.
inline bool fakeCudaIsAbandoned(const volatile int* abandoned) {
  return __atomic_load_n(abandoned, __ATOMIC_ACQUIRE) != 0;
}

#endif  // GRADSYNC_TESTS_FAKES_CUDA_FAKE_CUDA_H_

// cuDevicePrimaryCtx* and cuCtx*: primary contexts only, one per device of the process.
#include <vector>

#include "tests/fakes/cuda/process.h"

namespace gradsync::fake_cuda {
namespace {

// CUDA C++ Programming Guide, "Context": each host thread has a stack of current contexts.
thread_local std::vector<Context*> stack;

Context* Of(const Lock&, CUdevice ordinal) {
  const auto& contexts = Process::Get().contexts;
  if (ordinal < 0 || ordinal >= static_cast<int>(contexts.size())) return nullptr;
  return contexts[ordinal].get();
}

Context* Of(const Lock&, CUcontext handle) {
  for (const auto& context : Process::Get().contexts) {
    if (context->handle() == handle) return context.get();
  }
  return nullptr;
}

void Reset(Lock& lock, Context* context) {
  context->active = false;
  DestroyStreamsOf(lock, context);
  DestroyEventsOf(lock, context);
  DestroyModulesOf(lock, context);
  DestroyMemoryOf(lock, context);
  context->peers.clear();
  for (const auto& other : Process::Get().contexts) other->peers.erase(context);
  ++context->generation;
}

}  // namespace

CUresult Current(const Lock& lock, Context** context) {
  if (stack.empty() || stack.back() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  *context = stack.back();
  return Usable(lock, *context);
}

extern "C" {

FAKE_CUDA_API CUresult cuDevicePrimaryCtxRetain(CUcontext* handle, CUdevice device) {
  FAKE_CUDA_ENTER("cuDevicePrimaryCtxRetain");
  const Lock lock(Process::Get().mutex);
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Context* context = Of(lock, device);
  if (context == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (Machine::Get().Lost(context->device)) return kLost;
  if (context->error != CUDA_SUCCESS) return context->error;
  StartWatching();
  ++context->references;
  context->active = true;
  *handle = context->handle();
  return CUDA_SUCCESS;
}

// Driver API, cuDevicePrimaryCtxRelease: the last release resets it; one that was not retained is
// CUDA_ERROR_INVALID_CONTEXT; nothing is popped from any stack.
FAKE_CUDA_API CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  FAKE_CUDA_ENTER("cuDevicePrimaryCtxRelease");
  Lock lock(Process::Get().mutex);
  Context* context = Of(lock, device);
  if (context == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (context->references == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (--context->references == 0 && context->active) Reset(lock, context);
  return Machine::Get().Lost(context->device) ? kLost : context->error;
}

// Driver API, cuDevicePrimaryCtxReset: what belongs to it goes; whoever retained it must still
// release it.
FAKE_CUDA_API CUresult cuDevicePrimaryCtxReset(CUdevice device) {
  FAKE_CUDA_ENTER("cuDevicePrimaryCtxReset");
  Lock lock(Process::Get().mutex);
  Context* context = Of(lock, device);
  if (context == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (context->active) Reset(lock, context);
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  FAKE_CUDA_ENTER("cuDevicePrimaryCtxGetState");
  const Lock lock(Process::Get().mutex);
  const Context* context = Of(lock, device);
  if (context == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *flags = 0;
  *active = context->active ? 1 : 0;
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuCtxGetCurrent(CUcontext* handle) {
  FAKE_CUDA_ENTER("cuCtxGetCurrent");
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  // Driver API, cuCtxGetCurrent: NULL, and no error, if there is none.
  *handle = stack.empty() || stack.back() == nullptr ? nullptr : stack.back()->handle();
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuCtxSetCurrent(CUcontext handle) {
  FAKE_CUDA_ENTER("cuCtxSetCurrent");
  const Lock lock(Process::Get().mutex);
  if (handle == nullptr) {
    // Driver API, cuCtxSetCurrent: NULL takes the top of the stack away.
    if (!stack.empty()) stack.pop_back();
    return CUDA_SUCCESS;
  }
  Context* context = Of(lock, handle);
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (stack.empty()) stack.push_back(nullptr);
  stack.back() = context;
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuCtxPushCurrent(CUcontext handle) {
  FAKE_CUDA_ENTER("cuCtxPushCurrent");
  const Lock lock(Process::Get().mutex);
  Context* context = Of(lock, handle);
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  stack.push_back(context);
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuCtxPopCurrent(CUcontext* handle) {
  FAKE_CUDA_ENTER("cuCtxPopCurrent");
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (handle != nullptr) *handle = stack.back()->handle();
  stack.pop_back();
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuCtxGetDevice(CUdevice* device) {
  FAKE_CUDA_ENTER("cuCtxGetDevice");
  const Lock lock(Process::Get().mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *device = context->ordinal;
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuCtxEnablePeerAccess(CUcontext handle, unsigned flags) {
  FAKE_CUDA_ENTER("cuCtxEnablePeerAccess");
  const Lock lock(Process::Get().mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  Context* peer = Of(lock, handle);
  if (peer == nullptr || peer == context) return CUDA_ERROR_INVALID_CONTEXT;
  FAKE_CUDA_CHECK(Usable(lock, peer));
  if (!Machine::Get().peer()) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  if (!context->peers.insert(peer).second) return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
  return CUDA_SUCCESS;
}

}  // extern "C"

}  // namespace gradsync::fake_cuda

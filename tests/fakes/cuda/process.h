// The state of the stand-in in one process, and the door through which every call of the API goes.
// One lock guards all of it; what streams run, runs without that lock.
#ifndef GRADSYNC_TESTS_FAKES_CUDA_PROCESS_H_
#define GRADSYNC_TESTS_FAKES_CUDA_PROCESS_H_

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tests/fakes/cuda/fake_cuda.h"
#include "tests/fakes/cuda/machine.h"

// Exported: cuda.h declares the names, and so the compiler checks the signatures.
#define FAKE_CUDA_API __attribute__((visibility("default")))

// Returns from the enclosing call with an error that it did not make itself.
#define FAKE_CUDA_CHECK(expr)                 \
  do {                                        \
    const CUresult fake_cuda_result = (expr); \
    if (fake_cuda_result != CUDA_SUCCESS) {   \
      return fake_cuda_result;                \
    }                                         \
  } while (false)

// The first line of every call of the API.
#define FAKE_CUDA_ENTER(name) FAKE_CUDA_CHECK(::gradsync::fake_cuda::Enter(name))

namespace gradsync::fake_cuda {

struct Space;
struct Stream;
struct Event;
struct Module;
struct Function;
struct Backing;

using Lock = std::unique_lock<std::mutex>;

// What a device that fell off the bus (Xid 79) answers from then on. The documents name no code;
// reports of the real thing show this one.
inline constexpr CUresult kLost = CUDA_ERROR_UNKNOWN;

// Only primary contexts, one per visible device. Never freed: a handle stays recognisable.
struct Context {
  int ordinal = 0;
  int device = 0;  // its number on the machine
  unsigned references = 0;
  bool active = false;
  unsigned long long generation = 0;  // of its resources; grows when it is reset
  CUresult error = CUDA_SUCCESS;      // sticky
  std::set<const Context*> peers;     // whose memory kernels of this one may touch
  std::shared_ptr<Stream> null_stream;

  CUcontext handle() { return reinterpret_cast<CUcontext>(this); }
};

struct MemoryHandle {
  std::shared_ptr<Backing> backing;
  unsigned references = 1;
};

struct Process {
  static Process& Get();

  std::mutex mutex;
  std::condition_variable progress;  // something of a stream, an event or a context changed
  // The process that called cuInit: another one is a fork of it.
  std::atomic<int> initialised_by{0};
  std::atomic<bool> ended{false};
  std::vector<std::unique_ptr<Context>> contexts;  // by ordinal

  std::map<CUdeviceptr, std::shared_ptr<Space>> spaces;  // by their base
  std::map<CUmemGenericAllocationHandle, MemoryHandle> handles;
  std::map<CUstream, std::shared_ptr<Stream>> streams;
  std::set<std::shared_ptr<Stream>>
      threads;  // those that have one, NULL streams and ending ones too
  std::map<CUevent, std::shared_ptr<Event>> events;
  std::map<CUmodule, std::shared_ptr<Module>> modules;
  std::map<CUfunction, std::shared_ptr<Function>> functions;

  uint64_t last_id = 0;

  // Never given out twice, so that one that is gone is recognised.
  uint64_t NextId() { return ++last_id; }
  template <typename Handle>
  Handle NextHandle() {
    return reinterpret_cast<Handle>(uintptr_t{0x5fa000000000} + 16 * NextId());
  }
};

// Counts the call, injects, and refuses what no call may do: before cuInit, in a fork, in a host
// function of a stream.
CUresult Enter(const char* call);
// What is injected at this call and returned instead of it.
CUresult Inject(const char* call);

// Set while a host function runs on this thread.
extern thread_local bool in_host_function;

// The current context of this thread, usable: active, of a device that is there, without a sticky
// error. CUDA Driver API, "Error Handling": CUDA_ERROR_INVALID_CONTEXT if there is none.
CUresult Current(const Lock& lock, Context** context);
// Whether this context can be used at all.
CUresult Usable(const Lock& lock, Context* context);
// Whether one of a device that is there, without a current context (the virtual memory functions).
CUresult OrdinalOf(int device, int* ordinal);

// Makes the context unusable for good: its streams drop what they hold.
void Poison(const Lock& lock, Context* context, CUresult error);
// The context's resources that streams.cc, allocations.cc, ... own.
void DestroyStreamsOf(Lock& lock, Context* context);
void DestroyEventsOf(const Lock& lock, Context* context);
void DestroyMemoryOf(Lock& lock, Context* context);
void DestroyModulesOf(const Lock& lock, Context* context);
// Takes notice of devices that other processes lost.
void StartWatching();

}  // namespace gradsync::fake_cuda

#endif  // GRADSYNC_TESTS_FAKES_CUDA_PROCESS_H_

#include "tests/fakes/cuda/process.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "tests/fakes/cuda/streams.h"

namespace gradsync::fake_cuda {

thread_local bool in_host_function = false;

Process& Process::Get() {
  static Process& process = *new Process;  // never destroyed: its threads outlive exit
  return process;
}

CUresult Enter(const char* call) {
  FAKE_CUDA_CHECK(Inject(call));
  // Driver API, cuLaunchHostFunc: "The host function must not make any CUDA API calls. Attempting
  // to use a CUDA API may result in CUDA_ERROR_NOT_PERMITTED".
  if (in_host_function) return CUDA_ERROR_NOT_PERMITTED;
  Process& process = Process::Get();
  // Driver API, cuInit: "must be called before any other function from the driver API in the
  // current process". A fork is another process, whose copy of the driver is of no use to it.
  if (process.initialised_by != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
  if (process.ended) return CUDA_ERROR_DEINITIALIZED;
  return CUDA_SUCCESS;
}

CUresult Usable(const Lock& lock, Context* context) {
  if (Machine::Get().Lost(context->device)) {
    // At once, not when the watching thread comes to it: whoever is told of the loss may unmap what
    // streams wait for.
    Poison(lock, context, kLost);
    return kLost;
  }
  if (context->error != CUDA_SUCCESS) return context->error;
  // cuda.h: "is a primary context which has not yet been initialized".
  return context->active ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

void Poison(const Lock&, Context* context, CUresult error) {
  Process& process = Process::Get();
  if (context->error == CUDA_SUCCESS) context->error = error;
  for (const auto& stream : process.threads) {
    if (stream->context == context) stream->Abandon();
  }
  process.progress.notify_all();
}

void StartWatching() {
  if (Machine::Get().directory().empty()) return;  // there is no other process
  static std::once_flag once;
  std::call_once(once, [] {
    std::thread([] {
      Process& process = Process::Get();
      while (true) {
        {
          const Lock lock(process.mutex);
          for (const auto& context : process.contexts) {
            if (context->error == CUDA_SUCCESS && Machine::Get().Lost(context->device)) {
              Poison(lock, context.get(), kLost);
            }
          }
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    }).detach();
  });
}

extern "C" FAKE_CUDA_API void fakeCudaBreach(const char* rule, const char* source) {
  const std::string line = std::string(rule) + " [" + source + "]";
  std::fprintf(stderr, "fake CUDA: breach: %s\n", line.c_str());
  Machine::Get().Append("breaches", std::to_string(getpid()) + ": " + line);
  std::abort();
}

}  // namespace gradsync::fake_cuda

#include "tests/fakes/cuda/streams.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "tests/fakes/cuda/address_space.h"

namespace gradsync::fake_cuda {
namespace {

constexpr std::chrono::milliseconds kAskAgain(1);
constexpr int kLeastPriority = 0;
constexpr int kGreatestPriority = -5;

// What the work that runs on this thread has looked up.
thread_local std::vector<std::shared_ptr<Space>>* kept = nullptr;

bool Ready(const Lock& lock, const Work& work) {
  for (const auto& [stream, position] : work.after) {
    if (stream->completed < position) return false;
  }
  return work.ready == nullptr || work.ready(lock);
}

void WaitUntilReady(Lock& lock, Stream& stream, const Work& work) {
  Process& process = Process::Get();
  while (!stream.IsAbandoned() && !Ready(lock, work)) {
    if (work.ready == nullptr) {
      process.progress.wait(lock);
    } else {
      process.progress.wait_for(lock, kAskAgain);
    }
  }
}

void RunOne(Lock& lock, Stream& stream, std::vector<std::shared_ptr<Space>>& spaces) {
  Work work = std::move(stream.queue.front());
  stream.queue.pop_front();
  WaitUntilReady(lock, stream, work);
  if (!stream.IsAbandoned() && work.run != nullptr) {
    lock.unlock();
    const CUresult result = work.run(stream);
    work.run = nullptr;  // what it holds goes outside of the lock
    lock.lock();
    if (result != CUDA_SUCCESS && !stream.IsAbandoned()) Poison(lock, stream.context, result);
  }
  for (const auto& space : spaces) --space->users;
  spaces.clear();
  if (work.finish != nullptr) work.finish(lock);
  ++stream.completed;
  Process::Get().progress.notify_all();
}

void RunStream(const std::shared_ptr<Stream>& stream) {
  std::vector<std::shared_ptr<Space>> spaces;
  kept = &spaces;
  Lock lock(Process::Get().mutex);
  while (true) {
    stream->arrival.wait(lock, [&] { return !stream->queue.empty() || stream->closed; });
    if (stream->queue.empty()) break;
    RunOne(lock, *stream, spaces);
  }
  Process::Get().threads.erase(stream);
  Process::Get().progress.notify_all();
}

std::shared_ptr<Stream> NewStream(const Lock&, Context* context, bool blocking, int priority) {
  auto stream = std::make_shared<Stream>();
  stream->context = context;
  stream->blocking = blocking;
  stream->priority = priority;
  Process::Get().threads.insert(stream);
  std::thread(RunStream, stream).detach();
  return stream;
}

CUresult CreateStream(CUstream* handle, unsigned flags, int priority) {
  Process& process = Process::Get();
  const Lock lock(process.mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  if (handle == nullptr || (flags & ~unsigned{CU_STREAM_NON_BLOCKING}) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // Driver API, cuStreamCreateWithPriority: clamped to the range.
  priority = std::clamp(priority, kGreatestPriority, kLeastPriority);
  const auto stream = NewStream(lock, context, (flags & CU_STREAM_NON_BLOCKING) == 0, priority);
  stream->handle = process.NextHandle<CUstream>();
  process.streams[stream->handle] = stream;
  *handle = stream->handle;
  return CUDA_SUCCESS;
}

// Driver API, "Stream synchronization behavior", legacy default stream: its work waits for what all
// blocking streams of the context hold, and what they get later waits for it.
void OrderWithNullStream(const Lock&, const std::shared_ptr<Stream>& stream, Work& work) {
  Context* context = stream->context;
  if (stream != context->null_stream) {
    const auto& null_stream = context->null_stream;
    if (stream->blocking && null_stream != nullptr) {
      work.after.emplace_back(null_stream, null_stream->submitted);
    }
    return;
  }
  for (const auto& other : Process::Get().threads) {
    if (other->context == context && other->blocking) {
      work.after.emplace_back(other, other->submitted);
    }
  }
}

}  // namespace

// Whoever runs in the stream reads this as an ordinary volatile, as the header of the stand-in
// says: not a race that a sanitizer should judge.
__attribute__((no_sanitize("thread"))) void Stream::Abandon() {
  __atomic_store_n(&abandoned, 1, __ATOMIC_RELEASE);
}

void KeepWhileRunning(const Lock&, const std::shared_ptr<Space>& space) {
  if (kept == nullptr) return;
  ++space->users;
  kept->push_back(space);
}

CUresult FindStream(const Lock& lock, CUstream handle, std::shared_ptr<Stream>* stream) {
  // The stand-in has no per-thread default streams: nothing of the project's uses them.
  if (handle == CU_STREAM_PER_THREAD) return CUDA_ERROR_NOT_SUPPORTED;
  if (handle == nullptr || handle == CU_STREAM_LEGACY) {
    Context* context = nullptr;
    FAKE_CUDA_CHECK(Current(lock, &context));
    if (context->null_stream == nullptr) {
      context->null_stream = NewStream(lock, context, false, 0);
    }
    *stream = context->null_stream;
    return CUDA_SUCCESS;
  }
  const auto& streams = Process::Get().streams;
  const auto found = streams.find(handle);
  if (found == streams.end()) return CUDA_ERROR_INVALID_HANDLE;
  *stream = found->second;
  return Usable(lock, (*stream)->context);
}

CUresult CurrentStream(const Lock& lock, CUstream handle, std::shared_ptr<Stream>* stream) {
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  return FindStream(lock, handle, stream);
}

void Enqueue(const Lock& lock, const std::shared_ptr<Stream>& stream, Work work) {
  OrderWithNullStream(lock, stream, work);
  stream->queue.push_back(std::move(work));
  ++stream->submitted;
  stream->arrival.notify_all();
}

CUresult Synchronize(Lock& lock, const std::shared_ptr<Stream>& stream) {
  const uint64_t position = stream->submitted;
  Process::Get().progress.wait(
      lock, [&] { return stream->completed >= position || stream->IsAbandoned(); });
  return Usable(lock, stream->context);
}

CUresult SynchronizeContext(Lock& lock, Context* context) {
  std::vector<std::shared_ptr<Stream>> all;
  for (const auto& stream : Process::Get().threads) {
    if (stream->context == context) all.push_back(stream);
  }
  for (const auto& stream : all) FAKE_CUDA_CHECK(Synchronize(lock, stream));
  return Usable(lock, context);
}

void DestroyStreamsOf(Lock& lock, Context* context) {
  Process& process = Process::Get();
  std::erase_if(process.streams, [&](const auto& item) { return item.second->context == context; });
  context->null_stream = nullptr;
  for (const auto& stream : process.threads) {
    if (stream->context != context) continue;
    stream->Abandon();
    stream->closed = true;
    stream->arrival.notify_all();
  }
  process.progress.notify_all();
  process.progress.wait(lock, [&] {
    return std::none_of(process.threads.begin(), process.threads.end(),
                        [&](const auto& stream) { return stream->context == context; });
  });
}

extern "C" {

FAKE_CUDA_API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  FAKE_CUDA_ENTER("cuCtxGetStreamPriorityRange");
  const Lock lock(Process::Get().mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  if (least != nullptr) *least = kLeastPriority;
  if (greatest != nullptr) *greatest = kGreatestPriority;
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuStreamCreateWithPriority(CUstream* handle, unsigned flags, int priority) {
  FAKE_CUDA_ENTER("cuStreamCreateWithPriority");
  return CreateStream(handle, flags, priority);
}

FAKE_CUDA_API CUresult cuStreamCreate(CUstream* handle, unsigned flags) {
  FAKE_CUDA_ENTER("cuStreamCreate");
  return CreateStream(handle, flags, kLeastPriority);
}

// Driver API, cuStreamDestroy: returns at once; the stream goes when it has done its work.
FAKE_CUDA_API CUresult cuStreamDestroy(CUstream handle) {
  FAKE_CUDA_ENTER("cuStreamDestroy");
  const Lock lock(Process::Get().mutex);
  if (handle == nullptr || handle == CU_STREAM_LEGACY) return CUDA_ERROR_INVALID_HANDLE;
  auto& streams = Process::Get().streams;
  const auto found = streams.find(handle);
  if (found == streams.end()) return CUDA_ERROR_INVALID_HANDLE;
  const std::shared_ptr<Stream> stream = found->second;
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  stream->closed = true;
  stream->arrival.notify_all();
  streams.erase(found);
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuStreamSynchronize(CUstream handle) {
  FAKE_CUDA_ENTER("cuStreamSynchronize");
  Lock lock(Process::Get().mutex);
  std::shared_ptr<Stream> stream;
  FAKE_CUDA_CHECK(CurrentStream(lock, handle, &stream));
  return Synchronize(lock, stream);
}

FAKE_CUDA_API CUresult cuStreamQuery(CUstream handle) {
  FAKE_CUDA_ENTER("cuStreamQuery");
  const Lock lock(Process::Get().mutex);
  std::shared_ptr<Stream> stream;
  FAKE_CUDA_CHECK(CurrentStream(lock, handle, &stream));
  return stream->completed == stream->submitted ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

FAKE_CUDA_API CUresult cuStreamGetCtx(CUstream handle, CUcontext* context) {
  FAKE_CUDA_ENTER("cuStreamGetCtx");
  const Lock lock(Process::Get().mutex);
  std::shared_ptr<Stream> stream;
  FAKE_CUDA_CHECK(FindStream(lock, handle, &stream));
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *context = stream->context->handle();
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  FAKE_CUDA_ENTER("cuStreamIsCapturing");
  const Lock lock(Process::Get().mutex);
  std::shared_ptr<Stream> stream;
  FAKE_CUDA_CHECK(FindStream(lock, handle, &stream));
  if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *status = CU_STREAM_CAPTURE_STATUS_NONE;  // the stand-in knows no graphs
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuCtxSynchronize() {
  FAKE_CUDA_ENTER("cuCtxSynchronize");
  Lock lock(Process::Get().mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  return SynchronizeContext(lock, context);
}

FAKE_CUDA_API int fakeCudaStreamDevice(CUstream handle) {
  const Lock lock(Process::Get().mutex);
  std::shared_ptr<Stream> stream;
  const CUresult found = FindStream(lock, handle, &stream);
  return found == CUDA_ERROR_INVALID_HANDLE || stream == nullptr ? -1 : stream->context->ordinal;
}

FAKE_CUDA_API CUresult fakeCudaLaunch(CUstream handle,
                                      void (*run)(void* argument, const volatile int* abandoned),
                                      void* argument) {
  const Lock lock(Process::Get().mutex);
  std::shared_ptr<Stream> stream;
  FAKE_CUDA_CHECK(FindStream(lock, handle, &stream));
  Work work;
  work.run = [run, argument](Stream& self) {
    run(argument, self.AbandonedFlag());
    return CUDA_SUCCESS;
  };
  Enqueue(lock, stream, std::move(work));
  return CUDA_SUCCESS;
}

FAKE_CUDA_API void* fakeCudaKernelAddress(CUdeviceptr address, size_t bytes, int device) {
  const Lock lock(Process::Get().mutex);
  return LookUp(lock, address, bytes, device, Use::kKernelWrite);
}

}  // extern "C"

}  // namespace gradsync::fake_cuda

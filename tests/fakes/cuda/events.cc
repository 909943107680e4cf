// cuEvent* and cuIpc*EventHandle.
#include "tests/fakes/cuda/events.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "tests/fakes/cuda/ipc.h"
#include "tests/fakes/cuda/streams.h"

namespace gradsync::fake_cuda {

SharedEvent::~SharedEvent() {
  if (words != nullptr) munmap(words, sizeof(Words));
  if (fd >= 0) close(fd);
}

namespace {

std::shared_ptr<SharedEvent> MapShared(int fd) {
  auto shared = std::make_shared<SharedEvent>();
  shared->fd = fd;
  void* mapped =
      mmap(nullptr, sizeof(SharedEvent::Words), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) return nullptr;
  shared->words = static_cast<SharedEvent::Words*>(mapped);
  return shared;
}

std::shared_ptr<SharedEvent> NewShared() {
  const int fd = memfd_create("fake-cuda-event", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, sizeof(SharedEvent::Words)) != 0) return nullptr;
  return MapShared(fd);
}

CUresult FindEvent(const Lock& lock, CUevent handle, std::shared_ptr<Event>* event) {
  const auto& events = Process::Get().events;
  const auto found = events.find(handle);
  if (found == events.end()) return CUDA_ERROR_INVALID_HANDLE;
  *event = found->second;
  const auto& shared = (*event)->shared;
  if ((*event)->imported && shared->words->destroyed.load(std::memory_order_acquire) != 0) {
    fakeCudaBreach("use of an imported event whose exporter has destroyed it",
                   "CUDA Driver API, cuIpcOpenEventHandle: \"Performing operations on the imported "
                   "event after the exported event has been freed with cuEventDestroy will result "
                   "in undefined behavior\"");
  }
  return Usable(lock, (*event)->context);
}

// What the event has captured until now, as something to ask later.
std::function<bool(const Lock&)> Captured(const Event& event) {
  if (event.shared != nullptr) {
    const auto shared = event.shared;
    const uint64_t number = shared->words->recorded.load(std::memory_order_acquire);
    return [shared, number](const Lock&) {
      return shared->words->completed.load(std::memory_order_acquire) >= number;
    };
  }
  const auto record = event.last;
  return [record](const Lock&) { return record == nullptr || record->done; };
}

Work RecordShared(const std::shared_ptr<SharedEvent>& shared) {
  const uint64_t number = ++shared->words->recorded;
  Work work;
  work.finish = [shared, number](const Lock&) {
    uint64_t before = shared->words->completed;
    while (before < number && !shared->words->completed.compare_exchange_weak(before, number)) {
    }
  };
  return work;
}

Work RecordOwn(Event* event) {
  auto record = std::make_shared<EventRecord>();
  event->last = record;
  Work work;
  work.finish = [record](const Lock&) {
    record->done = true;
    record->at = std::chrono::steady_clock::now();
  };
  return work;
}

CUresult AddEvent(const Lock&, std::shared_ptr<Event> event, CUevent* handle) {
  Process& process = Process::Get();
  *handle = process.NextHandle<CUevent>();
  process.events[*handle] = std::move(event);
  return CUDA_SUCCESS;
}

}  // namespace

void DestroyEventsOf(const Lock&, Context* context) {
  std::erase_if(Process::Get().events, [&](const auto& item) {
    const Event& event = *item.second;
    if (event.context != context) return false;
    if (event.shared != nullptr && !event.imported) event.shared->words->destroyed = 1;
    return true;
  });
}

extern "C" {

FAKE_CUDA_API CUresult cuEventCreate(CUevent* handle, unsigned flags) {
  FAKE_CUDA_ENTER("cuEventCreate");
  const Lock lock(Process::Get().mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  constexpr unsigned kKnown =
      CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
  const bool shared = (flags & CU_EVENT_INTERPROCESS) != 0;
  // "CU_EVENT_INTERPROCESS must be specified along with CU_EVENT_DISABLE_TIMING."
  if (handle == nullptr || (flags & ~kKnown) != 0 ||
      (shared && (flags & CU_EVENT_DISABLE_TIMING) == 0)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto event = std::make_shared<Event>();
  event->context = context;
  event->flags = flags;
  if (shared) {
    event->shared = NewShared();
    if (event->shared == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  return AddEvent(lock, std::move(event), handle);
}

FAKE_CUDA_API CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  FAKE_CUDA_ENTER("cuEventRecord");
  const Lock lock(Process::Get().mutex);
  std::shared_ptr<Event> event;
  std::shared_ptr<Stream> stream;
  FAKE_CUDA_CHECK(FindEvent(lock, handle, &event));
  FAKE_CUDA_CHECK(CurrentStream(lock, stream_handle, &stream));
  // "hEvent and hStream must be from the same context otherwise CUDA_ERROR_INVALID_HANDLE".
  if (event->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
  Enqueue(lock, stream,
          event->shared != nullptr ? RecordShared(event->shared) : RecordOwn(event.get()));
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuEventQuery(CUevent handle) {
  FAKE_CUDA_ENTER("cuEventQuery");
  const Lock lock(Process::Get().mutex);
  std::shared_ptr<Event> event;
  FAKE_CUDA_CHECK(FindEvent(lock, handle, &event));
  return Captured(*event)(lock) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

FAKE_CUDA_API CUresult cuEventSynchronize(CUevent handle) {
  FAKE_CUDA_ENTER("cuEventSynchronize");
  Process& process = Process::Get();
  Lock lock(process.mutex);
  std::shared_ptr<Event> event;
  FAKE_CUDA_CHECK(FindEvent(lock, handle, &event));
  const auto captured = Captured(*event);
  while (!captured(lock)) {
    FAKE_CUDA_CHECK(Usable(lock, event->context));
    process.progress.wait_for(lock, std::chrono::milliseconds(1));
  }
  return Usable(lock, event->context);
}

// "cuStreamWaitEvent() use[s] the most recently captured state at the time of the API call"; an
// event that was never recorded "represents an empty set of work".
FAKE_CUDA_API CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned flags) {
  FAKE_CUDA_ENTER("cuStreamWaitEvent");
  const Lock lock(Process::Get().mutex);
  std::shared_ptr<Event> event;
  std::shared_ptr<Stream> stream;
  FAKE_CUDA_CHECK(CurrentStream(lock, stream_handle, &stream));
  FAKE_CUDA_CHECK(FindEvent(lock, handle, &event));
  // CU_EVENT_WAIT_EXTERNAL "is invalid outside of stream capture".
  if (flags != CU_EVENT_WAIT_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
  Work work;
  work.ready = Captured(*event);
  Enqueue(lock, stream, std::move(work));
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  FAKE_CUDA_ENTER("cuEventElapsedTime");
  const Lock lock(Process::Get().mutex);
  std::shared_ptr<Event> first;
  std::shared_ptr<Event> second;
  FAKE_CUDA_CHECK(FindEvent(lock, start, &first));
  FAKE_CUDA_CHECK(FindEvent(lock, end, &second));
  if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
  // "If either event was created with the CU_EVENT_DISABLE_TIMING flag", or never recorded.
  if (((first->flags | second->flags) & CU_EVENT_DISABLE_TIMING) != 0 || first->last == nullptr ||
      second->last == nullptr) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (!first->last->done || !second->last->done) return CUDA_ERROR_NOT_READY;
  *milliseconds =
      std::chrono::duration<float, std::milli>(second->last->at - first->last->at).count();
  return CUDA_SUCCESS;
}

// "An event may be destroyed before it is complete": what waits for it still does.
FAKE_CUDA_API CUresult cuEventDestroy(CUevent handle) {
  FAKE_CUDA_ENTER("cuEventDestroy");
  Process& process = Process::Get();
  const Lock lock(process.mutex);
  const auto found = process.events.find(handle);
  if (found == process.events.end()) return CUDA_ERROR_INVALID_HANDLE;
  const std::shared_ptr<Event> event = found->second;
  process.events.erase(found);
  if (event->shared != nullptr && !event->imported) event->shared->words->destroyed = 1;
  return Usable(lock, event->context);
}

FAKE_CUDA_API CUresult cuIpcGetEventHandle(CUipcEventHandle* handle, CUevent event_handle) {
  FAKE_CUDA_ENTER("cuIpcGetEventHandle");
  const Lock lock(Process::Get().mutex);
  std::shared_ptr<Event> event;
  FAKE_CUDA_CHECK(FindEvent(lock, event_handle, &event));
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  // "This event must have been created with the CU_EVENT_INTERPROCESS ... flags set."
  if (event->shared == nullptr || event->imported) return CUDA_ERROR_INVALID_HANDLE;
  struct stat info {};
  if (fstat(event->shared->fd, &info) != 0) return CUDA_ERROR_MAP_FAILED;
  IpcHandle content{};
  content.kind = IpcHandle::kEvent;
  content.pid = getpid();
  content.start = ProcessStart(content.pid);
  content.fd = event->shared->fd;
  content.inode = info.st_ino;
  *handle = {};
  std::memcpy(handle->reserved, &content, sizeof(content));
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuIpcOpenEventHandle(CUevent* event_handle, CUipcEventHandle handle) {
  FAKE_CUDA_ENTER("cuIpcOpenEventHandle");
  const Lock lock(Process::Get().mutex);
  Context* context = nullptr;
  FAKE_CUDA_CHECK(Current(lock, &context));
  IpcHandle content{};
  std::memcpy(&content, handle.reserved, sizeof(content));
  if (event_handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (content.kind != IpcHandle::kEvent) return CUDA_ERROR_INVALID_HANDLE;
  // "exported from another process".
  if (content.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  const int fd = OpenIpcDescriptor(content);
  if (fd < 0) return CUDA_ERROR_INVALID_HANDLE;
  auto event = std::make_shared<Event>();
  event->context = context;
  event->flags = CU_EVENT_DISABLE_TIMING;
  event->imported = true;
  event->shared = MapShared(fd);
  if (event->shared == nullptr) return CUDA_ERROR_MAP_FAILED;
  return AddEvent(lock, std::move(event), event_handle);
}

}  // extern "C"

}  // namespace gradsync::fake_cuda

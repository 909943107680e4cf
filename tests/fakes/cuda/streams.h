// Streams: each a thread that runs what was enqueued, in order.
#ifndef GRADSYNC_TESTS_FAKES_CUDA_STREAMS_H_
#define GRADSYNC_TESTS_FAKES_CUDA_STREAMS_H_

#include <cuda.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "tests/fakes/cuda/process.h"

namespace gradsync::fake_cuda {

// Work starts when `ready` says so (NULL: at once), under the lock; another process may be what
// makes it ready, so it is asked from time to time.
struct Work {
  std::function<bool(const Lock& lock)> ready;
  // Without the lock. What it returns becomes the context's sticky error.
  std::function<CUresult(Stream& stream)> run;
  // Under the lock, once it ran or was dropped.
  std::function<void(const Lock& lock)> finish;
  // What must have been done by other streams before.
  std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> after;
};

struct Stream {
  CUstream handle = nullptr;
  Context* context = nullptr;
  bool blocking = true;  // ordered with the NULL stream
  int priority = 0;
  uint64_t submitted = 0;
  uint64_t completed = 0;
  bool closed = false;  // the thread ends once the queue is empty
  std::deque<Work> queue;
  std::condition_variable arrival;

  void Abandon();
  bool IsAbandoned() const { return __atomic_load_n(&abandoned, __ATOMIC_ACQUIRE) != 0; }
  const volatile int* AbandonedFlag() const { return &abandoned; }

 private:
  int abandoned = 0;
};

// The stream of a handle, NULL and CU_STREAM_LEGACY included, in a usable context.
CUresult FindStream(const Lock& lock, CUstream handle, std::shared_ptr<Stream>* stream);
// The same, for calls that also want a current context.
CUresult CurrentStream(const Lock& lock, CUstream handle, std::shared_ptr<Stream>* stream);

void Enqueue(const Lock& lock, const std::shared_ptr<Stream>& stream, Work work);
// Waits until what is in the stream now has been done.
CUresult Synchronize(Lock& lock, const std::shared_ptr<Stream>& stream);
CUresult SynchronizeContext(Lock& lock, Context* context);

// On a stream's thread: the space stays until the running work ends.
void KeepWhileRunning(const Lock& lock, const std::shared_ptr<Space>& space);

}  // namespace gradsync::fake_cuda

#endif  // GRADSYNC_TESTS_FAKES_CUDA_STREAMS_H_

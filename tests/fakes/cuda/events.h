// Events: what was last recorded, in this process or, for an interprocess event, in any.
#ifndef GRADSYNC_TESTS_FAKES_CUDA_EVENTS_H_
#define GRADSYNC_TESTS_FAKES_CUDA_EVENTS_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include "tests/fakes/cuda/process.h"

namespace gradsync::fake_cuda {

// One call of cuEventRecord. Under the process's lock.
struct EventRecord {
  bool done = false;
  std::chrono::steady_clock::time_point at;
};

// Of an interprocess event: counts its records, in memory that all its processes map.
struct SharedEvent {
  struct Words {
    std::atomic<uint64_t> recorded;
    std::atomic<uint64_t> completed;  // the latest record that is done
    std::atomic<uint64_t> destroyed;
  };

  SharedEvent() = default;
  SharedEvent(const SharedEvent&) = delete;
  SharedEvent& operator=(const SharedEvent&) = delete;
  ~SharedEvent();

  int fd = -1;
  Words* words = nullptr;
};

struct Event {
  Context* context = nullptr;
  unsigned flags = 0;
  std::shared_ptr<EventRecord> last;  // null until the first
  std::shared_ptr<SharedEvent> shared;
  bool imported = false;
};

}  // namespace gradsync::fake_cuda

#endif  // GRADSYNC_TESTS_FAKES_CUDA_EVENTS_H_

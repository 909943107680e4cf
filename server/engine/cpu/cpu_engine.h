// The engine that works where gradients lie in shared memory, with the machine's cores.
#ifndef GRADSYNC_SERVER_ENGINE_CPU_CPU_ENGINE_H_
#define GRADSYNC_SERVER_ENGINE_CPU_CPU_ENGINE_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "server/engine/cpu/journal.h"
#include "server/engine/cpu/reduction.h"
#include "server/engine/cpu/thread_pool.h"
#include "server/engine/engine.h"
#include "server/engine/mutex.h"
#include "shm/segment.h"
#include "shm/status.h"

namespace gradsync {

struct CpuEngineOptions {
  // Threads of the pool. 0: the cores that this process may use, at most 16.
  int threads = 0;
  // How long an idle thread looks out for work before it sleeps. Not set: 20 us where there are
  // twice as many cores as threads, else not at all, since it would take them from the trainers.
  std::optional<std::chrono::nanoseconds> spin;
  // Shared memory of at least CpuEngine::JournalBytes(threads) bytes, at a page's start, that
  // outlives the engine and, if in-place reductions shall survive the process, the process. Its
  // contents are overwritten: recover from them (recovery.h) first. Empty: the engine's own.
  std::span<std::byte> journal;
  StepObserver* observer = nullptr;  // for tests
};

// Operations are carried out as engine.h says, and with these promises:
// - the bits of a result depend on the inputs and the ranks' order alone (kernels.h);
// - an in-place reduction can be finished by another process after this one died at any instant
//   (recovery.h); Task::id names it then.
class CpuEngine : public Engine {
 public:
  // kOutOfMemory if there is none for a journal; kInvalidArgument if the one given is too small.
  static Result<std::unique_ptr<CpuEngine>> Create(const CpuEngineOptions& options);

  static int DefaultThreads();
  static size_t JournalBytes(int threads);

  // Finishes every task.
  ~CpuEngine() override = default;

  bool Run(std::shared_ptr<const Task> task, std::function<void()> done) override;
  int threads() const override { return pool_.threads(); }

 private:
  struct Waiting {
    std::shared_ptr<const Task> task;
    std::function<void()> done;
  };

  CpuEngine(int threads, std::chrono::nanoseconds spin, Mapping own_journal, Journal journal,
            StepObserver* observer);

  void RunInline(const Task& task);
  void SubmitCopying(std::shared_ptr<const Task> task, std::function<void()> done);
  void SubmitOutOfPlace(std::shared_ptr<const Task> task, std::function<void()> done);
  void SubmitReduceScatter(std::shared_ptr<const Task> task, std::function<void()> done);
  // Submits an in-place reduction, or has it wait until a record of the journal is free.
  void SubmitInPlace(Waiting job);
  void SubmitInPlace(Waiting job, uint32_t record);
  void FinishInPlace(uint32_t record, const std::function<void()>& done);
  uint64_t TilesPerBatch(const Task& task) const;

  const Mapping own_journal_;  // not valid if the owner gave one
  const Journal journal_;
  StepObserver* const observer_;
  Mutex mutex_;
  // Longest free first: what is known of finished tasks is kept as long as possible.
  std::deque<uint32_t> free_records_ ABSL_GUARDED_BY(mutex_);
  std::deque<Waiting> waiting_ ABSL_GUARDED_BY(mutex_);  // for a free record
  ThreadPool pool_;  // last, so that its threads are gone before what they use
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_ENGINE_CPU_CPU_ENGINE_H_

#include "server/engine/cpu/cpu_engine.h"

#include <algorithm>
#include <string>
#include <utility>

#include "server/engine/cpu/copying.h"
#include "server/engine/cpu/cores.h"

namespace gradsync {
namespace {

constexpr int kMaxDefaultThreads = 16;
constexpr std::chrono::microseconds kSpin{20};

// Waking a thread of the pool and hearing from it takes about as long as moving this much.
constexpr uint64_t kInlineBytes = 256 * 1024;

// Of result. Small enough that threads end together, large enough that taking one costs nothing.
constexpr uint64_t kBatchBytes = 128 * 1024;
constexpr uint64_t kMinBatchBytes = 16 * 1024;

// The record that tasks on the calling thread use: there is one at a time.
constexpr uint32_t kInlineRecord = 0;

// One slot for each thread of the pool, one for the thread that calls Run, and one that an engine
// never uses, so that there is one for recovery.
uint32_t SlotsFor(int threads) { return static_cast<uint32_t>(threads) + 2; }

// Bytes read and written.
uint64_t BytesMoved(const Task& task) {
  const uint64_t ranks = task.inputs.size();
  const uint64_t bytes = InputBytes(task);
  switch (task.kind) {
    case OpKind::kAllReduce:
    case OpKind::kBucketReduce:
      return 2 * ranks * bytes;
    case OpKind::kBroadcast:
    case OpKind::kShare:
      return (1 + ranks) * bytes;
    case OpKind::kAllGather:
      return ranks * (1 + ranks) * bytes;
    case OpKind::kReduce:
      return (1 + ranks) * bytes;
    case OpKind::kGather:
    case OpKind::kScatter:
      return 2 * ranks * bytes;
    case OpKind::kReduceScatter:
      return ranks * (1 + ranks) * bytes;
    case OpKind::kAllToAll:
      return 2 * ranks * ranks * bytes;
    case OpKind::kBarrier:
      return 0;
  }
  return 0;
}

}  // namespace

int CpuEngine::DefaultThreads() { return std::min(AvailableCores(), kMaxDefaultThreads); }

size_t CpuEngine::JournalBytes(int threads) { return Journal::BytesFor(SlotsFor(threads)); }

Result<std::unique_ptr<CpuEngine>> CpuEngine::Create(const CpuEngineOptions& options) {
  const int threads = options.threads > 0 ? options.threads : DefaultThreads();
  const auto spin = options.spin.value_or(AvailableCores() >= 2 * threads ? kSpin : kSpin.zero());
  const size_t bytes = JournalBytes(threads);
  std::span<std::byte> memory = options.journal;
  Mapping own;
  if (memory.empty()) {
    Result<UniqueFd> fd = CreateSealedMemfd("gradsync-journal", bytes);
    if (!fd) return Unexpected(std::move(fd.error()));
    Result<Mapping> mapping = Mapping::Map(fd->get(), bytes);
    if (!mapping) return Unexpected(std::move(mapping.error()));
    own = std::move(*mapping);
    memory = {own.data(), own.size()};
  } else if (memory.size() < bytes) {
    return Unexpected(Code::kInvalidArgument,
                      "the engine's journal has " + std::to_string(memory.size()) + " bytes; " +
                          std::to_string(threads) + " threads need " + std::to_string(bytes));
  }
  const Journal journal = Journal::Format(memory, SlotsFor(threads));
  return std::unique_ptr<CpuEngine>(
      new CpuEngine(threads, spin, std::move(own), journal, options.observer));
}

CpuEngine::CpuEngine(int threads, std::chrono::nanoseconds spin, Mapping own_journal,
                     Journal journal, StepObserver* observer)
    : own_journal_(std::move(own_journal)),
      journal_(journal),
      observer_(observer),
      pool_(threads, spin) {
  const MutexLock lock(&mutex_);
  for (uint32_t i = kInlineRecord + 1; i < kJournalRecords; ++i) free_records_.push_back(i);
}

bool CpuEngine::Run(std::shared_ptr<const Task> task, std::function<void()> done) {
  const uint64_t moved = BytesMoved(*task);
  if (moved <= kInlineBytes) {
    if (moved > 0) RunInline(*task);
    return true;
  }
  if (!TraitsOf(task->kind).reduces) {
    SubmitCopying(std::move(task), std::move(done));
  } else if (task->kind == OpKind::kReduceScatter) {
    SubmitReduceScatter(std::move(task), std::move(done));
  } else if (IsInPlace(*task)) {
    SubmitInPlace({std::move(task), std::move(done)});
  } else {
    SubmitOutOfPlace(std::move(task), std::move(done));
  }
  return false;
}

void CpuEngine::RunInline(const Task& task) {
  const auto slot = static_cast<uint32_t>(pool_.threads());
  if (!TraitsOf(task.kind).reduces) {
    CopyRange(task, 0, InputBytes(task));
    return;
  }
  const uint64_t tiles_per_batch = kInlineBytes / kTileBytes;
  if (task.kind == OpKind::kReduceScatter) {
    for (const Task& part : PartsOfReduceScatter(task)) {
      Reduction(part, tiles_per_batch).RunBatch(0, journal_.slot(slot).result.data());
    }
    return;
  }
  const Reduction reduction(task, tiles_per_batch);
  if (!IsInPlace(task)) {
    reduction.RunBatch(0, journal_.slot(slot).result.data());
    return;
  }
  journal_.BeginRecord(kInlineRecord, task, tiles_per_batch);
  reduction.RunBatch(0, journal_, kInlineRecord, slot, observer_);
  journal_.FinishRecord(kInlineRecord);
}

void CpuEngine::SubmitCopying(std::shared_ptr<const Task> task, std::function<void()> done) {
  const uint64_t bytes = InputBytes(*task);
  const uint64_t parts = (bytes + kBatchBytes - 1) / kBatchBytes;
  pool_.Submit({parts,
                [task = std::move(task), bytes](int, uint64_t part) {
                  const uint64_t begin = part * kBatchBytes;
                  CopyRange(*task, begin, std::min(begin + kBatchBytes, bytes));
                },
                std::move(done)});
}

void CpuEngine::SubmitOutOfPlace(std::shared_ptr<const Task> task, std::function<void()> done) {
  const Reduction reduction(*task, TilesPerBatch(*task));
  pool_.Submit({reduction.batches(),
                [this, task = std::move(task), reduction](int worker, uint64_t batch) {
                  JournalSlot& slot = journal_.slot(static_cast<uint32_t>(worker));
                  reduction.RunBatch(batch, slot.result.data());
                },
                std::move(done)});
}

void CpuEngine::SubmitReduceScatter(std::shared_ptr<const Task> task, std::function<void()> done) {
  const uint64_t tiles_per_batch = TilesPerBatch(*task);
  const uint64_t batches = BatchCount(*task, tiles_per_batch);
  auto parts = std::make_shared<const std::vector<Task>>(PartsOfReduceScatter(*task));
  const uint64_t all = batches * parts->size();
  pool_.Submit({all,
                [this, task = std::move(task), parts = std::move(parts), batches, tiles_per_batch](
                    int worker, uint64_t number) {
                  JournalSlot& slot = journal_.slot(static_cast<uint32_t>(worker));
                  const Reduction reduction((*parts)[number / batches], tiles_per_batch);
                  reduction.RunBatch(number % batches, slot.result.data());
                },
                std::move(done)});
}

void CpuEngine::SubmitInPlace(Waiting job) {
  uint32_t record = 0;
  {
    const MutexLock lock(&mutex_);
    if (free_records_.empty()) {
      waiting_.push_back(std::move(job));
      return;
    }
    record = free_records_.front();
    free_records_.pop_front();
  }
  SubmitInPlace(std::move(job), record);
}

void CpuEngine::SubmitInPlace(Waiting job, uint32_t record) {
  const uint64_t tiles_per_batch = TilesPerBatch(*job.task);
  journal_.BeginRecord(record, *job.task, tiles_per_batch);
  const Reduction reduction(*job.task, tiles_per_batch);
  pool_.Submit({reduction.batches(),
                [this, task = std::move(job.task), reduction, record](int worker, uint64_t batch) {
                  reduction.RunBatch(batch, journal_, record, static_cast<uint32_t>(worker),
                                     observer_);
                },
                [this, done = std::move(job.done), record] { FinishInPlace(record, done); }});
}

void CpuEngine::FinishInPlace(uint32_t record, const std::function<void()>& done) {
  journal_.FinishRecord(record);
  done();
  Waiting next;
  uint32_t free = 0;
  {
    const MutexLock lock(&mutex_);
    free_records_.push_back(record);
    if (waiting_.empty()) return;
    next = std::move(waiting_.front());
    waiting_.pop_front();
    free = free_records_.front();
    free_records_.pop_front();
  }
  SubmitInPlace(std::move(next), free);
}

// A few batches for each thread, and never more than a record has marks for.
uint64_t CpuEngine::TilesPerBatch(const Task& task) const {
  const uint64_t bytes = InputBytes(task);
  const uint64_t share = bytes / (4 * static_cast<uint64_t>(threads()));
  uint64_t batch = std::clamp(share, kMinBatchBytes, kBatchBytes);
  batch = std::max(batch, bytes / kMaxBatches + 1);
  return (batch + kTileBytes - 1) / kTileBytes;
}

}  // namespace gradsync

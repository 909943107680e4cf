// Real processes that die in the middle of a reduction, and another that finishes it.
#include "server/engine/cpu/recovery.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <functional>
#include <latch>
#include <memory>
#include <span>
#include <vector>

#include "server/engine/cpu/cpu_engine.h"
#include "server/engine/cpu/reference_reduce.h"

namespace gradsync {
namespace {

// Memory that a child process shares.
class SharedMemory {
 public:
  explicit SharedMemory(size_t size)
      : data_(static_cast<std::byte*>(mmap(nullptr, size, PROT_READ | PROT_WRITE,
                                           MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))),
        size_(size) {}
  ~SharedMemory() { munmap(data_, size_); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* data() const { return data_; }
  std::span<std::byte> span() const { return {data_, size_}; }

 private:
  std::byte* data_;
  size_t size_;
};

// An in-place reduction over shared memory.
class SharedTask {
 public:
  SharedTask(uint64_t id, DType dtype, ReduceOp op, size_t ranks, uint64_t count)
      : task_(std::make_shared<Task>()) {
    task_->id = id;
    task_->kind = OpKind::kBucketReduce;
    task_->dtype = dtype;
    task_->reduce_op = op;
    task_->count = count;
    for (size_t rank = 0; rank < ranks; ++rank) {
      before_.push_back(RandomElements(dtype, count, 100 * id + rank));
      memory_.push_back(std::make_unique<SharedMemory>(before_.back().size()));
      task_->inputs.push_back(memory_.back()->data());
      task_->outputs.push_back(memory_.back()->data());
    }
    expected_ = ReferenceReduce(dtype, op, before_);
    Reset();
  }

  void Reset() const {
    for (size_t rank = 0; rank < before_.size(); ++rank) {
      std::memcpy(memory_[rank]->data(), before_[rank].data(), before_[rank].size());
    }
  }
  void ExpectReduced() const {
    for (const auto& memory : memory_) {
      EXPECT_EQ(Difference(task_->dtype, memory->data(), expected_), "") << "task " << task_->id;
    }
  }
  std::shared_ptr<const Task> task() const { return task_; }

 private:
  std::shared_ptr<Task> task_;
  std::vector<Bytes> before_;
  Bytes expected_;
  std::vector<std::unique_ptr<SharedMemory>> memory_;
};

[[noreturn]] void DieNow() {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

// Kills its process at the `fatal`th step, after half of what would have come next.
class Killer : public StepObserver {
 public:
  explicit Killer(uint64_t fatal, const Task* half_stored = nullptr)
      : fatal_(fatal), task_(half_stored) {}

  // As Reduction was made with; needed for `half_stored`.
  uint64_t tiles_per_batch = 0;

  void At(Step step, JournalSlot& slot) override {
    if (steps_.fetch_add(1) + 1 != fatal_) return;
    switch (step) {
      case Step::kBatchBegun:
      case Step::kTileDone:
      case Step::kBatchEnded:
        // The slot's result is free: the next tile's may be half there.
        std::memset(slot.result.data(), 0xa5, slot.result.size() / 2);
        break;
      case Step::kTileValid:
        StoreHalf(slot);
        break;
      case Step::kTileCombined:
      case Step::kTileStored:
        break;
    }
    DieNow();
  }

 private:
  // Stores the first bytes of the valid tile to the first rank alone.
  void StoreHalf(const JournalSlot& slot) const {
    if (task_ == nullptr) return;
    const uint64_t tile =
        BatchJournal::ClaimedBatch(slot.claim) * tiles_per_batch + slot.progress / 2;
    const uint64_t left = InputBytes(*task_) - tile * kTileBytes;
    std::memcpy(task_->outputs[0] + tile * kTileBytes, slot.result.data(),
                std::min<uint64_t>(kTileBytes, left) / 2);
  }

  const uint64_t fatal_;
  const Task* task_;
  std::atomic<uint64_t> steps_{0};
};

// Runs `body` in a child. True if it was killed, false if it came to its end.
bool DiesIn(const std::function<void()>& body) {
  std::fflush(nullptr);  // or the child would print it too
  const pid_t child = fork();
  if (child == 0) {
    body();
    _exit(0);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  if (WIFSIGNALED(status)) {
    EXPECT_EQ(WTERMSIG(status), SIGKILL);
    return true;
  }
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  return false;
}

void RunAll(const SharedMemory& journal, int threads, StepObserver* observer,
            const std::vector<const SharedTask*>& tasks) {
  CpuEngineOptions options;
  options.threads = threads;
  options.journal = journal.span();
  options.observer = observer;
  // Its destructor finishes every task.
  const auto engine = CpuEngine::Create(options).value();
  for (const SharedTask* task : tasks) engine->Run(task->task(), [] {});
}

Journal OpenJournal(const SharedMemory& memory) { return Journal::Open(memory.span()).value(); }

// Has a child run `task` and die at step 1, 2, 3, ... and finishes it each time, until a child
// survives. Returns in how many steps it does.
uint64_t DieAtEveryStep(const SharedTask& task, int threads, uint64_t stride = 1) {
  const SharedMemory memory(CpuEngine::JournalBytes(threads));
  // What the engine makes of it; the steps of the first run tell.
  uint64_t tiles_per_batch = 0;
  EXPECT_FALSE(DiesIn([&] { RunAll(memory, threads, nullptr, {&task}); }));
  for (uint32_t i = 0; i < kJournalRecords; ++i) {
    const JournalRecord& record = OpenJournal(memory).record(i);
    if (record.id == task.task()->id) tiles_per_batch = record.tiles_per_batch;
  }
  for (uint64_t step = 1;; step += stride) {
    task.Reset();
    const bool died = DiesIn([&] {
      Killer killer(step, task.task().get());
      killer.tiles_per_batch = tiles_per_batch;
      RunAll(memory, threads, &killer, {&task});
    });
    const Journal journal = OpenJournal(memory);
    EXPECT_EQ(InterruptedTasks(journal).size(), died ? 1U : 0U) << "step " << step;
    const auto recovered = Recover(journal, *task.task());
    EXPECT_TRUE(recovered.has_value()) << recovered.error().ToString();
    EXPECT_EQ(*recovered, died ? Recovered::kFinishedNow : Recovered::kAlreadyFinished);
    task.ExpectReduced();
    EXPECT_EQ(*Recover(journal, *task.task()), Recovered::kAlreadyFinished);
    if (!died || testing::Test::HasFailure()) return step;
  }
}

TEST(RecoveryTest, FinishesASmallTaskWhateverStepItsProcessDiedAt) {
  // Three tiles and a bit, run on the calling thread.
  const SharedTask task(7, DType::kFloat32, ReduceOp::kAvg, 3, 3 * kTileBytes / 4 + 5);
  EXPECT_GT(DieAtEveryStep(task, 1), 4U * 4);
}

TEST(RecoveryTest, FinishesALargeTaskWhateverStepItsProcessDiedAt) {
  // A sum is not idempotent: a tile combined twice, or stored before it was whole, shows.
  const SharedTask task(8, DType::kBFloat16, ReduceOp::kSum, 3, 25'003);
  EXPECT_GT(DieAtEveryStep(task, 1, 3), 25U * 4);
}

TEST(RecoveryTest, FinishesWhatSeveralThreadsWereAt) {
  const SharedTask task(9, DType::kInt32, ReduceOp::kSum, 2, 60'007);
  EXPECT_GT(DieAtEveryStep(task, 3, 17), 100U * 4);
}

TEST(RecoveryTest, FinishesSeveralTasksOfOneProcessInAnyOrder) {
  const int threads = 3;
  const SharedMemory memory(CpuEngine::JournalBytes(threads));
  std::vector<std::unique_ptr<SharedTask>> tasks;
  std::vector<const SharedTask*> pointers;
  for (uint64_t id = 1; id <= 4; ++id) {
    tasks.push_back(std::make_unique<SharedTask>(id, DType::kInt64, ReduceOp::kSum, 2, 9'000 + id));
    pointers.push_back(tasks.back().get());
  }
  size_t most = 0;
  for (uint64_t step = 1;; step += 23) {
    for (const auto& task : tasks) task->Reset();
    const bool died = DiesIn([&] {
      Killer killer(step);
      RunAll(memory, threads, &killer, pointers);
    });
    const Journal journal = OpenJournal(memory);
    most = std::max(most, InterruptedTasks(journal).size());
    for (size_t i = 0; i < tasks.size(); ++i) {
      const SharedTask& task = *tasks[step % 2 == 0 ? i : tasks.size() - 1 - i];
      const auto recovered = Recover(journal, *task.task());
      ASSERT_TRUE(recovered.has_value()) << recovered.error().ToString();
      // The caller knows what it had asked for: what had not begun begins now.
      if (*recovered == Recovered::kNotBegun) {
        RunAll(SharedMemory(CpuEngine::JournalBytes(1)), 1, nullptr, {&task});
      }
      task.ExpectReduced();
    }
    EXPECT_TRUE(InterruptedTasks(journal).empty());
    if (!died || testing::Test::HasFailure()) break;
  }
  EXPECT_GE(most, 2U);
}

TEST(RecoveryTest, RecoveryMayDieToo) {
  const SharedMemory memory(CpuEngine::JournalBytes(2));
  const SharedTask task(5, DType::kInt32, ReduceOp::kSum, 2, 40'000);
  for (uint64_t step = 1;; step += 11) {
    task.Reset();
    ASSERT_TRUE(DiesIn([&] {
      Killer killer(60);
      RunAll(memory, 2, &killer, {&task});
    }));
    const bool died = DiesIn([&] {
      Killer killer(step);
      Recover(OpenJournal(memory), *task.task(), &killer).value();
    });
    ASSERT_TRUE(Recover(OpenJournal(memory), *task.task()).has_value());
    task.ExpectReduced();
    if (!died || HasFailure()) break;
  }
}

// Killed from outside, at an instant of nobody's choosing.
TEST(RecoveryTest, FinishesWhatAKilledProcessLeft) {
  const int threads = 2;
  const SharedMemory memory(CpuEngine::JournalBytes(threads));
  const SharedTask task(3, DType::kInt32, ReduceOp::kSum, 2, 2'000'003);
  for (size_t batches = 1; batches <= 33; batches += 8) {
    task.Reset();
    Journal::Format(memory.span(), static_cast<uint32_t>(threads) + 2);
    const pid_t child = fork();
    if (child == 0) {
      RunAll(memory, threads, nullptr, {&task});
      _exit(0);
    }
    const Journal journal = OpenJournal(memory);
    const JournalRecord& record = journal.record(1);
    while (record.state.load() == static_cast<uint32_t>(RecordState::kUnused) ||
           record.done[batches].load() == 0) {
      sched_yield();
    }
    kill(child, SIGKILL);
    ASSERT_EQ(waitpid(child, nullptr, 0), child);
    ASSERT_NE(Recover(journal, *task.task()).value(), Recovered::kNotBegun);
    task.ExpectReduced();
  }
}

class JournalTest : public testing::Test {
 protected:
  static constexpr uint32_t kSlots = 2;
  const SharedMemory memory_{Journal::BytesFor(kSlots)};
  const Journal journal_ = Journal::Format(memory_.span(), kSlots);
  const SharedTask task_{1, DType::kFloat32, ReduceOp::kSum, 2, 50'000};
};

TEST_F(JournalTest, TaskThatItDoesNotKnowHasNotBegun) {
  EXPECT_EQ(Recover(journal_, *task_.task()).value(), Recovered::kNotBegun);
  EXPECT_TRUE(InterruptedTasks(journal_).empty());
}

TEST_F(JournalTest, TaskOfAnotherShapeIsRefused) {
  journal_.BeginRecord(4, *task_.task(), 8);
  EXPECT_EQ(InterruptedTasks(journal_), std::vector<uint64_t>{1});
  Task other = *task_.task();
  other.count -= 1;
  const auto recovered = Recover(journal_, other);
  ASSERT_FALSE(recovered.has_value());
  EXPECT_EQ(recovered.error().code(), Code::kMismatch);
  EXPECT_EQ(recovered.error().message(),
            "interrupted operation 1 was sum of 50000 x float32 over 2 ranks, not sum of 49999 x "
            "float32 over 2");
}

TEST_F(JournalTest, SlotsOfOtherTasksAreLeftAlone) {
  journal_.BeginRecord(4, *task_.task(), 8);
  for (uint32_t i = 0; i < kSlots; ++i) BatchJournal(journal_, 9, i, 0).Begin();
  const auto recovered = Recover(journal_, *task_.task());
  ASSERT_FALSE(recovered.has_value());
  EXPECT_EQ(recovered.error().code(), Code::kFailedPrecondition);
}

TEST_F(JournalTest, ContradictionsAreRefused) {
  journal_.BeginRecord(4, *task_.task(), 8);
  BatchJournal(journal_, 4, 0, 5000).Begin();
  EXPECT_EQ(Recover(journal_, *task_.task()).error().code(), Code::kProtocol);
  BatchJournal batch(journal_, 4, 0, 0);
  batch.Begin();
  batch.Valid(8);  // of 8
  EXPECT_EQ(Recover(journal_, *task_.task()).error().code(), Code::kProtocol);
  journal_.record(4).tiles_per_batch = 0;
  EXPECT_EQ(Recover(journal_, *task_.task()).error().code(), Code::kProtocol);
}

TEST_F(JournalTest, OnlyAJournalOfThisVersionOpens) {
  EXPECT_TRUE(Journal::Open(memory_.span()).has_value());
  EXPECT_EQ(Journal::Open(memory_.span().first(100'000)).error().code(), Code::kProtocol);
  EXPECT_EQ(Journal::Open({}).error().code(), Code::kProtocol);
  memory_.data()[offsetof(JournalHeader, version)] = std::byte{99};
  EXPECT_EQ(Journal::Open(memory_.span()).error().code(), Code::kProtocol);
}

}  // namespace
}  // namespace gradsync

// What the tests of the engine share: four GPUs of the stand-in for the driver, an engine on them,
// and ranks, whose streams are the test itself: it writes their memory and their `ready` words.
#ifndef GRADSYNC_SERVER_ENGINE_CUDA_ENGINE_FIXTURE_H_
#define GRADSYNC_SERVER_ENGINE_CUDA_ENGINE_FIXTURE_H_

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "server/engine/cpu/reference_reduce.h"
#include "server/engine/cuda_module.h"
#include "server/engine/device_engine.h"
#include "shm/cuda/device_memory.h"
#include "shm/cuda/driver.h"

namespace gradsync::cuda {

using std::chrono::milliseconds;
using std::chrono::seconds;

// One rank of a group, with an input and an output.
struct TestRank {
  uint32_t device = 0;
  std::shared_ptr<const Mapping> mapping;
  std::shared_ptr<DeviceFlags> flags;
  std::shared_ptr<const DeviceMemory> input;
  std::shared_ptr<const DeviceMemory> output;

  FlagPage* page() const { return flags->page(); }
  uint64_t done() const { return page()->done.load(std::memory_order_acquire); }
  void ComeTo(uint64_t sequence) const {
    page()->ready[sequence % kFlagSlots].store(sequence + 1, std::memory_order_release);
  }
};

// Gathers what the engine says of tasks, in order.
class Answers {
 public:
  DeviceEngine::Done Next();
  // Waits for `count` answers, or fails the test.
  std::vector<Status> Wait(size_t count);
  size_t count() const;

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<Status> statuses;
    std::vector<size_t> order;
  };
  size_t next_ = 0;
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

class CudaEngineTest : public testing::Test {
 protected:
  static constexpr uint64_t kRoom = 1 << 20;  // bytes of an input and of an output

  CudaEngineTest();
  // Nothing of the GPUs is left.
  ~CudaEngineTest() override;

  // Starts the engine; else the first use does, with the stand-in for NCCL.
  void Start(const CudaOptions& options);
  static CudaOptions WithNccl();
  DeviceEngine& engine();
  void Stop() { engine_ = nullptr; }

  // One rank per entry, on that GPU; none if the test has failed over it.
  std::vector<TestRank> MakeRanks(const std::vector<uint32_t>& devices);
  void Write(const DeviceMemory& memory, const Bytes& bytes, uint64_t offset = 0);
  Bytes Read(const DeviceMemory& memory, uint64_t bytes, uint64_t offset = 0);

  // An operation of these ranks, from input to output or, in place, from output to output.
  std::shared_ptr<Task> MakeTask(const std::vector<TestRank>& ranks, OpKind kind, uint64_t sequence,
                                 uint64_t count = 0, uint64_t group = 1);
  static void MakeInPlace(Task& task);

  // Runs it when all ranks are ready, and waits for it.
  Status Finish(const std::vector<TestRank>& ranks, std::shared_ptr<const Task> task);

  const CudaDriver& driver() const { return *driver_; }

 private:
  const PrimaryContext& ContextOf(uint32_t device);

  const CudaDriver* driver_ = nullptr;
  std::map<uint32_t, std::shared_ptr<const PrimaryContext>> contexts_;
  std::unique_ptr<DeviceEngine> engine_;
};

}  // namespace gradsync::cuda

#endif  // GRADSYNC_SERVER_ENGINE_CUDA_ENGINE_FIXTURE_H_

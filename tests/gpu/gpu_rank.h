// Ranks whose gradients are on GPUs, each a process of its own, and the daemon that serves them.
// The driver is whatever libcuda.so.1 is found: the stand-in where the machine has no GPU.
#ifndef GRADSYNC_TESTS_GPU_GPU_RANK_H_
#define GRADSYNC_TESTS_GPU_GPU_RANK_H_

#include <cuda.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/core/daemon_group.h"
#include "client/core/session.h"
#include "shm/cuda/device_memory.h"
#include "shm/cuda/driver.h"
#include "tests/fault/rank_process.h"
#include "tests/integration/daemon_fixture.h"

namespace gradsync::testing {

// One rank, in its process.
class GpuRank {
 public:
  // On GPU `rank` modulo the GPUs there are. Aborts the process if there is none.
  GpuRank(std::shared_ptr<Session> session, std::shared_ptr<DaemonGroup> group);
  GpuRank(const GpuRank&) = delete;
  GpuRank& operator=(const GpuRank&) = delete;
  ~GpuRank();

  uint32_t rank() const { return group_->rank(); }
  uint32_t size() const { return group_->size(); }
  uint32_t device() const { return device_; }  // as client/core/device.h counts
  const CudaDriver& cuda() const { return cuda_; }
  CUcontext context() const { return context_->get(); }
  // A stream of this rank's own, non-blocking.
  CUstream stream() const { return stream_; }
  CUstream MakeStream() const;
  const std::shared_ptr<Session>& session() const { return session_; }
  const std::shared_ptr<DaemonGroup>& group() const { return group_; }
  void LeaveGroup() { group_ = nullptr; }

  // Host memory to an address of the GPU, and back; waits for the stream.
  void Write(void* to, const void* from, size_t bytes) const;
  void Read(void* to, const void* from, size_t bytes) const;
  template <typename T>
  void Write(void* to, const std::vector<T>& values) const {
    Write(to, values.data(), values.size() * sizeof(T));
  }
  template <typename T>
  std::vector<T> Read(const void* from, size_t count) const {
    std::vector<T> values(count);
    Read(values.data(), from, count * sizeof(T));
    return values;
  }

  // Memory of cudaMalloc's kind, freed with the result.
  std::shared_ptr<std::byte> Malloc(size_t bytes) const;

  // Runs a collective and waits for its end, on the GPU and here.
  Status Perform(const Collective& collective, Timeout timeout = Timeout(0)) const;

 private:
  std::shared_ptr<Session> session_;
  std::shared_ptr<DaemonGroup> group_;
  const CudaDriver& cuda_;
  uint32_t device_ = 0;
  std::shared_ptr<const PrimaryContext> context_;
  CUstream stream_ = nullptr;
};

// A daemon, and the folder in which the stand-ins share what the machine is. Daemon and ranks see
// the first `devices` GPUs only; where there are fewer the test is skipped.
class GpuTest : public ::testing::Test {
 protected:
  explicit GpuTest(int devices = 1, std::vector<std::string> daemon_flags = {});
  ~GpuTest() override;
  void SetUp() override;

  std::string socket() const { return directory_.File("s"); }
  DaemonProcess& daemon() { return *daemon_; }
  // What of the machine is left in the folder of the stand-ins: breaches of the driver's rules, and
  // what processes had not given back when they ended.
  std::string Complaints() const;

  // Runs `body` as every rank of a job, in a group of all; waits for them. What fails there fails
  // here.
  void RunRanks(uint32_t world_size, const std::function<void(GpuRank&)>& body,
                const std::string& job = "job") const;
  // Starts them, for tests that kill some. A rank says "ready" once its group is formed, and
  // whatever `body` says; then "ok", or "failed".
  std::vector<RankProcess> StartRanks(uint32_t world_size,
                                      const std::function<void(const Channel&, GpuRank&)>& body,
                                      const std::string& job = "job") const;

  TemporaryDirectory directory_;
  std::unique_ptr<DaemonProcess> daemon_;

 private:
  const int devices_;
  std::optional<std::string> visible_;  // CUDA_VISIBLE_DEVICES as it was
};

// Whether the driver is the stand-in.
bool IsStandIn();

// In SetUp, for tests of what a real machine cannot be made to do.
#define GRADSYNC_SKIP_WITHOUT_STAND_IN(why) \
  if (!::gradsync::testing::IsStandIn()) GTEST_SKIP() << "needs the stand-in: " << (why)

}  // namespace gradsync::testing

#endif  // GRADSYNC_TESTS_GPU_GPU_RANK_H_

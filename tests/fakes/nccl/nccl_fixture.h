// What the tests of the stand-in for NCCL share: four devices of the stand-in for libcuda.so.1, and
// communicators on them. Every wait has a deadline.
#ifndef GRADSYNC_TESTS_FAKES_NCCL_NCCL_FIXTURE_H_
#define GRADSYNC_TESTS_FAKES_NCCL_NCCL_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <functional>
#include <vector>

#include "shm/cuda/driver.h"

namespace gradsync::fake_nccl {

inline constexpr int kDevices = 4;

class NcclTest : public ::testing::Test {
 protected:
  NcclTest();
  ~NcclTest() override = default;

  void Use(int device) const;
  CUstream NewStream(int device) const;
  CUdeviceptr Allocate(int device, size_t bytes) const;
  void Write(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) const;
  void Read(void* to, CUdeviceptr from, size_t bytes, CUstream stream) const;

  // Whether the stream has done all it was given, in time.
  static bool Finishes(CUstream stream);
  // Whether it has not, for a while.
  static bool KeepsWaiting(CUstream stream);
  // The state of a communicator once it is no longer ncclInProgress.
  static ncclResult_t Settled(ncclComm_t comm);

  // Communicators of devices 0, 1, ...
  static std::vector<ncclComm_t> Blocking(int ranks);
  std::vector<ncclComm_t> NonBlocking(int ranks) const;
  static void Abort(const std::vector<ncclComm_t>& comms);

  // Runs `run` in a thread for each rank, with its device; they must all end in time.
  void OnEach(int ranks, const std::function<void(int rank)>& run) const;

  template <typename T>
  CUdeviceptr Upload(int device, const std::vector<T>& values) const {
    const CUdeviceptr memory = Allocate(device, values.size() * sizeof(T));
    Write(memory, values.data(), values.size() * sizeof(T), streams_[device]);
    return memory;
  }
  template <typename T>
  std::vector<T> Download(int device, CUdeviceptr memory, size_t count) const {
    std::vector<T> values(count);
    Read(values.data(), memory, count * sizeof(T), streams_[device]);
    return values;
  }

  // A sum of four floats, in place and in memory of its own.
  ncclResult_t AllReduce(ncclComm_t comm, int device, CUstream stream) const;
  ncclResult_t AllReduce(ncclComm_t comm, int device) const {
    return AllReduce(comm, device, streams_[device]);
  }

  const CudaDriver* driver_ = nullptr;
  std::vector<CUcontext> contexts_;
  std::vector<CUstream> streams_;  // one per device
};

inline void* Pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

}  // namespace gradsync::fake_nccl

#endif  // GRADSYNC_TESTS_FAKES_NCCL_NCCL_FIXTURE_H_

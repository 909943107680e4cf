// One GPU of a process of the benchmark: its context, a stream, memory, and how long things take.
#ifndef GRADSYNC_TESTS_GPU_BENCH_GPU_H_
#define GRADSYNC_TESTS_GPU_BENCH_GPU_H_

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "shm/cuda/device_memory.h"
#include "shm/cuda/driver.h"
#include "shm/status.h"

namespace gradsync::bench {

// Used by one thread, on which the GPU last opened or made current is the current one.
class BenchGpu {
 public:
  static Result<std::unique_ptr<BenchGpu>> Open(int ordinal);
  BenchGpu(const BenchGpu&) = delete;
  BenchGpu& operator=(const BenchGpu&) = delete;
  ~BenchGpu();

  const CudaDriver& cuda() const { return cuda_; }
  CUstream stream() const { return stream_; }
  uint32_t device() const { return device_; }  // as client/core/device.h counts
  Status MakeCurrent() const;

  // Zeroed, and kept as long as the object.
  Result<CUdeviceptr> Allocate(uint64_t bytes);
  Status Copy(CUdeviceptr to, CUdeviceptr from, uint64_t bytes) const;
  Status Synchronize() const;
  // The seconds that the GPU took for what `enqueue` puts on the stream; waits for it.
  Result<double> Time(const std::function<Status()>& enqueue) const;
  Result<int> Multiprocessors() const;

 private:
  BenchGpu(const CudaDriver& cuda, std::shared_ptr<const PrimaryContext> context, int ordinal)
      : cuda_(cuda), context_(std::move(context)), device_(static_cast<uint32_t>(ordinal) + 1) {}
  Status Prepare();

  const CudaDriver& cuda_;
  const std::shared_ptr<const PrimaryContext> context_;
  const uint32_t device_;
  CUstream stream_ = nullptr;
  CUevent begin_ = nullptr;
  CUevent end_ = nullptr;
  std::vector<CUdeviceptr> memory_;
};

}  // namespace gradsync::bench

#endif  // GRADSYNC_TESTS_GPU_BENCH_GPU_H_

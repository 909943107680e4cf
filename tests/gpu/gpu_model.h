// A model on a GPU, as far as a Ddp is concerned: parameters, and gradients that a stream makes.
#ifndef GRADSYNC_TESTS_GPU_GPU_MODEL_H_
#define GRADSYNC_TESTS_GPU_GPU_MODEL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/ddp/ddp.h"
#include "shm/status.h"
#include "tests/gpu/gpu_rank.h"

namespace gradsync::testing {

class GpuModel {
 public:
  // float32 parameters of these sizes, called "p0", "p1"...
  GpuModel(GpuRank* rank, const std::vector<int64_t>& sizes);
  GpuModel(const GpuModel&) = delete;
  GpuModel& operator=(const GpuModel&) = delete;
  ~GpuModel();

  Status CreateDdp(const DdpOptions& options = {});
  Ddp& ddp() { return *ddp_; }
  void DropDdp() { ddp_ = nullptr; }
  uint32_t parameter_count() const { return static_cast<uint32_t>(specs_.size()); }
  std::vector<ParameterSpec>& specs() { return specs_; }

  // What rank `rank` gives for a parameter in an iteration; small numbers, so that sums are exact.
  std::vector<float> Gradient(uint32_t rank, uint32_t iteration, uint32_t parameter) const;
  // The average of it over `ranks` of `size`.
  std::vector<float> Average(uint32_t ranks, uint32_t iteration, uint32_t parameter,
                             uint32_t size = 0) const;

  // Enqueues the making of this rank's gradient in its slot, without waiting for it.
  Status Make(uint32_t iteration, uint32_t parameter);
  // What the slot holds when the stream is done.
  std::vector<float> Slot(uint32_t parameter) const;

  // A whole iteration, its parameters becoming ready in an order of the rank's own; waits for
  // nothing on the GPU.
  Status Iterate(uint32_t iteration);
  // Whether every slot holds the average, as far as float32 says; empty if so.
  std::string Differences(uint32_t ranks, uint32_t iteration, uint32_t size = 0) const;

 private:
  GpuRank* const rank_;
  std::vector<ParameterSpec> specs_;
  std::unique_ptr<Ddp> ddp_;
  // Where the gradients are copied from, so it must stay.
  std::vector<std::shared_ptr<std::byte>> made_;
  CUstream upload_ = nullptr;
};

}  // namespace gradsync::testing

#endif  // GRADSYNC_TESTS_GPU_GPU_MODEL_H_

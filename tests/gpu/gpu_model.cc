#include "tests/gpu/gpu_model.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

namespace gradsync::testing {

GpuModel::GpuModel(GpuRank* rank, const std::vector<int64_t>& sizes) : rank_(rank) {
  for (const int64_t size : sizes) {
    ParameterSpec spec;
    spec.name = "p" + std::to_string(specs_.size());
    spec.shape = {size};
    spec.device = rank->device();
    specs_.push_back(std::move(spec));
  }
  upload_ = rank->MakeStream();
}

GpuModel::~GpuModel() {
  EXPECT_EQ(rank_->cuda().cuStreamSynchronize(rank_->stream()), CUDA_SUCCESS);
  EXPECT_EQ(rank_->cuda().cuStreamDestroy(upload_), CUDA_SUCCESS);
}

Status GpuModel::CreateDdp(const DdpOptions& options) {
  Result<std::unique_ptr<Ddp>> ddp = Ddp::Create(rank_->group(), specs_, options);
  if (!ddp) return ddp.error();
  ddp_ = *std::move(ddp);
  ddp_->UseStream(rank_->stream());
  return OkStatus();
}

std::vector<float> GpuModel::Gradient(uint32_t rank, uint32_t iteration, uint32_t parameter) const {
  std::vector<float> values(ElementCount(specs_[parameter]));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>((i + 3 * iteration + 5 * parameter) % 100 + 60 * rank);
  }
  return values;
}

std::vector<float> GpuModel::Average(uint32_t ranks, uint32_t iteration, uint32_t parameter,
                                     uint32_t size) const {
  std::vector<float> sum = Gradient(0, iteration, parameter);
  for (uint32_t rank = 1; rank < ranks; ++rank) {
    const std::vector<float> values = Gradient(rank, iteration, parameter);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
  }
  for (float& value : sum) value /= static_cast<float>(size == 0 ? ranks : size);
  return sum;
}

Status GpuModel::Make(uint32_t iteration, uint32_t parameter) {
  const Result<gradsync::Slot> slot = ddp_->GetSlot(parameter);
  if (!slot) return slot.error();
  const std::vector<float> values = Gradient(rank_->rank(), iteration, parameter);
  const size_t bytes = values.size() * sizeof(float);
  const CudaDriver& cuda = rank_->cuda();
  // Uploaded at once, by a stream that nothing holds up; what the model's stream does is the copy.
  made_.push_back(rank_->Malloc(bytes));
  const auto source = reinterpret_cast<CUdeviceptr>(made_.back().get());
  GRADSYNC_RETURN_IF_ERROR(
      cuda.Check(cuda.cuMemcpyHtoDAsync(source, values.data(), bytes, upload_), "upload"));
  GRADSYNC_RETURN_IF_ERROR(cuda.Check(cuda.cuStreamSynchronize(upload_), "upload"));
  return cuda.Check(cuda.cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(slot->data), source, bytes,
                                           rank_->stream()),
                    "copy");
}

std::vector<float> GpuModel::Slot(uint32_t parameter) const {
  const Result<gradsync::Slot> slot = ddp_->GetSlot(parameter);
  return rank_->Read<float>(slot->data, slot->count);
}

Status GpuModel::Iterate(uint32_t iteration) {
  GRADSYNC_RETURN_IF_ERROR(ddp_->Begin());
  std::vector<uint32_t> order(parameter_count());
  std::iota(order.rbegin(), order.rend(), 0U);
  std::mt19937 random(iteration * 100 + rank_->rank());
  if (iteration > 0) std::shuffle(order.begin(), order.end(), random);
  for (const uint32_t parameter : order) {
    GRADSYNC_RETURN_IF_ERROR(Make(iteration, parameter));
    const Result<bool> ready = ddp_->Ready(parameter);
    if (!ready) return ready.error();
  }
  for (uint32_t bucket = 0; bucket < ddp_->bucket_count(); ++bucket) {
    GRADSYNC_RETURN_IF_ERROR(ddp_->Wait(bucket));
  }
  return ddp_->End();
}

std::string GpuModel::Differences(uint32_t ranks, uint32_t iteration, uint32_t size) const {
  std::string text;
  for (uint32_t parameter = 0; parameter < parameter_count(); ++parameter) {
    const std::vector<float> expected = Average(ranks, iteration, parameter, size);
    const std::vector<float> actual = Slot(parameter);
    const auto close = [](float x, float y) { return std::abs(x - y) <= 1e-6F * std::abs(y); };
    const auto [a, e] = std::mismatch(actual.begin(), actual.end(), expected.begin(), close);
    if (a == actual.end()) continue;
    text += specs_[parameter].name + "[" + std::to_string(a - actual.begin()) + "] is " +
            std::to_string(*a) + ", not " + std::to_string(*e) + "; ";
  }
  return text;
}

}  // namespace gradsync::testing

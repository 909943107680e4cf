#include "client/torch/broadcaster.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <utility>

#include "client/torch/group_collectives.h"
#include "client/torch/profiler_events.h"
#include "client/torch/tensors.h"

namespace gradsync::torch {
namespace {

// Tensors lie in a chunk at multiples of this, so that each is aligned for its type.
constexpr int64_t kAlignment = 64;

int64_t PaddedBytes(const at::Tensor& tensor) {
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Between a tensor and its part of a chunk, which is row-major. variable_data() is the same memory
// with a version counter of its own.
void CopyPart(std::byte* part, const at::Tensor& tensor, bool into_chunk) {
  if (IsPlain(tensor)) {
    void* const data = tensor.data_ptr();
    CopyBytes(into_chunk ? part : data, into_chunk ? data : part, tensor.nbytes());
    return;
  }
  const at::Tensor row_major =
      at::from_blob(part, tensor.sizes(), tensor.options().requires_grad(false));
  if (into_chunk) {
    row_major.copy_(tensor.variable_data());
  } else {
    tensor.variable_data().copy_(row_major);
  }
}

// The parts of a chunk on a GPU, each with the type and sizes of its tensor.
std::vector<at::Tensor> PartsOf(const at::Tensor& chunk, const at::Tensor* begin,
                                const at::Tensor* end) {
  std::vector<at::Tensor> parts;
  int64_t offset = 0;
  for (const at::Tensor* tensor = begin; tensor != end; ++tensor) {
    const auto bytes = static_cast<int64_t>(tensor->nbytes());
    parts.push_back(
        chunk.narrow(0, offset, bytes).view(tensor->scalar_type()).view(tensor->sizes()));
    offset += PaddedBytes(*tensor);
  }
  return parts;
}

// With version counters of their own.
std::vector<at::Tensor> DataOf(const at::Tensor* begin, const at::Tensor* end) {
  std::vector<at::Tensor> data;
  for (const at::Tensor* tensor = begin; tensor != end; ++tensor) {
    data.push_back(tensor->variable_data());
  }
  return data;
}

// In as few launches as there are types.
void CopyAll(const std::vector<at::Tensor>& targets, const std::vector<at::Tensor>& sources) {
  std::map<at::ScalarType, std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>> by_type;
  for (size_t i = 0; i < targets.size(); ++i) {
    auto& [to, from] = by_type[targets[i].scalar_type()];
    to.push_back(targets[i]);
    from.push_back(sources[i]);
  }
  for (const auto& [type, lists] : by_type) {
    at::_foreach_copy_(lists.first, lists.second, /*non_blocking=*/true);
  }
}

}  // namespace

void Broadcaster::Broadcast(const std::vector<at::Tensor>& tensors, int64_t chunk_bytes,
                            std::optional<uint32_t> root) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> on_cpu;
  std::vector<at::Tensor> on_gpu;
  for (const at::Tensor& tensor : tensors) {
    CheckDense(tensor, "broadcast");
    (tensor.is_cuda() ? on_gpu : on_cpu).push_back(tensor);
  }
  BroadcastInChunks(on_cpu, chunk_bytes, root);
  BroadcastInChunks(on_gpu, chunk_bytes, root);
}

void Broadcaster::BroadcastInChunks(const std::vector<at::Tensor>& tensors, int64_t chunk_bytes,
                                    std::optional<uint32_t> root) {
  const at::Tensor* const end = tensors.data() + tensors.size();
  for (const at::Tensor* begin = tensors.data(); begin != end;) {
    const at::Tensor* next = begin;
    int64_t bytes = 0;
    do {
      bytes += PaddedBytes(*next);
      ++next;
    } while (next != end && bytes + PaddedBytes(*next) <= chunk_bytes);
    BroadcastChunk(begin, next, bytes, root);
    begin = next;
  }
}

void Broadcaster::BroadcastChunk(const at::Tensor* begin, const at::Tensor* end, int64_t bytes,
                                 std::optional<uint32_t> root) {
  if (bytes == 0) return;
  const BlockingEvent event(title_);
  const c10::Device device = begin->device();
  // Zeroed: the padding is sent too.
  const at::Tensor chunk = at::zeros({bytes}, at::TensorOptions(device).dtype(at::kByte));
  const auto copy_each = [&](bool into_chunk) {
    if (device.is_cuda()) {
      const std::vector<at::Tensor> parts = PartsOf(chunk, begin, end);
      const std::vector<at::Tensor> data = DataOf(begin, end);
      CopyAll(into_chunk ? parts : data, into_chunk ? data : parts);
      return;
    }
    auto* part = static_cast<std::byte*>(chunk.data_ptr());
    for (const at::Tensor* tensor = begin; tensor != end; ++tensor) {
      CopyPart(part, *tensor, into_chunk);
      part += PaddedBytes(*tensor);
    }
  };
  if (Sends(root)) copy_each(true);
  const std::unique_ptr<Collectives> collectives = CollectivesOn(device, group_);
  if (root) {
    collectives->Broadcast(chunk, *root, timeout_);
  } else {
    collectives->Share(chunk, timeout_);
  }
  if (Receives(root)) copy_each(false);
}

std::vector<std::string> Broadcaster::AllGather(const std::string& text) {
  const uint32_t size = group_.size();
  const auto length = static_cast<int64_t>(text.size());
  std::vector<int64_t> lengths(size);
  group_.AllGather(&length, lengths.data(), 1, GRADSYNC_INT64, timeout_);
  const auto longest = static_cast<size_t>(*std::max_element(lengths.begin(), lengths.end()));
  std::vector<std::string> texts(size);
  if (longest == 0) return texts;
  std::string padded = text;
  padded.resize(longest);
  std::string all(longest * size, '\0');
  group_.AllGather(padded.data(), all.data(), longest, GRADSYNC_UINT8, timeout_);
  for (uint32_t rank = 0; rank < size; ++rank) {
    texts[rank] = all.substr(longest * rank, static_cast<size_t>(lengths[rank]));
  }
  return texts;
}

}  // namespace gradsync::torch

#include "client/torch/broadcaster.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstddef>

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

// Between a tensor and its part of a chunk, which is row-major. Detached, a tensor has the same
// memory but a version counter of its own.
void CopyPart(std::byte* part, const at::Tensor& tensor, bool into_chunk) {
  if (IsPlain(tensor)) {
    void* const data = tensor.data_ptr();
    CopyBytes(into_chunk ? part : data, into_chunk ? data : part, tensor.nbytes());
    return;
  }
  const at::Tensor row_major =
      at::from_blob(part, tensor.sizes(), tensor.options().requires_grad(false));
  if (into_chunk) {
    row_major.copy_(tensor.detach());
  } else {
    tensor.detach().copy_(row_major);
  }
}

}  // namespace

void Broadcaster::Broadcast(const std::vector<at::Tensor>& tensors, int64_t chunk_bytes,
                            std::optional<uint32_t> root) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& tensor : tensors) CheckDenseCpu(tensor, "broadcast");
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
  // Zeroed: the padding is sent too.
  const at::Tensor chunk = at::zeros({bytes}, at::kByte);
  auto* const data = static_cast<std::byte*>(chunk.data_ptr());
  const auto copy_each = [&](bool into_chunk) {
    std::byte* part = data;
    for (const at::Tensor* tensor = begin; tensor != end; ++tensor) {
      CopyPart(part, *tensor, into_chunk);
      part += PaddedBytes(*tensor);
    }
  };
  const auto count = static_cast<uint64_t>(bytes);
  if (!root || *root == group_.rank()) copy_each(true);
  if (root) {
    group_.Broadcast(data, count, GRADSYNC_UINT8, *root, timeout_);
  } else {
    group_.Share(data, count, GRADSYNC_UINT8, timeout_);
  }
  if (root != group_.rank()) copy_each(false);
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

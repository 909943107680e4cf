#include "server/engine/cpu/copying.h"

#include <algorithm>
#include <cstring>

#include "server/engine/cpu/reduction.h"

namespace gradsync {
namespace {

// A piece of the source stays in the first-level cache while it is copied to every output.
constexpr uint64_t kPieceBytes = 16 * 1024;

// Copies [begin, end) of `source` to `place` bytes further in every output but the source itself.
void CopyToAll(const std::byte* source, const Task& task, uint64_t place, uint64_t begin,
               uint64_t end) {
  for (uint64_t at = begin; at < end; at += kPieceBytes) {
    const uint64_t bytes = std::min(kPieceBytes, end - at);
    for (std::byte* output : task.outputs) {
      if (output + place != source) std::memcpy(output + place + at, source + at, bytes);
    }
  }
}

void Copy(std::byte* to, const std::byte* from, uint64_t begin, uint64_t end) {
  if (to != from) std::memcpy(to + begin, from + begin, end - begin);
}

void BroadcastRange(const Task& task, uint64_t begin, uint64_t end) {
  CopyToAll(task.inputs[task.root], task, 0, begin, end);
}

void AllGatherRange(const Task& task, uint64_t begin, uint64_t end) {
  // Rank 0 last: its place is where the inputs of a task in place lie.
  const uint64_t bytes = InputBytes(task);
  for (size_t rank = task.inputs.size(); rank-- > 0;) {
    CopyToAll(task.inputs[rank], task, rank * bytes, begin, end);
  }
}

void GatherRange(const Task& task, uint64_t begin, uint64_t end) {
  const uint64_t bytes = InputBytes(task);
  for (size_t rank = task.inputs.size(); rank-- > 0;) {
    Copy(task.outputs[task.root] + rank * bytes, task.inputs[rank], begin, end);
  }
}

void ScatterRange(const Task& task, uint64_t begin, uint64_t end) {
  const uint64_t bytes = InputBytes(task);
  for (size_t rank = 0; rank < task.outputs.size(); ++rank) {
    Copy(task.outputs[rank], task.inputs[task.root] + rank * bytes, begin, end);
  }
}

void AllToAllRange(const Task& task, uint64_t begin, uint64_t end) {
  const uint64_t bytes = InputBytes(task);
  const size_t ranks = task.inputs.size();
  for (size_t from = 0; from < ranks; ++from) {
    for (size_t to = 0; to < ranks; ++to) {
      Copy(task.outputs[to] + from * bytes, task.inputs[from] + to * bytes, begin, end);
    }
  }
}

}  // namespace

void CopyRange(const Task& task, uint64_t begin, uint64_t end) {
  switch (task.kind) {
    case OpKind::kShare:
      return CopyToAll(task.inputs.back(), task, 0, begin, end);
    case OpKind::kBroadcast:
      return BroadcastRange(task, begin, end);
    case OpKind::kAllGather:
      return AllGatherRange(task, begin, end);
    case OpKind::kGather:
      return GatherRange(task, begin, end);
    case OpKind::kScatter:
      return ScatterRange(task, begin, end);
    case OpKind::kAllToAll:
      return AllToAllRange(task, begin, end);
    case OpKind::kAllReduce:
    case OpKind::kBucketReduce:
    case OpKind::kReduce:
    case OpKind::kReduceScatter:
    case OpKind::kBarrier:
      return;
  }
}

}  // namespace gradsync

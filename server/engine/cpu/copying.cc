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

}  // namespace

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

}  // namespace gradsync

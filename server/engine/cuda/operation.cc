#include "server/engine/cuda/operation.h"

namespace gradsync::cuda {
namespace {

// "rank 3's GPU stream has", "the GPU streams of ranks 1, 2 and 5 have".
std::string StreamsOf(const std::vector<uint32_t>& ranks) {
  if (ranks.size() == 1) return "rank " + std::to_string(ranks.front()) + "'s GPU stream has";
  std::string text = "the GPU streams of ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text + " have";
}

std::string TextOf(std::chrono::nanoseconds time) {
  const auto milliseconds = std::chrono::ceil<std::chrono::milliseconds>(time).count();
  if (milliseconds % 1000 == 0) return std::to_string(milliseconds / 1000) + " s";
  return std::to_string(milliseconds) + " ms";
}

std::vector<uint32_t> MissingRanks(const DeviceSide& side) {
  std::vector<uint32_t> missing;
  for (const DevicePart& part : side.parts) {
    const std::atomic<uint64_t>& ready = part.flags->page()->ready[side.sequence % kFlagSlots];
    if (ready.load(std::memory_order_acquire) < side.sequence + 1) missing.push_back(part.rank);
  }
  return missing;
}

}  // namespace

std::string TextOf(const Operation& operation) {
  const Task& task = *operation.task;
  std::string text =
      "operation " + std::to_string(task.device->sequence) + " (" + OpKindName(task.kind);
  if (task.kind != OpKind::kBarrier) {
    text += " of " + std::to_string(task.count) + " " + DTypeName(task.dtype);
  }
  return text + ")";
}

Status Overdue(const Operation& operation) {
  const std::string within = TextOf(operation) + " within " + TextOf(operation.timeout);
  const std::vector<uint32_t> missing = MissingRanks(*operation.task->device);
  if (!missing.empty()) {
    return {Code::kDeadlineExceeded, StreamsOf(missing) + " not come to " + within};
  }
  std::string late;
  for (const Side& side : operation.sides) {
    if (!side.HasEnded()) late += (late.empty() ? "" : ", ") + side.device->text();
  }
  return {Code::kDeadlineExceeded, "every rank's GPU stream has come, but " + late +
                                       (operation.plan.uses_nccl() ? " with NCCL" : "") +
                                       " did not finish " + within};
}

}  // namespace gradsync::cuda

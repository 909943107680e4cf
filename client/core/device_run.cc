#include "client/core/device_run.h"

#include <algorithm>

namespace gradsync {
namespace {

bool Overlap(const std::byte* a, uint64_t a_bytes, const std::byte* b, uint64_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

DeviceRun::DeviceRun(Session* session, DeviceLane* lane, const Collective& what,
                     uint32_t group_size)
    : session_(session),
      lane_(lane),
      what_(what),
      traits_(TraitsOf(what.kind)),
      input_blocks_(traits_.input_per_rank ? group_size : 1),
      output_blocks_(traits_.output_per_rank ? group_size : 1) {
  if (what.count == 0) return;
  plan_ =
      PlanPieces(what.count, DTypeSize(what.dtype), in_place() ? 1 : input_blocks_ + output_blocks_,
                 input_blocks_, kDevicePieceBytes);
}

std::optional<Region> DeviceRun::FindInPlace(const std::byte* data, uint64_t blocks) const {
  // Several blocks that are cut into pieces do not lie together piece by piece.
  if (data == nullptr || (blocks > 1 && plan_->pieces > 1)) return std::nullopt;
  const auto region = session_->Find(data, blocks * block_bytes());
  // The daemon takes aligned memory only; the segments themselves are.
  if (region && region->offset % plan_->element_size != 0) return std::nullopt;
  return region;
}

Status DeviceRun::Prepare() {
  if (!plan_) return OkStatus();
  input_ = FindInPlace(what_.input, input_blocks_);
  output_ = FindInPlace(what_.output, output_blocks_);
  if (in_place()) {
    if (what_.output == nullptr) output_ = input_;
    if (what_.input == nullptr) input_ = output_;
  } else if (what_.input != nullptr && what_.output != nullptr &&
             Overlap(what_.input, input_blocks_ * block_bytes(), what_.output,
                     output_blocks_ * block_bytes())) {
    input_.reset();
  }
  if ((input_ || what_.input == nullptr) && (output_ || what_.output == nullptr)) return OkStatus();
  const uint64_t window = std::min(kDeviceWindow, plan_->pieces);
  Result<std::shared_ptr<SharedBuffer>> staging =
      lane_->Staging(window * std::max(plan_->slot_bytes(), kPieceAlignment));
  if (!staging) return staging.error();
  staging_ = *std::move(staging);
  staging_region_ = *session_->Find(staging_->data(), staging_->size());
  return OkStatus();
}

std::byte* DeviceRun::Slot(uint64_t piece) const {
  return staging_->data() + piece % kDeviceWindow * plan_->slot_bytes();
}

Region DeviceRun::RegionOf(uint64_t piece, const std::optional<Region>& direct,
                           uint64_t staged_offset) const {
  if (direct) {
    return {direct->segment, 0, direct->offset + plan_->first_element(piece) * plan_->element_size};
  }
  if (staging_ == nullptr) return {kNoSegment, 0, 0};  // this rank has no such side
  const auto slot = static_cast<uint64_t>(Slot(piece) - staging_->data());
  return {staging_region_.segment, 0, staging_region_.offset + slot + staged_offset};
}

Status DeviceRun::CopyIn(uint64_t piece) const {
  if (input_ || what_.input == nullptr) return OkStatus();
  const uint64_t bytes = plan_->elements_of(piece) * plan_->element_size;
  const std::byte* from = what_.input + plan_->first_element(piece) * plan_->element_size;
  for (uint64_t block = 0; block < input_blocks_; ++block) {
    GRADSYNC_RETURN_IF_ERROR(lane_->device().Copy(lane_->own_stream(), Slot(piece) + block * bytes,
                                                  from + block * block_bytes(), bytes));
  }
  return OkStatus();
}

Status DeviceRun::CopyOut(uint64_t piece) const {
  if (output_ || what_.output == nullptr) return OkStatus();
  const uint64_t bytes = plan_->elements_of(piece) * plan_->element_size;
  std::byte* to = what_.output + plan_->first_element(piece) * plan_->element_size;
  const std::byte* from = Slot(piece) + output_offset();
  for (uint64_t block = 0; block < output_blocks_; ++block) {
    GRADSYNC_RETURN_IF_ERROR(lane_->device().Copy(lane_->own_stream(), to + block * block_bytes(),
                                                  from + block * bytes, bytes));
  }
  return OkStatus();
}

Submission DeviceRun::MakeSubmission(uint64_t piece) const {
  Submission submission{};
  submission.count = plan_ ? plan_->elements_of(piece) : 0;
  submission.root = what_.root;
  submission.kind = static_cast<uint8_t>(what_.kind);
  submission.dtype = static_cast<uint8_t>(what_.dtype);
  submission.reduce_op = static_cast<uint8_t>(what_.op);
  submission.on_device = 1;
  submission.input = {kNoSegment, 0, 0};
  submission.output = {kNoSegment, 0, 0};
  if (!plan_) return submission;
  submission.input = RegionOf(piece, input_, 0);
  submission.output = RegionOf(piece, output_, output_offset());
  return submission;
}

Status DeviceRun::Enqueue(uint64_t first_sequence, Deadline deadline, const Submit& submit) {
  const uint64_t window = std::min(kDeviceWindow, operations());
  for (uint64_t step = 0; step < operations() + window; ++step) {
    if (step >= window) {
      const uint64_t over = step - window;
      GRADSYNC_RETURN_IF_ERROR(lane_->EnqueueWait(first_sequence + over, lane_->own_stream()));
      if (plan_) GRADSYNC_RETURN_IF_ERROR(CopyOut(over));
    }
    if (step < operations()) {
      if (plan_) GRADSYNC_RETURN_IF_ERROR(CopyIn(step));
      GRADSYNC_RETURN_IF_ERROR(
          lane_->MarkReady(first_sequence + step, lane_->own_stream(), deadline));
      Submission submission = MakeSubmission(step);
      submission.sequence = first_sequence + step;
      GRADSYNC_RETURN_IF_ERROR(submit(submission));
    }
  }
  return OkStatus();
}

}  // namespace gradsync

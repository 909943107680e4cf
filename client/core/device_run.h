// One collective over memory of a GPU, enqueued: the copies to and from memory that the daemon
// sees, where the caller's is not such, and the operations in between.
#ifndef GRADSYNC_CLIENT_CORE_DEVICE_RUN_H_
#define GRADSYNC_CLIENT_CORE_DEVICE_RUN_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "client/core/device_lane.h"
#include "client/core/pieces.h"
#include "client/core/session.h"
#include "shm/session_layout.h"
#include "shm/status.h"
#include "shm/types.h"

namespace gradsync {

// One collective, over memory of the caller.
struct Collective {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  uint32_t root = 0;
  uint64_t count = 0;
  const std::byte* input = nullptr;  // null: this rank gives nothing (broadcast, not the root)
  // Null: this rank takes nothing, or has the result already (broadcast, the root).
  std::byte* output = nullptr;
};

// A piece of a collective on a GPU is of this size: one that is staged takes two pieces' memory,
// and one that is not loses nothing by being cut.
inline constexpr uint64_t kDevicePieceBytes = uint64_t{32} << 20;
inline constexpr uint64_t kDeviceWindow = 2;

class DeviceRun {
 public:
  // Puts one operation into the ring; everything but the memory and what is the group's is filled
  // in.
  using Submit = std::function<Status(Submission)>;

  DeviceRun(Session* session, DeviceLane* lane, const Collective& what, uint32_t group_size);

  uint64_t operations() const { return plan_ ? plan_->pieces : 1; }

  // Decides what is used in place, and gets staging memory for the rest.
  Status Prepare();

  // Enqueues all of it on the lane's own stream, as the operations from `first_sequence` on.
  Status Enqueue(uint64_t first_sequence, Deadline deadline, const Submit& submit);

 private:
  bool in_place() const { return !traits_.input_per_rank && !traits_.output_per_rank; }
  uint64_t block_bytes() const { return what_.count * DTypeSize(what_.dtype); }
  std::optional<Region> FindInPlace(const std::byte* data, uint64_t blocks) const;
  std::byte* Slot(uint64_t piece) const;
  Region RegionOf(uint64_t piece, const std::optional<Region>& direct,
                  uint64_t staged_offset) const;
  uint64_t output_offset() const { return in_place() ? 0 : plan_->input_stride(); }
  Status CopyIn(uint64_t piece) const;
  Status CopyOut(uint64_t piece) const;
  Submission MakeSubmission(uint64_t piece) const;

  Session* const session_;
  DeviceLane* const lane_;
  const Collective& what_;
  const OpTraits& traits_;
  const uint64_t input_blocks_;
  const uint64_t output_blocks_;
  std::optional<PiecePlan> plan_;  // none without elements
  std::optional<Region> input_;    // in place
  std::optional<Region> output_;
  std::shared_ptr<SharedBuffer> staging_;
  Region staging_region_{kNoSegment, 0, 0};
};

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_CORE_DEVICE_RUN_H_

// What each GPU does of an operation. Pure: nothing here calls CUDA or NCCL.
//
// All ranks on one GPU: its own kernel reduces and copies. Several GPUs: one communicator rank per
// GPU, in the order in which the GPUs first come in the group's order; what several ranks on a GPU
// give is put together there first, and what they get is copied there last.
#ifndef GRADSYNC_SERVER_ENGINE_CUDA_PLAN_H_
#define GRADSYNC_SERVER_ENGINE_CUDA_PLAN_H_

#include <nccl.h>

#include <cstdint>
#include <variant>
#include <vector>

#include "server/engine/engine.h"
#include "shm/status.h"
#include "shm/types.h"

namespace gradsync::cuda {

// Ranks that one GPU can have in a reduction: what the kernel's arguments have room for.
inline constexpr uint32_t kMaxRanksPerDevice = 128;

// Where bytes are: at an address of a GPU, or that far into the operation's scratch on it.
struct Place {
  uint64_t at = 0;
  bool in_scratch = false;

  Place operator+(uint64_t bytes) const { return {at + bytes, in_scratch}; }
  bool operator==(const Place&) const = default;
};

// Combines the inputs, as server/engine/cpu/kernels.h says, into every output. An output may be one
// of the inputs.
struct ReduceStep {
  std::vector<Place> inputs;
  std::vector<Place> outputs;
  uint64_t count = 0;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  uint32_t divisor = 1;
  bool operator==(const ReduceStep&) const = default;
};

struct CopyStep {
  Place from;
  Place to;
  uint64_t bytes = 0;
  bool operator==(const CopyStep&) const = default;
};

using Step = std::variant<ReduceStep, CopyStep>;

// A call of NCCL. `count` is what that call takes.
struct Collective {
  enum class Kind : uint8_t { kAllReduce, kAllGather, kReduceScatter, kBroadcast };
  enum class Op : uint8_t { kSum, kProduct, kMin, kMax, kAverage, kScaledSum };

  Kind kind = Kind::kAllReduce;
  Place from;
  Place to;
  uint64_t count = 0;
  ncclDataType_t type = ncclUint8;
  Op op = Op::kSum;
  double scale = 1;  // of kScaledSum: what each rank's input is multiplied by
  int root = 0;
  bool operator==(const Collective&) const = default;
};

struct DevicePlan {
  uint32_t device = 0;
  std::vector<uint32_t> ranks;  // of the task, that are on this GPU; ascending
  uint64_t scratch_bytes = 0;
  // In order. The collectives are one group of NCCL's, so that their own order does not matter.
  std::vector<Step> before;
  std::vector<Collective> collectives;
  std::vector<Step> after;
};

struct Plan {
  std::vector<DevicePlan> devices;  // the communicator's ranks

  bool uses_nccl() const { return !devices.empty() && !devices.front().collectives.empty(); }
};

// Whether there is a plan for such an operation over `devices` (one entry per rank); if not, why,
// in a sentence that follows "operation 3, ...: ". Whether NCCL is there is another question.
Status CheckPlan(OpKind kind, DType dtype, ReduceOp op, const std::vector<uint32_t>& devices);

// Whether such an operation needs NCCL.
bool NeedsNccl(OpKind kind, const std::vector<uint32_t>& devices);

// `task` has a DeviceSide, and passed CheckPlan.
Plan MakePlan(const Task& task);

}  // namespace gradsync::cuda

#endif  // GRADSYNC_SERVER_ENGINE_CUDA_PLAN_H_

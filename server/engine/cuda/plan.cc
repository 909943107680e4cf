#include "server/engine/cuda/plan.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <string>

#include "server/engine/device_engine.h"

namespace gradsync::cuda {
namespace {

// How NCCL carries a type: `lanes` elements of `type` for each of the task's.
struct Carried {
  ncclDataType_t type;
  uint32_t lanes;
};

std::optional<Carried> CarriedAs(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return Carried{ncclFloat32, 1};
    case DType::kFloat64:
      return Carried{ncclFloat64, 1};
    case DType::kFloat16:
      return Carried{ncclFloat16, 1};
    case DType::kBFloat16:
      return Carried{ncclBfloat16, 1};
    case DType::kInt8:
      return Carried{ncclInt8, 1};
    case DType::kUInt8:
    case DType::kBool:
      return Carried{ncclUint8, 1};
    case DType::kInt32:
      return Carried{ncclInt32, 1};
    case DType::kInt64:
      return Carried{ncclInt64, 1};
    case DType::kComplex64:
      return Carried{ncclFloat32, 2};
    case DType::kComplex128:
      return Carried{ncclFloat64, 2};
    case DType::kInt16:
      return std::nullopt;
  }
  return std::nullopt;
}

bool IsComplex(DType dtype) { return dtype == DType::kComplex64 || dtype == DType::kComplex128; }

// How NCCL combines what each GPU's ranks came to. An average is divided there already.
std::optional<Collective::Op> CombinedBy(DType dtype, ReduceOp op) {
  const bool is_bool = dtype == DType::kBool;
  switch (op) {
    case ReduceOp::kSum:
      return is_bool ? Collective::Op::kMax : Collective::Op::kSum;
    case ReduceOp::kAvg:
      return Collective::Op::kSum;
    case ReduceOp::kProduct:
      if (IsComplex(dtype)) return std::nullopt;
      return is_bool ? Collective::Op::kMin : Collective::Op::kProduct;
    case ReduceOp::kMin:
      return Collective::Op::kMin;
    case ReduceOp::kMax:
      return Collective::Op::kMax;
    case ReduceOp::kBitAnd:
      return is_bool ? std::optional(Collective::Op::kMin) : std::nullopt;
    case ReduceOp::kBitOr:
      return is_bool ? std::optional(Collective::Op::kMax) : std::nullopt;
    case ReduceOp::kBitXor:
      return std::nullopt;
  }
  return std::nullopt;
}

bool IsOffered(OpKind kind) {
  switch (kind) {
    case OpKind::kAllReduce:
    case OpKind::kBucketReduce:
    case OpKind::kBroadcast:
    case OpKind::kShare:
    case OpKind::kAllGather:
    case OpKind::kReduceScatter:
    case OpKind::kBarrier:
      return true;
    case OpKind::kReduce:
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kAllToAll:
      return false;
  }
  return false;
}

bool AreSeveral(const std::vector<uint32_t>& devices) {
  return std::any_of(devices.begin(), devices.end(),
                     [&](uint32_t device) { return device != devices.front(); });
}

// Makes the plan of one task.
class Planner {
 public:
  explicit Planner(const Task& task)
      : task_(task),
        ranks_(static_cast<uint32_t>(task.device->parts.size())),
        bytes_(task.count * DTypeSize(task.dtype)) {
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
      DevicePlan& device = DeviceOf(task.device->parts[rank].device);
      device.ranks.push_back(rank);
    }
  }

  Plan Make() && {
    if (task_.count == 0) return std::move(plan_);
    switch (task_.kind) {
      case OpKind::kAllReduce:
      case OpKind::kBucketReduce:
        AllReduce();
        break;
      case OpKind::kReduceScatter:
        ReduceScatter();
        break;
      case OpKind::kAllGather:
        AllGather();
        break;
      case OpKind::kBroadcast:
        Broadcast(task_.root);
        break;
      case OpKind::kShare:
        Broadcast(ranks_ - 1);
        break;
      case OpKind::kBarrier:
      case OpKind::kReduce:
      case OpKind::kGather:
      case OpKind::kScatter:
      case OpKind::kAllToAll:
        break;
    }
    return std::move(plan_);
  }

 private:
  DevicePlan& DeviceOf(uint32_t index) {
    for (DevicePlan& device : plan_.devices) {
      if (device.device == index) return device;
    }
    plan_.devices.emplace_back().device = index;
    return plan_.devices.back();
  }

  Place In(uint32_t rank) const { return {reinterpret_cast<uint64_t>(task_.inputs[rank]), false}; }
  Place Out(uint32_t rank) const { return {reinterpret_cast<uint64_t>(task_.outputs[rank])}; }

  bool IsOneDevice() const { return plan_.devices.size() == 1; }
  bool IsOneRankEach() const { return plan_.devices.size() == ranks_; }

  // Whether device d has the ranks d * n to (d + 1) * n - 1, so that blocks by rank are blocks by
  // device.
  bool IsEvenAndInOrder() const {
    const size_t each = plan_.devices.front().ranks.size();
    for (size_t d = 0; d < plan_.devices.size(); ++d) {
      const std::vector<uint32_t>& ranks = plan_.devices[d].ranks;
      if (ranks.size() != each || ranks.front() != d * each || ranks.back() != (d + 1) * each - 1) {
        return false;
      }
    }
    return true;
  }

  uint32_t Divisor() const { return task_.divisor > 0 ? task_.divisor : ranks_; }

  ReduceStep Reduce(uint64_t count) const {
    ReduceStep step;
    step.count = count;
    step.dtype = task_.dtype;
    step.op = task_.reduce_op;
    step.divisor = Divisor();
    return step;
  }

  // `blocks` blocks from `from` to `to`, moved as bytes.
  void Copy(std::vector<Step>& steps, Place from, Place to, uint64_t blocks = 1) const {
    if (from != to) steps.emplace_back(CopyStep{from, to, blocks * bytes_});
  }

  // A reducing call of NCCL, over what is reduced within each GPU already.
  Collective Combining(Collective::Kind kind, Place from, Place to, uint64_t count) const {
    const Carried carried = *CarriedAs(task_.dtype);
    Collective call;
    call.kind = kind;
    call.from = from;
    call.to = to;
    call.count = count * carried.lanes;
    call.type = carried.type;
    call.op = *CombinedBy(task_.dtype, task_.reduce_op);
    return call;
  }

  // Whether NCCL does it all, from the trainers' memory: one rank per GPU, and no need for a pass
  // of the kernel. It is needed to make every true bool a 1, and where 1 / divisor is rounded as
  // coarsely as the elements: then every element would be off by that.
  bool IsNative() const {
    if (!IsOneRankEach() || task_.dtype == DType::kBool) return false;
    const bool is_coarse = task_.dtype == DType::kFloat16 || task_.dtype == DType::kBFloat16;
    return task_.reduce_op != ReduceOp::kAvg || !is_coarse || std::has_single_bit(Divisor());
  }

  // The same call when nothing is reduced, nor divided, before it.
  Collective Native(Collective::Kind kind, Place from, Place to) const {
    Collective call = Combining(kind, from, to, task_.count);
    if (task_.reduce_op != ReduceOp::kAvg) return call;
    if (task_.dtype == DType::kFloat32 && Divisor() == ranks_) {
      call.op = Collective::Op::kAverage;
    } else {
      call.op = Collective::Op::kScaledSum;
      call.scale = 1.0 / Divisor();
    }
    return call;
  }

  static Collective Moving(Collective::Kind kind, Place from, Place to, uint64_t bytes, int root) {
    Collective call;
    call.kind = kind;
    call.from = from;
    call.to = to;
    call.count = bytes;
    call.root = root;
    return call;
  }

  void AllReduce() {
    const bool is_native = !IsOneDevice() && IsNative();
    for (DevicePlan& device : plan_.devices) {
      const uint32_t first = device.ranks.front();
      if (is_native) {
        device.collectives = {Native(Collective::Kind::kAllReduce, In(first), Out(first))};
        continue;
      }
      ReduceStep reduce = Reduce(task_.count);
      for (uint32_t rank : device.ranks) reduce.inputs.push_back(In(rank));
      if (IsOneDevice()) {
        for (uint32_t rank : device.ranks) reduce.outputs.push_back(Out(rank));
        device.before.emplace_back(std::move(reduce));
        continue;
      }
      reduce.outputs = {Out(first)};
      device.before.emplace_back(std::move(reduce));
      device.collectives = {
          Combining(Collective::Kind::kAllReduce, Out(first), Out(first), task_.count)};
      for (uint32_t rank : device.ranks) Copy(device.after, Out(first), Out(rank));
    }
  }

  void ReduceScatter() {
    if (IsOneDevice()) return ReduceScatterHere();
    if (IsNative()) return ReduceScatterNatively();
    const bool scatters = IsEvenAndInOrder();
    for (size_t d = 0; d < plan_.devices.size(); ++d) {
      DevicePlan& device = plan_.devices[d];
      const uint64_t each = device.ranks.size();
      const Place scratch{0, true};
      device.scratch_bytes = ranks_ * bytes_;
      ReduceStep reduce = Reduce(ranks_ * task_.count);
      for (uint32_t rank : device.ranks) reduce.inputs.push_back(In(rank));
      reduce.outputs = {scratch};
      device.before.emplace_back(std::move(reduce));
      device.collectives = {scatters ? Combining(Collective::Kind::kReduceScatter, scratch,
                                                 scratch + d * each * bytes_, each * task_.count)
                                     : Combining(Collective::Kind::kAllReduce, scratch, scratch,
                                                 ranks_ * task_.count)};
      for (uint32_t rank : device.ranks) Copy(device.after, scratch + rank * bytes_, Out(rank));
    }
  }

  // In rank order: in place, a rank's output is the first block of its input, which the reduction
  // of the first block has read by then.
  void ReduceScatterHere() {
    DevicePlan& device = plan_.devices.front();
    for (uint32_t block = 0; block < ranks_; ++block) {
      ReduceStep reduce = Reduce(task_.count);
      for (uint32_t rank = 0; rank < ranks_; ++rank) {
        reduce.inputs.push_back(In(rank) + block * bytes_);
      }
      reduce.outputs = {Out(block)};
      device.before.emplace_back(std::move(reduce));
    }
  }

  void ReduceScatterNatively() {
    for (DevicePlan& device : plan_.devices) {
      const uint32_t rank = device.ranks.front();
      // NCCL's in place is another: there the output is the rank's own block of the input.
      if (Out(rank) != In(rank) || rank == 0) {
        device.collectives = {Native(Collective::Kind::kReduceScatter, In(rank), Out(rank))};
        continue;
      }
      const Place scratch{0, true};
      device.scratch_bytes = bytes_;
      device.collectives = {Native(Collective::Kind::kReduceScatter, In(rank), scratch)};
      Copy(device.after, scratch, Out(rank));
    }
  }

  // Each GPU puts its ranks' blocks where they belong in the first of its outputs, the others'
  // come there, and the whole goes to its other outputs.
  void AllGather() {
    const bool gathers = IsEvenAndInOrder();
    for (size_t d = 0; d < plan_.devices.size(); ++d) {
      DevicePlan& device = plan_.devices[d];
      const uint32_t first = device.ranks.front();
      const uint64_t each = device.ranks.size();
      const Place all = Out(first);
      const bool is_direct = !IsOneDevice() && each == 1 && gathers && In(first) != all;
      // The last first: in place, the input of the first lies where block 0 belongs.
      for (size_t i = device.ranks.size(); i-- > 0 && !is_direct;) {
        const uint32_t rank = device.ranks[i];
        Copy(device.before, In(rank), all + rank * bytes_);
      }
      if (!IsOneDevice() && gathers) {
        const Place from = is_direct ? In(first) : all + first * bytes_;
        device.collectives = {Moving(Collective::Kind::kAllGather, from, all, each * bytes_, 0)};
      } else if (!IsOneDevice()) {
        for (uint32_t rank = 0; rank < ranks_; ++rank) {
          const Place block = all + rank * bytes_;
          device.collectives.push_back(
              Moving(Collective::Kind::kBroadcast, block, block, bytes_, HomeOf(rank)));
        }
      }
      for (uint32_t rank : device.ranks) Copy(device.after, all, Out(rank), ranks_);
    }
  }

  void Broadcast(uint32_t root) {
    const int home = HomeOf(root);
    for (size_t d = 0; d < plan_.devices.size(); ++d) {
      DevicePlan& device = plan_.devices[d];
      const bool is_home = static_cast<int>(d) == home;
      const Place to = Out(is_home ? root : device.ranks.front());
      if (!IsOneDevice()) {
        device.collectives = {
            Moving(Collective::Kind::kBroadcast, is_home ? In(root) : to, to, bytes_, home)};
      } else {
        Copy(device.before, In(root), to);
      }
      for (uint32_t rank : device.ranks) Copy(device.after, to, Out(rank));
    }
  }

  // The communicator's rank of the GPU that `rank` is on.
  int HomeOf(uint32_t rank) const {
    const uint32_t index = task_.device->parts[rank].device;
    const auto is_it = [&](const DevicePlan& device) { return device.device == index; };
    return static_cast<int>(std::find_if(plan_.devices.begin(), plan_.devices.end(), is_it) -
                            plan_.devices.begin());
  }

  const Task& task_;
  const uint32_t ranks_;
  const uint64_t bytes_;  // of a block
  Plan plan_;
};

}  // namespace

bool NeedsNccl(OpKind kind, const std::vector<uint32_t>& devices) {
  return kind != OpKind::kBarrier && AreSeveral(devices);
}

Status CheckPlan(OpKind kind, DType dtype, ReduceOp op, const std::vector<uint32_t>& devices) {
  if (!IsOffered(kind)) {
    return {Code::kUnsupported,
            std::string(OpKindName(kind)) +
                " is not offered on GPUs; use all_reduce, all_gather, reduce_scatter, broadcast or "
                "barrier, or copy to the machine's memory"};
  }
  if (!TraitsOf(kind).reduces) return OkStatus();
  for (uint32_t device : devices) {
    if (std::count(devices.begin(), devices.end(), device) > kMaxRanksPerDevice) {
      return {Code::kUnsupported, "more than " + std::to_string(kMaxRanksPerDevice) +
                                      " ranks on one GPU cannot be reduced"};
    }
  }
  if (AreSeveral(devices) && (!CarriedAs(dtype) || !CombinedBy(dtype, op))) {
    return {Code::kUnsupported, std::string(ReduceOpName(op)) + " of " + DTypeName(dtype) +
                                    " is not offered over several GPUs, since NCCL has none; copy "
                                    "to the machine's memory, or to another type"};
  }
  return OkStatus();
}

Plan MakePlan(const Task& task) { return Planner(task).Make(); }

}  // namespace gradsync::cuda

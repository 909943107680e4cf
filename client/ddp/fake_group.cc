#include "client/ddp/fake_group.h"

#include <chrono>
#include <cstring>
#include <numeric>
#include <utility>

namespace gradsync {
namespace {

// Nothing waits this long unless something is broken.
constexpr std::chrono::seconds kPatience(30);

class FakeBuffer : public SharedBuffer {
 public:
  explicit FakeBuffer(uint64_t bytes) : bytes_(bytes), lines_((bytes + 63) / 64) {}
  std::byte* data() const override { return lines_.data()->bytes; }
  uint64_t size() const override { return bytes_; }

 private:
  struct alignas(64) Line {
    std::byte bytes[64] = {};
  };
  uint64_t bytes_;
  mutable std::vector<Line> lines_;
};

std::vector<uint32_t> Identity(uint32_t size) {
  std::vector<uint32_t> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0U);
  return ranks;
}

// The engine's association: float32 is summed in rank order and divided, float64 pre-divided.
template <typename T, bool kPreDivide>
void Average(const std::vector<T*>& inputs, uint64_t count, size_t divisor) {
  const auto size = static_cast<T>(divisor);
  for (uint64_t i = 0; i < count; ++i) {
    T sum = kPreDivide ? inputs[0][i] / size : inputs[0][i];
    for (size_t rank = 1; rank < inputs.size(); ++rank) {
      sum += kPreDivide ? inputs[rank][i] / size : inputs[rank][i];
    }
    for (T* output : inputs) output[i] = kPreDivide ? sum : sum / size;
  }
}

void Add(const std::vector<int32_t*>& inputs, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    int32_t sum = 0;
    for (const int32_t* input : inputs) sum += input[i];
    for (int32_t* output : inputs) output[i] = sum;
  }
}

}  // namespace

FakeNetwork::FakeNetwork(uint32_t size) : FakeNetwork(Identity(size)) {}

FakeNetwork::FakeNetwork(std::vector<uint32_t> job_ranks)
    : job_ranks_(std::move(job_ranks)), logs_(job_ranks_.size()) {}

void FakeNetwork::Run(const std::function<void(std::shared_ptr<Group>)>& body) {
  std::vector<std::thread> threads;
  for (uint32_t member = 0; member < job_ranks_.size(); ++member) {
    threads.emplace_back([this, member, &body] {
      body(std::make_shared<FakeGroup>(this, member));
      Leave(member);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void FakeNetwork::FailNextAllocation(uint32_t member) {
  const std::lock_guard<std::mutex> lock(mutex_);
  failing_allocations_.insert(member);
}

void FakeNetwork::Submit(uint32_t member, uint64_t sequence, const FakeOperation& operation,
                         Share share) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Pending& pending = pending_[sequence];
  if (!pending.shares.empty() && pending.operation != operation) {
    FailLocked({Code::kMismatch, "member " + std::to_string(member) +
                                     " submitted something else as operation " +
                                     std::to_string(sequence)});
  }
  if (sequence < completed_ || pending.shares.contains(member)) {
    FailLocked({Code::kInternal, "operation " + std::to_string(sequence) + " submitted twice"});
  }
  pending.operation = operation;
  pending.shares[member] = share;
  RunReady();
  FailOrphans();
}

void FakeNetwork::RunReady() {
  while (failure_.ok()) {
    const auto next = pending_.find(completed_);
    if (next == pending_.end()) return;
    if (next->second.shares.size() + aside_.size() < job_ranks_.size()) return;
    Status status = Execute(next->second);
    if (!status.ok()) FailLocked(std::move(status));
    pending_.erase(next);
    ++completed_;
    changed_.notify_all();
  }
}

Status FakeNetwork::Execute(const Pending& pending) const {
  const FakeOperation& operation = pending.operation;
  const uint64_t bytes = operation.count * DTypeSize(operation.dtype);
  const size_t present = pending.shares.size();
  const size_t divisor =
      aside_policy_ == AsidePolicy::kAverageOverPresent ? present : job_ranks_.size();
  if (present < job_ranks_.size() && aside_policy_ == AsidePolicy::kForbid) {
    return {Code::kFailedPrecondition, "a rank exhausted its input"};
  }
  if (operation.kind == OpKind::kShare) {
    const void* last = pending.shares.rbegin()->second.input;
    for (const auto& [member, share] : pending.shares) {
      if (share.output != last) std::memcpy(share.output, last, bytes);
    }
    return OkStatus();
  }
  if (present < job_ranks_.size() && operation.kind != OpKind::kAllReduce &&
      operation.kind != OpKind::kBucketReduce && operation.kind != OpKind::kBarrier) {
    return {Code::kFailedPrecondition, "an operation needs every rank, but one stands aside"};
  }
  if (operation.kind == OpKind::kBroadcast) {
    const void* root = pending.shares.at(operation.root).input;
    for (const auto& [member, share] : pending.shares) {
      if (member != operation.root) std::memcpy(share.output, root, bytes);
    }
    return OkStatus();
  }
  if (operation.kind == OpKind::kAllGather) {
    for (const auto& [to, receiver] : pending.shares) {
      for (const auto& [from, sender] : pending.shares) {
        std::memcpy(static_cast<std::byte*>(receiver.output) + from * bytes, sender.input, bytes);
      }
    }
    return OkStatus();
  }
  if (operation.kind == OpKind::kBarrier) return OkStatus();
  if (operation.reduce_op == ReduceOp::kAvg && operation.dtype == DType::kFloat32) {
    std::vector<float*> data;
    for (const auto& [member, share] : pending.shares) {
      data.push_back(static_cast<float*>(share.output));
    }
    Average<float, false>(data, operation.count, divisor);
    return OkStatus();
  }
  if (operation.reduce_op == ReduceOp::kAvg && operation.dtype == DType::kFloat64) {
    std::vector<double*> data;
    for (const auto& [member, share] : pending.shares) {
      data.push_back(static_cast<double*>(share.output));
    }
    Average<double, true>(data, operation.count, divisor);
    return OkStatus();
  }
  if (operation.reduce_op == ReduceOp::kSum && operation.dtype == DType::kInt32) {
    std::vector<int32_t*> data;
    for (const auto& [member, share] : pending.shares) {
      data.push_back(static_cast<int32_t*>(share.output));
    }
    Add(data, operation.count);
    return OkStatus();
  }
  return {Code::kUnsupported, "the fake group averages float32 and float64, and adds int32, only"};
}

Status FakeNetwork::WaitFor(uint64_t sequence) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool settled =
      changed_.wait_for(lock, kPatience, [&] { return completed_ > sequence || !failure_.ok(); });
  if (!settled) {
    FailLocked({Code::kDeadlineExceeded, "operation " + std::to_string(sequence) + " never ran"});
  }
  return completed_ > sequence ? OkStatus() : failure_;
}

uint64_t FakeNetwork::StandAside(uint32_t member, uint64_t next_sequence, AsidePolicy policy) {
  const std::lock_guard<std::mutex> lock(mutex_);
  aside_policy_ = policy;
  aside_[member] = next_sequence;
  RunReady();
  if (aside_.size() < job_ranks_.size()) return rejoinings_;
  rejoined_ = {0, 0};
  for (const auto& [who, next] : aside_) {
    if (next >= rejoined_.first) rejoined_ = {next, who};
  }
  aside_.clear();
  changed_.notify_all();
  return rejoinings_++;
}

Result<std::pair<uint64_t, uint32_t>> FakeNetwork::Rejoin(uint64_t before) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool settled =
      changed_.wait_for(lock, kPatience, [&] { return rejoinings_ > before || !failure_.ok(); });
  if (!settled) FailLocked({Code::kDeadlineExceeded, "some member never stood aside"});
  if (!failure_.ok()) return Unexpected(failure_);
  return rejoined_;
}

void FakeNetwork::Leave(uint32_t member) {
  const std::lock_guard<std::mutex> lock(mutex_);
  gone_.insert(member);
  FailOrphans();
}

// Whoever waits for what a member that is gone has not submitted would wait for ever.
void FakeNetwork::FailOrphans() {
  for (const auto& [sequence, pending] : pending_) {
    for (const uint32_t member : gone_) {
      if (pending.shares.contains(member) || aside_.contains(member)) continue;
      FailLocked({Code::kRankLost, "rank " + std::to_string(job_ranks_[member]) + " has left"});
    }
  }
}

void FakeNetwork::Fail(Status why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  FailLocked(std::move(why));
}

void FakeNetwork::FailLocked(Status why) {
  if (failure_.ok()) failure_ = std::move(why);
  changed_.notify_all();
}

Status FakeGroup::Failure() const {
  const std::lock_guard<std::mutex> lock(network_->mutex_);
  return network_->failure_;
}

Status FakeGroup::Collective(const FakeOperation& operation, const void* input, void* output) {
  ++network_->logs_[member_].collectives;
  const uint64_t sequence = next_sequence_++;
  network_->Submit(member_, sequence, operation, {input, output});
  return network_->WaitFor(sequence);
}

Status FakeGroup::AllReduce(void* data, uint64_t count, DType dtype, ReduceOp op,
                            Timeout /*timeout*/) {
  return Collective({.kind = OpKind::kAllReduce, .count = count, .dtype = dtype, .reduce_op = op},
                    data, data);
}

Status FakeGroup::Broadcast(void* data, uint64_t count, DType dtype, uint32_t root,
                            Timeout /*timeout*/) {
  return Collective({.kind = OpKind::kBroadcast, .count = count, .dtype = dtype, .root = root},
                    data, data);
}

Status FakeGroup::AllGather(const void* input, void* output, uint64_t count, DType dtype,
                            Timeout /*timeout*/) {
  return Collective({.kind = OpKind::kAllGather, .count = count, .dtype = dtype}, input, output);
}

Status FakeGroup::Barrier(Timeout /*timeout*/) {
  return Collective({.kind = OpKind::kBarrier}, nullptr, nullptr);
}

Status FakeGroup::Share(void* data, uint64_t count, DType dtype, Timeout /*timeout*/) {
  return Collective({.kind = OpKind::kShare, .count = count, .dtype = dtype}, data, data);
}

Status FakeGroup::StandAside(AsidePolicy policy, Timeout /*timeout*/) {
  rejoinings_before_ = network_->StandAside(member_, next_sequence_, policy);
  return OkStatus();
}

Result<uint32_t> FakeGroup::Rejoin() {
  const Result<std::pair<uint64_t, uint32_t>> rejoined = network_->Rejoin(rejoinings_before_);
  if (!rejoined) return Unexpected(rejoined.error());
  next_sequence_ = rejoined->first;
  return rejoined->second;
}

Result<std::shared_ptr<SharedBuffer>> FakeGroup::Allocate(uint64_t bytes, const std::string& label,
                                                          uint32_t device) {
  if (device != kCpu) return Unexpected(Code::kUnsupported, "the fake has no GPU");
  {
    const std::lock_guard<std::mutex> lock(network_->mutex_);
    if (network_->failing_allocations_.erase(member_) > 0) {
      return Unexpected(Code::kOutOfMemory, "no memory for " + label);
    }
  }
  network_->logs_[member_].allocated.push_back(bytes);
  return std::make_shared<FakeBuffer>(bytes);
}

Status FakeGroup::DescribeBucket(const BucketInfo& info) {
  network_->logs_[member_].described.push_back(info);
  return OkStatus();
}

uint64_t FakeGroup::ReserveSequences(uint32_t count) {
  return std::exchange(next_sequence_, next_sequence_ + count);
}

Status FakeGroup::SubmitBucket(uint64_t sequence, const BucketInfo& info,
                               const SharedBuffer& buffer, uint64_t offset, ReduceOp op,
                               Timeout /*timeout*/, Stream /*stream*/) {
  if (offset % 64 != 0 || offset + info.count * DTypeSize(info.dtype) > buffer.size()) {
    return {Code::kInvalidArgument, "a bucket lies askew, or outside its buffer"};
  }
  GRADSYNC_RETURN_IF_ERROR(CheckUsable());
  network_->logs_[member_].bucket_sequences.push_back(sequence);
  std::byte* data = buffer.data() + offset;
  network_->Submit(member_, sequence,
                   {.kind = OpKind::kBucketReduce,
                    .count = info.count,
                    .dtype = info.dtype,
                    .reduce_op = op,
                    .bucket = info.index},
                   {data, data});
  return OkStatus();
}

Status FakeGroup::SubmitAllReduce(uint64_t sequence, uint64_t count, DType dtype,
                                  const SharedBuffer& buffer, uint64_t offset, ReduceOp op,
                                  Timeout /*timeout*/) {
  GRADSYNC_RETURN_IF_ERROR(CheckUsable());
  ++network_->logs_[member_].all_reduces;
  std::byte* data = buffer.data() + offset;
  network_->Submit(member_, sequence,
                   {.kind = OpKind::kAllReduce, .count = count, .dtype = dtype, .reduce_op = op},
                   {data, data});
  return OkStatus();
}

Status FakeGroup::Wait(uint64_t sequence, Timeout /*timeout*/) {
  return network_->WaitFor(sequence);
}

Status FakeGroup::EnqueueWait(uint64_t /*sequence*/, uint32_t /*device*/, Stream /*stream*/) {
  return {Code::kUnsupported, "the fake has no GPU"};
}

Status FakeGroup::CopyOnDevice(uint32_t /*device*/, std::span<const DeviceCopy> /*copies*/,
                               Stream /*stream*/) {
  return {Code::kUnsupported, "the fake has no GPU"};
}

void FakeGroup::Abort(const Status& why) { network_->Fail(why); }

}  // namespace gradsync

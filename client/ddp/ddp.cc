#include "client/ddp/ddp.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "client/ddp/sentences.h"

namespace gradsync {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kDefaultBucketBytes = 25 * kMiB;
constexpr uint64_t kDefaultFirstBucketBytes = kMiB;

DdpOptions WithDefaults(DdpOptions options) {
  if (options.first_bucket_bytes == 0) {
    options.first_bucket_bytes =
        options.bucket_bytes != 0 ? options.bucket_bytes : kDefaultFirstBucketBytes;
  }
  if (options.bucket_bytes == 0) options.bucket_bytes = kDefaultBucketBytes;
  return options;
}

Digest CapsDigest(std::span<const uint64_t> caps) {
  DigestBuilder digest;
  for (const uint64_t cap : caps) digest.Add(cap);
  return digest.Finish();
}

std::vector<BucketInfo> DescribeBuckets(const BucketPlan& plan,
                                        std::span<const ParameterSpec> parameters) {
  std::vector<BucketInfo> infos;
  infos.reserve(plan.buckets.size());
  for (const PlannedBucket& bucket : plan.buckets) {
    BucketInfo& info = infos.emplace_back();
    info.index = static_cast<uint32_t>(infos.size() - 1);
    info.bucket_count = static_cast<uint32_t>(plan.buckets.size());
    info.parameter_count = static_cast<uint32_t>(bucket.parameters.size());
    info.count = bucket.count;
    info.dtype = bucket.dtype;
    info.parameters = parameters[bucket.parameters.front()].name;
    if (bucket.parameters.size() > 1) {
      info.parameters += " ... " + parameters[bucket.parameters.back()].name;
    }
  }
  return infos;
}

Status OutOfRange(const char* what, uint32_t index, uint32_t count) {
  return {Code::kInvalidArgument, std::string("there is no ") + what + " " + std::to_string(index) +
                                      ": there are " + std::to_string(count)};
}

Status OutOfOrder(const char* call) {
  return {Code::kFailedPrecondition,
          std::string(call) + " was called outside an iteration; call begin before backward"};
}

}  // namespace

Result<std::unique_ptr<Ddp>> Ddp::Create(std::shared_ptr<Group> group,
                                         std::vector<ParameterSpec> parameters,
                                         const DdpOptions& options) {
  std::unique_ptr<Ddp> ddp(new Ddp(std::move(group), std::move(parameters), options));
  GRADSYNC_RETURN_IF_ERROR(AgreeOnModel(*ddp->group_, ddp->parameters_, ddp->Settings(),
                                        CheckParameters(ddp->parameters_), options.timeout));
  Result<Layout> layout = ddp->Prepare(ddp->FirstPlan());
  if (!layout) return Unexpected(layout.error());
  GRADSYNC_RETURN_IF_ERROR(ddp->Adopt(*std::move(layout)));
  return ddp;
}

Ddp::Ddp(std::shared_ptr<Group> group, std::vector<ParameterSpec> parameters,
         const DdpOptions& options)
    : group_(std::move(group)),
      parameters_(std::move(parameters)),
      options_(WithDefaults(options)),
      device_(parameters_.empty() ? kCpu : parameters_.front().device),
      may_replan_(!options.fixed_plan) {}

Ddp::~Ddp() {
  // What was handed over can never be completed, and the others wait for it.
  if (!Unready().empty()) static_cast<void>(LeaveIteration());
}

PlanSettings Ddp::Settings() const {
  return {.first_bucket_bytes = options_.first_bucket_bytes,
          .bucket_bytes = options_.bucket_bytes,
          .fixed_plan = options_.fixed_plan,
          .caps = CapsDigest(options_.bucket_bytes_list),
          .fill_from_front = options_.fill_from_front,
          .on_gpu = device_ != kCpu};
}

std::vector<uint64_t> Ddp::Caps() const {
  if (!options_.bucket_bytes_list.empty()) return options_.bucket_bytes_list;
  return {options_.first_bucket_bytes, options_.bucket_bytes};
}

BucketPlan Ddp::FirstPlan() const {
  if (options_.fill_from_front) return PlanBucketsFromFront(parameters_, Caps());
  return PlanBuckets(parameters_, ReversedOrder(parameter_count()), Caps());
}

Result<Ddp::Layout> Ddp::Prepare(BucketPlan plan) {
  Layout layout{.plan = std::move(plan)};
  layout.infos = DescribeBuckets(layout.plan, parameters_);
  Result<std::shared_ptr<SharedBuffer>> buffer =
      group_->Allocate(layout.plan.bytes, "gradients", device_);
  GRADSYNC_RETURN_IF_ERROR(AgreeOnPlan(*group_, PlanDigest(layout.plan),
                                       buffer ? OkStatus() : buffer.error(), options_.timeout));
  layout.buffer = *std::move(buffer);
  return layout;
}

Status Ddp::Adopt(Layout layout) {
  for (const BucketInfo& info : layout.infos) {
    Status described = PutOff(group_->DescribeBucket(info));
    if (described.ok()) continue;
    group_->Abort(described);  // the others have agreed, and would wait for this rank's buckets
    return described;
  }
  layout_ = std::move(layout);
  readiness_ = Readiness(layout_.plan);
  waited_.assign(bucket_count(), 0);
  skipped_.assign(bucket_count(), 0);
  sequences_.assign(bucket_count(), 0);
  return OkStatus();
}

Status Ddp::CheckBeforeFirstIteration(const char* call) const {
  if (!failure_.ok()) return failure_;
  if (iterations_ == 0 && (phase_ == Phase::kIdle || !readiness_.any_ready())) return OkStatus();
  return {Code::kFailedPrecondition,
          std::string(call) + " was called after training had begun; call it before"};
}

Status Ddp::SetUnusedPolicy(UnusedPolicy policy) {
  GRADSYNC_RETURN_IF_ERROR(CheckBeforeFirstIteration("set_unused_policy"));
  if (policy != UnusedPolicy::kError && use_ == nullptr) {
    Result<std::shared_ptr<SharedBuffer>> use =
        group_->Allocate(parameter_count() * sizeof(int32_t), "used parameters", kCpu);
    if (!use) {
      group_->Abort(use.error());  // the other ranks would wait for this one's part
      return Fail(use.error());
    }
    use_ = *std::move(use);
    used_here_.assign(parameter_count(), 0);
    used_by_.assign(parameter_count(), 0);
  }
  policy_ = policy;
  may_replan_ = !options_.fixed_plan && policy != UnusedPolicy::kFind;
  return OkStatus();
}

Status Ddp::ReduceElsewhere() {
  GRADSYNC_RETURN_IF_ERROR(CheckBeforeFirstIteration("reduce_elsewhere"));
  reduces_elsewhere_ = true;
  return OkStatus();
}

Status Ddp::Skip(uint32_t bucket) {
  if (!failure_.ok()) return failure_;
  if (phase_ != Phase::kIterating) return OutOfOrder("skip");
  if (bucket >= bucket_count()) return OutOfRange("bucket", bucket, bucket_count());
  if (readiness_.any_ready()) {
    return {Code::kFailedPrecondition,
            "skip was called while gradients were being handed over; call it before the first"};
  }
  skipped_[bucket] = 1;
  return OkStatus();
}

Result<Slot> Ddp::GetSlot(uint32_t parameter) const {
  if (parameter >= parameter_count()) {
    return Unexpected(OutOfRange("parameter", parameter, parameter_count()));
  }
  const PlannedSlot& slot = layout_.plan.slots[parameter];
  return Slot{.data = layout_.buffer->data() + slot.offset,
              .count = ElementCount(parameters_[parameter]),
              .bucket = slot.bucket};
}

Result<Bucket> Ddp::GetBucket(uint32_t index) const {
  if (index >= bucket_count()) return Unexpected(OutOfRange("bucket", index, bucket_count()));
  const PlannedBucket& bucket = layout_.plan.buckets[index];
  return Bucket{.data = layout_.buffer->data() + bucket.offset,
                .count = bucket.count,
                .dtype = bucket.dtype,
                .parameters = bucket.parameters};
}

Status Ddp::Begin() {
  GRADSYNC_RETURN_IF_ERROR(LeaveIteration());
  GRADSYNC_RETURN_IF_ERROR(PutOff(group_->CheckUsable()));
  readiness_.Reset();
  waited_.assign(waited_.size(), 0);
  waited_count_ = 0;
  has_sequences_ = false;
  std::fill(skipped_.begin(), skipped_.end(), uint8_t{0});
  std::fill(used_here_.begin(), used_here_.end(), uint8_t{0});
  phase_ = Phase::kIterating;
  return OkStatus();
}

// To be between iterations: at once if nothing became ready in the current one. Otherwise the other
// ranks wait, or will, for buckets that this one can never bring into step again.
Status Ddp::LeaveIteration() {
  if (!failure_.ok()) return failure_;
  if (phase_ == Phase::kIterating && readiness_.any_ready()) {
    if (readiness_.all_ready() && !put_off_.ok()) return Fail(put_off_);
    const std::vector<uint32_t> unready = readiness_.Unready();
    const auto unfinished = [&](size_t names_limit) {
      return Status(Code::kFailedPrecondition,
                    UnfinishedSentence(parameters_, unready, rank(), policy_, names_limit));
    };
    group_->Abort(unfinished(kGroupNamesLimit));
    return Fail(unfinished(kErrorNamesLimit));
  }
  phase_ = Phase::kIdle;
  return OkStatus();
}

Status Ddp::Fail(Status status) {
  failure_ = std::move(status);
  return failure_;
}

// The others wait for what this rank cannot do.
Status Ddp::FailEverywhere(Status status) {
  group_->Abort(status);
  return Fail(std::move(status));
}

Status Ddp::PutOff(Status status) {
  // The group keeps its first failure, and this is the code of LeaveIteration's.
  if (status.ok() || group_->Failure().code() != Code::kFailedPrecondition) return status;
  put_off_ = std::move(status);
  return OkStatus();
}

Result<bool> Ddp::Ready(uint32_t parameter) { return MarkReady(parameter, true); }

Result<bool> Ddp::ReadyUnused(uint32_t parameter) { return MarkReady(parameter, false); }

Result<bool> Ddp::MarkReady(uint32_t parameter, bool used) {
  if (!failure_.ok()) return Unexpected(failure_);
  if (phase_ != Phase::kIterating) return Unexpected(OutOfOrder("ready"));
  if (parameter >= parameter_count()) {
    return Unexpected(OutOfRange("parameter", parameter, parameter_count()));
  }
  const Readiness::Event event = readiness_.MarkReady(parameter);
  if (event == Readiness::Event::kAlreadyReady) {
    return Unexpected(Code::kFailedPrecondition,
                      ReadyTwiceSentence(parameters_[parameter], parameter));
  }
  if (use_ != nullptr && used) used_here_[parameter] = 1;
  if (event == Readiness::Event::kCounted) return false;
  GRADSYNC_RETURN_IF_ERROR(SubmitBucket(readiness_.BucketOf(parameter)));
  if (!readiness_.all_ready()) return false;
  if (combines_use()) GRADSYNC_RETURN_IF_ERROR(SubmitUse());
  return true;
}

// Buckets are numbered in index order, so the numbers are taken together, before the first of them
// is handed over in whatever order.
void Ddp::ReserveSequences() {
  if (std::exchange(has_sequences_, true)) return;
  uint32_t count = 0;
  for (uint32_t bucket = 0; bucket < bucket_count(); ++bucket) {
    sequences_[bucket] = count;
    if (skipped_[bucket] == 0 && !reduces_elsewhere_) ++count;
  }
  const uint64_t base = group_->ReserveSequences(count + (combines_use() ? 1 : 0));
  for (uint64_t& sequence : sequences_) sequence += base;
  use_sequence_ = base + count;
}

Status Ddp::SubmitBucket(uint32_t bucket) {
  ReserveSequences();
  if (skipped_[bucket] != 0 || reduces_elsewhere_) return OkStatus();
  const Status status = PutOff(group_->SubmitBucket(
      sequences_[bucket], layout_.infos[bucket], *layout_.buffer,
      layout_.plan.buckets[bucket].offset, ReduceOp::kAvg, options_.timeout, stream_));
  return status.ok() ? status : FailEverywhere(status);
}

// Behind the last bucket: whether it was used, of each parameter, for the ranks to add up.
Status Ddp::SubmitUse() {
  auto* counts = reinterpret_cast<int32_t*>(use_->data());
  std::copy(used_here_.begin(), used_here_.end(), counts);
  const Status status =
      PutOff(group_->SubmitAllReduce(use_sequence_, parameter_count(), DType::kInt32, *use_,
                                     /*offset=*/0, ReduceOp::kSum, options_.timeout));
  return status.ok() ? status : Fail(status);
}

Status Ddp::WaitForUse() {
  Status status = group_->Wait(use_sequence_, options_.timeout);
  if (!status.ok()) return Fail(std::move(status));
  std::memcpy(used_by_.data(), use_->data(), used_by_.size() * sizeof(int32_t));
  return OkStatus();
}

uint32_t Ddp::UsedBy(uint32_t parameter) const {
  if (use_ == nullptr || parameter >= parameter_count()) return group_->size();
  return static_cast<uint32_t>(used_by_[parameter]);
}

Status Ddp::Wait(uint32_t bucket) {
  if (!failure_.ok()) return failure_;
  if (phase_ != Phase::kIterating) return OutOfOrder("wait");
  if (bucket >= bucket_count()) return OutOfRange("bucket", bucket, bucket_count());
  if (!readiness_.IsBucketComplete(bucket)) {
    std::vector<uint32_t> missing;
    for (const uint32_t parameter : layout_.plan.buckets[bucket].parameters) {
      if (!readiness_.IsReady(parameter)) missing.push_back(parameter);
    }
    return {Code::kFailedPrecondition, BucketNotReadySentence(parameters_, bucket, missing)};
  }
  if (waited_[bucket] != 0) return OkStatus();
  if (!put_off_.ok()) return Fail(put_off_);
  if (combines_use() && bucket + 1 == bucket_count() && !readiness_.all_ready()) {
    return {Code::kFailedPrecondition,
            "the last bucket was waited for before every parameter was ready"};
  }
  GRADSYNC_RETURN_IF_ERROR(AwaitBucket(bucket));
  waited_[bucket] = 1;
  ++waited_count_;
  return OkStatus();
}

Status Ddp::AwaitBucket(uint32_t bucket) {
  const bool is_handed_over = skipped_[bucket] == 0 && !reduces_elsewhere_;
  if (device_ != kCpu && is_handed_over) {
    Status status = group_->EnqueueWait(sequences_[bucket], device_, stream_);
    if (!status.ok()) return FailEverywhere(std::move(status));
  }
  // Operations complete in order, so that what comes behind the last bucket says it is there too.
  if (combines_use() && bucket + 1 == bucket_count()) return WaitForUse();
  if (device_ != kCpu || !is_handed_over) return OkStatus();
  Status status = group_->Wait(sequences_[bucket], options_.timeout);
  return status.ok() ? status : Fail(std::move(status));
}

Status Ddp::End() {
  if (!failure_.ok()) return failure_;
  if (phase_ != Phase::kIterating) return OutOfOrder("end");
  if (waited_count_ != bucket_count()) {
    return {Code::kFailedPrecondition, "end was called after " + std::to_string(waited_count_) +
                                           " of " + std::to_string(bucket_count()) +
                                           " buckets have been waited for"};
  }
  if (may_replan_ && first_order_.empty()) {
    first_order_.assign(readiness_.order().begin(), readiness_.order().end());
  }
  phase_ = Phase::kIdle;
  ++iterations_;
  return OkStatus();
}

Result<bool> Ddp::Replan() {
  GRADSYNC_RETURN_IF_ERROR(LeaveIteration());
  // The same on every rank, or they would not make the same collectives: all have ended as many
  // iterations, and their options have been compared.
  if (!may_replan_ || first_order_.empty()) return false;
  may_replan_ = false;
  const Result<bool> complete = IsEverybodyHere();
  if (!complete) return Unexpected(Fail(complete.error()));
  if (!*complete) return false;
  const Result<std::vector<uint32_t>> order = FirstRanksOrder();
  if (!order) return Unexpected(Fail(order.error()));
  return MoveTo(PlanBuckets(parameters_, *order, Caps()));
}

Result<bool> Ddp::MoveTo(BucketPlan plan) {
  if (plan == layout_.plan) {
    const Status agreed = AgreeOnPlan(*group_, PlanDigest(plan), OkStatus(), options_.timeout);
    if (!agreed.ok()) return Unexpected(Fail(agreed));
    return false;
  }
  Result<Layout> layout = Prepare(std::move(plan));
  // Every rank has the same answer, so all stay together, where they are.
  if (!layout && layout.error().code() == Code::kOutOfMemory) return false;
  if (!layout) return Unexpected(Fail(layout.error()));
  if (Status moved = MoveGradients(*layout); !moved.ok()) {
    return Unexpected(FailEverywhere(std::move(moved)));
  }
  Status adopted = Adopt(*std::move(layout));
  if (!adopted.ok()) return Unexpected(Fail(std::move(adopted)));
  return true;
}

// A rank that stands aside cannot move its gradients along, nor say in which order it had them.
Result<bool> Ddp::IsEverybodyHere() {
  int32_t here = 1;
  GRADSYNC_RETURN_IF_ERROR(
      group_->AllReduce(&here, 1, DType::kInt32, ReduceOp::kSum, options_.timeout));
  return here == static_cast<int32_t>(group_->size());
}

Result<std::vector<uint32_t>> Ddp::FirstRanksOrder() {
  std::vector<uint32_t> order = std::exchange(first_order_, {});
  GRADSYNC_RETURN_IF_ERROR(
      group_->Broadcast(order.data(), order.size(), DType::kInt32, /*root=*/0, options_.timeout));
  if (!IsPermutation(order, parameter_count())) {
    return Unexpected(Code::kInternal, "rank " + std::to_string(group_->job_rank(0)) +
                                           " sent an order of parameters that is not one");
  }
  return order;
}

Status Ddp::MoveGradients(const Layout& target) const {
  std::vector<DeviceCopy> copies;
  copies.reserve(parameter_count());
  for (uint32_t i = 0; i < parameter_count(); ++i) {
    const PlannedSlot& from = layout_.plan.slots[i];
    const PlannedSlot& to = target.plan.slots[i];
    copies.push_back(
        {target.buffer->data() + to.offset, layout_.buffer->data() + from.offset, to.bytes});
  }
  if (device_ != kCpu) return group_->CopyOnDevice(device_, copies, stream_);
  for (const DeviceCopy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
  return OkStatus();
}

Status Ddp::StandAside(AsidePolicy policy) {
  if (reduces_elsewhere_ || policy_ == UnusedPolicy::kStatic) {
    return {Code::kUnsupported,
            "a rank cannot stand aside where buckets are reduced elsewhere, or in a static graph"};
  }
  GRADSYNC_RETURN_IF_ERROR(LeaveIteration());
  may_replan_ = false;  // as on the ranks that go on
  return group_->StandAside(policy, options_.timeout);
}

Status Ddp::Renew() {
  if (!failure_.ok()) return failure_;
  if (phase_ == Phase::kIterating && readiness_.any_ready()) {
    return {Code::kFailedPrecondition,
            "renew was called while gradients were being handed over; call it before the first"};
  }
  Result<std::shared_ptr<SharedBuffer>> buffer =
      group_->Allocate(layout_.plan.bytes, "gradients", device_);
  if (!buffer) return buffer.error();
  layout_.buffer = *std::move(buffer);
  return OkStatus();
}

std::vector<uint32_t> Ddp::Unready() const {
  return phase_ == Phase::kIterating ? readiness_.Unready() : std::vector<uint32_t>();
}

}  // namespace gradsync

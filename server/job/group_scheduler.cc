#include "server/job/group_scheduler.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/job/describe.h"

namespace gradsync {
namespace {

// A text that listed what each of many ranks did would bury the rest.
constexpr size_t kMaxRanksInDetail = 6;

std::shared_ptr<Task> MakeTask(const Operation& operation, size_t members) {
  auto task = std::make_shared<Task>();
  task->kind = operation.kind;
  task->dtype = operation.dtype;
  task->reduce_op = operation.reduce_op;
  task->root = operation.root;
  task->count = operation.count;
  task->inputs.resize(members);
  task->outputs.resize(members);
  task->keep_alive.resize(members);
  if (operation.on_device) {
    task->device = std::make_shared<DeviceSide>();
    task->device->sequence = operation.sequence;
    task->device->parts.resize(members);
  }
  return task;
}

}  // namespace

GroupScheduler::GroupScheduler(const std::string& job, const std::string& tag,
                               std::vector<uint32_t> ranks, uint64_t id)
    : id_(id),
      tag_(tag),
      where_(absl::StrCat("job ", job, ", group ", tag)),
      ranks_(std::move(ranks)),
      asides_(ranks_.size()),
      plan_(ranks_) {
  members_.reserve(ranks_.size());
  for (const uint32_t rank : ranks_) {
    everybody_.set(members_.size());
    members_.push_back({.rank = rank});
  }
}

Decision GroupScheduler::Submit(uint32_t member, const Operation& operation, MemberBuffers buffers,
                                Time now) {
  Decision decision;
  if (!failure_.ok()) return decision;
  decision.rejected = CheckSequence(member, operation);
  if (!decision.rejected.ok()) return decision;
  members_[member].has_submitted = true;
  members_[member].last = operation;
  members_[member].last_time = now;
  asides_.Touch(now);

  Pending& pending = pending_[operation.sequence];
  if (pending.arrived_count > 0 && !SameOperation(pending.operation, operation)) {
    Fail(MismatchStatus(pending, member, operation), &decision);
    return decision;
  }
  Arrive(&pending, member, operation, std::move(buffers), now);
  if (unreachable_ && operation.sequence >= *unreachable_) {
    Fail(UnreachableStatus(pending), &decision);
    return decision;
  }
  AdvanceReady(&decision);
  StartReady(now, &decision);
  return decision;
}

Decision GroupScheduler::StandAside(uint32_t member, const AsideRequest& request, Time now) {
  Decision decision;
  if (failure_.ok()) {
    decision.rejected = CheckAside(member, request);
    if (!decision.rejected.ok()) return decision;
  }
  const bool same_policy = !asides_.any() || asides_.policy() == request.policy;
  asides_.Add(member, request, now);
  if (!failure_.ok()) {
    if (running_.empty()) decision.asides = asides_.Fail(failure_);
    return decision;
  }
  if (!same_policy) {
    Fail(PoliciesDifferStatus(member), &decision);
    return decision;
  }
  AdvanceReady(&decision);
  StartReady(now, &decision);
  if (failure_.ok() && asides_.all()) decision.asides = asides_.Rejoin();
  FailIfDeserted(&decision);
  return decision;
}

Status GroupScheduler::CheckAside(uint32_t member, const AsideRequest& request) const {
  const auto bad = [&](const std::string& what) -> Status {
    return {Code::kProtocol, absl::StrCat(where_, ": rank ", ranks_[member], what)};
  };
  if (asides_.members()[member]) return bad(" stands aside twice");
  const bool later = std::any_of(pending_.begin(), pending_.end(), [&](const auto& entry) {
    return entry.first >= request.next_sequence && entry.second.arrived[member];
  });
  if (later || request.next_sequence != FirstNotSubmittedBy(member)) {
    return bad(absl::StrCat(" stands aside from operation ", request.next_sequence,
                            " on, which does not follow what it has submitted"));
  }
  return OkStatus();
}

Status GroupScheduler::CheckSequence(uint32_t member, const Operation& operation) const {
  const uint64_t sequence = operation.sequence;
  const Pending* pending = Find(sequence);
  if (asides_.members()[member]) {
    return {Code::kProtocol, absl::StrCat(where_, ": rank ", ranks_[member],
                                          " stands aside and submitted operation ", sequence)};
  }
  if (sequence < ready_ || (pending != nullptr && pending->arrived[member])) {
    return {Code::kProtocol, absl::StrCat(where_, ": rank ", ranks_[member],
                                          " submitted operation ", sequence, " twice")};
  }
  if (sequence - completed_ >= kSequenceWindow) {
    return {Code::kProtocol,
            absl::StrCat(where_, ": rank ", ranks_[member], " submitted operation ", sequence,
                         " when operations below ", completed_, " were complete; ", kSequenceWindow,
                         " at most may be under way")};
  }
  return OkStatus();
}

void GroupScheduler::Arrive(Pending* pending, uint32_t member, const Operation& operation,
                            MemberBuffers buffers, Time now) {
  if (pending->arrived_count == 0) {
    pending->operation = operation;
    pending->task = MakeTask(operation, members_.size());
    pending->first_member = member;
    pending->first = now;
  }
  // No member waits longer than it asked for.
  const Time deadline = now + buffers.timeout;
  if (pending->arrived_count == 0 || deadline < pending->deadline) {
    pending->deadline = deadline;
    pending->timeout = buffers.timeout;
    expiries_.emplace(deadline, operation.sequence);
  }
  pending->task->inputs[member] = buffers.input;
  pending->task->outputs[member] = buffers.output;
  pending->task->keep_alive[member] = std::move(buffers.keep_alive);
  if (DeviceSide* device = pending->task->device.get(); device != nullptr) {
    device->group = id_;
    device->parts[member] = {buffers.device, ranks_[member], std::move(buffers.flags)};
  }
  pending->hand_over = std::max(pending->hand_over, buffers.hand_over);
  pending->arrived.set(member);
  ++pending->arrived_count;
  pending->last_member = member;
  pending->last = now;
}

void GroupScheduler::AdvanceReady(Decision* decision) {
  for (auto next = pending_.find(ready_);
       next != pending_.end() && MissingFrom(&next->second).none(); next = pending_.find(ready_)) {
    if (next->second.arrived_count < members_.size()) {
      Status left_out = LeaveOutMissing(&next->second);
      if (!left_out.ok()) {
        Fail(std::move(left_out), decision);
        return;
      }
    }
    ++ready_;
  }
  while (!expiries_.empty() && expiries_.top().second < ready_) expiries_.pop();
}

// Of those who are to submit it; all, if it is null.
MemberSet GroupScheduler::MissingFrom(const Pending* pending) const {
  const MemberSet missing = everybody_ & ~asides_.members();
  return pending == nullptr ? missing : missing & ~pending->arrived;
}

Status GroupScheduler::LeaveOutMissing(Pending* pending) const {
  if (asides_.policy() == AsidePolicy::kForbid) return ExhaustedStatus(*pending);
  Task& task = *pending->task;
  const bool sums = task.reduce_op == ReduceOp::kSum || task.reduce_op == ReduceOp::kAvg;
  const bool reduces_to_all = task.kind == OpKind::kAllReduce || task.kind == OpKind::kBucketReduce;
  const bool can_do_without =
      (reduces_to_all && sums) || task.kind == OpKind::kShare || task.kind == OpKind::kBarrier;
  if (!can_do_without) return NeedsEveryRankStatus(*pending);
  if (asides_.policy() == AsidePolicy::kAverageOverAll) {
    task.divisor = static_cast<uint32_t>(members_.size());
  }
  size_t kept = 0;
  for (size_t member = 0; member < members_.size(); ++member) {
    if (!pending->arrived[member]) continue;
    task.inputs[kept] = task.inputs[member];
    task.outputs[kept] = task.outputs[member];
    task.keep_alive[kept] = std::move(task.keep_alive[member]);
    if (task.device != nullptr) {
      task.device->parts[kept] = std::move(task.device->parts[member]);
    }
    ++kept;
  }
  task.inputs.resize(kept);
  task.outputs.resize(kept);
  task.keep_alive.resize(kept);
  if (task.device != nullptr) task.device->parts.resize(kept);
  return OkStatus();
}

bool GroupScheduler::MayStart(const Pending& next) const {
  if (running_.empty()) return true;
  return next.operation.on_device && running_.back().operation.on_device &&
         running_.size() < kFlagSlots;
}

void GroupScheduler::StartReady(Time now, Decision* decision) {
  if (!failure_.ok()) return;
  for (uint64_t sequence = completed_ + running_.size(); sequence < ready_; ++sequence) {
    const auto next = pending_.find(sequence);
    if (!MayStart(next->second)) return;
    Pending& started = running_.emplace_back(std::move(next->second));
    pending_.erase(next);
    started.started = now;
    used_devices_ |= started.operation.on_device;
    decision->starts.push_back({sequence, std::move(started.task), started.timeout});
  }
}

Decision GroupScheduler::Finished(uint64_t sequence, const Status& result, Time now) {
  Decision decision;
  if (running_.empty() || sequence != running_.front().operation.sequence) return decision;
  const Pending finished = std::move(running_.front());
  running_.pop_front();
  decision.finished = true;
  asides_.Touch(now);
  if (result.ok()) {
    Record(finished, now);
    completed_ = sequence + 1;
    decision.completed = completed_;
  } else if (failure_.ok()) {
    Fail(EngineStatus(finished, result), &decision);
    return decision;
  }
  if (!failure_.ok() && running_.empty()) {
    decision.failure = failure_;
    decision.asides = asides_.Fail(failure_);
  }
  StartReady(now, &decision);
  return decision;
}

void GroupScheduler::Record(const Pending& finished, Time now) {
  const Operation& operation = finished.operation;
  last_timing_ = {.wait = finished.last - finished.first,
                  .queue = finished.started - finished.last,
                  .reduce = now - finished.started};
  if (operation.kind != OpKind::kBarrier) {
    const OpTraits& traits = TraitsOf(operation.kind);
    const uint64_t copies = traits.input_per_rank || traits.output_per_rank ? members_.size() : 1;
    bytes_ += operation.count * DTypeSize(operation.dtype) * copies;
  }
  if (operation.kind == OpKind::kBucketReduce) {
    plan_.Record(operation.bucket, last_timing_, ranks_[finished.last_member], finished.hand_over);
  }
}

Decision GroupScheduler::MemberGone(uint32_t member, bool orderly, const Status& why) {
  Decision decision;
  gone_.set(member);
  if (!failure_.ok()) return decision;
  if (!orderly) {
    Fail(LostStatus(member, why), &decision);
    return decision;
  }
  const uint64_t first_missing = FirstNotSubmittedBy(member);
  if (!unreachable_ || first_missing < *unreachable_) {
    unreachable_ = first_missing;
    unreachable_why_ = why;
  }
  FailIfUnreachable(&decision);
  FailIfDeserted(&decision);
  return decision;
}

uint64_t GroupScheduler::FirstNotSubmittedBy(uint32_t member) const {
  uint64_t sequence = ready_;
  const Pending* pending = Find(sequence);
  while (pending != nullptr && pending->arrived[member]) pending = Find(++sequence);
  return sequence;
}

// Who stands aside waits for every other member, and one that has left will not come.
void GroupScheduler::FailIfDeserted(Decision* decision) {
  if (!failure_.ok() || !asides_.any() || (gone_ & ~asides_.members()).none()) return;
  Fail({unreachable_why_.code(),
        absl::StrCat(unreachable_why_.message(), "; ", DescribeRanks(RanksIn(asides_.members())),
                     " of group ", tag_,
                     " ran out of input and waited for it to do the same. Every rank must leave "
                     "the join in order.")},
       decision);
}

void GroupScheduler::FailIfUnreachable(Decision* decision) {
  const Pending* lowest = nullptr;
  for (const auto& [sequence, pending] : pending_) {
    const bool wanted = (pending.arrived & ~gone_).any();
    if (sequence < *unreachable_ || !wanted) continue;
    if (lowest == nullptr || sequence < lowest->operation.sequence) lowest = &pending;
  }
  if (lowest != nullptr) Fail(UnreachableStatus(*lowest), decision);
}

Decision GroupScheduler::CheckDeadline(Time now) {
  Decision decision;
  if (!expiries_.empty() && expiries_.top().first <= now) {
    Fail(DeadlineStatus(*Find(expiries_.top().second), now), &decision);
  } else if (const auto of_asides = asides_.Deadline();
             of_asides && *of_asides <= now && running_.empty()) {
    Fail(DesertedStatus(now), &decision);
  }
  return decision;
}

std::optional<Time> GroupScheduler::NextDeadline() const {
  std::optional<Time> next = running_.empty() ? asides_.Deadline() : std::nullopt;
  if (!expiries_.empty()) {
    next = next ? std::min(*next, expiries_.top().first) : expiries_.top().first;
  }
  return next;
}

Decision GroupScheduler::Stop(const Status& why) {
  Decision decision;
  if (failure_.ok()) Fail(why, &decision);
  return decision;
}

void GroupScheduler::Fail(Status why, Decision* decision) {
  failure_ = std::move(why);
  pending_ = {};
  expiries_ = {};
  if (!running_.empty()) {
    decision->abandon = running_.back().operation.on_device;
    return;
  }
  decision->failure = failure_;
  decision->asides = asides_.Fail(failure_);
}

const GroupScheduler::Pending* GroupScheduler::Find(uint64_t sequence) const {
  const auto found = pending_.find(sequence);
  return found == pending_.end() ? nullptr : &found->second;
}

Status GroupScheduler::DescribeBucket(uint32_t member, BucketDescription description) {
  Status status = plan_.Describe(member, std::move(description));
  if (status.ok()) return status;
  return {status.code(), absl::StrCat(where_, ": ", status.message())};
}

std::vector<uint32_t> GroupScheduler::RanksIn(const MemberSet& members) const {
  std::vector<uint32_t> ranks;
  for (size_t member = 0; member < ranks_.size(); ++member) {
    if (members[member]) ranks.push_back(ranks_[member]);
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

std::string GroupScheduler::OperationText(const Operation& operation) const {
  std::string text = DescribeOperation(operation);
  const BucketDescription* bucket =
      operation.kind == OpKind::kBucketReduce ? plan_.Find(operation.bucket) : nullptr;
  if (bucket != nullptr) {
    absl::StrAppend(&text, " of ", bucket->bucket_count, " (", bucket->parameters, ")");
  }
  return text;
}

std::string GroupScheduler::LastSubmissionsText(const MemberSet& missing, Time now) const {
  std::vector<std::string> texts;
  size_t count = 0;
  for (size_t index = 0; index < members_.size(); ++index) {
    const Member& member = members_[index];
    if (!missing[index] || ++count > kMaxRanksInDetail) continue;
    texts.push_back(member.has_submitted
                        ? absl::StrCat("rank ", member.rank, " last submitted operation ",
                                       member.last.sequence, ", ", DescribeOperation(member.last),
                                       ", ", DescribeDuration(now - member.last_time), " ago")
                        : absl::StrCat("rank ", member.rank, " has submitted nothing yet"));
  }
  return absl::StrJoin(texts, "; ");
}

Status GroupScheduler::MismatchStatus(const Pending& pending, uint32_t member,
                                      const Operation& operation) const {
  struct Side {
    uint32_t rank;
    const Operation* operation;
  };
  Side low{ranks_[pending.first_member], &pending.operation};
  Side high{ranks_[member], &operation};
  if (low.rank > high.rank) std::swap(low, high);
  return {Code::kMismatch,
          absl::StrCat(where_, ": operation ", operation.sequence, " differs: rank ", low.rank,
                       " submitted ", OperationText(*low.operation), ", rank ", high.rank,
                       " submitted ", OperationText(*high.operation), "; they differ in ",
                       DifferingFields(*low.operation, *high.operation),
                       ". Every rank must make the same calls in the same order.")};
}

Status GroupScheduler::DeadlineStatus(const Pending& expired, Time now) const {
  const Pending* blocking = Find(ready_);
  const MemberSet missing = MissingFrom(blocking);
  std::string text = absl::StrCat(where_, ": operation ", expired.operation.sequence, ", ",
                                  OperationText(expired.operation), ", timed out after ",
                                  DescribeDuration(expired.timeout), " waiting for ",
                                  DescribeRanks(RanksIn(missing)));
  if (blocking == nullptr) {
    absl::StrAppend(&text, " (it comes after operation ", ready_, ", which no rank has submitted)");
  } else if (blocking != &expired) {
    absl::StrAppend(&text, " (it comes after operation ", ready_, ", ",
                    OperationText(blocking->operation), ")");
  }
  absl::StrAppend(
      &text, ": ", LastSubmissionsText(missing, now),
      ". Waiting: ", DescribeRanks(RanksIn(expired.arrived)), ", rank ",
      ranks_[expired.first_member], " for ", DescribeDuration(now - expired.first),
      ". Find out what the missing ranks are doing: stuck, on another code path, or only"
      " slow, in which case a longer timeout helps.");
  return {Code::kDeadlineExceeded, std::move(text)};
}

Status GroupScheduler::LostStatus(uint32_t member, const Status& why) const {
  std::string text = absl::StrCat(why.message(), "; group ", tag_, " cannot go on");
  if (const Pending* blocking = Find(ready_); blocking != nullptr) {
    absl::StrAppend(&text, " in operation ", ready_, ", ", OperationText(blocking->operation),
                    ", which rank ", ranks_[member],
                    blocking->arrived[member] ? " had submitted" : " had not submitted");
  } else if (!running_.empty()) {
    const Operation& last = running_.back().operation;
    absl::StrAppend(&text, " after operation ", last.sequence, ", ", OperationText(last));
  }
  absl::StrAppend(&text, ". Look at that rank's own output for the cause.");
  return {why.code(), std::move(text)};
}

Status GroupScheduler::EngineStatus(const Pending& failed, const Status& why) const {
  return {why.code(), absl::StrCat(where_, ": operation ", failed.operation.sequence, ", ",
                                   OperationText(failed.operation), ": ", why.message())};
}

Status GroupScheduler::UnreachableStatus(const Pending& pending) const {
  return {unreachable_why_.code(),
          absl::StrCat(unreachable_why_.message(), "; operation ", pending.operation.sequence,
                       " of group ", tag_, ", ", OperationText(pending.operation),
                       ", cannot start without it. Every rank must make the same calls.")};
}

// torch's words, which programs look for.
Status GroupScheduler::ExhaustedStatus(const Pending& pending) const {
  return {Code::kFailedPrecondition,
          absl::StrCat("Detected at least one rank that exhausted inputs. Throwing across all "
                       "ranks. (",
                       where_, ": ", DescribeRanks(RanksIn(asides_.members())),
                       " ran out before operation ", pending.operation.sequence, ", ",
                       OperationText(pending.operation), ")")};
}

Status GroupScheduler::NeedsEveryRankStatus(const Pending& pending) const {
  return {Code::kFailedPrecondition,
          absl::StrCat(where_, ": operation ", pending.operation.sequence, ", ",
                       OperationText(pending.operation), ", needs every rank, but ",
                       DescribeRanks(RanksIn(asides_.members())),
                       " ran out of input and stands aside. Make it before or after the join, or "
                       "give every rank as much input.")};
}

Status GroupScheduler::PoliciesDifferStatus(uint32_t member) const {
  return {
      Code::kMismatch,
      absl::StrCat(where_, ": rank ", ranks_[member], " stands aside under another policy than ",
                   DescribeRanks(RanksIn(asides_.members() & ~MemberSet().set(member))),
                   " before it. Every rank must pass the same arguments to join.")};
}

Status GroupScheduler::DesertedStatus(Time now) const {
  const MemberSet missing = MissingFrom(nullptr);
  return {Code::kDeadlineExceeded,
          absl::StrCat(
              where_, ": ", DescribeRanks(RanksIn(asides_.members())),
              " ran out of input and waited for ", DescribeRanks(RanksIn(missing)),
              ", of which nothing came within the timeout: ", LastSubmissionsText(missing, now),
              ". Find out what the missing ranks are doing: stuck, on another code path, "
              "or only slow, in which case a longer timeout helps.")};
}

GroupSnapshot GroupScheduler::Snapshot(Time now) const {
  GroupSnapshot snapshot;
  snapshot.tag = tag_;
  snapshot.ranks = ranks_;
  snapshot.completed = completed_;
  snapshot.bytes = bytes_;
  snapshot.last = last_timing_;
  snapshot.failure = failure_.message();
  snapshot.buckets = plan_.Snapshot();
  snapshot.aside_ranks = RanksIn(asides_.members());
  AddBucketStates(&snapshot.buckets);
  if (expiries_.empty()) {
    AddDeserters(&snapshot, now);
    return snapshot;
  }
  // Something is held up by a missing member.
  if (const Pending* blocking = Find(ready_); blocking != nullptr) {
    snapshot.waiting_operation =
        absl::StrCat("operation ", ready_, ", ", OperationText(blocking->operation));
    snapshot.missing_ranks = RanksIn(MissingFrom(blocking));
    snapshot.waiting = now - blocking->first;
  } else {
    const Pending& later = *Find(expiries_.top().second);
    snapshot.waiting_operation =
        absl::StrCat("operation ", ready_, ", which no rank has submitted");
    snapshot.missing_ranks = RanksIn(MissingFrom(nullptr));
    snapshot.waiting = now - later.first;
  }
  return snapshot;
}

// Nothing is held up but those that stand aside.
void GroupScheduler::AddDeserters(GroupSnapshot* snapshot, Time now) const {
  if (!asides_.any() || !running_.empty()) return;
  snapshot->waiting_operation = absl::StrCat("operation ", ready_, ", which no rank has submitted");
  snapshot->missing_ranks = RanksIn(MissingFrom(nullptr));
  snapshot->waiting = now - asides_.last_activity();
}

void GroupScheduler::AddBucketStates(std::vector<BucketSnapshot>* buckets) const {
  for (const Pending& running : running_) {
    AddBucketState(running, BucketState::kRunning, RanksIn(running.arrived), buckets);
  }
  std::vector<const Pending*> in_order;
  in_order.reserve(pending_.size());
  for (const auto& [sequence, pending] : pending_) in_order.push_back(&pending);
  std::sort(in_order.begin(), in_order.end(), [](const Pending* a, const Pending* b) {
    return a->operation.sequence < b->operation.sequence;
  });
  for (const Pending* pending : in_order) {
    AddBucketState(*pending, BucketState::kWaiting, RanksIn(pending->arrived), buckets);
  }
}

void GroupScheduler::AddBucketState(const Pending& pending, BucketState state,
                                    std::vector<uint32_t> ready_ranks,
                                    std::vector<BucketSnapshot>* buckets) {
  const Operation& operation = pending.operation;
  if (operation.kind != OpKind::kBucketReduce || operation.bucket >= buckets->size()) return;
  BucketSnapshot& bucket = (*buckets)[operation.bucket];
  // An earlier operation's state is the current one.
  if (bucket.state != BucketState::kIdle) return;
  bucket.state = state;
  bucket.ready_ranks = std::move(ready_ranks);
}

}  // namespace gradsync

#include "server/job/job_table.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "server/job/group_scheduler.h"
#include "server/job/incarnation.h"
#include "server/job/job_texts.h"
#include "shm/session_layout.h"

namespace gradsync {
namespace {

// One of a session's group numbers.
struct Slot {
  bool used = false;             // by a group, or reserved for one that is being formed
  FormedGroup* group = nullptr;  // null while it is being formed
  uint32_t member = 0;
};

struct Session {
  Incarnation* incarnation = nullptr;
  uint32_t rank = 0;
  uint64_t segment_bytes = 0;
  std::vector<Slot> slots;  // by number; grows as needed
  // Of all groups that it is in.
  uint64_t operations = 0;
  uint64_t buckets = 0;

  // The lowest free number, now in use; nullopt if there is none.
  std::optional<uint32_t> Reserve() {
    const auto free =
        std::find_if(slots.begin(), slots.end(), [](const Slot& s) { return !s.used; });
    const auto number = static_cast<uint32_t>(free - slots.begin());
    if (number == kMaxGroupsPerSession) return std::nullopt;
    if (free == slots.end()) slots.emplace_back();
    slots[number].used = true;
    return number;
  }

  const Slot* FindActive(uint32_t number) const {
    return number < slots.size() && slots[number].group != nullptr ? &slots[number] : nullptr;
  }
};

}  // namespace

class JobTable::Impl {
 public:
  Status Join(SessionId id, const JoinRequest& request, Time now, Actions* actions);
  void CreateGroup(SessionId id, const GroupRequest& request, Time now, Actions* actions);
  void DestroyGroup(SessionId id, uint32_t number, Actions* actions);
  void AbortGroup(SessionId id, uint32_t number, const Status& why, Actions* actions);
  Status DescribeBucket(SessionId id, uint32_t number, BucketDescription description);
  std::optional<Membership> FindGroup(SessionId id, uint32_t number) const;
  void Submit(SessionId id, uint32_t number, const Operation& operation, MemberBuffers buffers,
              Time now, Actions* actions);
  void Send(SessionId id, uint32_t number, uint32_t request_id, uint32_t to,
            std::shared_ptr<Message> message, Duration timeout, Time now, Actions* actions);
  void Receive(SessionId id, uint32_t number, uint32_t request_id, std::optional<uint32_t> from,
               uint64_t tag, Duration timeout, Time now, Actions* actions);
  void CancelMessage(SessionId id, uint32_t number, uint32_t request_id, Actions* actions);
  void StandAside(SessionId id, uint32_t number, const AsideRequest& request, Time now,
                  Actions* actions);
  void Finished(GroupId id, uint64_t sequence, const Status& result, Time now, Actions* actions);
  void Leave(SessionId id, Departure departure, Actions* actions);
  void CheckDeadlines(Time now, Actions* actions);
  std::optional<Time> NextDeadline() const;
  void Drain(Actions* actions);
  size_t session_count() const { return sessions_.size(); }
  size_t running_count() const { return running_; }
  void SetSegmentBytes(SessionId id, uint64_t bytes);
  std::vector<JobSnapshot> Snapshot(Time now) const;

 private:
  using Incarnations = std::vector<std::unique_ptr<Incarnation>>;  // oldest first

  // Joining.
  Incarnation* FindOpening(const Incarnations& incarnations, uint32_t rank) const;
  void Enter(Incarnation* incarnation, SessionId id, const JoinRequest& request);
  void EndJob(Incarnation* incarnation, const Status& why, Actions* actions);

  // Forming groups.
  Status CheckRequest(const Session& session, const GroupRequest& request) const;
  void Refuse(const Session& session, SessionId id, const GroupRequest& request,
              const Status& status, Actions* actions);
  Rendezvous* FindOrOpen(const Session& session, const GroupRequest& request, Time now);
  void Form(Incarnation* incarnation, const std::string& tag, Actions* actions);
  void FailRendezvous(Incarnation* incarnation, const std::string& tag, const Status& status,
                      Actions* actions);

  // Leaving.
  void Remove(SessionId id, bool orderly, const Status& clause, Actions* actions);
  void LeaveRendezvous(Incarnation* incarnation, uint32_t rank, bool orderly, const Status& clause,
                       Actions* actions);
  void DeactivateMember(FormedGroup* group, uint32_t member);
  void ReleaseGroupIfOver(FormedGroup* group, Actions* actions);
  void ReleaseIfOver(Incarnation* incarnation);

  void Apply(FormedGroup* group, Decision decision, Actions* actions);
  void Expel(SessionId id, const Status& rule, Actions* actions);
  // The session's group, if it may have another message; else null, and the request is answered.
  const Slot* AdmitMessage(SessionId id, uint32_t number, uint32_t request_id, Actions* actions);
  static void Answer(const FormedGroup& group, MessageAnswers answers, Actions* actions);
  bool Recount(FormedGroup* group);
  void UpdateAlarm(FormedGroup* group);
  const Session* Find(SessionId id) const;
  std::vector<std::string> GroupsOf(SessionId id) const;
  JobSnapshot SnapshotOf(const Incarnation& incarnation, Time now) const;

  absl::btree_map<JobKey, Incarnations> jobs_;
  absl::flat_hash_map<SessionId, Session> sessions_;
  absl::btree_map<GroupId, std::unique_ptr<FormedGroup>> groups_;
  GroupId next_group_ = 1;
  uint64_t next_rendezvous_ = 1;
  size_t running_ = 0;
  bool draining_ = false;
  // A group has at most one alarm here, so that an operation that comes and goes costs nothing: it
  // stays when the deadline moves later, and is set anew when it goes off.
  absl::btree_set<std::pair<Time, GroupId>> group_alarms_;
  std::map<std::pair<Time, uint64_t>, Rendezvous*> rendezvous_alarms_;
};

// ---- Joining ------------------------------------------------------------------------------------

Status JobTable::Impl::Join(SessionId id, const JoinRequest& request, Time now, Actions* actions) {
  if (draining_) return ShuttingDownStatus(request.job);
  GRADSYNC_RETURN_IF_ERROR(CheckJoinRequest(request));
  const JobKey key{request.uid, request.job, request.generation};
  if (const auto job = jobs_.find(key); job != jobs_.end()) {
    for (const auto& incarnation : job->second) {
      if (incarnation->open() && incarnation->has_been_in(request.rank) &&
          incarnation->ranks[request.rank].connected) {
        return RankTakenStatus(*incarnation, request.rank);
      }
    }
    if (Incarnation* incarnation = FindOpening(job->second, request.rank)) {
      if (incarnation->world_size == request.world_size) {
        Enter(incarnation, id, request);
        return OkStatus();
      }
      const Status status = WorldSizeStatus(*incarnation, request);
      if (!incarnation->complete()) EndJob(incarnation, status, actions);
      return status;
    }
  }
  auto incarnation = std::make_unique<Incarnation>();
  incarnation->key = key;
  incarnation->world_size = request.world_size;
  incarnation->first_rank = request.rank;
  incarnation->created = now;
  incarnation->ranks.resize(request.world_size);
  Enter(incarnation.get(), id, request);
  jobs_[key].push_back(std::move(incarnation));
  return OkStatus();
}

// The incarnation that `rank` belongs to, whatever it thinks of the world size; null: a new one. A
// complete one is a last resort: a rank that has not been in it is beyond its world size.
Incarnation* JobTable::Impl::FindOpening(const Incarnations& incarnations, uint32_t rank) const {
  Incarnation* last_resort = nullptr;
  for (const auto& incarnation : incarnations) {
    if (!incarnation->open() || incarnation->has_been_in(rank)) continue;
    if (!incarnation->complete()) return incarnation.get();
    if (last_resort == nullptr) last_resort = incarnation.get();
  }
  return last_resort;
}

void JobTable::Impl::Enter(Incarnation* incarnation, SessionId id, const JoinRequest& request) {
  incarnation->ranks[request.rank] = {.joined = true,
                                      .connected = true,
                                      .session = id,
                                      .local_rank = request.local_rank,
                                      .pid = request.pid,
                                      .program = request.program};
  ++incarnation->joined;
  ++incarnation->connected;
  Session& session = sessions_[id];
  session.incarnation = incarnation;
  session.rank = request.rank;
}

void JobTable::Impl::EndJob(Incarnation* incarnation, const Status& why, Actions* actions) {
  incarnation->failure = why;
  std::vector<SessionId> sessions;
  for (RankRecord& record : incarnation->ranks) {
    if (record.connected) sessions.push_back(record.session);
  }
  for (const SessionId id : sessions) actions->push_back(CloseSession{id, why});
  // They are told by that, so nothing that their leaving brings about is sent to them as well.
  Actions unsent;
  for (const SessionId id : sessions) Remove(id, /*orderly=*/false, why, &unsent);
  for (Action& action : unsent) {
    const bool for_engine =
        std::holds_alternative<AbandonTasks>(action) || std::holds_alternative<ForgetGroup>(action);
    if (for_engine) actions->push_back(std::move(action));
  }
}

// ---- Forming groups -----------------------------------------------------------------------------

void JobTable::Impl::CreateGroup(SessionId id, const GroupRequest& request, Time now,
                                 Actions* actions) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  Session& session = found->second;
  const Status status = CheckRequest(session, request);
  if (!status.ok()) return Refuse(session, id, request, status, actions);
  const std::optional<uint32_t> number = session.Reserve();
  if (!number) {
    const Status full = TooManyGroupsStatus(*session.incarnation, session.rank, request.tag);
    return Refuse(session, id, request, full, actions);
  }
  Rendezvous* rendezvous = FindOrOpen(session, request, now);
  rendezvous->requests[session.rank] = {id, request.request_id, *number};
  if (rendezvous->requests.size() == rendezvous->ranks.size()) {
    Form(session.incarnation, request.tag, actions);
  }
}

Status JobTable::Impl::CheckRequest(const Session& session, const GroupRequest& request) const {
  const Incarnation& incarnation = *session.incarnation;
  if (draining_) return ShuttingDownStatus(incarnation.key.name);
  if (!incarnation.failure.ok()) return incarnation.failure;
  GRADSYNC_RETURN_IF_ERROR(CheckGroupRequest(incarnation, session.rank, request));
  for (const Slot& slot : session.slots) {
    if (slot.group != nullptr && slot.group->tag == request.tag) {
      return TagInUseStatus(incarnation, session.rank, request.tag);
    }
  }
  if (const auto open = incarnation.rendezvous.find(request.tag);
      open != incarnation.rendezvous.end()) {
    if (open->second.requests.contains(session.rank)) {
      return TagInUseStatus(incarnation, session.rank, request.tag);
    }
    if (open->second.ranks != request.ranks) {
      return GroupsDifferStatus(incarnation, open->second, session.rank, request.ranks);
    }
  }
  for (const uint32_t rank : request.ranks) {
    const RankRecord& record = incarnation.ranks[rank];
    if (record.joined && !record.connected) {
      return NotFormedStatus(GoneClause(incarnation, rank, Departure::kGoodbye), request.tag);
    }
  }
  return OkStatus();
}

// Refuses the request, and with it all others under its tag: they wait for what cannot come.
void JobTable::Impl::Refuse(const Session& session, SessionId id, const GroupRequest& request,
                            const Status& status, Actions* actions) {
  actions->push_back(ReplyCreateGroup{id, request.request_id, 0, status});
  FailRendezvous(session.incarnation, request.tag, status, actions);
}

Rendezvous* JobTable::Impl::FindOrOpen(const Session& session, const GroupRequest& request,
                                       Time now) {
  auto& open = session.incarnation->rendezvous;
  if (const auto found = open.find(request.tag); found != open.end()) {
    Rendezvous& rendezvous = found->second;
    // No rank waits longer than it asked for.
    if (now + request.timeout < rendezvous.deadline) {
      rendezvous_alarms_.erase({rendezvous.deadline, rendezvous.id});
      rendezvous.deadline = now + request.timeout;
      rendezvous.timeout = request.timeout;
      rendezvous_alarms_[{rendezvous.deadline, rendezvous.id}] = &rendezvous;
    }
    return &rendezvous;
  }
  Rendezvous& rendezvous = open[request.tag];
  rendezvous = {.id = next_rendezvous_++,
                .tag = request.tag,
                .ranks = request.ranks,
                .first_rank = session.rank,
                .timeout = request.timeout,
                .deadline = now + request.timeout,
                .requests = {}};
  rendezvous_alarms_[{rendezvous.deadline, rendezvous.id}] = &rendezvous;
  return &rendezvous;
}

void JobTable::Impl::Form(Incarnation* incarnation, const std::string& tag, Actions* actions) {
  const auto node = incarnation->rendezvous.extract(tag);
  const Rendezvous& rendezvous = node.mapped();
  rendezvous_alarms_.erase({rendezvous.deadline, rendezvous.id});
  const GroupId id = next_group_++;
  auto group = std::make_unique<FormedGroup>(id, incarnation, tag, rendezvous.ranks);
  for (const uint32_t rank : rendezvous.ranks) {
    const Rendezvous::Request& request = rendezvous.requests.at(rank);
    const auto member = static_cast<uint32_t>(group->members.size());
    group->members.push_back({.session = request.session, .number = request.number});
    sessions_.at(request.session).slots[request.number] = {true, group.get(), member};
    actions->push_back(
        ReplyCreateGroup{request.session, request.request_id, request.number, OkStatus()});
  }
  group->active = static_cast<uint32_t>(group->members.size());
  incarnation->groups[id] = group.get();
  groups_[id] = std::move(group);
}

void JobTable::Impl::FailRendezvous(Incarnation* incarnation, const std::string& tag,
                                    const Status& status, Actions* actions) {
  const auto node = incarnation->rendezvous.extract(tag);
  if (node.empty()) return;
  const Rendezvous& rendezvous = node.mapped();
  rendezvous_alarms_.erase({rendezvous.deadline, rendezvous.id});
  for (const auto& [rank, request] : rendezvous.requests) {
    sessions_.at(request.session).slots[request.number] = {};
    actions->push_back(ReplyCreateGroup{request.session, request.request_id, 0, status});
  }
}

// ---- Groups at work -----------------------------------------------------------------------------

Status JobTable::Impl::DescribeBucket(SessionId id, uint32_t number,
                                      BucketDescription description) {
  const Session* session = Find(id);
  const Slot* slot = session == nullptr ? nullptr : session->FindActive(number);
  if (slot == nullptr) return {Code::kInvalidArgument, "the session has no such group"};
  FormedGroup* group = slot->group;
  GRADSYNC_RETURN_IF_ERROR(group->scheduler.DescribeBucket(slot->member, std::move(description)));
  if (Recount(group) && session->buckets > kMaxSessionBuckets) {
    return TooManyBucketsStatus(*session->incarnation, session->rank);
  }
  return OkStatus();
}

void JobTable::Impl::AbortGroup(SessionId id, uint32_t number, const Status& why,
                                Actions* actions) {
  const Session* session = Find(id);
  const Slot* slot = session == nullptr ? nullptr : session->FindActive(number);
  if (slot != nullptr) Apply(slot->group, slot->group->scheduler.Stop(why), actions);
}

std::optional<JobTable::Membership> JobTable::Impl::FindGroup(SessionId id, uint32_t number) const {
  const Session* session = Find(id);
  const Slot* slot = session == nullptr ? nullptr : session->FindActive(number);
  if (slot == nullptr) return std::nullopt;
  return Membership{.size = static_cast<uint32_t>(slot->group->members.size()),
                    .member = slot->member};
}

void JobTable::Impl::Submit(SessionId id, uint32_t number, const Operation& operation,
                            MemberBuffers buffers, Time now, Actions* actions) {
  const Session* session = Find(id);
  if (session == nullptr) return;
  const Slot* slot = session->FindActive(number);
  Decision decision;
  if (slot == nullptr) {
    decision.rejected = NoSuchGroupStatus(*session->incarnation, session->rank, number);
  } else {
    decision = slot->group->scheduler.Submit(slot->member, operation, std::move(buffers), now);
  }
  if (decision.rejected.ok()) {
    const bool more = Recount(slot->group);
    Apply(slot->group, std::move(decision), actions);
    if (!more || session->operations <= kMaxSessionOperations) return;
    decision = {};
    decision.rejected = TooManyOperationsStatus(*session->incarnation, session->rank);
  }
  Expel(id, decision.rejected, actions);
}

// Closes a session that broke the rules.
void JobTable::Impl::Expel(SessionId id, const Status& rule, Actions* actions) {
  const Session& session = sessions_.at(id);
  const Status clause = BrokeRulesClause(*session.incarnation, session.rank, rule);
  actions->push_back(CloseSession{id, rule});
  Remove(id, /*orderly=*/false, clause, actions);
}

void JobTable::Impl::StandAside(SessionId id, uint32_t number, const AsideRequest& request,
                                Time now, Actions* actions) {
  const Session* session = Find(id);
  if (session == nullptr) return;
  const Slot* slot = session->FindActive(number);
  if (slot == nullptr) {
    Expel(id, NoSuchGroupStatus(*session->incarnation, session->rank, number), actions);
    return;
  }
  Decision decision = slot->group->scheduler.StandAside(slot->member, request, now);
  if (decision.rejected.ok()) {
    Apply(slot->group, std::move(decision), actions);
  } else {
    Expel(id, decision.rejected, actions);
  }
}

const Slot* JobTable::Impl::AdmitMessage(SessionId id, uint32_t number, uint32_t request_id,
                                         Actions* actions) {
  const Session* session = Find(id);
  if (session == nullptr) return nullptr;
  const Slot* slot = session->FindActive(number);
  Status status;
  if (slot == nullptr) {
    status = NoSuchGroupStatus(*session->incarnation, session->rank, number);
  } else if (!slot->group->scheduler.failure().ok()) {
    status = slot->group->scheduler.failure();
  } else {
    uint64_t held = 0;
    for (const Slot& one : session->slots) {
      if (one.group != nullptr) held += one.group->mailboxes.HeldBy(one.member);
    }
    if (held >= kMaxSessionMessages) {
      status = TooManyMessagesStatus(*session->incarnation, session->rank);
    }
  }
  if (status.ok()) return slot;
  actions->push_back(AnswerMessage{id, request_id, std::move(status), nullptr});
  return nullptr;
}

void JobTable::Impl::Send(SessionId id, uint32_t number, uint32_t request_id, uint32_t to,
                          std::shared_ptr<Message> message, Duration timeout, Time now,
                          Actions* actions) {
  const Slot* slot = AdmitMessage(id, number, request_id, actions);
  if (slot == nullptr) return;
  message->from = slot->member;
  Mailboxes& mailboxes = slot->group->mailboxes;
  Answer(*slot->group, mailboxes.Send(request_id, to, std::move(message), timeout, now), actions);
  UpdateAlarm(slot->group);
}

void JobTable::Impl::Receive(SessionId id, uint32_t number, uint32_t request_id,
                             std::optional<uint32_t> from, uint64_t tag, Duration timeout, Time now,
                             Actions* actions) {
  const Slot* slot = AdmitMessage(id, number, request_id, actions);
  if (slot == nullptr) return;
  Mailboxes& mailboxes = slot->group->mailboxes;
  Answer(*slot->group, mailboxes.Receive(slot->member, request_id, from, tag, timeout, now),
         actions);
  UpdateAlarm(slot->group);
}

void JobTable::Impl::CancelMessage(SessionId id, uint32_t number, uint32_t request_id,
                                   Actions* actions) {
  const Session* session = Find(id);
  const Slot* slot = session == nullptr ? nullptr : session->FindActive(number);
  if (slot == nullptr) return;
  Answer(*slot->group, slot->group->mailboxes.Cancel(slot->member, request_id), actions);
}

void JobTable::Impl::Answer(const FormedGroup& group, MessageAnswers answers, Actions* actions) {
  for (MessageAnswer& answer : answers) {
    const FormedGroup::Member& member = group.members[answer.member];
    if (!member.active) continue;
    actions->push_back(AnswerMessage{member.session, answer.request_id, std::move(answer.status),
                                     std::move(answer.message)});
  }
}

void JobTable::Impl::Finished(GroupId id, uint64_t sequence, const Status& result, Time now,
                              Actions* actions) {
  const auto found = groups_.find(id);
  if (found == groups_.end()) return;
  FormedGroup* group = found->second.get();
  Decision decision = group->scheduler.Finished(sequence, result, now);
  if (!decision.finished) return;
  --running_;
  Apply(group, std::move(decision), actions);
  Incarnation* incarnation = group->incarnation;
  ReleaseGroupIfOver(group, actions);
  ReleaseIfOver(incarnation);
}

void JobTable::Impl::Apply(FormedGroup* group, Decision decision, Actions* actions) {
  for (const FormedGroup::Member& member : group->members) {
    if (!member.active) continue;
    if (decision.completed) {
      actions->push_back(CompleteOperations{member.session, member.number, *decision.completed});
    }
    if (!decision.failure.ok()) {
      actions->push_back(FailGroup{member.session, member.number, decision.failure});
    }
  }
  if (!decision.failure.ok()) {
    Answer(*group, group->mailboxes.Fail(decision.failure), actions);
  }
  for (AsideAnswer& answer : decision.asides) {
    const FormedGroup::Member& member = group->members[answer.member];
    if (member.active) actions->push_back(AnswerAside{member.session, std::move(answer)});
  }
  if (decision.abandon) actions->push_back(AbandonTasks{group->id});
  for (Decision::Start& start : decision.starts) {
    ++running_;
    actions->push_back(StartTask{group->id, start.sequence, std::move(start.task), start.timeout});
  }
  Recount(group);
  UpdateAlarm(group);
}

// Charges the members with what the group remembers now. Whether that is more than before.
bool JobTable::Impl::Recount(FormedGroup* group) {
  const uint64_t operations = group->scheduler.operation_count();
  const uint64_t buckets = group->scheduler.bucket_count();
  if (operations == group->operations && buckets == group->buckets) return false;
  const bool more = operations > group->operations || buckets > group->buckets;
  for (const FormedGroup::Member& member : group->members) {
    if (!member.active) continue;
    Session& session = sessions_.at(member.session);
    session.operations += operations - group->operations;
    session.buckets += buckets - group->buckets;
  }
  group->operations = operations;
  group->buckets = buckets;
  return more;
}

// ---- Leaving ------------------------------------------------------------------------------------

void JobTable::Impl::DestroyGroup(SessionId id, uint32_t number, Actions* actions) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  Session& session = found->second;
  const Slot* slot = session.FindActive(number);
  if (slot == nullptr) return;
  FormedGroup* group = slot->group;
  const uint32_t member = slot->member;
  session.slots[number] = {};
  session.operations -= group->operations;
  session.buckets -= group->buckets;
  DeactivateMember(group, member);
  const Status clause = DestroyedClause(*session.incarnation, session.rank, group->tag);
  Apply(group, group->scheduler.MemberGone(member, /*orderly=*/true, clause), actions);
  Answer(*group, group->mailboxes.MemberGone(member, clause), actions);
  ReleaseGroupIfOver(group, actions);
}

void JobTable::Impl::Leave(SessionId id, Departure departure, Actions* actions) {
  const Session* session = Find(id);
  if (session == nullptr) return;
  const Status clause = GoneClause(*session->incarnation, session->rank, departure);
  Remove(id, departure == Departure::kGoodbye, clause, actions);
}

void JobTable::Impl::Remove(SessionId id, bool orderly, const Status& clause, Actions* actions) {
  const auto node = sessions_.extract(id);
  const Session& session = node.mapped();
  Incarnation* incarnation = session.incarnation;
  incarnation->ranks[session.rank].connected = false;
  --incarnation->connected;
  if (!orderly && incarnation->failure.ok()) incarnation->failure = IncarnationFailure(clause);
  LeaveRendezvous(incarnation, session.rank, orderly, clause, actions);
  for (const Slot& slot : session.slots) {
    if (slot.group == nullptr) continue;
    DeactivateMember(slot.group, slot.member);
    Apply(slot.group, slot.group->scheduler.MemberGone(slot.member, orderly, clause), actions);
    Answer(*slot.group, slot.group->mailboxes.MemberGone(slot.member, clause), actions);
    ReleaseGroupIfOver(slot.group, actions);
  }
  ReleaseIfOver(incarnation);
}

// Fails what cannot be formed without `rank`: its own groups, or all if the incarnation has failed.
void JobTable::Impl::LeaveRendezvous(Incarnation* incarnation, uint32_t rank, bool orderly,
                                     const Status& clause, Actions* actions) {
  std::vector<std::string> tags;
  for (auto& [tag, rendezvous] : incarnation->rendezvous) {
    rendezvous.requests.erase(rank);
    const auto& ranks = rendezvous.ranks;
    if (!orderly || std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) tags.push_back(tag);
  }
  for (const std::string& tag : tags) {
    FailRendezvous(incarnation, tag, NotFormedStatus(clause, tag), actions);
  }
}

void JobTable::Impl::DeactivateMember(FormedGroup* group, uint32_t member) {
  group->members[member].active = false;
  --group->active;
}

void JobTable::Impl::ReleaseGroupIfOver(FormedGroup* group, Actions* actions) {
  if (group->active > 0 || group->scheduler.running()) return;
  if (group->alarm) group_alarms_.erase({*group->alarm, group->id});
  if (group->scheduler.used_devices()) actions->push_back(ForgetGroup{group->id});
  group->incarnation->groups.erase(group->id);
  groups_.erase(group->id);
}

void JobTable::Impl::ReleaseIfOver(Incarnation* incarnation) {
  if (incarnation->connected > 0 || !incarnation->groups.empty()) return;
  const auto job = jobs_.find(incarnation->key);
  std::erase_if(job->second, [&](const auto& entry) { return entry.get() == incarnation; });
  if (job->second.empty()) jobs_.erase(job);
}

// ---- Time ---------------------------------------------------------------------------------------

void JobTable::Impl::UpdateAlarm(FormedGroup* group) {
  std::optional<Time> deadline = group->scheduler.NextDeadline();
  if (const std::optional<Time> of_messages = group->mailboxes.NextDeadline(); of_messages) {
    deadline = deadline ? std::min(*deadline, *of_messages) : *of_messages;
  }
  if (!deadline || (group->alarm && *group->alarm <= *deadline)) return;
  if (group->alarm) group_alarms_.erase({*group->alarm, group->id});
  group->alarm = deadline;
  group_alarms_.emplace(*deadline, group->id);
}

void JobTable::Impl::CheckDeadlines(Time now, Actions* actions) {
  while (!group_alarms_.empty() && group_alarms_.begin()->first <= now) {
    FormedGroup* group = groups_.at(group_alarms_.begin()->second).get();
    group_alarms_.erase(group_alarms_.begin());
    group->alarm.reset();
    Answer(*group, group->mailboxes.CheckDeadlines(now), actions);
    Apply(group, group->scheduler.CheckDeadline(now), actions);
  }
  while (!rendezvous_alarms_.empty() && rendezvous_alarms_.begin()->first.first <= now) {
    const Rendezvous& rendezvous = *rendezvous_alarms_.begin()->second;
    Incarnation* incarnation =
        sessions_.at(rendezvous.requests.begin()->second.session).incarnation;
    const Status status = NotFormedInTimeStatus(
        *incarnation, rendezvous, [this](SessionId session) { return GroupsOf(session); });
    FailRendezvous(incarnation, std::string(rendezvous.tag), status, actions);
  }
}

std::optional<Time> JobTable::Impl::NextDeadline() const {
  std::optional<Time> next;
  if (!group_alarms_.empty()) next = group_alarms_.begin()->first;
  if (!rendezvous_alarms_.empty()) {
    const Time deadline = rendezvous_alarms_.begin()->first.first;
    next = next ? std::min(*next, deadline) : deadline;
  }
  return next;
}

void JobTable::Impl::Drain(Actions* actions) {
  draining_ = true;
  for (auto& [key, incarnations] : jobs_) {
    const Status status = ShuttingDownStatus(key.name);
    for (const auto& incarnation : incarnations) {
      while (!incarnation->rendezvous.empty()) {
        const std::string tag = incarnation->rendezvous.begin()->first;
        FailRendezvous(incarnation.get(), tag, status, actions);
      }
      for (const auto& [id, group] : incarnation->groups) {
        Apply(group, group->scheduler.Stop(status), actions);
      }
    }
  }
}

// ---- Looking ------------------------------------------------------------------------------------

const Session* JobTable::Impl::Find(SessionId id) const {
  const auto found = sessions_.find(id);
  return found == sessions_.end() ? nullptr : &found->second;
}

std::vector<std::string> JobTable::Impl::GroupsOf(SessionId id) const {
  std::vector<std::string> tags;
  for (const Slot& slot : sessions_.at(id).slots) {
    if (slot.group != nullptr) tags.push_back(slot.group->tag);
  }
  return tags;
}

void JobTable::Impl::SetSegmentBytes(SessionId id, uint64_t bytes) {
  const auto found = sessions_.find(id);
  if (found != sessions_.end()) found->second.segment_bytes = bytes;
}

std::vector<JobSnapshot> JobTable::Impl::Snapshot(Time now) const {
  std::vector<JobSnapshot> snapshots;
  for (const auto& [key, incarnations] : jobs_) {
    for (const auto& incarnation : incarnations) {
      snapshots.push_back(SnapshotOf(*incarnation, now));
    }
  }
  return snapshots;
}

JobSnapshot JobTable::Impl::SnapshotOf(const Incarnation& incarnation, Time now) const {
  JobSnapshot snapshot;
  snapshot.uid = incarnation.key.uid;
  snapshot.job = incarnation.key.name;
  snapshot.generation = incarnation.key.generation;
  snapshot.world_size = incarnation.world_size;
  snapshot.failure = incarnation.failure.message();
  snapshot.age = now - incarnation.created;
  for (uint32_t rank = 0; rank < incarnation.world_size; ++rank) {
    const RankRecord& record = incarnation.ranks[rank];
    if (!record.joined) continue;
    snapshot.ranks.push_back(
        {.rank = rank,
         .local_rank = record.local_rank,
         .pid = record.pid,
         .program = record.program,
         .connected = record.connected,
         .segment_bytes = record.connected ? sessions_.at(record.session).segment_bytes : 0});
  }
  for (const auto& [id, group] : incarnation.groups) {
    snapshot.groups.push_back(group->scheduler.Snapshot(now));
    snapshot.groups.back().id = id;
  }
  return snapshot;
}

// ---- The public face ----------------------------------------------------------------------------

JobTable::JobTable() : impl_(std::make_unique<Impl>()) {}
JobTable::~JobTable() = default;

Status JobTable::Join(SessionId session, const JoinRequest& request, Time now, Actions* actions) {
  return impl_->Join(session, request, now, actions);
}

Actions JobTable::CreateGroup(SessionId session, const GroupRequest& request, Time now) {
  Actions actions;
  impl_->CreateGroup(session, request, now, &actions);
  return actions;
}

Actions JobTable::DestroyGroup(SessionId session, uint32_t number, Time /*now*/) {
  Actions actions;
  impl_->DestroyGroup(session, number, &actions);
  return actions;
}

Actions JobTable::AbortGroup(SessionId session, uint32_t number, const Status& why, Time /*now*/) {
  Actions actions;
  impl_->AbortGroup(session, number, why, &actions);
  return actions;
}

Status JobTable::DescribeBucket(SessionId session, uint32_t number, BucketDescription description) {
  return impl_->DescribeBucket(session, number, std::move(description));
}

std::optional<JobTable::Membership> JobTable::FindGroup(SessionId session, uint32_t number) const {
  return impl_->FindGroup(session, number);
}

Actions JobTable::Submit(SessionId session, uint32_t number, const Operation& operation,
                         MemberBuffers buffers, Time now) {
  Actions actions;
  impl_->Submit(session, number, operation, std::move(buffers), now, &actions);
  return actions;
}

Actions JobTable::Send(SessionId session, uint32_t number, uint32_t request_id, uint32_t to,
                       std::shared_ptr<Message> message, Duration timeout, Time now) {
  Actions actions;
  impl_->Send(session, number, request_id, to, std::move(message), timeout, now, &actions);
  return actions;
}

Actions JobTable::Receive(SessionId session, uint32_t number, uint32_t request_id,
                          std::optional<uint32_t> from, uint64_t tag, Duration timeout, Time now) {
  Actions actions;
  impl_->Receive(session, number, request_id, from, tag, timeout, now, &actions);
  return actions;
}

Actions JobTable::CancelMessage(SessionId session, uint32_t number, uint32_t request_id) {
  Actions actions;
  impl_->CancelMessage(session, number, request_id, &actions);
  return actions;
}

Actions JobTable::StandAside(SessionId session, uint32_t number, const AsideRequest& request,
                             Time now) {
  Actions actions;
  impl_->StandAside(session, number, request, now, &actions);
  return actions;
}

Actions JobTable::Finished(GroupId group, uint64_t sequence, const Status& result, Time now) {
  Actions actions;
  impl_->Finished(group, sequence, result, now, &actions);
  return actions;
}

Actions JobTable::Leave(SessionId session, Departure departure, Time /*now*/) {
  Actions actions;
  impl_->Leave(session, departure, &actions);
  return actions;
}

Actions JobTable::CheckDeadlines(Time now) {
  Actions actions;
  impl_->CheckDeadlines(now, &actions);
  return actions;
}

std::optional<Time> JobTable::NextDeadline() const { return impl_->NextDeadline(); }

Actions JobTable::Drain(Time /*now*/) {
  Actions actions;
  impl_->Drain(&actions);
  return actions;
}

size_t JobTable::session_count() const { return impl_->session_count(); }
size_t JobTable::running_count() const { return impl_->running_count(); }

void JobTable::SetSegmentBytes(SessionId session, uint64_t bytes) {
  impl_->SetSegmentBytes(session, bytes);
}

std::vector<JobSnapshot> JobTable::Snapshot(Time now) const { return impl_->Snapshot(now); }

}  // namespace gradsync

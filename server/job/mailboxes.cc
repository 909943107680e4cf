#include "server/job/mailboxes.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/job/describe.h"

namespace gradsync {
namespace {

// Tags above 32 bits are the client's own.
std::string TagText(uint64_t tag) {
  return tag >> 32 == 0 ? absl::StrCat("tag ", tag) : std::string("sent by a collective");
}

}  // namespace

Mailboxes::Mailboxes(const std::string& job, const std::string& tag, std::vector<uint32_t> ranks)
    : where_(absl::StrCat("job ", job, ", group ", tag)), members_(ranks.size()) {
  for (size_t i = 0; i < ranks.size(); ++i) members_[i].rank = ranks[i];
}

bool Mailboxes::MayTake(const Member& sender, uint64_t bytes) const {
  return sender.unreceived == 0 ||
         (sender.unreceived < kEagerMessages && sender.unreceived_bytes + bytes <= kEagerBytes);
}

MessageAnswers Mailboxes::Send(uint32_t request_id, uint32_t to,
                               std::shared_ptr<const Message> message, Duration timeout, Time now) {
  const uint32_t from = message->from;
  Member& receiver = members_[to];
  if (receiver.gone) {
    return {{from, request_id, GoneStatus(receiver, "nobody will receive a message to it"), {}}};
  }
  const auto waiting =
      std::find_if(receiver.waiting.begin(), receiver.waiting.end(), [&](const Waiting& one) {
        return one.from.value_or(from) == from && one.tag == message->tag;
      });
  if (waiting != receiver.waiting.end()) {
    const uint32_t receive_id = waiting->request_id;
    Remove(&receiver, waiting);
    return {{from, request_id, OkStatus(), {}}, {to, receive_id, OkStatus(), std::move(message)}};
  }
  Member& sender = members_[from];
  const bool take = MayTake(sender, message->bytes);
  ++sender.unreceived;
  sender.unreceived_bytes += message->bytes;
  receiver.inbox.push_back({.message = std::move(message),
                            .request_id = take ? std::nullopt : std::optional(request_id),
                            .deadline = now + timeout,
                            .timeout = timeout});
  if (!take) {
    deadlines_.insert(now + timeout);
    return {};
  }
  return {{from, request_id, OkStatus(), {}}};
}

MessageAnswers Mailboxes::Receive(uint32_t member, uint32_t request_id,
                                  std::optional<uint32_t> from, uint64_t tag, Duration timeout,
                                  Time now) {
  Member& receiver = members_[member];
  const auto sent = std::find_if(receiver.inbox.begin(), receiver.inbox.end(), [&](const Sent& s) {
    return from.value_or(s.message->from) == s.message->from && s.message->tag == tag;
  });
  if (sent == receiver.inbox.end()) {
    const Waiting waiting{request_id, from, tag, now + timeout, timeout};
    if (const Status never = Unreachable(member, waiting); !never.ok()) {
      return {{member, request_id, never, {}}};
    }
    receiver.waiting.push_back(waiting);
    deadlines_.insert(waiting.deadline);
    return {};
  }
  MessageAnswers answers = {{member, request_id, OkStatus(), sent->message}};
  if (sent->request_id) {
    answers.push_back({sent->message->from, *sent->request_id, OkStatus(), {}});
  }
  Forget(*sent);
  receiver.inbox.erase(sent);
  return answers;
}

void Mailboxes::Forget(const Sent& sent) {
  Member& sender = members_[sent.message->from];
  --sender.unreceived;
  sender.unreceived_bytes -= sent.message->bytes;
  if (sent.request_id) deadlines_.erase(deadlines_.find(sent.deadline));
}

std::list<Mailboxes::Waiting>::iterator Mailboxes::Remove(Member* member,
                                                          std::list<Waiting>::iterator waiting) {
  deadlines_.erase(deadlines_.find(waiting->deadline));
  return member->waiting.erase(waiting);
}

void Mailboxes::DropInbox(Member* member, const Status& why, MessageAnswers* answers) {
  for (const Sent& sent : member->inbox) {
    if (sent.request_id) answers->push_back({sent.message->from, *sent.request_id, why, {}});
    Forget(sent);
  }
  member->inbox.clear();
}

MessageAnswers Mailboxes::Cancel(uint32_t member, uint32_t request_id) {
  const Status cancelled(Code::kFailedPrecondition,
                         absl::StrCat(where_, ": rank ", members_[member].rank,
                                      " waits no longer for its message: it was cancelled"));
  MessageAnswers answers = {{member, request_id, cancelled, {}}};
  std::list<Waiting>& waiting = members_[member].waiting;
  for (auto one = waiting.begin(); one != waiting.end(); ++one) {
    if (one->request_id != request_id) continue;
    Remove(&members_[member], one);
    return answers;
  }
  for (Member& receiver : members_) {
    for (auto sent = receiver.inbox.begin(); sent != receiver.inbox.end(); ++sent) {
      if (sent->message->from != member || sent->request_id != request_id) continue;
      Forget(*sent);
      receiver.inbox.erase(sent);
      return answers;
    }
  }
  return {};
}

MessageAnswers Mailboxes::MemberGone(uint32_t member, const Status& why) {
  MessageAnswers answers;
  Member& gone = members_[member];
  if (gone.gone) return answers;
  gone.gone = why;
  while (!gone.waiting.empty()) Remove(&gone, gone.waiting.begin());
  DropInbox(&gone, GoneStatus(gone, "nobody will receive a message to it"), &answers);
  for (uint32_t index = 0; index < members_.size(); ++index) {
    std::list<Waiting>& waiting = members_[index].waiting;
    for (auto one = waiting.begin(); one != waiting.end();) {
      const Status never = Unreachable(index, *one);
      if (never.ok()) {
        ++one;
        continue;
      }
      answers.push_back({index, one->request_id, never, {}});
      one = Remove(&members_[index], one);
    }
  }
  return answers;
}

Status Mailboxes::Unreachable(uint32_t member, const Waiting& waiting) const {
  const Member* last_gone = nullptr;
  for (uint32_t index = 0; index < members_.size(); ++index) {
    if (waiting.from.value_or(index) != index || (!waiting.from && index == member)) continue;
    if (!members_[index].gone) return OkStatus();
    last_gone = &members_[index];
  }
  if (last_gone == nullptr) return OkStatus();  // any source, but there are no others: it may wait
  return GoneStatus(*last_gone, absl::StrCat(Text(member, waiting), " will never come").c_str());
}

MessageAnswers Mailboxes::Fail(const Status& why) {
  MessageAnswers answers;
  for (uint32_t index = 0; index < members_.size(); ++index) {
    Member& member = members_[index];
    while (!member.waiting.empty()) {
      answers.push_back({index, member.waiting.front().request_id, why, {}});
      Remove(&member, member.waiting.begin());
    }
    DropInbox(&member, why, &answers);
  }
  return answers;
}

MessageAnswers Mailboxes::CheckDeadlines(Time now) {
  MessageAnswers answers;
  for (uint32_t index = 0; index < members_.size(); ++index) {
    Member& member = members_[index];
    for (auto one = member.waiting.begin(); one != member.waiting.end();) {
      if (one->deadline > now) {
        ++one;
        continue;
      }
      answers.push_back(
          {index,
           one->request_id,
           {Code::kDeadlineExceeded,
            absl::StrCat(where_, ": Timed out waiting ", DescribeDuration(one->timeout), " for ",
                         Text(index, *one), ". Find out what the sender is doing.")},
           {}});
      one = Remove(&member, one);
    }
    for (auto one = member.inbox.begin(); one != member.inbox.end();) {
      if (!one->request_id || one->deadline > now) {
        ++one;
        continue;
      }
      const Member& sender = members_[one->message->from];
      answers.push_back(
          {one->message->from,
           *one->request_id,
           {Code::kDeadlineExceeded,
            absl::StrCat(where_, ": Timed out waiting for rank ", member.rank,
                         " to receive a message of rank ", sender.rank, " (",
                         TagText(one->message->tag), ") after ", DescribeDuration(one->timeout),
                         "; ", sender.unreceived, " messages of rank ", sender.rank,
                         " have not been received")},
           {}});
      Forget(*one);
      one = member.inbox.erase(one);
    }
  }
  return answers;
}

std::optional<Time> Mailboxes::NextDeadline() const {
  if (deadlines_.empty()) return std::nullopt;
  return *deadlines_.begin();
}

size_t Mailboxes::HeldBy(uint32_t member) const {
  return members_[member].unreceived + members_[member].waiting.size();
}

Status Mailboxes::GoneStatus(const Member& member, const char* what) const {
  return {member.gone->code(), absl::StrCat(member.gone->message(), "; ", what)};
}

std::string Mailboxes::Text(uint32_t member, const Waiting& waiting) const {
  return absl::StrCat(
      "a message to rank ", members_[member].rank, " from ",
      waiting.from ? absl::StrCat("rank ", members_[*waiting.from].rank) : std::string("any rank"),
      " (", TagText(waiting.tag), ")");
}

}  // namespace gradsync

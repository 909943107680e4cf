// The messages of one group: what was sent and not received, who waits for what. A pure state
// machine, apart from the group's operations and their order.
//
// A message is taken as soon as it is sent, so that two ranks that send to each other before either
// receives come to no stand-still. Only a member that has sent kEagerMessages of them, or
// kEagerBytes, that nobody has received yet is answered later, when its message is received.
#ifndef GRADSYNC_SERVER_JOB_MAILBOXES_H_
#define GRADSYNC_SERVER_JOB_MAILBOXES_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "server/job/operation.h"
#include "shm/status.h"

namespace gradsync {

inline constexpr size_t kEagerMessages = 64;
inline constexpr uint64_t kEagerBytes = uint64_t{1} << 30;

// To a member's request, which it knows by `request_id`.
struct MessageAnswer {
  uint32_t member = 0;
  uint32_t request_id = 0;
  Status status;
  std::shared_ptr<const Message> message;  // null: the request was to send one
};
using MessageAnswers = std::vector<MessageAnswer>;

class Mailboxes {
 public:
  // As GroupScheduler's.
  Mailboxes(const std::string& job, const std::string& tag, std::vector<uint32_t> ranks);

  // `message->from` sends. `timeout` is for it to be answered.
  MessageAnswers Send(uint32_t request_id, uint32_t to, std::shared_ptr<const Message> message,
                      Duration timeout, Time now);

  // `from`: a member; nullopt: any, in the order in which messages came.
  MessageAnswers Receive(uint32_t member, uint32_t request_id, std::optional<uint32_t> from,
                         uint64_t tag, Duration timeout, Time now);

  // Ends a request of the member that has no answer yet.
  MessageAnswers Cancel(uint32_t member, uint32_t request_id);

  // The member sends and receives nothing more; what it has sent can still be received. `why` is a
  // clause, as for GroupScheduler.
  MessageAnswers MemberGone(uint32_t member, const Status& why);

  // The group has failed: everybody who waits is told, and what was sent is dropped.
  MessageAnswers Fail(const Status& why);

  MessageAnswers CheckDeadlines(Time now);
  // Cheap: asked after every operation of the group.
  std::optional<Time> NextDeadline() const;

  // Messages that the member has sent and nobody has received, and receives that it waits in.
  size_t HeldBy(uint32_t member) const;

 private:
  struct Sent {
    std::shared_ptr<const Message> message;
    std::optional<uint32_t> request_id;  // of the sender, if it has no answer yet
    Time deadline{};
    Duration timeout{};
  };
  struct Waiting {
    uint32_t request_id = 0;
    std::optional<uint32_t> from;
    uint64_t tag = 0;
    Time deadline{};
    Duration timeout{};
  };
  struct Member {
    uint32_t rank = 0;
    std::optional<Status> gone;
    std::list<Sent> inbox;       // oldest first
    std::list<Waiting> waiting;  // likewise
    // What it has sent that is in some inbox.
    size_t unreceived = 0;
    uint64_t unreceived_bytes = 0;
  };

  bool MayTake(const Member& sender, uint64_t bytes) const;
  void Forget(const Sent& sent);
  std::list<Waiting>::iterator Remove(Member* member, std::list<Waiting>::iterator waiting);
  void DropInbox(Member* member, const Status& why, MessageAnswers* answers);
  Status GoneStatus(const Member& member, const char* what) const;
  // Why the receive can never be answered; OK if it may.
  Status Unreachable(uint32_t member, const Waiting& waiting) const;
  std::string Text(uint32_t member, const Waiting& waiting) const;

  const std::string where_;  // "job x, group y"
  std::vector<Member> members_;
  std::multiset<Time> deadlines_;  // of all requests that have no answer yet
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_JOB_MAILBOXES_H_

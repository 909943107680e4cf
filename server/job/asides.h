// Which members of a group stand aside: they take no part in its operations until all do. Pure.
#ifndef GRADSYNC_SERVER_JOB_ASIDES_H_
#define GRADSYNC_SERVER_JOB_ASIDES_H_

#include <bitset>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "server/job/operation.h"
#include "shm/protocol.h"
#include "shm/status.h"

namespace gradsync {

using MemberSet = std::bitset<kMaxLocalRanks>;

// To one member that stood aside: why it will not take part again, or where it does.
struct AsideAnswer {
  uint32_t member = 0;
  uint32_t request_id = 0;
  Status status;
  uint64_t next_sequence = 0;
  uint32_t last_member = 0;
};

class Asides {
 public:
  explicit Asides(size_t group_size) : group_size_(group_size) {}

  const MemberSet& members() const { return members_; }
  bool any() const { return !requests_.empty(); }
  bool all() const { return requests_.size() == group_size_; }
  // Of the first that stood aside. To be called if any() does.
  AsidePolicy policy() const { return policy_; }

  void Add(uint32_t member, const AsideRequest& request, Time now) {
    if (requests_.empty()) policy_ = request.policy;
    requests_[member] = request;
    members_.set(member);
    last_activity_ = now;
  }

  // The others have done something.
  void Touch(Time now) { last_activity_ = now; }
  Time last_activity() const { return last_activity_; }

  // When one of those that stand aside has seen nothing done for as long as it is ready to wait.
  std::optional<Time> Deadline() const {
    std::optional<Time> deadline;
    for (const auto& [member, request] : requests_) {
      const Time own = last_activity_ + request.timeout;
      deadline = deadline ? std::min(*deadline, own) : own;
    }
    return deadline;
  }

  // All stand aside: none does from now on. The group goes on after the operation that was
  // submitted last, by the member that is named.
  std::vector<AsideAnswer> Rejoin() {
    uint64_t next_sequence = 0;
    uint32_t last_member = 0;
    for (const auto& [member, request] : requests_) {
      if (request.next_sequence < next_sequence) continue;
      next_sequence = request.next_sequence;
      last_member = member;
    }
    return AnswerAll(OkStatus(), next_sequence, last_member);
  }

  std::vector<AsideAnswer> Fail(const Status& why) { return AnswerAll(why, 0, 0); }

 private:
  std::vector<AsideAnswer> AnswerAll(const Status& status, uint64_t next_sequence,
                                     uint32_t last_member) {
    std::vector<AsideAnswer> answers;
    for (const auto& [member, request] : requests_) {
      answers.push_back({member, request.request_id, status, next_sequence, last_member});
    }
    requests_.clear();
    members_.reset();
    return answers;
  }

  size_t group_size_;
  MemberSet members_;
  AsidePolicy policy_ = AsidePolicy::kAverageOverAll;
  std::map<uint32_t, AsideRequest> requests_;  // by member
  Time last_activity_{};
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_JOB_ASIDES_H_

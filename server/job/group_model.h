// What must hold of one group, written down as simply as can be: everything that ever happened is
// kept, and each question is answered by looking through all of it. The tests compare the real
// scheduler with it, event by event.
#ifndef GRADSYNC_SERVER_JOB_GROUP_MODEL_H_
#define GRADSYNC_SERVER_JOB_GROUP_MODEL_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <ostream>
#include <set>

#include "server/job/group_scheduler.h"
#include "server/job/operation.h"
#include "shm/status.h"

namespace gradsync {

// What an event must bring about.
struct Expectation {
  std::optional<uint64_t> completed;
  std::optional<uint64_t> start;
  Code failure = Code::kOk;
  Code rejected = Code::kOk;

  static Expectation Rejected(Code code) {
    Expectation expectation;
    expectation.rejected = code;
    return expectation;
  }

  bool operator==(const Expectation&) const = default;
};

inline std::ostream& operator<<(std::ostream& out, const Expectation& e) {
  if (e.completed) out << "completed " << *e.completed << " ";
  if (e.start) out << "start " << *e.start << " ";
  return out << "failure " << CodeName(e.failure) << " rejected " << CodeName(e.rejected);
}

// The same of what the scheduler decided.
inline Expectation Outcome(const Decision& decision) {
  Expectation outcome;
  outcome.completed = decision.completed;
  if (decision.start != nullptr) outcome.start = decision.start_sequence;
  outcome.failure = decision.failure.code();
  outcome.rejected = decision.rejected.code();
  return outcome;
}

class GroupModel {
 public:
  explicit GroupModel(uint32_t size) : size_(size) {}

  Expectation Submit(uint32_t member, const Operation& operation, Duration timeout, Time now) {
    if (reason_ != Code::kOk) return {};
    auto& submissions = submitted_[operation.sequence];
    if (submissions.contains(member)) return Expectation::Rejected(Code::kProtocol);
    for (const auto& [other, submission] : submissions) {
      if (submission.count != operation.count) reason_ = Code::kMismatch;
    }
    submissions[member] = {operation.count, now + timeout};
    if (reason_ == Code::kOk && IsSomebodyStranded()) reason_ = Code::kRankLost;
    return Settle();
  }

  Expectation Finished() {
    running_ = false;
    ++finished_;
    Expectation expectation = Settle();
    expectation.completed = finished_;
    return expectation;
  }

  Expectation Gone(uint32_t member, bool orderly) {
    gone_.insert(member);
    if (reason_ == Code::kOk && (!orderly || IsSomebodyStranded())) reason_ = Code::kRankLost;
    return Settle();
  }

  Expectation CheckDeadline(Time now) {
    const std::optional<Time> deadline = Deadline();
    if (deadline && *deadline <= now) reason_ = Code::kDeadlineExceeded;
    return Settle();
  }

  Expectation Stop(Code code) {
    if (reason_ == Code::kOk) reason_ = code;
    return Settle();
  }

  std::optional<Time> Deadline() const {
    if (reason_ != Code::kOk) return std::nullopt;
    std::optional<Time> earliest;
    for (const auto& [sequence, submissions] : submitted_) {
      if (sequence < finished_ || !IsHeldUp(sequence)) continue;
      for (const auto& [member, submission] : submissions) {
        earliest = earliest ? std::min(*earliest, submission.deadline) : submission.deadline;
      }
    }
    return earliest;
  }

  uint64_t finished() const { return finished_; }
  bool running() const { return running_; }
  bool failed() const { return told_; }
  Code reason() const { return reason_; }

 private:
  struct Submission {
    uint64_t count;  // stands for the whole descriptor
    Time deadline;
  };

  bool HasSubmitted(uint32_t member, uint64_t sequence) const {
    const auto found = submitted_.find(sequence);
    return found != submitted_.end() && found->second.contains(member);
  }

  bool IsReady(uint64_t sequence) const {
    const auto found = submitted_.find(sequence);
    return found != submitted_.end() && found->second.size() == size_;
  }

  // Whether some operation up to `sequence` lacks a member.
  bool IsHeldUp(uint64_t sequence) const {
    for (uint64_t s = finished_; s <= sequence; ++s) {
      if (!IsReady(s)) return true;
    }
    return false;
  }

  // Whether a member that is still there has submitted what a member that has left keeps from
  // starting.
  bool IsSomebodyStranded() const {
    for (const uint32_t gone : gone_) {
      uint64_t gap = 0;
      while (HasSubmitted(gone, gap)) ++gap;
      for (const auto& [sequence, submissions] : submitted_) {
        for (const auto& [member, submission] : submissions) {
          if (sequence >= gap && !gone_.contains(member)) return true;
        }
      }
    }
    return false;
  }

  Expectation Settle() {
    Expectation expectation;
    if (running_ || told_) return expectation;
    if (reason_ != Code::kOk) {
      told_ = true;
      expectation.failure = reason_;
    } else if (IsReady(finished_)) {
      running_ = true;
      expectation.start = finished_;
    }
    return expectation;
  }

  uint32_t size_;
  std::map<uint64_t, std::map<uint32_t, Submission>> submitted_;  // by sequence and member
  std::set<uint32_t> gone_;
  uint64_t finished_ = 0;
  bool running_ = false;
  bool told_ = false;
  Code reason_ = Code::kOk;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_JOB_GROUP_MODEL_H_

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
#include <utility>

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
  std::set<uint32_t> answered;                            // members that stood aside
  std::optional<std::pair<uint64_t, uint32_t>> rejoined;  // where they go on, and the last

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
  for (const uint32_t member : e.answered) out << "answer " << member << " ";
  if (e.rejoined) out << "rejoin " << e.rejoined->first << " of " << e.rejoined->second << " ";
  return out << "failure " << CodeName(e.failure) << " rejected " << CodeName(e.rejected);
}

// The same of what the scheduler decided.
inline Expectation Outcome(const Decision& decision) {
  Expectation outcome;
  outcome.completed = decision.completed;
  if (!decision.starts.empty()) outcome.start = decision.starts.front().sequence;
  outcome.failure = decision.failure.code();
  outcome.rejected = decision.rejected.code();
  for (const AsideAnswer& answer : decision.asides) {
    outcome.answered.insert(answer.member);
    if (answer.status.ok()) outcome.rejoined = {answer.next_sequence, answer.last_member};
  }
  return outcome;
}

class GroupModel {
 public:
  explicit GroupModel(uint32_t size) : size_(size) {}

  Expectation Submit(uint32_t member, const Operation& operation, Duration timeout, Time now) {
    if (reason_ != Code::kOk) return {};
    if (aside_.contains(member)) return Expectation::Rejected(Code::kProtocol);
    auto& submissions = submitted_[operation.sequence];
    if (submissions.contains(member)) return Expectation::Rejected(Code::kProtocol);
    for (const auto& [other, submission] : submissions) {
      if (submission.count != operation.count) reason_ = Code::kMismatch;
    }
    submissions[member] = {operation.count, now + timeout};
    activity_ = now;
    if (reason_ == Code::kOk && IsSomebodyStranded()) reason_ = Code::kRankLost;
    return Settle();
  }

  // A member that has submitted all before `next`, and nothing else.
  Expectation StandAside(uint32_t member, uint64_t next, Duration timeout, Time now) {
    if (aside_.contains(member)) return Expectation::Rejected(Code::kProtocol);
    aside_[member] = {next, timeout};
    activity_ = now;
    Expectation expectation = Settle();
    if (reason_ == Code::kOk && IsSomebodyDeserted()) {
      const std::optional<uint64_t> started = expectation.start;
      reason_ = Code::kRankLost;
      expectation = Settle();
      expectation.start = started;
    } else if (reason_ != Code::kOk) {
      if (told_) AnswerAll(&expectation);
    } else if (aside_.size() == size_) {
      expectation.rejoined = {0, 0};
      for (const auto& [who, aside] : aside_) {
        if (aside.next >= expectation.rejoined->first) expectation.rejoined = {aside.next, who};
      }
      AnswerAll(&expectation);
    }
    return expectation;
  }

  Expectation Finished(Time now) {
    running_ = false;
    ++finished_;
    activity_ = now;
    Expectation expectation = Settle();
    expectation.completed = finished_;
    return expectation;
  }

  Expectation Gone(uint32_t member, bool orderly) {
    gone_.insert(member);
    if (reason_ == Code::kOk && (!orderly || IsSomebodyStranded() || IsSomebodyDeserted())) {
      reason_ = Code::kRankLost;
    }
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
    for (const auto& [member, aside] : aside_) {
      if (running_) break;
      const Time deadline = activity_ + aside.timeout;
      earliest = earliest ? std::min(*earliest, deadline) : deadline;
    }
    return earliest;
  }

  uint64_t finished() const { return finished_; }
  bool running() const { return running_; }
  bool failed() const { return told_; }
  Code reason() const { return reason_; }
  bool HasSubmitted(uint32_t member, uint64_t sequence) const {
    const auto found = submitted_.find(sequence);
    return found != submitted_.end() && found->second.contains(member);
  }

 private:
  struct Submission {
    uint64_t count;  // stands for the whole descriptor
    Time deadline;
  };
  struct Aside {
    uint64_t next;
    Duration timeout;
  };

  bool IsReady(uint64_t sequence) const { return ready_.contains(sequence); }

  // Submitted by all that do not stand aside, now or at some time before.
  void FindReady() {
    for (const auto& [sequence, submissions] : submitted_) {
      uint32_t there = 0;
      for (uint32_t member = 0; member < size_; ++member) {
        if (submissions.contains(member) || aside_.contains(member)) ++there;
      }
      const bool next = sequence == 0 || ready_.contains(sequence - 1);
      if (next && there == size_) ready_.insert(sequence);
    }
  }

  void AnswerAll(Expectation* expectation) {
    for (const auto& [member, aside] : aside_) expectation->answered.insert(member);
    aside_.clear();
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
      while (HasSubmitted(gone, gap) || IsReady(gap)) ++gap;
      for (const auto& [sequence, submissions] : submitted_) {
        for (const auto& [member, submission] : submissions) {
          if (sequence >= gap && !gone_.contains(member)) return true;
        }
      }
    }
    return false;
  }

  // Whether a member stands aside and waits for one that has left.
  bool IsSomebodyDeserted() const {
    const auto is_aside = [this](uint32_t member) { return aside_.contains(member); };
    return !aside_.empty() && !std::all_of(gone_.begin(), gone_.end(), is_aside);
  }

  Expectation Settle() {
    Expectation expectation;
    if (reason_ == Code::kOk) FindReady();
    if (running_ || told_) return expectation;
    if (reason_ != Code::kOk) {
      told_ = true;
      expectation.failure = reason_;
      AnswerAll(&expectation);
    } else if (IsReady(finished_)) {
      running_ = true;
      expectation.start = finished_;
    }
    return expectation;
  }

  uint32_t size_;
  std::map<uint64_t, std::map<uint32_t, Submission>> submitted_;  // by sequence and member
  std::set<uint64_t> ready_;                                      // sequences
  std::map<uint32_t, Aside> aside_;
  Time activity_{};
  std::set<uint32_t> gone_;
  uint64_t finished_ = 0;
  bool running_ = false;
  bool told_ = false;
  Code reason_ = Code::kOk;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_JOB_GROUP_MODEL_H_

// Drives GroupScheduler through every interleaving of small groups, and through random ones of
// larger groups, and compares each decision with GroupModel's.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/job/group_model.h"
#include "server/job/group_scheduler.h"
#include "server/job/job_testing.h"

namespace gradsync {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// A group whose scheduler and model are fed the same events. Checks after each that they agree, and
// that the scheduler's tasks are made of what the members submitted.
class CheckedGroup {
 public:
  explicit CheckedGroup(uint32_t size)
      : size_(size), scheduler_("job", "group", Ranks(size)), model_(size), gone_(size, false) {}

  bool Submit(uint32_t member, const Operation& operation, Duration timeout) {
    MemberBuffers buffers;
    buffers.input = MemoryOf(member, operation.sequence);
    buffers.output = MemoryOf(member, operation.sequence) + 1;
    buffers.keep_alive = mapping_;
    buffers.timeout = timeout;
    Decision decision = scheduler_.Submit(member, operation, std::move(buffers), now_);
    return Check(decision, model_.Submit(member, operation, timeout, now_),
                 absl::StrCat("rank ", member, " submits ", operation.sequence));
  }

  bool StandAside(uint32_t member, uint64_t next, Duration timeout) {
    const AsideRequest request{.request_id = member, .next_sequence = next, .timeout = timeout};
    const Expectation expected = model_.StandAside(member, next, timeout, now_);
    if (expected.rejoined) rejoined_at_ = expected.rejoined->first;
    return Check(scheduler_.StandAside(member, request, now_), expected,
                 absl::StrCat("rank ", member, " stands aside at ", next));
  }

  bool Finish() {
    const uint64_t sequence = model_.finished();
    task_.reset();
    return Check(scheduler_.Finished(sequence, OkStatus(), now_), model_.Finished(now_),
                 absl::StrCat("engine finishes ", sequence));
  }

  bool Gone(uint32_t member, bool orderly) {
    gone_[member] = true;
    return Check(scheduler_.MemberGone(member, orderly, {Code::kRankLost, "gone"}),
                 model_.Gone(member, orderly),
                 absl::StrCat("rank ", member, orderly ? " leaves" : " dies"));
  }

  bool Stop() {
    return Check(scheduler_.Stop({Code::kShuttingDown, "stop"}), model_.Stop(Code::kShuttingDown),
                 "stop");
  }

  bool CheckDeadline() {
    return Check(scheduler_.CheckDeadline(now_), model_.CheckDeadline(now_), "deadlines");
  }

  void Advance(Duration duration) { now_ += duration; }
  bool AdvanceToDeadline() {
    if (model_.Deadline()) now_ = std::max(now_, *model_.Deadline());
    return CheckDeadline();
  }

  // Nothing is under way any more: all `operations` are complete, or the group has failed.
  bool CheckEnd(uint64_t operations) {
    EXPECT_FALSE(scheduler_.running());
    EXPECT_TRUE(model_.failed() || model_.finished() == operations) << "stuck after:" << history_;
    EXPECT_EQ(mapping_.use_count(), 1) << "memory is held on to after:" << history_;
    return !testing::Test::HasFailure();
  }

  // Where the members went on after they had all stood aside, since the last call.
  std::optional<uint64_t> TakeRejoined() { return std::exchange(rejoined_at_, std::nullopt); }

  bool running() const { return model_.running(); }
  bool failed() const { return model_.failed(); }
  bool gone(uint32_t member) const { return gone_[member]; }

 private:
  static std::vector<uint32_t> Ranks(uint32_t size) {
    std::vector<uint32_t> ranks(size);
    std::iota(ranks.begin(), ranks.end(), 0u);
    return ranks;
  }

  bool Check(const Decision& decision, const Expectation& expected, const std::string& event) {
    absl::StrAppend(&history_, "\n  ", event);
    const bool same =
        Outcome(decision) == expected && scheduler_.NextDeadline() == model_.Deadline() &&
        scheduler_.running() == model_.running() && scheduler_.failure().code() == model_.reason();
    EXPECT_TRUE(same) << "decided " << Outcome(decision) << ", expected " << expected
                      << ", after:" << history_;
    if (!decision.starts.empty()) CheckTask(decision);
    return same;
  }

  void CheckTask(const Decision& decision) {
    task_ = decision.starts.empty() ? nullptr : decision.starts.front().task;
    size_t at = 0;
    for (uint32_t member = 0; member < size_; ++member) {
      if (!model_.HasSubmitted(member, decision.starts.front().sequence))
        continue;  // it stood aside
      std::byte* memory = MemoryOf(member, decision.starts.front().sequence);
      ASSERT_LT(at, task_->inputs.size());
      ASSERT_EQ(task_->inputs[at], memory);
      ASSERT_EQ(task_->outputs[at], memory + 1);
      ++at;
    }
    ASSERT_EQ(task_->inputs.size(), at);
    ASSERT_EQ(task_->divisor, at < size_ ? size_ : 0);
  }

  // Different for every submission of a group.
  std::byte* MemoryOf(uint32_t member, uint64_t sequence) const {
    static std::array<std::byte, 4096> memory;
    return &memory.at(2 * (member + size_ * sequence));
  }

  uint32_t size_;
  GroupScheduler scheduler_;
  GroupModel model_;
  std::vector<bool> gone_;
  std::shared_ptr<int> mapping_ = std::make_shared<int>();
  std::shared_ptr<const Task> task_;  // as the engine keeps it
  std::optional<uint64_t> rejoined_at_;
  Time now_;
  std::string history_;
};

// ---- Every interleaving -------------------------------------------------------------------------

enum class Trouble { kNone, kDeath, kGoodbye, kMismatch, kStop, kDeadline };

// Tries every order in which members can submit their operations (each in any order of its own),
// the engine can finish, and at most one trouble can come in between. A path is replayed from its
// start, for a scheduler cannot be copied.
class Explorer {
 public:
  Explorer(uint32_t members, uint32_t operations, std::vector<Trouble> troubles)
      : members_(members), operations_(operations), troubles_(std::move(troubles)) {}

  uint64_t Explore() {
    while (!testing::Test::HasFailure() && RunOnce() && NextPath()) ++paths_;
    return paths_ + 1;
  }

 private:
  struct Event {
    enum Kind { kSubmit, kFinish, kTrouble } kind;
    uint32_t member = 0;
    uint32_t operation = 0;
    Trouble trouble = Trouble::kNone;
  };

  // Everything that may happen now. Members that have done nothing yet are all alike: only the
  // first of them may begin.
  std::vector<Event> Choices(const CheckedGroup& group, const std::vector<uint32_t>& submitted,
                             bool troubled) const {
    std::vector<Event> choices;
    if (group.running()) choices.push_back({.kind = Event::kFinish});
    bool fresh = false;
    for (uint32_t member = 0; member < members_; ++member) {
      if (group.gone(member)) continue;
      if (submitted[member] == 0 && fresh) continue;
      fresh |= submitted[member] == 0;
      for (uint32_t operation = 0; operation < operations_; ++operation) {
        if ((submitted[member] >> operation & 1) == 0) {
          choices.push_back({.kind = Event::kSubmit, .member = member, .operation = operation});
        }
      }
    }
    if (troubled || group.failed()) return choices;
    for (const Trouble trouble : troubles_) {
      const bool of_member = trouble != Trouble::kStop && trouble != Trouble::kDeadline;
      for (uint32_t member = 0; member < (of_member ? members_ : 1); ++member) {
        choices.push_back({.kind = Event::kTrouble, .member = member, .trouble = trouble});
      }
    }
    return choices;
  }

  bool RunOnce() {
    CheckedGroup group(members_);
    std::vector<uint32_t> submitted(members_, 0);  // a bit per operation
    bool troubled = false;
    for (size_t depth = 0;; ++depth) {
      const std::vector<Event> choices = Choices(group, submitted, troubled);
      if (choices.empty()) return End(&group, troubled);
      // At the end of the work the trouble may also stay away.
      const bool only_trouble = choices.front().kind == Event::kTrouble;
      const size_t options = choices.size() + (only_trouble ? 1 : 0);
      if (depth == path_.size()) path_.push_back({0, options});
      const size_t choice = path_[depth].choice;
      if (choice == choices.size()) return End(&group, troubled);
      troubled |= choices[choice].kind == Event::kTrouble;
      if (!Happen(choices[choice], &group, &submitted)) return false;
    }
  }

  bool End(CheckedGroup* group, bool troubled) {
    if (troubled) group->AdvanceToDeadline();
    // A member that left in an orderly way may leave nothing to do and nothing to fail.
    return LeftInOrder(*group) || group->CheckEnd(operations_);
  }

  bool LeftInOrder(const CheckedGroup& group) const {
    for (uint32_t member = 0; member < members_; ++member) {
      if (group.gone(member) && !group.failed()) return true;
    }
    return false;
  }

  bool Happen(const Event& event, CheckedGroup* group, std::vector<uint32_t>* submitted) {
    switch (event.kind) {
      case Event::kFinish:
        return group->Finish();
      case Event::kSubmit:
        (*submitted)[event.member] |= 1u << event.operation;
        return group->Submit(event.member, AllReduce(event.operation), seconds(30));
      case Event::kTrouble:
        return Disturb(event, group, submitted);
    }
    return false;
  }

  bool Disturb(const Event& event, CheckedGroup* group, std::vector<uint32_t>* submitted) {
    switch (event.trouble) {
      case Trouble::kDeath:
        return group->Gone(event.member, /*orderly=*/false);
      case Trouble::kGoodbye:
        return group->Gone(event.member, /*orderly=*/true);
      case Trouble::kStop:
        return group->Stop();
      case Trouble::kDeadline:
        return group->AdvanceToDeadline();
      case Trouble::kMismatch:
        for (uint32_t operation = 0; operation < operations_; ++operation) {
          if (((*submitted)[event.member] >> operation & 1) != 0) continue;
          (*submitted)[event.member] |= 1u << operation;
          return group->Submit(event.member, AllReduce(operation, 99), seconds(30));
        }
        return true;
      case Trouble::kNone:
        return true;
    }
    return false;
  }

  // Moves on to the next path, depth first; false after the last one.
  bool NextPath() {
    while (!path_.empty() && ++path_.back().choice == path_.back().options) path_.pop_back();
    return !path_.empty();
  }

  struct Step {
    size_t choice;
    size_t options;
  };
  const uint32_t members_;
  const uint32_t operations_;
  const std::vector<Trouble> troubles_;
  std::vector<Step> path_;
  uint64_t paths_ = 0;
};

TEST(GroupInterleavingTest, EveryInterleavingOfTwoMembersAndThreeOperations) {
  EXPECT_GT(Explorer(2, 3, {}).Explore(), 300u);
}

TEST(GroupInterleavingTest, EveryInterleavingOfThreeMembersAndTwoOperations) {
  EXPECT_GT(Explorer(3, 2, {}).Explore(), 100u);
}

TEST(GroupInterleavingTest, EveryInterleavingOfThreeMembersAndThreeOperations) {
  EXPECT_GT(Explorer(3, 3, {}).Explore(), 60000u);
}

TEST(GroupInterleavingTest, EveryTroubleAtEveryPointOfTwoMembersAndThreeOperations) {
  EXPECT_GT(Explorer(2, 3,
                     {Trouble::kDeath, Trouble::kGoodbye, Trouble::kMismatch, Trouble::kStop,
                      Trouble::kDeadline})
                .Explore(),
            10000u);
}

TEST(GroupInterleavingTest, EveryTroubleAtEveryPointOfThreeMembersAndTwoOperations) {
  EXPECT_GT(Explorer(3, 2,
                     {Trouble::kDeath, Trouble::kGoodbye, Trouble::kMismatch, Trouble::kStop,
                      Trouble::kDeadline})
                .Explore(),
            10000u);
}

// ---- Random interleavings -----------------------------------------------------------------------

// Members that train: each submits the buckets of an iteration in a random order of its own, then
// those of the next, as fast or slow as it happens to be.
class RandomTraining {
 public:
  explicit RandomTraining(uint64_t seed)
      : random_(seed),
        members_(static_cast<uint32_t>(1 + Below(6))),
        buckets_(static_cast<uint32_t>(1 + Below(6))),
        iterations_(1 + Below(5)),
        group_(members_) {
    for (uint32_t member = 0; member < members_; ++member) programs_.push_back(MakeProgram());
    if (Below(2) == 0) trouble_at_ = Below(2 * members_ * buckets_ * iterations_);
  }

  bool Run() {
    for (uint64_t step = 0; !IsOver(); ++step) {
      group_.Advance(milliseconds(Below(3)));
      if (step == trouble_at_ && !Disturb()) return false;
      if (!Step()) return false;
    }
    while (group_.running()) {
      if (!group_.Finish()) return false;
    }
    // Whoever still waits for a member that submits no more is failed in time.
    if (!group_.AdvanceToDeadline()) return false;
    return (may_stop_short_ && !group_.failed()) || group_.CheckEnd(buckets_ * iterations_);
  }

 private:
  uint64_t Below(uint64_t limit) {
    return std::uniform_int_distribution<uint64_t>(0, limit - 1)(random_);
  }

  std::vector<uint64_t> MakeProgram() {
    std::vector<uint64_t> program;
    for (uint64_t iteration = 0; iteration < iterations_; ++iteration) {
      std::vector<uint64_t> sequences(buckets_);
      std::iota(sequences.begin(), sequences.end(), iteration * buckets_);
      std::shuffle(sequences.begin(), sequences.end(), random_);
      program.insert(program.begin(), sequences.rbegin(), sequences.rend());
    }
    return program;  // the next operation is the last entry
  }

  bool IsOver() const {
    return std::all_of(programs_.begin(), programs_.end(),
                       [](const auto& program) { return program.empty(); });
  }

  bool Step() {
    if (group_.running() && Below(3) == 0) return group_.Finish();
    if (Below(16) == 0) return group_.CheckDeadline();
    const auto member = static_cast<uint32_t>(Below(members_));
    if (programs_[member].empty()) return true;
    const uint64_t sequence = programs_[member].back();
    programs_[member].pop_back();
    return group_.Submit(member, BucketReduce(sequence, static_cast<uint32_t>(sequence % buckets_)),
                         milliseconds(Below(20) == 0 ? 500 : 5000));
  }

  bool Disturb() {
    const auto member = static_cast<uint32_t>(Below(members_));
    std::vector<uint64_t>& program = programs_[member];
    switch (Below(7)) {
      case 0:
        program.clear();
        return group_.Gone(member, /*orderly=*/false);
      case 1:
        may_stop_short_ = true;
        program.clear();
        return group_.Gone(member, /*orderly=*/true);
      case 2:
        return group_.Stop();
      case 3:
        program.clear();                  // it hangs
        may_stop_short_ = members_ == 1;  // with nobody to wait for it
        return true;
      case 4:
        group_.Advance(seconds(10));
        return group_.CheckDeadline();
      case 5:  // twice the same number: what the others do from then on is what counts
        if (program.empty()) return true;
        return group_.Submit(member, BucketReduce(program.back(), 0, 7), seconds(5)) &&
               group_.Submit(member, BucketReduce(program.back(), 0, 7), seconds(5)) &&
               (program.pop_back(), true);
      default:
        if (program.empty()) return true;
        const uint64_t sequence = program.back();
        program.pop_back();
        return group_.Submit(member, BucketReduce(sequence, 0, 7), seconds(5));
    }
  }

  std::mt19937_64 random_;
  const uint32_t members_;
  const uint32_t buckets_;
  const uint64_t iterations_;
  CheckedGroup group_;
  std::vector<std::vector<uint64_t>> programs_;
  std::optional<uint64_t> trouble_at_;
  bool may_stop_short_ = false;
};

// Two epochs in which members have different numbers of iterations: each stands aside when it has
// no more, and all go on together.
class RandomJoin {
 public:
  explicit RandomJoin(uint64_t seed)
      : random_(seed),
        members_(static_cast<uint32_t>(1 + Below(5))),
        buckets_(static_cast<uint32_t>(1 + Below(4))),
        group_(members_),
        next_(members_, 0),
        aside_(members_, false),
        stuck_(members_, false) {
    Begin(0);
    if (Below(3) == 0) trouble_at_ = Below(60);
  }

  bool Run() {
    for (uint64_t step = 0; step < 400 && !IsOver(); ++step) {
      group_.Advance(milliseconds(Below(3)));
      if (step == trouble_at_ && !Disturb()) return false;
      if (!Step()) return false;
      if (const auto rejoined = group_.TakeRejoined()) {
        ++epoch_;
        longest_ = *rejoined;
        std::fill(aside_.begin(), aside_.end(), false);
        if (epoch_ == 1) Begin(*rejoined);
      }
    }
    while (group_.running()) {
      if (!group_.Finish()) return false;
    }
    if (!group_.AdvanceToDeadline()) return false;
    // Nobody waits for a member that hangs alone.
    if (group_.failed() || (members_ == 1 && stuck_[0])) return true;
    EXPECT_EQ(epoch_, 2u);
    return epoch_ == 2 && group_.CheckEnd(longest_);
  }

 private:
  uint64_t Below(uint64_t limit) {
    return std::uniform_int_distribution<uint64_t>(0, limit - 1)(random_);
  }

  void Begin(uint64_t sequence) {
    ends_.clear();
    for (uint32_t member = 0; member < members_; ++member) {
      next_[member] = sequence;
      ends_.push_back(sequence + buckets_ * Below(4));
    }
  }

  bool IsOver() const { return epoch_ == 2 || group_.failed(); }

  bool Step() {
    if (group_.running() && Below(3) == 0) return group_.Finish();
    if (Below(16) == 0) return group_.CheckDeadline();
    const auto member = static_cast<uint32_t>(Below(members_));
    if (stuck_[member] || aside_[member] || epoch_ == 2) return true;
    if (next_[member] == ends_[member]) {
      aside_[member] = true;
      return group_.StandAside(member, next_[member], seconds(5));
    }
    const uint64_t sequence = next_[member]++;
    return group_.Submit(member, BucketReduce(sequence, static_cast<uint32_t>(sequence % buckets_)),
                         seconds(5));
  }

  bool Disturb() {
    const auto member = static_cast<uint32_t>(Below(members_));
    stuck_[member] = true;
    switch (Below(4)) {
      case 0:
        return group_.Gone(member, /*orderly=*/false);
      case 1:
        return group_.Gone(member, /*orderly=*/true) && (group_.Advance(seconds(10)), true);
      case 2:
        return group_.Stop();
      default:  // it hangs
        return true;
    }
  }

  std::mt19937_64 random_;
  const uint32_t members_;
  const uint64_t buckets_;
  CheckedGroup group_;
  std::vector<uint64_t> next_;  // by member: the operation that it submits next
  std::vector<uint64_t> ends_;  // by member: the operation before which it stands aside
  std::vector<bool> aside_;
  std::vector<bool> stuck_;
  std::optional<uint64_t> trouble_at_;
  uint32_t epoch_ = 0;
  uint64_t longest_ = 0;
};

TEST(GroupInterleavingTest, RandomJoinsDoWhatTheModelSays) {
  for (uint64_t seed = 0; seed < 10000; ++seed) {
    ASSERT_TRUE(RandomJoin(seed).Run()) << "seed " << seed;
  }
}

TEST(GroupInterleavingTest, RandomTrainingDoesWhatTheModelSays) {
  for (uint64_t seed = 0; seed < 20000; ++seed) {
    ASSERT_TRUE(RandomTraining(seed).Run()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace gradsync

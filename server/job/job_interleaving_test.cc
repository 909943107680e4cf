// Drives JobTable through random lives of several jobs at once: trainers join, form groups, train,
// leave and come again, in any interleaving, and some of them get into trouble. What it does after
// each event is compared with a model that keeps plain lists and, for each group, a GroupModel.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/job/group_model.h"
#include "server/job/job_table.h"
#include "server/job/job_testing.h"

namespace gradsync {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

struct Trainer;

// What a trainer does, step by step.
struct Command {
  enum Kind { kAsk, kSubmit, kWait, kDestroy, kGoodbye } kind;
  std::string tag;
  std::vector<uint32_t> ranks;  // kAsk
  uint64_t sequence = 0;        // kSubmit; kWait: all below it
};

struct ModelGroup {
  struct Member {
    Trainer* trainer;
    SessionId session;
    uint32_t number;
    bool active;
  };
  explicit ModelGroup(uint32_t size) : model(size) {}
  GroupModel model;
  std::vector<Member> members;
  std::optional<GroupId> id;  // known once it has started something
};

struct ModelRun {
  struct Forming {
    std::vector<uint32_t> ranks;
    std::map<uint32_t, Trainer*> asked;
    Time deadline;
  };
  std::set<uint32_t> joined;
  std::set<uint32_t> connected;
  bool failed = false;
  std::map<std::string, Forming> forming;
};

struct Trainer {
  struct Holding {
    std::shared_ptr<ModelGroup> group;
    uint32_t member = 0;
    uint64_t completed = 0;
  };
  size_t job = 0;
  uint32_t rank = 0;
  int runs_left = 0;
  SessionId session = 0;  // 0: not joined
  std::shared_ptr<ModelRun> run;
  std::deque<Command> program;
  std::map<std::string, Holding> groups;
  std::set<uint32_t> numbers;
  std::map<std::string, uint32_t> reserved;  // numbers, by the tag that is being formed
  bool waits_for_reply = false;
  bool broken = false;  // was told of an error: it leaves as soon as it can
  bool hung = false;
};

struct ModelJob {
  std::string name;
  uint32_t world_size = 0;
  bool troubled = false;  // may end in errors
  std::vector<std::shared_ptr<ModelRun>> runs;
  std::vector<Command> script;  // of rank-independent steps; buckets are shuffled per rank
};

class Simulation {
 public:
  explicit Simulation(uint64_t seed) : random_(seed) {
    jobs_.resize(1 + Below(3));
    for (size_t job = 0; job < jobs_.size(); ++job) {
      jobs_[job].name = absl::StrCat("job", job);
      jobs_[job].world_size = static_cast<uint32_t>(1 + Below(4));
      const int runs = static_cast<int>(1 + Below(2));
      WriteScript(&jobs_[job]);
      for (uint32_t rank = 0; rank < jobs_[job].world_size; ++rank) {
        trainers_.push_back(std::make_unique<Trainer>());
        trainers_.back()->job = job;
        trainers_.back()->rank = rank;
        trainers_.back()->runs_left = runs;
      }
    }
    for (uint64_t troubles = Below(3); troubles > 0; --troubles) trouble_at_.insert(Below(150));
  }

  void Run() {
    for (uint64_t step = 0; !IsOver() && !testing::Test::HasFailure(); ++step) {
      ASSERT_LT(step, 100000u) << "it never ends";
      now_ += milliseconds(Below(2));
      if (trouble_at_.contains(step)) Disturb();
      Step();
    }
    EXPECT_EQ(table_.session_count(), 0u);
    EXPECT_EQ(table_.running_count(), 0u);
    EXPECT_TRUE(table_.Snapshot(now_).empty());
    EXPECT_EQ(table_.NextDeadline(), std::nullopt);
  }

 private:
  struct Running {
    std::shared_ptr<ModelGroup> group;
    uint64_t sequence;
  };

  uint64_t Below(uint64_t limit) {
    return std::uniform_int_distribution<uint64_t>(0, limit - 1)(random_);
  }

  // ---- What trainers do ----

  void WriteScript(ModelJob* job) {
    std::vector<uint32_t> all(job->world_size);
    std::iota(all.begin(), all.end(), 0u);
    AddGroup(job, "world", all);
    for (uint64_t extra = Below(3); extra > 0; --extra) {
      std::vector<uint32_t> some = all;
      std::shuffle(some.begin(), some.end(), random_);
      some.resize(1 + Below(some.size()));
      AddGroup(job, absl::StrCat("sub", extra), some);
    }
  }

  void AddGroup(ModelJob* job, const std::string& tag, const std::vector<uint32_t>& ranks) {
    job->script.push_back({Command::kAsk, tag, ranks, 0});
    const uint64_t buckets = 1 + Below(4);
    uint64_t sequence = 0;
    for (uint64_t iteration = Below(4); iteration > 0; --iteration) {
      for (uint64_t bucket = 0; bucket < buckets; ++bucket) {
        job->script.push_back({Command::kSubmit, tag, ranks, sequence++});
      }
      if (Below(2) == 0) job->script.push_back({Command::kWait, tag, ranks, sequence});
    }
    if (Below(2) == 0) job->script.push_back({Command::kDestroy, tag, ranks, 0});
  }

  // The script as `rank` follows it: the groups it is in, neighbouring submissions in an order of
  // its own.
  std::deque<Command> MakeProgram(const ModelJob& job, uint32_t rank) {
    std::deque<Command> program;
    for (const Command& command : job.script) {
      const auto& ranks = command.ranks;
      if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) program.push_back(command);
    }
    for (auto begin = program.begin(); begin != program.end();) {
      const auto end = std::find_if(begin, program.end(), [&](const Command& command) {
        return command.kind != Command::kSubmit || command.tag != begin->tag;
      });
      std::shuffle(begin, end, random_);
      begin = end == begin ? end + 1 : end;
    }
    program.push_back({Command::kGoodbye, "", {}, 0});
    return program;
  }

  bool IsOver() const {
    return running_.empty() &&
           std::all_of(trainers_.begin(), trainers_.end(), [](const auto& trainer) {
             return trainer->session == 0 && trainer->runs_left == 0;
           });
  }

  bool CanAct(const Trainer& trainer) const {
    if (trainer.hung) return false;
    if (trainer.session == 0) return trainer.runs_left > 0 && !draining_;
    if (trainer.broken) return true;
    if (trainer.waits_for_reply) return false;
    const Command& command = trainer.program.front();
    return command.kind != Command::kWait ||
           trainer.groups.at(command.tag).completed >= command.sequence;
  }

  void Step() {
    std::vector<Trainer*> able;
    for (const auto& trainer : trainers_) {
      if (CanAct(*trainer)) able.push_back(trainer.get());
    }
    if (able.empty() && running_.empty()) return BreakTheStandstill();
    const uint64_t choice = Below(able.size() + running_.size());
    if (choice >= able.size()) return FinishRunning(choice - able.size());
    Act(able[choice]);
  }

  void Act(Trainer* trainer) {
    if (trainer->session == 0) return Join(trainer);
    if (trainer->broken) {
      EXPECT_TRUE(jobs_[trainer->job].troubled) << "a job without trouble met with an error";
      return Leave(trainer, Below(2) == 0);
    }
    const Command command = trainer->program.front();
    trainer->program.pop_front();
    switch (command.kind) {
      case Command::kAsk:
        return Ask(trainer, command);
      case Command::kSubmit:
        return Submit(trainer, command, 100);
      case Command::kDestroy:
        return Destroy(trainer, command.tag);
      case Command::kGoodbye:
        return Leave(trainer, /*orderly=*/true);
      case Command::kWait:
        return;
    }
  }

  // Nobody can do anything: time passes until somebody is told why, and what hangs is killed at
  // last.
  void BreakTheStandstill() {
    if (const std::optional<Time> deadline = table_.NextDeadline()) {
      now_ = std::max(now_, *deadline);
      return CheckDeadlines();
    }
    for (const auto& trainer : trainers_) {
      if (trainer->session != 0 && trainer->hung) return Leave(trainer.get(), /*orderly=*/false);
      if (draining_ || trainer->hung) trainer->runs_left = 0;
    }
    // A drained daemon leaves trainers alone that asked for nothing; they go by themselves.
    for (const auto& trainer : trainers_) {
      ASSERT_EQ(trainer->session, 0u) << "a trainer waits for ever: " << history_;
    }
  }

  // ---- Events, fed to the table and to the model ----

  void Join(Trainer* trainer) {
    ModelJob& job = jobs_[trainer->job];
    trainer->session = next_session_++;
    --trainer->runs_left;
    trainer->program = MakeProgram(job, trainer->rank);
    for (const auto& run : job.runs) {
      if (run->failed || run->connected.empty() || run->joined.contains(trainer->rank)) continue;
      trainer->run = run;
      break;
    }
    if (trainer->run == nullptr) {
      job.runs.push_back(std::make_shared<ModelRun>());
      trainer->run = job.runs.back();
    }
    trainer->run->joined.insert(trainer->rank);
    trainer->run->connected.insert(trainer->rank);
    Actions actions;
    EXPECT_TRUE(
        table_.Join(trainer->session, Rank(trainer->rank, job.world_size, job.name), now_, &actions)
            .ok());
    Check(actions, "join", trainer);
  }

  void Ask(Trainer* trainer, const Command& command) {
    ModelRun& run = *trainer->run;
    uint32_t number = 0;
    while (trainer->numbers.contains(number)) ++number;
    trainer->waits_for_reply = true;
    const Code refusal = Refusal(run, command.ranks);
    if (refusal != Code::kOk) {
      ExpectReply(trainer, 0, refusal);
    } else {
      trainer->numbers.insert(number);
      trainer->reserved[command.tag] = number;
      auto& forming = run.forming[command.tag];
      if (forming.asked.empty()) forming = {command.ranks, {}, now_ + seconds(5)};
      forming.asked[trainer->rank] = trainer;
      if (forming.asked.size() == forming.ranks.size()) Form(&run, command.tag);
    }
    GroupRequest request;
    request.tag = command.tag;
    request.ranks = command.ranks;
    request.timeout = seconds(5);
    Check(table_.CreateGroup(trainer->session, request, now_), "ask", trainer);
  }

  Code Refusal(const ModelRun& run, const std::vector<uint32_t>& ranks) const {
    if (draining_) return Code::kShuttingDown;
    if (run.failed) return Code::kRankLost;
    for (const uint32_t rank : ranks) {
      if (run.joined.contains(rank) && !run.connected.contains(rank)) return Code::kRankLost;
    }
    return Code::kOk;
  }

  void Form(ModelRun* run, const std::string& tag) {
    const ModelRun::Forming forming = run->forming.extract(tag).mapped();
    auto group = std::make_shared<ModelGroup>(static_cast<uint32_t>(forming.ranks.size()));
    for (const uint32_t rank : forming.ranks) {
      Trainer* trainer = forming.asked.at(rank);
      const uint32_t number = trainer->reserved.extract(tag).mapped();
      const auto member = static_cast<uint32_t>(group->members.size());
      group->members.push_back({trainer, trainer->session, number, true});
      trainer->groups[tag] = {group, member, 0};
      ExpectReply(trainer, number, Code::kOk);
    }
  }

  void FailForming(ModelRun* run, const std::string& tag, Code code) {
    const ModelRun::Forming forming = run->forming.extract(tag).mapped();
    for (const auto& [rank, trainer] : forming.asked) {
      trainer->numbers.erase(trainer->reserved.extract(tag).mapped());
      if (trainer->session != 0) ExpectReply(trainer, 0, code);
    }
  }

  void Submit(Trainer* trainer, const Command& command, uint64_t count) {
    const Trainer::Holding& holding = trainer->groups.at(command.tag);
    const Operation operation = AllReduce(command.sequence, count);
    Expect(holding.group, holding.group->model.Submit(holding.member, operation, seconds(5), now_));
    const uint32_t number = holding.group->members[holding.member].number;
    Check(table_.Submit(trainer->session, number, operation, WithTimeout(seconds(5)), now_),
          absl::StrCat("submit ", command.tag, " ", command.sequence), trainer);
  }

  void FinishRunning(uint64_t index) {
    const Running done = running_[index];
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(index));
    Expect(done.group, done.group->model.Finished(now_));
    Check(table_.Finished(*done.group->id, done.sequence, OkStatus(), now_), "finished", nullptr);
  }

  void Destroy(Trainer* trainer, const std::string& tag) {
    const Trainer::Holding holding = trainer->groups.extract(tag).mapped();
    ModelGroup::Member& member = holding.group->members[holding.member];
    member.active = false;
    trainer->numbers.erase(member.number);
    Expect(holding.group, holding.group->model.Gone(holding.member, /*orderly=*/true));
    Check(table_.DestroyGroup(trainer->session, member.number, now_), "destroy", trainer);
  }

  void Leave(Trainer* trainer, bool orderly) {
    const SessionId session = trainer->session;
    ModelLeave(trainer, orderly);
    Check(table_.Leave(session, orderly ? Departure::kGoodbye : Departure::kLost, now_),
          orderly ? "goodbye" : "death", trainer);
  }

  void ModelLeave(Trainer* trainer, bool orderly) {
    ModelRun& run = *trainer->run;
    run.connected.erase(trainer->rank);
    run.failed |= !orderly;
    trainer->session = 0;
    std::vector<std::string> tags;
    for (const auto& [tag, forming] : run.forming) {
      const auto& ranks = forming.ranks;
      const bool needs = std::find(ranks.begin(), ranks.end(), trainer->rank) != ranks.end();
      if (!orderly || needs) tags.push_back(tag);
    }
    for (const std::string& tag : tags) FailForming(&run, tag, Code::kRankLost);
    for (auto& [tag, holding] : trainer->groups) {
      holding.group->members[holding.member].active = false;
      Expect(holding.group, holding.group->model.Gone(holding.member, orderly));
    }
    const size_t job = trainer->job;
    const uint32_t rank = trainer->rank;
    const int runs_left = trainer->runs_left;
    *trainer = Trainer();
    trainer->job = job;
    trainer->rank = rank;
    trainer->runs_left = runs_left;
  }

  void CheckDeadlines() {
    ForEachGroup([&](const std::shared_ptr<ModelGroup>& group) {
      Expect(group, group->model.CheckDeadline(now_));
    });
    ForEachRun([&](ModelRun* run) {
      for (const std::string& tag : TagsOf(*run)) {
        if (run->forming[tag].deadline <= now_) FailForming(run, tag, Code::kDeadlineExceeded);
      }
    });
    Check(table_.CheckDeadlines(now_), "deadlines", nullptr);
  }

  void Drain() {
    draining_ = true;
    for (ModelJob& job : jobs_) job.troubled = true;
    ForEachGroup([&](const std::shared_ptr<ModelGroup>& group) {
      Expect(group, group->model.Stop(Code::kShuttingDown));
    });
    ForEachRun([&](ModelRun* run) {
      for (const std::string& tag : TagsOf(*run)) FailForming(run, tag, Code::kShuttingDown);
    });
    Check(table_.Drain(now_), "drain", nullptr);
  }

  static std::vector<std::string> TagsOf(const ModelRun& run) {
    std::vector<std::string> tags;
    for (const auto& [tag, forming] : run.forming) tags.push_back(tag);
    return tags;
  }

  template <typename Visitor>
  void ForEachGroup(Visitor visit) {
    std::set<std::shared_ptr<ModelGroup>> groups;
    for (const auto& trainer : trainers_) {
      for (const auto& [tag, holding] : trainer->groups) groups.insert(holding.group);
    }
    for (const auto& group : groups) visit(group);
  }

  template <typename Visitor>
  void ForEachRun(Visitor visit) {
    for (ModelJob& job : jobs_) {
      for (const auto& run : job.runs) visit(run.get());
    }
  }

  // ---- Trouble ----

  void Disturb() {
    Trainer* trainer = trainers_[Below(trainers_.size())].get();
    if (trainer->session == 0 || trainer->hung) return;
    ModelJob& job = jobs_[trainer->job];
    const bool may_submit = !trainer->broken && !trainer->waits_for_reply &&
                            trainer->program.front().kind == Command::kSubmit;
    const uint64_t kind = Below(9);
    if (kind < 7) job.troubled = true;
    if (kind == 0) return Leave(trainer, /*orderly=*/false);
    if (kind == 1) return Leave(trainer, /*orderly=*/true);
    if (kind == 2) trainer->hung = true;
    if (kind == 3 && may_submit) {
      const Command command = trainer->program.front();
      trainer->program.pop_front();
      return Submit(trainer, command, 99);
    }
    if (kind == 4 && may_submit) return SubmitTwice(trainer);
    if (kind == 5) return JoinWithOtherWorldSize(trainer->job);
    if (kind == 6 && Below(3) == 0) return Drain();
    if (kind == 7) return JoinAgain(*trainer);
    if (kind == 8) {
      Actions actions = table_.CheckDeadlines(now_);
      Check(actions, "deadlines that are not due", nullptr);
    }
  }

  void SubmitTwice(Trainer* trainer) {
    const Command command = trainer->program.front();
    Submit(trainer, command, 100);
    const Trainer::Holding holding = trainer->groups.at(command.tag);
    if (holding.group->model.reason() != Code::kOk) return;
    const SessionId session = trainer->session;
    const uint32_t number = holding.group->members[holding.member].number;
    expected_.push_back(Line(CloseSession{session, {Code::kProtocol, ""}}));
    ModelLeave(trainer, /*orderly=*/false);
    Check(table_.Submit(session, number, AllReduce(command.sequence), HalfMinute(), now_),
          "submit twice", trainer);
  }

  void JoinAgain(const Trainer& trainer) {
    if (trainer.run->failed || draining_) return;
    Actions actions;
    const ModelJob& job = jobs_[trainer.job];
    EXPECT_EQ(
        table_.Join(next_session_++, Rank(trainer.rank, job.world_size, job.name), now_, &actions)
            .code(),
        Code::kAlreadyExists);
    Check(actions, "join again", nullptr);
  }

  // A rank that has not been in the oldest open run claims another world size.
  void JoinWithOtherWorldSize(size_t index) {
    ModelJob& job = jobs_[index];
    const uint32_t stranger = job.world_size;
    const auto open = std::find_if(job.runs.begin(), job.runs.end(), [&](const auto& run) {
      return !run->failed && !run->connected.empty() && run->joined.size() < job.world_size;
    });
    const bool any_open = std::any_of(job.runs.begin(), job.runs.end(), [](const auto& run) {
      return !run->failed && !run->connected.empty();
    });
    if (!any_open || draining_) return;
    if (open != job.runs.end()) EndRun(index, open->get());
    Actions actions;
    const Status status =
        table_.Join(next_session_++, Rank(stranger, job.world_size + 1, job.name), now_, &actions);
    EXPECT_EQ(status.code(), Code::kMismatch);
    Check(actions, "other world size", nullptr);
  }

  void EndRun(size_t job, ModelRun* run) {
    std::vector<Trainer*> ended;
    for (const auto& trainer : trainers_) {
      if (trainer->job == job && trainer->session != 0 && trainer->run.get() == run) {
        ended.push_back(trainer.get());
      }
    }
    std::vector<std::string> closes;
    for (Trainer* trainer : ended) {
      closes.push_back(Line(CloseSession{trainer->session, {Code::kMismatch, ""}}));
      ModelLeave(trainer, /*orderly=*/false);
    }
    expected_ = closes;  // and nothing of what their leaving would bring about
  }

  // ---- Comparison ----

  void ExpectReply(Trainer* trainer, uint32_t number, Code code) {
    expected_.push_back(Line(ReplyCreateGroup{trainer->session, 0, number, {code, ""}}));
    trainer->waits_for_reply = false;
    trainer->broken |= code != Code::kOk;
  }

  void Expect(const std::shared_ptr<ModelGroup>& group, const Expectation& expectation) {
    for (size_t index = 0; index < group->members.size(); ++index) {
      const ModelGroup::Member& member = group->members[index];
      if (!member.active) continue;
      if (expectation.completed) {
        const uint64_t completed = *expectation.completed;
        expected_.push_back(Line(CompleteOperations{member.session, member.number, completed}));
        HoldingOf(*member.trainer, group)->completed = completed;
      }
      if (expectation.failure != Code::kOk) {
        expected_.push_back(
            Line(FailGroup{member.session, member.number, {expectation.failure, ""}}));
        member.trainer->broken = true;
      }
    }
    if (expectation.start) {
      expected_.push_back(Line(StartTask{0, *expectation.start, nullptr}));
      starting_ = group;
    }
  }

  static Trainer::Holding* HoldingOf(Trainer& trainer, const std::shared_ptr<ModelGroup>& group) {
    for (auto& [tag, holding] : trainer.groups) {
      if (holding.group == group) return &holding;
    }
    return nullptr;
  }

  void Check(const Actions& actions, const std::string& event, const Trainer* trainer) {
    absl::StrAppend(&history_, "\n  ", event);
    if (trainer != nullptr) {
      absl::StrAppend(&history_, " by rank ", trainer->rank, " of job", trainer->job);
    }
    std::vector<std::string> lines = Lines(actions);
    std::sort(lines.begin(), lines.end());
    std::sort(expected_.begin(), expected_.end());
    EXPECT_EQ(lines, expected_) << "after:" << history_;
    expected_.clear();
    for (const Action& action : actions) {
      if (const auto* start = std::get_if<StartTask>(&action)) Started(*start);
    }
    CheckAlarm();
    EXPECT_EQ(table_.running_count(), running_.size());
  }

  void Started(const StartTask& start) {
    ASSERT_NE(starting_, nullptr) << "after:" << history_;
    if (!starting_->id) {
      EXPECT_TRUE(group_ids_.insert(start.group).second) << "a group's id was used again";
      starting_->id = start.group;
    }
    EXPECT_EQ(*starting_->id, start.group);
    running_.push_back({std::move(starting_), start.sequence});
  }

  // The table may look too early, but never too late.
  void CheckAlarm() {
    std::optional<Time> earliest;
    const auto consider = [&](Time deadline) {
      earliest = earliest ? std::min(*earliest, deadline) : deadline;
    };
    ForEachGroup([&](const std::shared_ptr<ModelGroup>& group) {
      if (group->model.Deadline()) consider(*group->model.Deadline());
    });
    ForEachRun([&](ModelRun* run) {
      for (const auto& [tag, forming] : run->forming) consider(forming.deadline);
    });
    if (!earliest) return;
    ASSERT_TRUE(table_.NextDeadline());
    EXPECT_LE(*table_.NextDeadline(), *earliest);
  }

  std::mt19937_64 random_;
  JobTable table_;
  Time now_;
  std::vector<ModelJob> jobs_;
  std::vector<std::unique_ptr<Trainer>> trainers_;
  std::vector<Running> running_;
  std::shared_ptr<ModelGroup> starting_;
  std::set<GroupId> group_ids_;
  std::set<uint64_t> trouble_at_;
  std::vector<std::string> expected_;
  std::string history_;
  SessionId next_session_ = 1;
  bool draining_ = false;
};

TEST(JobInterleavingTest, RandomLivesOfSeveralJobsDoWhatTheModelSays) {
  for (uint64_t seed = 0; seed < 5000; ++seed) {
    Simulation(seed).Run();
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace gradsync

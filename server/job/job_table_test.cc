#include "server/job/job_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/job/job_testing.h"
#include "shm/session_layout.h"

namespace gradsync {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::UnorderedElementsAre;

// The text of the first action that carries an error.
std::string Text(const Actions& actions) {
  for (const Action& action : actions) {
    const std::string text = std::visit(
        [](const auto& what) -> std::string {
          if constexpr (requires { what.status; }) {
            return what.status.message();
          } else if constexpr (std::is_same_v<std::decay_t<decltype(what)>, AnswerAside>) {
            return what.answer.status.message();
          } else {
            return "";
          }
        },
        action);
    if (!text.empty()) return text;
  }
  return "";
}

GroupId StartedGroup(const Actions& actions) {
  for (const Action& action : actions) {
    if (const auto* start = std::get_if<StartTask>(&action)) return start->group;
  }
  ADD_FAILURE() << "nothing was started";
  return 0;
}

class JobTableTest : public testing::Test {
 protected:
  // Sessions have the number of their rank, plus ten for each further run of a rank.
  void JoinAll(uint32_t world_size, SessionId first_session = 0) {
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      ASSERT_TRUE(Join(first_session + rank, Rank(rank, world_size)).ok());
    }
  }

  Status Join(SessionId session, const JoinRequest& request) {
    join_actions_.clear();
    return table_.Join(session, request, now_, &join_actions_);
  }

  Actions Ask(SessionId session, const std::string& tag, const std::vector<uint32_t>& ranks,
              Duration timeout = seconds(30)) {
    GroupRequest request;
    request.request_id = 7;
    request.tag = tag;
    request.ranks = ranks;
    request.timeout = timeout;
    return table_.CreateGroup(session, request, now_);
  }

  void FormGroup(const std::string& tag, const std::vector<uint32_t>& ranks,
                 SessionId first_session = 0) {
    Actions actions;
    for (const uint32_t rank : ranks) actions = Ask(first_session + rank, tag, ranks);
    ASSERT_EQ(actions.size(), ranks.size());
  }

  Actions Submit(SessionId session, uint32_t number, const Operation& operation) {
    return table_.Submit(session, number, operation, HalfMinute(), now_);
  }

  Actions Send(SessionId session, uint32_t number, uint32_t request_id, uint32_t to) {
    auto message = std::make_shared<Message>();
    message->tag = 3;
    return table_.Send(session, number, request_id, to, std::move(message), seconds(5), now_);
  }

  Actions Receive(SessionId session, uint32_t number, uint32_t request_id,
                  std::optional<uint32_t> from) {
    return table_.Receive(session, number, request_id, from, 3, seconds(5), now_);
  }

  void ExpectNothingIsLeft() {
    EXPECT_EQ(table_.session_count(), 0u);
    EXPECT_EQ(table_.running_count(), 0u);
    EXPECT_THAT(table_.Snapshot(now_), IsEmpty());
    EXPECT_EQ(table_.NextDeadline(), std::nullopt);
  }

  JobTable table_;
  Time now_;
  Actions join_actions_;
};

// ---- Joining ------------------------------------------------------------------------------------

TEST_F(JobTableTest, RequestsThatMakeNoSenseAreRefused) {
  JoinRequest unnamed = Rank(0, 1, "");
  EXPECT_EQ(Join(1, unnamed).code(), Code::kInvalidArgument);

  EXPECT_EQ(Join(1, Rank(2, 2)).code(), Code::kInvalidArgument);
  EXPECT_EQ(Join(1, Rank(2, 2)).message(), "job bert-7: rank 2 is not below the world size, 2");
  EXPECT_EQ(Join(1, Rank(0, 0)).code(), Code::kInvalidArgument);
  ExpectNothingIsLeft();
}

TEST_F(JobTableTest, RanksOnOtherNodesAreNotSupported) {
  JoinRequest request = Rank(0, 4);
  request.local_world_size = 2;
  const Status status = Join(1, request);
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_EQ(status.message(),
            "job bert-7: rank 0 says that 2 of the job's 4 ranks are on this node; this version "
            "joins the ranks of one node only. Start all of them here.");
  EXPECT_EQ(Join(1, Rank(0, 257)).code(), Code::kUnsupported);
  ExpectNothingIsLeft();
}

TEST_F(JobTableTest, TakenRankIsRefusedToTheNewcomerAlone) {
  JoinAll(2);
  const Status status = Join(5, Rank(1, 2));
  EXPECT_EQ(status.code(), Code::kAlreadyExists);
  EXPECT_EQ(
      status.message(),
      "job bert-7: rank 1 is taken by another process (pid 101, train.py). Give every process "
      "a rank of its own, and every job a name of its own (GRADSYNC_JOB).");
  EXPECT_THAT(join_actions_, IsEmpty());
  EXPECT_EQ(table_.session_count(), 2u);
  FormGroup("world", {0, 1});
}

TEST_F(JobTableTest, JobsAreToldApartByUserNameAndGeneration) {
  JoinAll(2);
  JoinRequest other_user = Rank(0, 2);
  other_user.uid = 1001;
  EXPECT_TRUE(Join(11, other_user).ok());
  JoinRequest other_generation = Rank(0, 2);
  other_generation.generation = 1;
  EXPECT_TRUE(Join(12, other_generation).ok());
  EXPECT_TRUE(Join(13, Rank(0, 2, "gpt-2")).ok());
  EXPECT_EQ(table_.Snapshot(now_).size(), 4u);
}

TEST_F(JobTableTest, OtherWorldSizeEndsAJobThatIsNotComplete) {
  ASSERT_TRUE(Join(0, Rank(0, 3)).ok());
  ASSERT_TRUE(Join(1, Rank(1, 3)).ok());
  (void)Ask(0, "world", {0, 1, 2});
  const Status status = Join(2, Rank(2, 4));
  EXPECT_EQ(status.code(), Code::kMismatch);
  EXPECT_EQ(
      status.message(),
      "job bert-7: rank 2 says that the world size is 4, rank 0 said 3. Start every rank of a "
      "job with the same world size (WORLD_SIZE), and every job with a name of its own "
      "(GRADSYNC_JOB).");
  EXPECT_THAT(Lines(join_actions_), ElementsAre("close s0 MISMATCH", "close s1 MISMATCH"));
  EXPECT_EQ(Text(join_actions_), status.message());
  ExpectNothingIsLeft();
}

TEST_F(JobTableTest, OtherWorldSizeIsRefusedAloneWhenTheJobIsComplete) {
  JoinAll(2);
  const Status status = Join(5, Rank(2, 3));
  EXPECT_EQ(status.code(), Code::kMismatch);
  EXPECT_THAT(join_actions_, IsEmpty());
  EXPECT_EQ(table_.session_count(), 2u);
}

TEST_F(JobTableTest, EndedJobLetsTheEngineFinish) {
  ASSERT_TRUE(Join(0, Rank(0, 2)).ok());
  FormGroup("self", {0});
  const GroupId group = StartedGroup(Submit(0, 0, Barrier(0)));
  EXPECT_EQ(Join(1, Rank(1, 3)).code(), Code::kMismatch);
  EXPECT_EQ(table_.running_count(), 1u);
  EXPECT_TRUE(Join(2, Rank(0, 2)).ok()) << "a new run is not held up";
  EXPECT_THAT(table_.Finished(group, 0, OkStatus(), now_), IsEmpty());
  EXPECT_EQ(table_.running_count(), 0u);
  EXPECT_EQ(table_.Snapshot(now_).size(), 1u);
}

TEST_F(JobTableTest, RanksThatComeAgainMeetInANewIncarnation) {
  JoinAll(2);
  FormGroup("world", {0, 1});
  (void)table_.Leave(0, Departure::kGoodbye, now_);
  EXPECT_TRUE(Join(10, Rank(0, 2)).ok()) << "rank 1 has not left the first incarnation yet";
  EXPECT_THAT(Lines(Ask(10, "world", {0, 1})), IsEmpty());
  (void)table_.Leave(1, Departure::kGoodbye, now_);
  EXPECT_TRUE(Join(11, Rank(1, 2)).ok());
  EXPECT_THAT(Lines(Ask(11, "world", {0, 1})), ElementsAre("reply s10 r7 #0", "reply s11 r7 #0"));
  EXPECT_EQ(table_.Snapshot(now_).size(), 1u);
}

TEST_F(JobTableTest, LateRankGoesToTheOldestIncarnationThatItHasNotBeenIn) {
  ASSERT_TRUE(Join(0, Rank(0, 3)).ok());
  ASSERT_TRUE(Join(1, Rank(1, 3)).ok());
  (void)table_.Leave(0, Departure::kGoodbye, now_);
  ASSERT_TRUE(Join(10, Rank(0, 3)).ok());
  ASSERT_TRUE(Join(2, Rank(2, 3)).ok());
  EXPECT_THAT(Text(Ask(2, "world", {0, 1, 2})), HasSubstr("rank 0 has left the job"));
}

TEST_F(JobTableTest, ANewRunMayHaveAnotherWorldSize) {
  JoinAll(2);
  (void)table_.Leave(0, Departure::kGoodbye, now_);
  EXPECT_TRUE(Join(10, Rank(0, 3)).ok());
  EXPECT_TRUE(Join(12, Rank(2, 3)).ok()) << "the old run is complete: this is not one of its ranks";
}

TEST_F(JobTableTest, FailedIncarnationIsNotEntered) {
  ASSERT_TRUE(Join(0, Rank(0, 2)).ok());
  ASSERT_TRUE(Join(1, Rank(1, 2)).ok());
  (void)table_.Leave(0, Departure::kLost, now_);
  EXPECT_TRUE(Join(10, Rank(0, 2)).ok());
  EXPECT_TRUE(Join(11, Rank(1, 2)).ok()) << "its old session does not hold the rank any more";
  FormGroup("world", {0, 1}, 10);
}

// ---- Forming groups -----------------------------------------------------------------------------

TEST_F(JobTableTest, GroupIsFormedWhenEveryRankHasAsked) {
  JoinAll(3);
  EXPECT_THAT(Ask(2, "pair", {2, 0}), IsEmpty());
  EXPECT_EQ(table_.FindGroup(2, 0), std::nullopt);
  EXPECT_THAT(Lines(Ask(0, "pair", {2, 0})), ElementsAre("reply s2 r7 #0", "reply s0 r7 #0"));
  ASSERT_TRUE(table_.FindGroup(0, 0));
  EXPECT_EQ(table_.FindGroup(0, 0)->size, 2u);
  EXPECT_EQ(table_.FindGroup(0, 0)->member, 1u);
  EXPECT_EQ(table_.FindGroup(2, 0)->member, 0u);
  EXPECT_EQ(table_.FindGroup(1, 0), std::nullopt);
  EXPECT_EQ(table_.FindGroup(0, 1), std::nullopt);
  EXPECT_EQ(table_.FindGroup(99, 0), std::nullopt);
  EXPECT_EQ(table_.NextDeadline(), std::nullopt);
}

TEST_F(JobTableTest, GroupRequestsThatMakeNoSenseAreRefused) {
  JoinAll(3);
  EXPECT_EQ(Text(Ask(0, "g", {})), "job bert-7: rank 0 asked for group g without ranks");
  EXPECT_EQ(Text(Ask(0, "g", {0, 3})),
            "job bert-7: rank 0 asked for group g with rank 3; the world size is 3");
  EXPECT_EQ(Text(Ask(0, "g", {0, 1, 1})), "job bert-7: rank 0 asked for group g with rank 1 twice");
  EXPECT_EQ(Text(Ask(0, "g", {1, 2})),
            "job bert-7: rank 0 asked for group g of ranks 1-2, which does not include itself");
  EXPECT_THAT(Lines(Ask(0, "g", {1, 2})), ElementsAre("reply s0 r7 INVALID_ARGUMENT"));
  EXPECT_THAT(Ask(99, "g", {0}), IsEmpty());
}

TEST_F(JobTableTest, DifferentRanksOfAGroupFailAllWhoAsked) {
  JoinAll(3);
  (void)Ask(0, "world", {0, 1, 2});
  (void)Ask(1, "world", {0, 1, 2});
  const Actions actions = Ask(2, "world", {0, 2, 1});
  EXPECT_THAT(Lines(actions),
              ElementsAre("reply s2 r7 MISMATCH", "reply s0 r7 MISMATCH", "reply s1 r7 MISMATCH"));
  EXPECT_EQ(
      Text(actions),
      "job bert-7: group world differs: rank 0 asked for it with ranks 0-2, rank 2 with ranks "
      "0, 2, 1. Every rank of a group must name the same ranks in the same order.");
  EXPECT_EQ(table_.NextDeadline(), std::nullopt);
  FormGroup("world", {0, 1, 2});
}

TEST_F(JobTableTest, TagThatTheSessionHasAlreadyFailsAllWhoAsked) {
  JoinAll(2);
  FormGroup("world", {0, 1});
  EXPECT_EQ(Text(Ask(0, "world", {0, 1})),
            "job bert-7: rank 0 asked for group world, which it already has or has asked for. "
            "Destroy that group first, or use another tag.");
  (void)table_.DestroyGroup(1, 0, now_);
  (void)Ask(1, "world", {0, 1});
  EXPECT_THAT(Lines(Ask(0, "world", {0, 1})),
              ElementsAre("reply s0 r7 INVALID_ARGUMENT", "reply s1 r7 INVALID_ARGUMENT"));
}

TEST_F(JobTableTest, AskingTwiceForOneGroupIsRefused) {
  JoinAll(2);
  (void)Ask(0, "world", {0, 1});
  EXPECT_THAT(Lines(Ask(0, "world", {0, 1})),
              ElementsAre("reply s0 r7 INVALID_ARGUMENT", "reply s0 r7 INVALID_ARGUMENT"));
}

TEST_F(JobTableTest, TagIsFreeAgainOnceTheGroupIsDestroyed) {
  JoinAll(2);
  for (int round = 0; round < 3; ++round) {
    FormGroup("world", {0, 1});
    (void)table_.DestroyGroup(0, 0, now_);
    EXPECT_EQ(table_.FindGroup(0, 0), std::nullopt);
    (void)table_.DestroyGroup(1, 0, now_);
    EXPECT_THAT(table_.Snapshot(now_).at(0).groups, IsEmpty());
  }
}

TEST_F(JobTableTest, GroupsGetTheLowestFreeNumberOfEachSession) {
  JoinAll(2);
  FormGroup("a", {0});
  FormGroup("b", {0, 1});
  FormGroup("c", {0});
  EXPECT_EQ(table_.FindGroup(0, 1)->size, 2u);
  EXPECT_EQ(table_.FindGroup(1, 0)->size, 2u);
  (void)table_.DestroyGroup(0, 0, now_);
  EXPECT_THAT(Lines(Ask(0, "d", {0})), ElementsAre("reply s0 r7 #0"));
}

TEST_F(JobTableTest, NumberOfGroupsOfASessionIsLimited) {
  JoinAll(2);
  for (uint32_t i = 0; i < kMaxGroupsPerSession - 1; ++i) FormGroup(absl::StrCat("g", i), {0});
  (void)Ask(0, "forming", {0, 1});  // holds the last number
  EXPECT_THAT(Lines(Ask(0, "more", {0})), ElementsAre("reply s0 r7 OUT_OF_MEMORY"));
  EXPECT_EQ(Text(Ask(0, "more", {0})),
            "job bert-7: rank 0 asked for group more but has 256 groups already, which is the "
            "limit. Destroy groups that are done with.");
  // The other rank waits for this one's turn: it hears of the refusal too.
  (void)Ask(1, "both", {0, 1});
  EXPECT_THAT(Lines(Ask(0, "both", {0, 1})),
              ElementsAre("reply s0 r7 OUT_OF_MEMORY", "reply s1 r7 OUT_OF_MEMORY"));
  (void)table_.DestroyGroup(0, 3, now_);
  EXPECT_THAT(Lines(Ask(0, "more", {0})), ElementsAre("reply s0 r7 #3"));
}

TEST_F(JobTableTest, RequestThatFailsGivesItsNumberBack) {
  JoinAll(2);
  (void)Ask(0, "forming", {0, 1}, seconds(1));
  now_ += seconds(1);
  (void)table_.CheckDeadlines(now_);
  EXPECT_THAT(Lines(Ask(0, "self", {0})), ElementsAre("reply s0 r7 #0"));
}

TEST_F(JobTableTest, GroupThatIsNotFormedInTimeNamesWhoIsMissingAndHow) {
  ASSERT_TRUE(Join(0, Rank(0, 5)).ok());
  ASSERT_TRUE(Join(1, Rank(1, 5)).ok());
  ASSERT_TRUE(Join(3, Rank(3, 5)).ok());
  FormGroup("world", {1});
  FormGroup("tp:1", {1});
  (void)Ask(1, "pp:0", {1, 3}, seconds(100));
  (void)Ask(0, "ddp:0", {0, 1, 2, 3, 4});
  now_ += seconds(10);
  (void)Ask(3, "ddp:0", {0, 1, 2, 3, 4});
  EXPECT_EQ(table_.NextDeadline(), At(seconds(30)));
  EXPECT_THAT(table_.CheckDeadlines(At(milliseconds(29999))), IsEmpty());
  const Actions actions = table_.CheckDeadlines(At(seconds(30)));
  EXPECT_THAT(Lines(actions),
              ElementsAre("reply s0 r7 DEADLINE_EXCEEDED", "reply s3 r7 DEADLINE_EXCEEDED"));
  EXPECT_EQ(
      Text(actions),
      "job bert-7: group ddp:0 of ranks 0-4 was not formed within 30 s: ranks 2, 4 have not "
      "connected; rank 1 is connected but has not asked for it (it has groups world, tp:1 and "
      "waits for group pp:0). Waiting: ranks 0, 3. Check that the missing ranks run, that they "
      "name the same job and generation, and that they make the same calls.");
  EXPECT_EQ(table_.NextDeadline(), At(seconds(100)));
}

TEST_F(JobTableTest, NoRankWaitsLongerForAGroupThanItAskedFor) {
  JoinAll(3);
  (void)Ask(0, "world", {0, 1, 2}, seconds(30));
  now_ += seconds(10);
  (void)Ask(1, "world", {0, 1, 2}, seconds(5));
  EXPECT_EQ(table_.NextDeadline(), At(seconds(15)));
  const Actions actions = table_.CheckDeadlines(At(seconds(15)));
  EXPECT_THAT(Lines(actions),
              ElementsAre("reply s0 r7 DEADLINE_EXCEEDED", "reply s1 r7 DEADLINE_EXCEEDED"));
  EXPECT_THAT(Text(actions), HasSubstr("was not formed within 5 s: rank 2 is connected"));
}

TEST_F(JobTableTest, RankWithoutGroupsThatDoesNotAskIsDescribedSo) {
  JoinAll(2);
  (void)Ask(0, "world", {0, 1});
  EXPECT_THAT(Text(table_.CheckDeadlines(At(seconds(30)))),
              HasSubstr("rank 1 is connected but has not asked for it (it has no group)."));
}

// ---- Groups at work -----------------------------------------------------------------------------

TEST_F(JobTableTest, OperationRunsWhenEveryRankHasSubmittedItAndCompletesOnAll) {
  JoinAll(2);
  FormGroup("self", {1});  // so that the numbers differ
  FormGroup("world", {0, 1});
  EXPECT_THAT(Submit(0, 0, AllReduce(0)), IsEmpty());
  const Actions actions = Submit(1, 1, AllReduce(0));
  EXPECT_THAT(Lines(actions), ElementsAre("start 0"));
  EXPECT_EQ(table_.running_count(), 1u);
  EXPECT_THAT(Lines(table_.Finished(StartedGroup(actions), 0, OkStatus(), now_)),
              ElementsAre("complete s0 #0 below 1", "complete s1 #1 below 1"));
  EXPECT_EQ(table_.running_count(), 0u);
}

TEST_F(JobTableTest, MismatchFailsTheGroupOnEveryRankButNoOtherGroup) {
  JoinAll(2);
  FormGroup("world", {0, 1});
  FormGroup("other", {0, 1});
  (void)Submit(0, 0, AllReduce(0, 1));
  const Actions actions = Submit(1, 0, AllReduce(0, 2));
  EXPECT_THAT(Lines(actions), ElementsAre("fail s0 #0 MISMATCH", "fail s1 #0 MISMATCH"));
  EXPECT_THAT(Text(actions), HasSubstr("job bert-7, group world: operation 0 differs: rank 0"));
  (void)Submit(0, 1, AllReduce(0));
  EXPECT_THAT(Lines(Submit(1, 1, AllReduce(0))), ElementsAre("start 0"));
}

TEST_F(JobTableTest, BreakingTheRulesClosesTheSessionAndFailsItsGroupsOnTheOthers) {
  JoinAll(2);
  FormGroup("world", {0, 1});
  (void)Submit(1, 0, AllReduce(0));
  const Actions actions = Submit(1, 0, AllReduce(0));
  EXPECT_THAT(Lines(actions), ElementsAre("close s1 PROTOCOL", "fail s0 #0 RANK_LOST"));
  EXPECT_EQ(Text(actions), "job bert-7, group world: rank 1 submitted operation 0 twice");
  EXPECT_THAT(
      std::get<FailGroup>(actions[1]).status.message(),
      HasSubstr("job bert-7: rank 1 was cut off because it broke the protocol (job bert-7, "
                "group world: rank 1 submitted operation 0 twice); group world cannot go on"));
  EXPECT_EQ(table_.session_count(), 1u);
  EXPECT_THAT(table_.Leave(1, Departure::kLost, now_), IsEmpty()) << "it has left already";
}

TEST_F(JobTableTest, SubmittingToAGroupThatIsNotThereClosesTheSession) {
  JoinAll(1);
  const Actions actions = Submit(0, 3, AllReduce(0));
  EXPECT_THAT(Lines(actions), ElementsAre("close s0 PROTOCOL"));
  EXPECT_EQ(Text(actions),
            "job bert-7: rank 0 submitted an operation to its group number 3, which it does not "
            "have");
  EXPECT_THAT(Submit(0, 3, AllReduce(0)), IsEmpty());
}

TEST_F(JobTableTest, OperationThatMissesItsDeadlineFailsTheGroup) {
  JoinAll(2);
  FormGroup("world", {0, 1});
  (void)Submit(0, 0, AllReduce(0));
  EXPECT_EQ(table_.NextDeadline(), At(seconds(30)));
  EXPECT_THAT(table_.CheckDeadlines(At(milliseconds(29999))), IsEmpty());
  const Actions actions = table_.CheckDeadlines(At(seconds(30)));
  EXPECT_THAT(Lines(actions),
              ElementsAre("fail s0 #0 DEADLINE_EXCEEDED", "fail s1 #0 DEADLINE_EXCEEDED"));
  EXPECT_THAT(Text(actions), HasSubstr("timed out after 30 s waiting for rank 1"));
  EXPECT_EQ(table_.NextDeadline(), std::nullopt);
}

TEST_F(JobTableTest, AlarmOfAnOperationThatIsDoneDisturbsNothing) {
  JoinAll(2);
  FormGroup("world", {0, 1});
  (void)Submit(0, 0, AllReduce(0));
  (void)table_.Finished(StartedGroup(Submit(1, 0, AllReduce(0))), 0, OkStatus(), now_);
  now_ = At(seconds(20));
  (void)Submit(0, 0, AllReduce(1));
  ASSERT_TRUE(table_.NextDeadline());
  EXPECT_LE(*table_.NextDeadline(), At(seconds(50)));
  EXPECT_THAT(table_.CheckDeadlines(At(seconds(30))), IsEmpty());
  EXPECT_EQ(table_.NextDeadline(), At(seconds(50)));
  EXPECT_EQ(table_.CheckDeadlines(At(seconds(50))).size(), 2u);
}

TEST_F(JobTableTest, ShorterDeadlineThatComesLaterIsKept) {
  JoinAll(2);
  FormGroup("a", {0, 1});
  (void)table_.Submit(0, 0, AllReduce(0), WithTimeout(seconds(60)), now_);
  (void)table_.Submit(0, 0, AllReduce(1), WithTimeout(seconds(5)), now_);
  EXPECT_EQ(table_.NextDeadline(), At(seconds(5)));
  EXPECT_EQ(table_.CheckDeadlines(At(seconds(5))).size(), 2u);
}

TEST_F(JobTableTest, AbortFailsTheGroupOnEveryRank) {
  JoinAll(2);
  FormGroup("world", {0, 1});
  const Status why(Code::kMismatch, "parameter 3 differs");
  EXPECT_THAT(table_.AbortGroup(1, 5, why, now_), IsEmpty());
  EXPECT_THAT(table_.AbortGroup(99, 0, why, now_), IsEmpty());
  const Actions actions = table_.AbortGroup(1, 0, why, now_);
  EXPECT_THAT(Lines(actions), ElementsAre("fail s0 #0 MISMATCH", "fail s1 #0 MISMATCH"));
  EXPECT_EQ(Text(actions), "parameter 3 differs");
}

TEST_F(JobTableTest, MessagesGoFromMemberToMemberWhileAnOperationWaits) {
  JoinAll(3);
  FormGroup("pair", {2, 0});
  Submit(0, 0, AllReduce(0));
  EXPECT_THAT(Lines(Receive(0, 0, 5, 0)), IsEmpty());
  EXPECT_THAT(Lines(Send(2, 0, 6, 1)), ElementsAre("answer s2 r6 OK", "answer s0 r5 message of 0"));
  EXPECT_THAT(Lines(Send(1, 0, 7, 1)), ElementsAre("answer s1 r7 PROTOCOL"));  // not in it
  EXPECT_THAT(Lines(Submit(2, 0, AllReduce(0))), ElementsAre("start 0"));
}

TEST_F(JobTableTest, MessagesEndWithTheirGroup) {
  JoinAll(3);
  FormGroup("world", {0, 1, 2});
  Receive(0, 0, 1, 1);
  Receive(0, 0, 2, std::nullopt);
  EXPECT_THAT(Lines(table_.DestroyGroup(1, 0, now_)), ElementsAre("answer s0 r1 RANK_LOST"));
  const Actions actions = table_.Leave(2, Departure::kLost, now_);
  EXPECT_THAT(Lines(actions), ElementsAre("fail s0 #0 RANK_LOST", "answer s0 r2 RANK_LOST"));
  EXPECT_THAT(Lines(Send(0, 0, 3, 2)), ElementsAre("answer s0 r3 RANK_LOST"));
  table_.Leave(0, Departure::kGoodbye, now_);
  table_.Leave(1, Departure::kGoodbye, now_);
  ExpectNothingIsLeft();
}

TEST_F(JobTableTest, AReceiveEndsAtItsDeadlineAndTheGroupGoesOn) {
  JoinAll(2);
  FormGroup("world", {0, 1});
  Receive(0, 0, 1, 1);
  EXPECT_EQ(table_.NextDeadline(), now_ + seconds(5));
  now_ += seconds(5);
  EXPECT_THAT(Lines(table_.CheckDeadlines(now_)), ElementsAre("answer s0 r1 DEADLINE_EXCEEDED"));
  EXPECT_EQ(table_.NextDeadline(), std::nullopt);
  Submit(0, 0, AllReduce(0));
  EXPECT_THAT(Lines(Submit(1, 0, AllReduce(0))), ElementsAre("start 0"));
}

TEST_F(JobTableTest, MessagesOfAllGroupsOfASessionAreLimited) {
  JoinAll(2);
  FormGroup("a", {0, 1});
  FormGroup("b", {0, 1});
  uint32_t id = 0;
  for (; id < kMaxSessionMessages / 2; ++id) Send(0, 0, id, 1);
  for (; id < kMaxSessionMessages; ++id) EXPECT_THAT(Receive(0, 1, id, 1), IsEmpty());
  EXPECT_THAT(Lines(Send(0, 1, 9999, 1)), ElementsAre("answer s0 r9999 OUT_OF_MEMORY"));
  EXPECT_THAT(Lines(table_.CancelMessage(0, 1, kMaxSessionMessages - 1)),
              ElementsAre("answer s0 r4095 FAILED_PRECONDITION"));
  EXPECT_THAT(Lines(Send(0, 1, 9999, 1)), ElementsAre("answer s0 r9999 OK"));
  EXPECT_THAT(Lines(Send(1, 0, 1, 0)), ElementsAre("answer s1 r1 OK"));  // another session
}

TEST_F(JobTableTest, DescriptionsGoToTheSessionsGroup) {
  JoinAll(2);
  FormGroup("world", {0, 1});
  EXPECT_EQ(table_.DescribeBucket(0, 1, Describe(0, 1)).code(), Code::kInvalidArgument);
  EXPECT_TRUE(table_.DescribeBucket(0, 0, Describe(0, 1)).ok());
  EXPECT_EQ(table_.DescribeBucket(1, 0, Describe(0, 1, 3)).code(), Code::kMismatch);
  EXPECT_EQ(table_.Snapshot(now_).at(0).groups.at(0).buckets.size(), 1u);
}

TEST_F(JobTableTest, OperationsOfAllGroupsOfASessionAreLimited) {
  JoinAll(2);
  FormGroup("a", {0, 1});
  FormGroup("b", {0, 1});
  constexpr uint64_t kHalf = kMaxSessionOperations / 2;
  for (uint64_t sequence = 0; sequence < kHalf; ++sequence) {
    ASSERT_THAT(Submit(0, 0, Barrier(sequence)), IsEmpty());
    ASSERT_THAT(Submit(0, 1, Barrier(sequence)), IsEmpty());
  }
  // What the other rank has submitted already costs nothing, and one that is complete makes room.
  const GroupId group = StartedGroup(Submit(1, 0, Barrier(0)));
  (void)table_.Finished(group, 0, OkStatus(), now_);
  EXPECT_THAT(Submit(0, 0, Barrier(kHalf)), IsEmpty());
  const Actions actions = Submit(0, 0, Barrier(kHalf + 1));
  EXPECT_THAT(Lines(actions), ElementsAre("close s0 OUT_OF_MEMORY", "fail s1 #0 RANK_LOST",
                                          "fail s1 #1 RANK_LOST"));
  EXPECT_EQ(
      Text(actions),
      "job bert-7: more than 65536 operations are under way in the groups of rank 0. Wait for "
      "some before more are submitted.");
}

TEST_F(JobTableTest, OperationsOfGroupsThatFailedOrEndedNoLongerCount) {
  JoinAll(2);
  for (int round = 0; round < 3; ++round) {
    FormGroup("a", {0, 1});
    for (uint64_t sequence = 0; sequence < kMaxSessionOperations; ++sequence) {
      ASSERT_THAT(Submit(0, 0, Barrier(sequence)), IsEmpty());
    }
    if (round == 1) {
      (void)table_.AbortGroup(1, 0, {Code::kMismatch, "they differ"}, now_);
      EXPECT_THAT(Submit(0, 0, Barrier(kMaxSessionOperations)), IsEmpty());
    }
    (void)table_.DestroyGroup(0, 0, now_);
    (void)table_.DestroyGroup(1, 0, now_);
  }
}

TEST_F(JobTableTest, BucketsOfAllGroupsOfASessionAreLimited) {
  JoinAll(1);
  FormGroup("a", {0});
  FormGroup("b", {0});
  const auto describe = [this](uint32_t number, uint32_t buckets) {
    Status status;
    for (uint32_t bucket = 0; bucket < buckets && status.ok(); ++bucket) {
      status = table_.DescribeBucket(0, number, Describe(bucket, buckets));
    }
    return status;
  };
  constexpr auto kMost = static_cast<uint32_t>(kMaxSessionBuckets);
  EXPECT_TRUE(describe(0, kMost).ok());
  EXPECT_TRUE(describe(0, kMost).ok()) << "a plan takes the place of the one before";
  EXPECT_EQ(describe(1, 1).code(), Code::kOutOfMemory);
  (void)table_.DestroyGroup(0, 0, now_);
  EXPECT_TRUE(describe(1, kMost).ok());
}

TEST_F(JobTableTest, FinishingWhatDoesNotRunIsIgnored) {
  JoinAll(1);
  FormGroup("self", {0});
  EXPECT_THAT(table_.Finished(1, 0, OkStatus(), now_), IsEmpty());
  EXPECT_THAT(table_.Finished(99, 0, OkStatus(), now_), IsEmpty());
  const GroupId group = StartedGroup(Submit(0, 0, Barrier(0)));
  EXPECT_THAT(table_.Finished(group, 1, OkStatus(), now_), IsEmpty());
  EXPECT_EQ(table_.running_count(), 1u);
}

// ---- Leaving ------------------------------------------------------------------------------------

TEST_F(JobTableTest, DeathOfARankFailsEveryGroupItIsInAtOnce) {
  JoinAll(3);
  FormGroup("world", {0, 1, 2});
  FormGroup("pair", {0, 1});
  FormGroup("rest", {0, 2});
  (void)Submit(0, 0, AllReduce(0));
  const Actions actions = table_.Leave(1, Departure::kLost, now_);
  EXPECT_THAT(Lines(actions), UnorderedElementsAre("fail s0 #0 RANK_LOST", "fail s2 #0 RANK_LOST",
                                                   "fail s0 #1 RANK_LOST"));
  EXPECT_EQ(Text(actions),
            "job bert-7: rank 1 died (its process ended or its connection broke); group world "
            "cannot go on in operation 0, all_reduce of 100 float32 (sum), which rank 1 had not "
            "submitted. Look at that rank's own output for the cause.");
  (void)Submit(0, 2, AllReduce(0));
  EXPECT_THAT(Lines(Submit(2, 1, AllReduce(0))), ElementsAre("start 0")) << "a group without it";
}

TEST_F(JobTableTest, DeathOfARankLetsTheRunningOperationFinish) {
  JoinAll(2);
  FormGroup("world", {0, 1});
  (void)Submit(0, 0, AllReduce(0));
  const GroupId group = StartedGroup(Submit(1, 0, AllReduce(0)));
  EXPECT_THAT(table_.Leave(1, Departure::kLost, now_), IsEmpty());
  EXPECT_THAT(Lines(table_.Finished(group, 0, OkStatus(), now_)),
              ElementsAre("complete s0 #0 below 1", "fail s0 #0 RANK_LOST"));
}

TEST_F(JobTableTest, DeathOfARankFailsWhatIsBeingFormedAndWhatIsAskedForLater) {
  JoinAll(4);
  (void)Ask(0, "world", {0, 1, 2, 3});
  (void)Ask(1, "world", {0, 1, 2, 3});
  (void)Ask(2, "rest", {2, 3});
  const Actions actions = table_.Leave(1, Departure::kLost, now_);
  EXPECT_THAT(Lines(actions),
              UnorderedElementsAre("reply s0 r7 RANK_LOST", "reply s2 r7 RANK_LOST"));
  EXPECT_THAT(std::get<ReplyCreateGroup>(actions[1]).status.message(),
              "job bert-7: rank 1 died (its process ended or its connection broke); group world "
              "cannot be formed. Look at that rank's own output for the cause.");
  const Actions later = Ask(3, "rest", {2, 3});
  EXPECT_THAT(Lines(later), ElementsAre("reply s3 r7 RANK_LOST"));
  EXPECT_EQ(Text(later),
            "job bert-7: rank 1 died (its process ended or its connection broke). Look at that "
            "rank's own output for the cause.");
  EXPECT_EQ(table_.Snapshot(now_).at(0).failure, Text(later));
  EXPECT_EQ(table_.NextDeadline(), std::nullopt);
}

TEST_F(JobTableTest, GoodbyeFailsOnlyWhatStillNeedsTheRank) {
  JoinAll(2);
  FormGroup("world", {0, 1});
  FormGroup("idle", {0, 1});
  (void)Submit(1, 0, AllReduce(0));
  EXPECT_THAT(table_.Leave(1, Departure::kGoodbye, now_), IsEmpty());
  const Actions started = Submit(0, 0, AllReduce(0));
  EXPECT_THAT(Lines(table_.Finished(StartedGroup(started), 0, OkStatus(), now_)),
              ElementsAre("complete s0 #0 below 1"));
  const Actions actions = Submit(0, 1, AllReduce(0));
  EXPECT_THAT(Lines(actions), ElementsAre("fail s0 #1 RANK_LOST"));
  EXPECT_EQ(Text(actions),
            "job bert-7: rank 1 has left the job; operation 0 of group idle, all_reduce of 100 "
            "float32 (sum), cannot start without it. Every rank must make the same calls.");
  EXPECT_EQ(table_.Snapshot(now_).at(0).failure, "");
}

TEST_F(JobTableTest, GoodbyeFailsTheGroupsThatWaitForTheRankToAsk) {
  JoinAll(3);
  (void)Ask(0, "world", {0, 1, 2});
  (void)Ask(0, "pair", {0, 2});
  const Actions actions = table_.Leave(1, Departure::kGoodbye, now_);
  EXPECT_THAT(Lines(actions), ElementsAre("reply s0 r7 RANK_LOST"));
  EXPECT_THAT(Text(actions),
              HasSubstr("job bert-7: rank 1 has left the job; group world cannot be formed."));
  EXPECT_THAT(Lines(Ask(0, "world", {0, 1})), ElementsAre("reply s0 r7 RANK_LOST"));
  EXPECT_EQ(Ask(2, "pair", {0, 2}).size(), 2u);
}

TEST_F(JobTableTest, DestroyedGroupFailsForWhoStillUsesIt) {
  JoinAll(2);
  FormGroup("world", {0, 1});
  EXPECT_THAT(table_.DestroyGroup(1, 0, now_), IsEmpty());
  EXPECT_THAT(table_.DestroyGroup(1, 0, now_), IsEmpty());
  const Actions actions = Submit(0, 0, AllReduce(0));
  EXPECT_THAT(Lines(actions), ElementsAre("fail s0 #0 RANK_LOST"));
  EXPECT_THAT(Text(actions), HasSubstr("job bert-7: rank 1 has destroyed its group world;"));
}

TEST_F(JobTableTest, DestroyedGroupIsNotHeardOfAgain) {
  JoinAll(2);
  FormGroup("world", {0, 1});
  (void)Submit(0, 0, AllReduce(0));
  const GroupId group = StartedGroup(Submit(1, 0, AllReduce(0)));
  (void)table_.DestroyGroup(0, 0, now_);
  FormGroup("again", {0});  // takes the number
  EXPECT_THAT(Lines(table_.Finished(group, 0, OkStatus(), now_)),
              ElementsAre("complete s1 #0 below 1"));
}

TEST_F(JobTableTest, OperationOutlivesEverybodyWhoWantedIt) {
  JoinAll(2);
  FormGroup("world", {0, 1});
  (void)Submit(0, 0, AllReduce(0));
  const GroupId group = StartedGroup(Submit(1, 0, AllReduce(0)));
  (void)table_.Leave(0, Departure::kGoodbye, now_);
  (void)table_.Leave(1, Departure::kLost, now_);
  EXPECT_EQ(table_.running_count(), 1u);
  EXPECT_TRUE(Join(10, Rank(0, 2)).ok());
  EXPECT_EQ(table_.Snapshot(now_).size(), 2u) << "not the one that only waits for the engine";
  (void)table_.Leave(10, Departure::kGoodbye, now_);
  EXPECT_THAT(table_.Finished(group, 0, OkStatus(), now_), IsEmpty());
  ExpectNothingIsLeft();
}

TEST_F(JobTableTest, OthersWhoseJobHasTheSameRanksNoticeNothing) {
  JoinAll(2);
  FormGroup("world", {0, 1});
  ASSERT_TRUE(Join(20, Rank(0, 2, "gpt-2")).ok());
  ASSERT_TRUE(Join(21, Rank(1, 2, "gpt-2")).ok());
  FormGroup("world", {0, 1}, 20);
  (void)Submit(20, 0, AllReduce(0));
  EXPECT_THAT(Lines(table_.Leave(1, Departure::kLost, now_)), ElementsAre("fail s0 #0 RANK_LOST"));
  EXPECT_THAT(Lines(Submit(21, 0, AllReduce(0))), ElementsAre("start 0"));
}

TEST_F(JobTableTest, ManyShortJobsLeaveNothingBehind) {
  for (uint32_t run = 0; run < 10000; ++run) {
    const SessionId first = 2 * SessionId{run};
    for (uint32_t rank = 0; rank < 2; ++rank) {
      // A third of them under one name, over and over.
      const std::string job = run % 3 == 0 ? "same" : absl::StrCat("job", run);
      ASSERT_TRUE(Join(first + rank, Rank(rank, 2, job)).ok());
    }
    FormGroup("world", {0, 1}, first);
    (void)Ask(first, "never", {0, 1});
    (void)Submit(first, 0, AllReduce(0));
    const GroupId group = StartedGroup(Submit(first + 1, 0, AllReduce(0)));
    (void)Submit(first, 0, AllReduce(1));
    if (run % 2 == 0) (void)table_.Finished(group, 0, OkStatus(), now_);
    (void)table_.Leave(first, run % 5 == 0 ? Departure::kLost : Departure::kGoodbye, now_);
    (void)table_.Leave(first + 1, Departure::kGoodbye, now_);
    if (run % 2 == 1) (void)table_.Finished(group, 0, OkStatus(), now_);
  }
  ExpectNothingIsLeft();
}

// ---- Standing aside -----------------------------------------------------------------------------

AsideRequest Aside(uint64_t next_sequence) {
  return {.request_id = 9, .next_sequence = next_sequence, .timeout = std::chrono::seconds(5)};
}

TEST_F(JobTableTest, WhoStandsAsideIsAnsweredWhenAllDo) {
  JoinAll(2);
  FormGroup("world", {0, 1});
  EXPECT_THAT(table_.StandAside(0, 0, Aside(0), now_), IsEmpty());
  const GroupId group = StartedGroup(Submit(1, 0, AllReduce(0)));
  EXPECT_THAT(Lines(table_.Finished(group, 0, OkStatus(), now_)),
              ElementsAre("complete s0 #0 below 1", "complete s1 #0 below 1"));
  EXPECT_THAT(Lines(table_.StandAside(1, 0, Aside(1), now_)),
              ElementsAre("rejoin s0 r9 at 1 of 1", "rejoin s1 r9 at 1 of 1"));
  (void)Submit(0, 0, AllReduce(1));
  EXPECT_THAT(Lines(Submit(1, 0, AllReduce(1))), ElementsAre("start 1"));
}

TEST_F(JobTableTest, WhoStandsAsideHearsOfALostRankAndOfTheTimeout) {
  JoinAll(2);
  FormGroup("world", {0, 1});
  FormGroup("other", {0, 1});
  (void)table_.StandAside(0, 0, Aside(0), now_);
  (void)table_.StandAside(0, 1, Aside(0), now_);
  EXPECT_EQ(table_.NextDeadline(), now_ + std::chrono::seconds(5));
  (void)Submit(1, 1, AllReduce(0));  // the engine is at work there
  now_ += std::chrono::seconds(5);
  EXPECT_THAT(Lines(table_.CheckDeadlines(now_)),
              ElementsAre("fail s0 #0 DEADLINE_EXCEEDED", "fail s1 #0 DEADLINE_EXCEEDED",
                          "rejoin s0 r9 DEADLINE_EXCEEDED"));
  const Actions actions = table_.Leave(1, Departure::kLost, now_);
  EXPECT_THAT(actions, IsEmpty()) << "not before the operation is complete";
}

TEST_F(JobTableTest, ARankThatStandsAsideTwiceOrInNoGroupIsClosed) {
  JoinAll(2);
  FormGroup("world", {0, 1});
  (void)table_.StandAside(0, 0, Aside(0), now_);
  EXPECT_THAT(Lines(table_.StandAside(0, 0, Aside(0), now_)),
              ElementsAre("close s0 PROTOCOL", "fail s1 #0 RANK_LOST"));
  EXPECT_THAT(Lines(table_.StandAside(1, 7, Aside(0), now_)), ElementsAre("close s1 PROTOCOL"));
}

// ---- Draining -----------------------------------------------------------------------------------

TEST_F(JobTableTest, DrainRefusesWhatIsNewAndFinishesWhatRuns) {
  JoinAll(2);
  FormGroup("busy", {0, 1});
  FormGroup("idle", {0, 1});
  (void)Submit(0, 0, AllReduce(0));
  const GroupId group = StartedGroup(Submit(1, 0, AllReduce(0)));
  (void)Submit(0, 0, AllReduce(1));
  (void)Submit(1, 0, AllReduce(1));
  (void)Ask(0, "forming", {0, 1});
  const Actions actions = table_.Drain(now_);
  EXPECT_THAT(Lines(actions),
              UnorderedElementsAre("reply s0 r7 SHUTTING_DOWN", "fail s0 #1 SHUTTING_DOWN",
                                   "fail s1 #1 SHUTTING_DOWN"));
  EXPECT_EQ(Text(actions),
            "job bert-7: the daemon is shutting down. Start the job again when gradsyncd is back.");
  EXPECT_THAT(Lines(Ask(0, "new", {0})), ElementsAre("reply s0 r7 SHUTTING_DOWN"));
  EXPECT_EQ(Join(9, Rank(0, 1, "new")).code(), Code::kShuttingDown);
  EXPECT_EQ(table_.running_count(), 1u);
  EXPECT_THAT(Lines(table_.Finished(group, 0, OkStatus(), now_)),
              ElementsAre("complete s0 #0 below 1", "fail s0 #0 SHUTTING_DOWN",
                          "complete s1 #0 below 1", "fail s1 #0 SHUTTING_DOWN"));
  EXPECT_EQ(table_.running_count(), 0u);
  EXPECT_THAT(table_.Drain(now_), IsEmpty());
}

// ---- Inspection ---------------------------------------------------------------------------------

TEST_F(JobTableTest, SnapshotShowsJobsRanksAndGroups) {
  now_ = At(seconds(1));
  JoinRequest request = Rank(1, 3);
  request.generation = 4;
  ASSERT_TRUE(Join(1, request).ok());
  request = Rank(0, 3);
  request.generation = 4;
  ASSERT_TRUE(Join(0, request).ok());
  FormGroup("pair", {0, 1});
  table_.SetSegmentBytes(1, 4096);
  table_.SetSegmentBytes(99, 1);
  (void)table_.Leave(0, Departure::kGoodbye, now_);
  const std::vector<JobSnapshot> jobs = table_.Snapshot(At(seconds(3)));
  ASSERT_EQ(jobs.size(), 1u);
  EXPECT_EQ(jobs[0].uid, 1000u);
  EXPECT_EQ(jobs[0].job, "bert-7");
  EXPECT_EQ(jobs[0].generation, 4u);
  EXPECT_EQ(jobs[0].world_size, 3u);
  EXPECT_EQ(jobs[0].age, seconds(2));
  ASSERT_EQ(jobs[0].ranks.size(), 2u);
  EXPECT_FALSE(jobs[0].ranks[0].connected);
  EXPECT_TRUE(jobs[0].ranks[1].connected);
  EXPECT_EQ(jobs[0].ranks[1].rank, 1u);
  EXPECT_EQ(jobs[0].ranks[1].local_rank, 1u);
  EXPECT_EQ(jobs[0].ranks[1].pid, 101u);
  EXPECT_EQ(jobs[0].ranks[1].program, "train.py");
  EXPECT_EQ(jobs[0].ranks[1].segment_bytes, 4096u);
  ASSERT_EQ(jobs[0].groups.size(), 1u);
  EXPECT_EQ(jobs[0].groups[0].tag, "pair");
  EXPECT_NE(jobs[0].groups[0].id, 0u);
}

}  // namespace
}  // namespace gradsync

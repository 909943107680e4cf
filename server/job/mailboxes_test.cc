#include "server/job/mailboxes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/job/job_testing.h"

namespace gradsync {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string Line(const MessageAnswer& answer) {
  const std::string whom = absl::StrCat("m", answer.member, " r", answer.request_id, " ");
  if (!answer.status.ok()) return whom + CodeName(answer.status.code());
  return whom + (answer.message == nullptr ? "taken" : absl::StrCat("got ", answer.message->bytes));
}

std::vector<std::string> Lines(const MessageAnswers& answers) {
  std::vector<std::string> lines;
  for (const MessageAnswer& answer : answers) lines.push_back(Line(answer));
  return lines;
}

std::shared_ptr<const Message> Of(uint32_t from, uint64_t tag, uint64_t bytes) {
  auto message = std::make_shared<Message>();
  message->from = from;
  message->tag = tag;
  message->bytes = bytes;
  return message;
}

class MailboxesTest : public ::testing::Test {
 protected:
  std::vector<std::string> Send(uint32_t from, uint32_t to, uint32_t id, uint64_t tag,
                                uint64_t bytes = 8) {
    return Lines(mailboxes_.Send(id, to, Of(from, tag, bytes), seconds(5), now_));
  }
  std::vector<std::string> Receive(uint32_t member, std::optional<uint32_t> from, uint32_t id,
                                   uint64_t tag) {
    return Lines(mailboxes_.Receive(member, id, from, tag, seconds(5), now_));
  }

  Time now_ = At(milliseconds(0));
  Mailboxes mailboxes_{"bert-7", "world", {4, 5, 6}};
};

TEST_F(MailboxesTest, TwoMembersThatSendToEachOtherFirstAreBothAnsweredAtOnce) {
  EXPECT_THAT(Send(0, 1, 1, 7, 10), ElementsAre("m0 r1 taken"));
  EXPECT_THAT(Send(1, 0, 1, 7, 20), ElementsAre("m1 r1 taken"));
  EXPECT_THAT(Receive(0, 1, 2, 7), ElementsAre("m0 r2 got 20"));
  EXPECT_THAT(Receive(1, 0, 2, 7), ElementsAre("m1 r2 got 10"));
  EXPECT_EQ(mailboxes_.HeldBy(0), 0);
}

TEST_F(MailboxesTest, AReceiveWaitsForItsSenderAndTag) {
  EXPECT_THAT(Receive(0, 1, 1, 7), IsEmpty());
  EXPECT_THAT(Send(2, 0, 1, 7), ElementsAre("m2 r1 taken"));
  EXPECT_THAT(Send(1, 0, 1, 8), ElementsAre("m1 r1 taken"));
  EXPECT_THAT(Send(1, 0, 2, 7, 30), ElementsAre("m1 r2 taken", "m0 r1 got 30"));
}

TEST_F(MailboxesTest, ReceivesTakeMessagesInTheOrderOfBoth) {
  EXPECT_THAT(Receive(0, 1, 1, 7), IsEmpty());
  EXPECT_THAT(Receive(0, std::nullopt, 2, 7), IsEmpty());
  EXPECT_THAT(Send(1, 0, 1, 7, 10), ElementsAre("m1 r1 taken", "m0 r1 got 10"));
  EXPECT_THAT(Send(1, 0, 2, 7, 20), ElementsAre("m1 r2 taken", "m0 r2 got 20"));
  Send(2, 0, 1, 7, 30);
  Send(1, 0, 3, 7, 40);
  Send(1, 0, 4, 7, 50);
  EXPECT_THAT(Receive(0, 1, 3, 7), ElementsAre("m0 r3 got 40"));
  EXPECT_THAT(Receive(0, std::nullopt, 4, 7), ElementsAre("m0 r4 got 30"));
  EXPECT_THAT(Receive(0, std::nullopt, 5, 7), ElementsAre("m0 r5 got 50"));
}

TEST_F(MailboxesTest, BeyondTheEagerMessagesASendIsAnsweredWhenItIsReceived) {
  for (uint32_t i = 0; i < kEagerMessages; ++i) EXPECT_EQ(Send(0, 1, i, 7).size(), 1);
  EXPECT_THAT(Send(0, 1, 100, 8), IsEmpty());
  EXPECT_THAT(Send(0, 2, 101, 8), IsEmpty());
  EXPECT_EQ(mailboxes_.HeldBy(0), kEagerMessages + 2);
  EXPECT_THAT(Receive(1, 0, 1, 8), ElementsAre("m1 r1 got 8", "m0 r100 taken"));
  EXPECT_THAT(Send(1, 0, 1, 7), ElementsAre("m1 r1 taken"));  // another member's count
  now_ += seconds(6);
  EXPECT_THAT(Lines(mailboxes_.CheckDeadlines(now_)), ElementsAre("m0 r101 DEADLINE_EXCEEDED"));
  EXPECT_THAT(Receive(2, 0, 1, 8), IsEmpty());  // and it is gone
}

TEST_F(MailboxesTest, OneMessageOfAnySizeIsTakenButNotASecondBeyondTheEagerBytes) {
  EXPECT_THAT(Send(0, 1, 1, 7, 4 * kEagerBytes), ElementsAre("m0 r1 taken"));
  EXPECT_THAT(Send(0, 1, 2, 7, 1), IsEmpty());
  EXPECT_THAT(Receive(1, 0, 1, 7), ElementsAre("m1 r1 got 4294967296"));
  EXPECT_THAT(Send(0, 1, 3, 7, 1), ElementsAre("m0 r3 taken"));
}

TEST_F(MailboxesTest, AReceiveEndsAtItsDeadlineAndNamesTheSender) {
  Receive(0, 1, 1, 7);
  now_ += seconds(2);
  Receive(0, std::nullopt, 2, 9);
  EXPECT_EQ(mailboxes_.NextDeadline(), At(seconds(5)));
  EXPECT_THAT(mailboxes_.CheckDeadlines(At(milliseconds(4999))), IsEmpty());
  const MessageAnswers answers = mailboxes_.CheckDeadlines(At(seconds(5)));
  EXPECT_THAT(Lines(answers), ElementsAre("m0 r1 DEADLINE_EXCEEDED"));
  EXPECT_THAT(answers[0].status.message(),
              HasSubstr("Timed out waiting 5 s for a message to rank 4 from rank 5 (tag 7)"));
  EXPECT_EQ(mailboxes_.NextDeadline(), At(seconds(7)));
  // What comes later is for the next receive.
  EXPECT_THAT(Send(1, 0, 1, 7, 10), ElementsAre("m1 r1 taken"));
  EXPECT_THAT(Receive(0, 1, 3, 7), ElementsAre("m0 r3 got 10"));
}

TEST_F(MailboxesTest, WhatAMemberSentBeforeItLeftIsReceivedAndNothingMoreIsWaitedFor) {
  Send(1, 0, 1, 7, 10);
  Receive(0, 1, 1, 8);
  Receive(0, std::nullopt, 2, 8);
  const Status left(Code::kRankLost, "rank 5 left");
  EXPECT_THAT(Lines(mailboxes_.MemberGone(1, left)), ElementsAre("m0 r1 RANK_LOST"));
  EXPECT_THAT(Receive(0, 1, 3, 7), ElementsAre("m0 r3 got 10"));
  EXPECT_THAT(Receive(0, 1, 4, 7), ElementsAre("m0 r4 RANK_LOST"));
  EXPECT_THAT(Send(0, 1, 5, 7), ElementsAre("m0 r5 RANK_LOST"));
  EXPECT_THAT(Lines(mailboxes_.MemberGone(2, left)), ElementsAre("m0 r2 RANK_LOST"));
}

TEST_F(MailboxesTest, AMemberThatLeavesAnswersThoseWhoWaitForItToReceive) {
  for (uint32_t i = 0; i < kEagerMessages; ++i) Send(0, 2, i, 7);
  Send(0, 1, 100, 7);
  Receive(1, 0, 1, 9);
  EXPECT_THAT(Lines(mailboxes_.MemberGone(1, {Code::kRankLost, "rank 5 left"})),
              ElementsAre("m0 r100 RANK_LOST"));
  EXPECT_EQ(mailboxes_.HeldBy(0), kEagerMessages);
  EXPECT_EQ(mailboxes_.HeldBy(1), 0);
}

TEST_F(MailboxesTest, OnlyWhatHasNoAnswerYetIsCancelled) {
  Receive(0, 1, 1, 7);
  Receive(0, 1, 2, 7);
  EXPECT_THAT(Lines(mailboxes_.Cancel(0, 1)), ElementsAre("m0 r1 FAILED_PRECONDITION"));
  EXPECT_THAT(mailboxes_.Cancel(0, 1), IsEmpty());
  EXPECT_THAT(mailboxes_.Cancel(1, 2), IsEmpty());  // another member's number
  EXPECT_THAT(Send(1, 0, 1, 7, 10), ElementsAre("m1 r1 taken", "m0 r2 got 10"));
  for (uint32_t i = 0; i < kEagerMessages; ++i) Send(1, 2, i, 7);
  Send(1, 0, 100, 7);
  EXPECT_THAT(mailboxes_.Cancel(1, 0), IsEmpty());
  EXPECT_THAT(Lines(mailboxes_.Cancel(1, 100)), ElementsAre("m1 r100 FAILED_PRECONDITION"));
  EXPECT_THAT(Receive(0, 1, 3, 7), IsEmpty());
}

TEST_F(MailboxesTest, AFailureIsToldToAllWhoWait) {
  Receive(0, 1, 1, 7);
  Receive(1, std::nullopt, 1, 8);
  for (uint32_t i = 0; i <= kEagerMessages; ++i) Send(2, 0, i, 8);
  EXPECT_THAT(Lines(mailboxes_.Fail({Code::kMismatch, "they differ"})),
              ElementsAre("m0 r1 MISMATCH", "m2 r64 MISMATCH", "m1 r1 MISMATCH"));
  EXPECT_EQ(mailboxes_.NextDeadline(), std::nullopt);
  for (uint32_t member = 0; member < 3; ++member) EXPECT_EQ(mailboxes_.HeldBy(member), 0);
}

// Against a model: per sender, receiver and tag a queue of messages and one of receives.
TEST_F(MailboxesTest, RandomTrafficIsMatchedInOrder) {
  std::mt19937 random(7);
  using Channel = std::tuple<uint32_t, uint32_t, uint64_t>;
  std::map<Channel, std::deque<uint64_t>> sent;
  std::map<Channel, std::deque<uint32_t>> waiting;
  uint32_t next_id = 1;
  for (int step = 0; step < 20000; ++step) {
    const auto from = static_cast<uint32_t>(random() % 3);
    const auto to = static_cast<uint32_t>(random() % 3);
    const Channel channel(from, to, random() % 2);
    auto& messages = sent[channel];
    auto& receives = waiting[channel];
    const uint32_t id = next_id++;
    std::vector<std::string> expected;
    std::vector<std::string> answers;
    if (random() % 2 == 0 && (mailboxes_.HeldBy(from) < kEagerMessages || !receives.empty())) {
      answers = Send(from, to, id, std::get<2>(channel), id);
      expected.push_back(absl::StrCat("m", from, " r", id, " taken"));
      if (receives.empty()) {
        messages.push_back(id);
      } else {
        expected.push_back(absl::StrCat("m", to, " r", receives.front(), " got ", id));
        receives.pop_front();
      }
    } else {
      answers = Receive(to, from, id, std::get<2>(channel));
      if (messages.empty()) {
        receives.push_back(id);
      } else {
        expected.push_back(absl::StrCat("m", to, " r", id, " got ", messages.front()));
        messages.pop_front();
      }
    }
    ASSERT_EQ(answers, expected) << "step " << step;
  }
}

}  // namespace
}  // namespace gradsync

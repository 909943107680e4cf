#include "server/local/inbox.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

namespace gradsync {
namespace {

constexpr std::chrono::seconds kPatience{30};

Time In(std::chrono::nanoseconds duration) { return std::chrono::steady_clock::now() + duration; }

bool IsReadable(int fd) {
  pollfd entry{fd, POLLIN, 0};
  return poll(&entry, 1, 0) > 0;
}

TEST(InboxTest, MessagesComeOutInTheOrderTheyCameIn) {
  const auto inbox = *Inbox::Create();
  EXPECT_TRUE(inbox->empty());
  inbox->Post(OperationDone{1, 10});
  inbox->Post(OperationDone{1, 11});
  std::vector<Inbox::Message> messages;
  inbox->Take(&messages);
  ASSERT_EQ(messages.size(), 2);
  EXPECT_EQ(std::get<OperationDone>(messages[1]).sequence, 11);
  EXPECT_TRUE(inbox->empty());
}

TEST(InboxTest, OnlyASleepingReactorIsRung) {
  const auto inbox = *Inbox::Create();
  inbox->Post(OperationDone{});
  EXPECT_FALSE(IsReadable(inbox->fd()));
  EXPECT_FALSE(inbox->PrepareToSleep());
  inbox->WakeUp();
  std::vector<Inbox::Message> messages;
  inbox->Take(&messages);
  EXPECT_TRUE(inbox->PrepareToSleep());
  inbox->Post(OperationDone{});
  EXPECT_TRUE(IsReadable(inbox->fd()));
}

TEST(InboxTest, NothingIsTakenOnceClosed) {
  const auto inbox = *Inbox::Create();
  inbox->Close();
  EXPECT_FALSE(inbox->Post(OperationDone{}));
}

TEST(PostedCallTest, TheCallerGetsItsAnswer) {
  PostedCall call([](const JobTable&, Time) {});
  std::thread reactor([&] { call.Run(JobTable(), In({})); });
  EXPECT_TRUE(call.Wait(In(kPatience)).ok());
  reactor.join();
}

TEST(PostedCallTest, ARefusalIsTheCallersStatus) {
  PostedCall call([](const JobTable&, Time) { FAIL(); });
  call.Refuse({Code::kShuttingDown, "end"});
  EXPECT_EQ(call.Wait(In(kPatience)).code(), Code::kShuttingDown);
}

TEST(PostedCallTest, AWithdrawnCallIsNotMade) {
  bool ran = false;
  PostedCall call([&](const JobTable&, Time) { ran = true; });
  EXPECT_EQ(call.Wait(In({})).code(), Code::kDeadlineExceeded);
  call.Run(JobTable(), In({}));
  EXPECT_FALSE(ran);
}

TEST(PostedCallTest, ACallThatHasBegunIsWaitedForBeyondItsDeadline) {
  std::atomic<bool> began{false};
  std::atomic<bool> may_end{false};
  std::atomic<bool> ended{false};
  PostedCall call([&](const JobTable&, Time) {
    began = true;
    while (!may_end) std::this_thread::yield();
    ended = true;
  });
  std::thread reactor([&] { call.Run(JobTable(), In({})); });
  while (!began) std::this_thread::yield();
  std::thread release([&] { may_end = true; });
  EXPECT_TRUE(call.Wait(In({})).ok());
  EXPECT_TRUE(ended);
  release.join();
  reactor.join();
}

}  // namespace
}  // namespace gradsync

#include "server/local/frames.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shm/segment.h"

namespace gradsync {
namespace {

using ::testing::HasSubstr;

Hello GoodHello() {
  auto hello = MakeMessage<Hello>(1);
  hello.job.Set("job");
  hello.world_size = 4;
  hello.rank = 2;
  hello.local_rank = 2;
  hello.local_world_size = 4;
  hello.program.Set("train.py");
  return hello;
}

Status HelloError(const std::function<void(Hello*)>& change) {
  Hello hello = GoodHello();
  change(&hello);
  const auto checked = CheckHello(hello, 0);
  return checked ? OkStatus() : checked.error();
}

CreateGroup GoodGroup() {
  auto request = MakeMessage<CreateGroup>(5);
  request.tag.Set("world");
  request.timeout_ms = 1000;
  request.rank_count = 2;
  request.ranks[0] = 3;
  request.ranks[1] = 1;
  return request;
}

Status GroupError(const std::function<void(CreateGroup*)>& change) {
  CreateGroup request = GoodGroup();
  change(&request);
  const auto checked = CheckCreateGroup(request);
  return checked ? OkStatus() : checked.error();
}

TEST(CheckHeaderTest, AnotherVersionIsToldBothVersions) {
  Hello hello = GoodHello();
  hello.header.version = kProtocolVersion + 1;
  const Status status = CheckHeader(AsBytes(hello)).error();
  EXPECT_EQ(status.code(), Code::kProtocol);
  EXPECT_THAT(status.message(),
              HasSubstr(absl::StrCat("the client speaks protocol ", kProtocolVersion + 1,
                                     ", this daemon ", kProtocolVersion)));
}

TEST(CheckHeaderTest, WhatIsNoFrameOrLiesAboutItsSizeIsRefused) {
  Hello hello = GoodHello();
  EXPECT_TRUE(CheckHeader(AsBytes(hello)).has_value());
  EXPECT_FALSE(CheckHeader(AsBytes(hello).first(15)).has_value());
  EXPECT_FALSE(CheckHeader(AsBytes(hello).first(100)).has_value());
  hello.header.magic = 0;
  EXPECT_FALSE(CheckHeader(AsBytes(hello)).has_value());
}

TEST(CheckMessageTest, AFrameOfAnotherLengthIsRefusedByName) {
  auto request = MakeMessage<Goodbye>();
  request.header.type = static_cast<uint16_t>(FrameType::kHello);
  const Status status = CheckMessage<Hello>(AsBytes(request)).error();
  EXPECT_THAT(status.message(), HasSubstr("a HELLO frame has 16 bytes"));
}

TEST(CheckHelloTest, AGoodHelloIsTakenOver) {
  const auto request = CheckHello(GoodHello(), 1000);
  ASSERT_TRUE(request.has_value());
  EXPECT_EQ(request->uid, 1000);
  EXPECT_EQ(request->job, "job");
  EXPECT_EQ(request->rank, 2);
  EXPECT_EQ(request->world_size, 4);
  EXPECT_EQ(request->program, "train.py");
}

TEST(CheckHelloTest, EveryFieldIsChecked) {
  EXPECT_EQ(HelloError([](Hello* h) { h->job.Set(""); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(HelloError([](Hello* h) { h->job.Set("a\nb"); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(HelloError([](Hello* h) { h->job.bytes.fill('a'); }).code(), Code::kProtocol);
  EXPECT_EQ(HelloError([](Hello* h) { h->rank = 4; }).code(), Code::kInvalidArgument);
  EXPECT_EQ(HelloError([](Hello* h) { h->world_size = 0; }).code(), Code::kInvalidArgument);
  EXPECT_EQ(HelloError([](Hello* h) { h->local_rank = 4; }).code(), Code::kInvalidArgument);
  EXPECT_EQ(HelloError([](Hello* h) { h->local_world_size = 0; }).code(), Code::kInvalidArgument);
  EXPECT_EQ(HelloError([](Hello* h) { h->local_world_size = 5; }).code(), Code::kInvalidArgument);
  EXPECT_EQ(HelloError([](Hello* h) { h->world_size = h->local_world_size = 257; }).code(),
            Code::kUnsupported);
}

TEST(CheckHelloTest, AProgramNameForPeopleIsRepairedNotRefused) {
  Hello hello = GoodHello();
  hello.program.bytes.fill('\x01');
  EXPECT_EQ(CheckHello(hello, 0)->program, std::string(64, '?'));
}

TEST(CheckCreateGroupTest, AGoodRequestKeepsTheOrderOfItsRanks) {
  const auto request = CheckCreateGroup(GoodGroup());
  ASSERT_TRUE(request.has_value());
  EXPECT_EQ(request->request_id, 5);
  EXPECT_EQ(request->ranks, (std::vector<uint32_t>{3, 1}));
  EXPECT_EQ(request->timeout, std::chrono::seconds(1));
}

TEST(CheckCreateGroupTest, EveryFieldIsChecked) {
  EXPECT_FALSE(GroupError([](CreateGroup* g) { g->tag.Set(""); }).ok());
  EXPECT_FALSE(GroupError([](CreateGroup* g) { g->timeout_ms = 0; }).ok());
  EXPECT_FALSE(GroupError([](CreateGroup* g) { g->rank_count = 0; }).ok());
  EXPECT_FALSE(GroupError([](CreateGroup* g) { g->rank_count = 257; }).ok());
  EXPECT_THAT(GroupError([](CreateGroup* g) { g->ranks[1] = 3; }).message(),
              HasSubstr("rank 3 is named twice"));
}

TEST(CheckCreateGroupTest, ATimeoutBeyondTheLimitIsTheLimit) {
  CreateGroup request = GoodGroup();
  request.timeout_ms = ~0u;
  EXPECT_EQ(CheckCreateGroup(request)->timeout, std::chrono::milliseconds(kMaxTimeoutMs));
}

TEST(CheckDescribeBucketTest, EveryFieldIsChecked) {
  auto request = MakeMessage<DescribeBucket>();
  request.bucket = 1;
  request.bucket_count = 2;
  request.count = 10;
  request.parameters.Set("a ... b");
  const auto good = CheckDescribeBucket(request);
  ASSERT_TRUE(good.has_value());
  EXPECT_EQ(good->bucket, 1);
  EXPECT_EQ(good->parameters, "a ... b");
  request.dtype = kDTypeCount;
  EXPECT_FALSE(CheckDescribeBucket(request).has_value());
  request.dtype = 0;
  request.bucket = 2;
  EXPECT_FALSE(CheckDescribeBucket(request).has_value());
}

TEST(CheckAbortGroupTest, TheReasonMustBeAnError) {
  auto request = MakeMessage<AbortGroup>();
  request.text.Set("the loss is not finite");
  EXPECT_FALSE(CheckAbortGroup(request).has_value());
  request.code = 99;
  EXPECT_FALSE(CheckAbortGroup(request).has_value());
  request.code = static_cast<int32_t>(Code::kMismatch);
  const auto why = CheckAbortGroup(request);
  ASSERT_TRUE(why.has_value());
  EXPECT_EQ(why->code(), Code::kMismatch);
  EXPECT_EQ(why->message(), "the loss is not finite");
}

// As member 1 of a group of three.
Result<std::shared_ptr<Message>> CheckSend(const SendMessage& request,
                                           std::vector<UniqueFd> fds = {}) {
  return CheckSendMessage(request, &fds, JobTable::Membership{.size = 3, .member = 1});
}

SendMessage GoodSend(uint64_t bytes) {
  auto request = MakeMessage<SendMessage>(1);
  request.bytes = bytes;
  request.to = 2;
  request.tag = 7;
  request.timeout_ms = 1000;
  request.data.fill(std::byte{'x'});
  return request;
}

std::vector<UniqueFd> Memory(size_t bytes) {
  std::vector<UniqueFd> fds;
  fds.push_back(*CreateSealedMemfd("test", bytes));
  return fds;
}

TEST(CheckSendMessageTest, AShortMessageLiesInTheFrameAndALongOneInItsMemory) {
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{3}, uint64_t{kInlineMessageBytes}}) {
    const auto message = CheckSend(GoodSend(bytes));
    ASSERT_TRUE(message.has_value()) << message.error().ToString();
    EXPECT_EQ((*message)->from, 1);
    EXPECT_EQ((*message)->tag, 7);
    EXPECT_EQ((*message)->data, std::vector(bytes, std::byte{'x'}));
    EXPECT_FALSE((*message)->memory.valid());
  }
  const auto message = CheckSend(GoodSend(100000), Memory(100000));
  ASSERT_TRUE(message.has_value()) << message.error().ToString();
  EXPECT_EQ((*message)->bytes, 100000);
  EXPECT_TRUE((*message)->memory.valid());
}

TEST(CheckSendMessageTest, WhatMakesNoSenseIsRefused) {
  SendMessage request = GoodSend(3);
  request.to = 3;
  EXPECT_THAT(CheckSend(request).error().message(), HasSubstr("has no such member"));
  request = GoodSend(3);
  request.timeout_ms = 0;
  EXPECT_THAT(CheckSend(request).error().message(), HasSubstr("timeout"));
  EXPECT_THAT(CheckSend(GoodSend(3), Memory(3)).error().message(),
              HasSubstr("carries 1 descriptors"));
  EXPECT_THAT(CheckSend(GoodSend(kInlineMessageBytes + 1)).error().message(),
              HasSubstr("carries 0 descriptors"));
  EXPECT_FALSE(CheckSend(GoodSend(100000), Memory(99999)).has_value());
  EXPECT_FALSE(CheckSend(GoodSend(100000), Memory(100001)).has_value());
  std::vector<UniqueFd> no_memory;
  no_memory.emplace_back(open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_FALSE(CheckSend(GoodSend(100000), std::move(no_memory)).has_value());
  std::vector<UniqueFd> none;
  EXPECT_THAT(CheckSendMessage(GoodSend(3), &none, std::nullopt).error().message(),
              HasSubstr("not in the group"));
}

TEST(CheckReceiveMessageTest, TheSenderIsAMemberOrAny) {
  const JobTable::Membership membership{.size = 3, .member = 1};
  auto request = MakeMessage<ReceiveMessage>(1);
  request.timeout_ms = 1000;
  for (const uint32_t from : {0u, 1u, 2u, kAnyMember}) {
    request.from = from;
    EXPECT_TRUE(CheckReceiveMessage(request, membership).ok());
  }
  EXPECT_FALSE(CheckReceiveMessage(request, std::nullopt).ok());
  for (const uint32_t from : {3u, kAnyMember - 1}) {
    request.from = from;
    EXPECT_FALSE(CheckReceiveMessage(request, membership).ok());
  }
  request.from = 0;
  request.timeout_ms = 0;
  EXPECT_FALSE(CheckReceiveMessage(request, membership).ok());
}

TEST(CheckStandAsideTest, OnlyAMemberUnderAPolicyAndWithATimeout) {
  const JobTable::Membership membership{.size = 3, .member = 1};
  auto request = MakeMessage<StandAside>(4);
  request.timeout_ms = 1000;
  request.next_sequence = 12;
  request.policy = 1;
  const auto checked = CheckStandAside(request, membership);
  ASSERT_TRUE(checked);
  EXPECT_EQ(checked->request_id, 4u);
  EXPECT_EQ(checked->next_sequence, 12u);
  EXPECT_EQ(checked->policy, AsidePolicy::kAverageOverPresent);
  EXPECT_EQ(checked->timeout, std::chrono::seconds(1));
  EXPECT_FALSE(CheckStandAside(request, std::nullopt));
  request.policy = kAsidePolicyCount;
  EXPECT_FALSE(CheckStandAside(request, membership));
  request.policy = 0;
  request.timeout_ms = 0;
  EXPECT_FALSE(CheckStandAside(request, membership));
}

}  // namespace
}  // namespace gradsync

#include "server/local/frames.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

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
  hello.header.version = 2;
  const Status status = CheckHeader(AsBytes(hello)).error();
  EXPECT_EQ(status.code(), Code::kProtocol);
  EXPECT_THAT(status.message(), HasSubstr("the client speaks protocol 2, this daemon 1"));
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

}  // namespace
}  // namespace gradsync

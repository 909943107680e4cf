#include "server/local/submissions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <limits>
#include <memory>

#include "shm/protocol.h"

namespace gradsync {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kPage = 4096;

class SubmissionsTest : public ::testing::Test {
 protected:
  SubmissionsTest() {
    first_ = table_.Allocate(2 * kPage, "first")->number;
    second_ = table_.Allocate(kPage, "second")->number;
  }

  // An in-place sum of the whole first segment.
  Submission Good() const {
    Submission entry{};
    entry.sequence = 17;
    entry.count = 2 * kPage / 4;
    entry.group = 3;
    entry.timeout_ms = 1000;
    entry.input = {first_, 0, 0};
    entry.output = {first_, 0, 0};
    return entry;
  }

  Result<CheckedSubmission> Check(const Submission& entry) const {
    return CheckSubmission(entry, membership_, table_);
  }

  Status ErrorOf(const std::function<void(Submission*)>& change) const {
    Submission entry = Good();
    change(&entry);
    const auto checked = Check(entry);
    return checked ? OkStatus() : checked.error();
  }

  std::byte* Data(uint32_t segment) const { return (*table_.Find(segment))->data(); }

  SegmentTable table_{
      {8, 100 * kPage},
      {std::make_shared<Budget>(100 * kPage), std::make_shared<Budget>(100 * kPage)}};
  std::optional<JobTable::Membership> membership_ = JobTable::Membership{.size = 2, .member = 1};
  uint32_t first_ = 0;
  uint32_t second_ = 0;
};

TEST_F(SubmissionsTest, AGoodEntryBecomesAnOperation) {
  Submission entry = Good();
  entry.kind = static_cast<uint8_t>(OpKind::kBucketReduce);
  entry.reduce_op = static_cast<uint8_t>(ReduceOp::kAvg);
  entry.bucket = 9;
  const auto checked = Check(entry);
  ASSERT_TRUE(checked.has_value()) << checked.error().ToString();
  EXPECT_EQ(checked->operation.sequence, 17);
  EXPECT_EQ(checked->operation.kind, OpKind::kBucketReduce);
  EXPECT_EQ(checked->operation.reduce_op, ReduceOp::kAvg);
  EXPECT_EQ(checked->operation.bucket, 9);
  EXPECT_EQ(checked->operation.count, 2 * kPage / 4);
  EXPECT_EQ(checked->buffers.input, Data(first_));
  EXPECT_EQ(checked->buffers.output, Data(first_));
  EXPECT_EQ(checked->buffers.timeout, std::chrono::seconds(1));
  EXPECT_EQ(checked->buffers.keep_alive, *table_.Find(first_));
}

TEST_F(SubmissionsTest, BothSegmentsAreKeptAliveWhenTheyDiffer) {
  Submission entry = Good();
  entry.count = 4;
  entry.output = {second_, 0, 64};
  auto checked = Check(entry);
  ASSERT_TRUE(checked.has_value());
  const std::weak_ptr<const Mapping> first = *table_.Find(first_);
  const std::weak_ptr<const Mapping> second = *table_.Find(second_);
  ASSERT_TRUE(table_.Free(first_));
  ASSERT_TRUE(table_.Free(second_));
  EXPECT_FALSE(first.expired());
  EXPECT_FALSE(second.expired());
  checked->buffers.keep_alive.reset();
  EXPECT_TRUE(first.expired());
  EXPECT_TRUE(second.expired());
}

TEST_F(SubmissionsTest, AnUnknownGroupIsRefused) {
  membership_.reset();
  EXPECT_THAT(Check(Good()).error().message(), HasSubstr("in no such group"));
}

TEST_F(SubmissionsTest, WrongEnumsAreRefused) {
  EXPECT_THAT(ErrorOf([](Submission* e) { e->kind = kOpKindCount; }).message(), HasSubstr("kind"));
  EXPECT_THAT(ErrorOf([](Submission* e) { e->dtype = 255; }).message(), HasSubstr("dtype 255"));
  EXPECT_THAT(ErrorOf([](Submission* e) { e->reduce_op = kReduceOpCount; }).message(),
              HasSubstr("reduce op"));
  EXPECT_THAT(ErrorOf([](Submission* e) {
                e->dtype = static_cast<uint8_t>(DType::kInt32);
                e->reduce_op = static_cast<uint8_t>(ReduceOp::kAvg);
              }).message(),
              HasSubstr("int32 values have no avg"));
}

TEST_F(SubmissionsTest, NumbersThatMeanNothingHereAreRefused) {
  EXPECT_FALSE(ErrorOf([](Submission* e) { e->timeout_ms = 0; }).ok());
  EXPECT_FALSE(ErrorOf([](Submission* e) { e->root = 1; }).ok());
  EXPECT_FALSE(ErrorOf([](Submission* e) { e->bucket = 1; }).ok());
  EXPECT_FALSE(ErrorOf([](Submission* e) {
                 e->kind = static_cast<uint8_t>(OpKind::kBroadcast);
                 e->root = 2;
               }).ok());
  EXPECT_FALSE(
      ErrorOf([](Submission* e) { e->kind = static_cast<uint8_t>(OpKind::kBarrier); }).ok());
}

TEST_F(SubmissionsTest, ATimeoutBeyondTheLimitIsTheLimit) {
  Submission entry = Good();
  entry.timeout_ms = ~0u;
  EXPECT_EQ(Check(entry)->buffers.timeout, std::chrono::milliseconds(kMaxTimeoutMs));
}

TEST_F(SubmissionsTest, RegionsOutsideTheirSegmentAreRefused) {
  EXPECT_FALSE(ErrorOf([](Submission* e) { e->count += 1; }).ok());
  EXPECT_FALSE(ErrorOf([](Submission* e) { e->input.offset = 4; }).ok());
  EXPECT_FALSE(ErrorOf([](Submission* e) { e->output.offset = 4; }).ok());
  EXPECT_FALSE(ErrorOf([](Submission* e) { e->input.segment = 77; }).ok());
  EXPECT_FALSE(ErrorOf([](Submission* e) { e->output.segment = kNoSegment; }).ok());
  EXPECT_FALSE(ErrorOf([](Submission* e) {
                 e->input.offset = e->output.offset = std::numeric_limits<uint64_t>::max() - 3;
               }).ok());
  EXPECT_THAT(ErrorOf([](Submission* e) { e->count += 1; }).message(),
              HasSubstr("the input, 8196 bytes from 0, lies outside segment 0 of 8192 bytes"));
}

TEST_F(SubmissionsTest, CountsThatOverflowAreRefused) {
  EXPECT_THAT(ErrorOf([](Submission* e) { e->count = 1ull << 62; }).message(),
              HasSubstr("do not fit in memory"));
  EXPECT_FALSE(ErrorOf([](Submission* e) {
                 e->kind = static_cast<uint8_t>(OpKind::kAllGather);
                 e->count = (1ull << 61) + 1;
               }).ok());
}

TEST_F(SubmissionsTest, MisalignedRegionsAreRefused) {
  EXPECT_THAT(ErrorOf([](Submission* e) {
                e->count = 1;
                e->input.offset = 2;
              }).message(),
              HasSubstr("not aligned for float32"));
}

TEST_F(SubmissionsTest, PartialOverlapsAreRefused) {
  EXPECT_THAT(ErrorOf([](Submission* e) {
                e->count = 4;
                e->output.offset = 8;
              }).message(),
              HasSubstr("overlap in a way"));
  EXPECT_TRUE(ErrorOf([](Submission* e) {
                e->count = 4;
                e->output.offset = 16;
              }).ok());
}

TEST_F(SubmissionsTest, AnAllGatherNeedsRoomForEveryMember) {
  Submission entry = Good();
  entry.kind = static_cast<uint8_t>(OpKind::kAllGather);
  entry.input = {second_, 0, 0};
  entry.count = kPage / 4;
  EXPECT_TRUE(Check(entry).has_value());
  membership_->size = 3;
  EXPECT_FALSE(Check(entry).has_value());
}

TEST_F(SubmissionsTest, OnlyTheRootOfABroadcastNeedsAnInput) {
  Submission entry = Good();
  entry.kind = static_cast<uint8_t>(OpKind::kBroadcast);
  entry.input.segment = kNoSegment;
  entry.root = 0;
  const auto checked = Check(entry);
  ASSERT_TRUE(checked.has_value());
  EXPECT_EQ(checked->buffers.input, nullptr);
  entry.root = 1;
  EXPECT_FALSE(Check(entry).has_value());
}

// What each kind needs of a group of two, as member 1: blocks of input and of output, with this
// member as the root and without.
struct Needs {
  OpKind kind;
  uint64_t input_as_root, output_as_root;
  uint64_t input, output;
};
constexpr std::array<Needs, 9> kNeeds = {{
    {OpKind::kAllReduce, 1, 1, 1, 1},
    {OpKind::kBroadcast, 1, 1, 0, 1},
    {OpKind::kAllGather, 1, 2, 1, 2},
    {OpKind::kReduce, 1, 1, 1, 0},
    {OpKind::kGather, 1, 2, 1, 0},
    {OpKind::kScatter, 2, 1, 0, 1},
    {OpKind::kReduceScatter, 2, 1, 2, 1},
    {OpKind::kAllToAll, 2, 2, 2, 2},
    {OpKind::kShare, 1, 1, 1, 1},
}};

TEST_F(SubmissionsTest, EveryKindNeedsExactlyTheMemoryThatItUses) {
  for (const Needs& needs : kNeeds) {
    const bool has_root = TraitsOf(needs.kind).has_root;
    for (const bool is_root : {false, true}) {
      if (is_root && !has_root) continue;
      const uint64_t in = is_root ? needs.input_as_root : needs.input;
      const uint64_t out = is_root ? needs.output_as_root : needs.output;
      Submission good = Good();
      good.kind = static_cast<uint8_t>(needs.kind);
      good.root = is_root ? 1 : 0;
      // Each side ends with its segment, to the byte.
      good.count = kPage / 4 / 2;
      good.input = {in > 0 ? first_ : kNoSegment, 0, 2 * kPage - in * kPage / 2};
      good.output = {out > 0 ? second_ : kNoSegment, 0, kPage - out * kPage / 2};
      const auto checked = Check(good);
      ASSERT_TRUE(checked.has_value()) << checked.error().ToString();
      EXPECT_EQ(checked->buffers.input, in > 0 ? Data(first_) + good.input.offset : nullptr);
      EXPECT_EQ(checked->buffers.output, out > 0 ? Data(second_) + good.output.offset : nullptr);
      EXPECT_NE(checked->buffers.keep_alive, nullptr);
      EXPECT_EQ(checked->operation.root, good.root);
      Submission bad = good;
      bad.count += 1;
      EXPECT_FALSE(Check(bad).has_value()) << OpKindName(needs.kind);
      for (const bool of_input : {true, false}) {
        if ((of_input ? in : out) == 0) continue;
        bad = good;
        (of_input ? bad.input : bad.output).offset += 4;
        EXPECT_FALSE(Check(bad).has_value()) << OpKindName(needs.kind);
        (of_input ? bad.input : bad.output) = {kNoSegment, 0, 0};
        EXPECT_FALSE(Check(bad).has_value()) << OpKindName(needs.kind);
      }
      bad = good;
      bad.root = has_root ? 2 : 1;
      EXPECT_FALSE(Check(bad).has_value()) << OpKindName(needs.kind);
      bad = good;
      bad.count = (1ull << 61) + 1;
      EXPECT_FALSE(Check(bad).has_value()) << OpKindName(needs.kind);
      bad = good;
      bad.bucket = 1;
      EXPECT_FALSE(Check(bad).has_value()) << OpKindName(needs.kind);
    }
  }
}

TEST_F(SubmissionsTest, AnAllToAllCannotBeInPlace) {
  EXPECT_THAT(ErrorOf([](Submission* e) {
                e->kind = static_cast<uint8_t>(OpKind::kAllToAll);
                e->count = kPage / 4;
              }).message(),
              HasSubstr("overlap in a way"));
}

TEST_F(SubmissionsTest, AReduceScatterIntoItsOwnInputIsRefused) {
  EXPECT_THAT(ErrorOf([](Submission* e) {
                e->kind = static_cast<uint8_t>(OpKind::kReduceScatter);
                e->count = kPage / 4;
              }).message(),
              HasSubstr("overlap in a way"));
}

TEST_F(SubmissionsTest, KindsThatReduceCheckTheReduction) {
  for (const OpKind kind : {OpKind::kReduce, OpKind::kReduceScatter}) {
    Submission entry = Good();
    entry.kind = static_cast<uint8_t>(kind);
    entry.count = 4;
    entry.output = {second_, 0, 0};
    entry.dtype = static_cast<uint8_t>(DType::kFloat32);
    entry.reduce_op = static_cast<uint8_t>(ReduceOp::kBitAnd);
    EXPECT_THAT(Check(entry).error().message(), HasSubstr("float32 values have no bit_and"));
    entry.reduce_op = static_cast<uint8_t>(ReduceOp::kMax);
    EXPECT_EQ(Check(entry)->operation.reduce_op, ReduceOp::kMax);
  }
}

TEST_F(SubmissionsTest, WithoutElementsNoMemoryIsNeeded) {
  Submission entry = Good();
  entry.kind = static_cast<uint8_t>(OpKind::kBarrier);
  entry.count = 0;
  entry.input.segment = entry.output.segment = kNoSegment;
  const auto checked = Check(entry);
  ASSERT_TRUE(checked.has_value());
  EXPECT_EQ(checked->buffers.output, nullptr);
}

TEST_F(SubmissionsTest, AReductionThatIsNotUsedMakesNoDifference) {
  Submission entry = Good();
  entry.kind = static_cast<uint8_t>(OpKind::kBroadcast);
  entry.reduce_op = static_cast<uint8_t>(ReduceOp::kMax);
  EXPECT_EQ(Check(entry)->operation.reduce_op, ReduceOp::kSum);
}

}  // namespace
}  // namespace gradsync

#include "server/local/segments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <vector>

namespace gradsync {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kPage = 4096;

class SegmentsTest : public ::testing::Test {
 protected:
  SegmentTable Table(SegmentLimits limits) { return SegmentTable(limits, {user_, total_}); }

  std::shared_ptr<Budget> user_ = std::make_shared<Budget>(64 * kPage);
  std::shared_ptr<Budget> total_ = std::make_shared<Budget>(16 * kPage);
};

TEST_F(SegmentsTest, SizesAreWholePages) {
  SegmentTable table = Table({8, 8 * kPage});
  const auto segment = table.Allocate(kPage + 1, "a");
  ASSERT_TRUE(segment.has_value());
  EXPECT_EQ(segment->bytes, 2 * kPage);
  EXPECT_EQ((*table.Find(segment->number))->size(), 2 * kPage);
  EXPECT_TRUE(CheckSealedMemfd(segment->fd.get(), 2 * kPage).ok());
  EXPECT_EQ(table.bytes(), 2 * kPage);
}

TEST_F(SegmentsTest, AnEmptySegmentIsRefused) {
  SegmentTable table = Table({8, 8 * kPage});
  EXPECT_EQ(table.Allocate(0, "a").error().code(), Code::kInvalidArgument);
}

TEST_F(SegmentsTest, AFreedNumberIsGivenAgainAndUnknownOnesAreNot) {
  SegmentTable table = Table({8, 8 * kPage});
  const uint32_t first = table.Allocate(1, "a")->number;
  const uint32_t second = table.Allocate(1, "b")->number;
  EXPECT_NE(first, second);
  EXPECT_TRUE(table.Free(first));
  EXPECT_EQ(table.Find(first), nullptr);
  EXPECT_FALSE(table.Free(first));
  EXPECT_FALSE(table.Free(77));
  EXPECT_EQ(table.Find(std::numeric_limits<uint32_t>::max()), nullptr);
  EXPECT_EQ(table.Allocate(1, "c")->number, first);
}

TEST_F(SegmentsTest, EachLimitRefusesAndNamesItsFlag) {
  SegmentTable few = Table({2, 8 * kPage});
  ASSERT_TRUE(few.Allocate(1, "a").has_value());
  ASSERT_TRUE(few.Allocate(1, "b").has_value());
  EXPECT_EQ(few.Allocate(1, "c").error().code(), Code::kOutOfMemory);

  SegmentTable small = Table({100, 4 * kPage});
  EXPECT_TRUE(small.Allocate(4 * kPage, "a").has_value());
  const Status over = small.Allocate(1, "b").error();
  EXPECT_EQ(over.code(), Code::kOutOfMemory);
  EXPECT_THAT(over.message(), HasSubstr("--max-session-bytes"));

  SegmentTable large = Table({100, 100 * kPage});
  const Status total = large.Allocate(11 * kPage, "a").error();
  EXPECT_EQ(total.code(), Code::kOutOfMemory);
  EXPECT_THAT(total.message(), HasSubstr("--max-total-bytes"));
  EXPECT_TRUE(large.Allocate(10 * kPage, "a").has_value());
}

TEST_F(SegmentsTest, TheSessionsOfOneUserShareItsLimit) {
  user_ = std::make_shared<Budget>(3 * kPage);
  SegmentTable first = Table({100, 100 * kPage});
  SegmentTable second = Table({100, 100 * kPage});
  EXPECT_TRUE(first.Allocate(2 * kPage, "a").has_value());
  const Status over = second.Allocate(2 * kPage, "a").error();
  EXPECT_EQ(over.code(), Code::kOutOfMemory);
  EXPECT_THAT(over.message(), HasSubstr("--max-user-bytes"));
  EXPECT_TRUE(second.Allocate(kPage, "a").has_value());
  user_ = std::make_shared<Budget>(3 * kPage);
  EXPECT_TRUE(Table({100, 100 * kPage}).Allocate(3 * kPage, "another user's").has_value());
}

TEST_F(SegmentsTest, ARefusedAllocationCostsNothing) {
  SegmentTable table = Table({2, 100 * kPage});
  EXPECT_FALSE(table.Allocate(17 * kPage, "a").has_value());
  EXPECT_FALSE(table.Allocate(std::numeric_limits<uint64_t>::max(), "a").has_value());
  EXPECT_EQ(table.bytes(), 0);
  EXPECT_EQ(user_->used(), 0);
  EXPECT_EQ(total_->used(), 0);
  EXPECT_TRUE(table.Allocate(16 * kPage, "a").has_value());
}

TEST_F(SegmentsTest, MemoryInUseCountsUntilItsLastHolderLetsGo) {
  auto table =
      std::make_unique<SegmentTable>(SegmentLimits{1, 4 * kPage}, SharedBudgets{user_, total_});
  const uint32_t number = table->Allocate(4 * kPage, "a")->number;
  std::shared_ptr<const void> holder = *table->Find(number);
  ASSERT_TRUE(table->Free(number));
  EXPECT_FALSE(table->Allocate(1, "b").has_value());
  table.reset();
  EXPECT_EQ(total_->used(), 4 * kPage);
  holder.reset();
  EXPECT_EQ(total_->used(), 0);
}

}  // namespace
}  // namespace gradsync

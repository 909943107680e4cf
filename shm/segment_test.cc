#include "shm/segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <utility>

namespace gradsync {
namespace {

constexpr size_t kSize = 64 * 1024;

UniqueFd MakeSegment() {
  auto fd = CreateSealedMemfd("gradsync-test", kSize);
  EXPECT_TRUE(fd) << fd.error().ToString();
  return std::move(*fd);
}

TEST(SegmentTest, CannotBeResizedByWhoeverHoldsIt) {
  const UniqueFd fd = MakeSegment();
  EXPECT_NE(ftruncate(fd.get(), 0), 0);
  EXPECT_NE(ftruncate(fd.get(), 2 * kSize), 0);
  EXPECT_NE(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE), 0);
  EXPECT_TRUE(CheckSealedMemfd(fd.get(), kSize).ok());
}

TEST(SegmentTest, RefusesADescriptorThatIsNotSealedOrOfAnotherSize) {
  const UniqueFd sealed = MakeSegment();
  EXPECT_EQ(CheckSealedMemfd(sealed.get(), kSize + 4096).code(), Code::kProtocol);
  const UniqueFd open_ended(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(open_ended.get(), kSize), 0);
  EXPECT_EQ(CheckSealedMemfd(open_ended.get(), kSize).code(), Code::kProtocol);
  const UniqueFd file(open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_EQ(CheckSealedMemfd(file.get(), kSize).code(), Code::kProtocol);
}

TEST(SegmentTest, ZeroBytesIsAnError) {
  const auto fd = CreateSealedMemfd("gradsync-test", 0);
  ASSERT_FALSE(fd);
  EXPECT_EQ(fd.error().code(), Code::kOutOfMemory);
}

TEST(SegmentTest, TwoMappingsShareTheirBytesAndOutliveTheDescriptor) {
  Result<Mapping> one = Unexpected(Code::kInternal, "");
  Result<Mapping> two = Unexpected(Code::kInternal, "");
  {
    const UniqueFd fd = MakeSegment();
    one = Mapping::Map(fd.get(), kSize);
    two = Mapping::Map(fd.get(), kSize);
  }
  ASSERT_TRUE(one && two);
  one->data()[kSize - 1] = std::byte{42};
  EXPECT_EQ(two->data()[kSize - 1], std::byte{42});
  const Mapping moved = std::move(*one);
  EXPECT_FALSE(one->valid());  // NOLINT(bugprone-use-after-move): that is the question
  EXPECT_EQ(moved.data()[kSize - 1], std::byte{42});
}

TEST(SegmentTest, ContainsKnowsTheEdgesAndDoesNotOverflow) {
  const UniqueFd fd = MakeSegment();
  const auto mapping = Mapping::Map(fd.get(), kSize);
  ASSERT_TRUE(mapping);
  EXPECT_TRUE(mapping->Contains(0, kSize));
  EXPECT_TRUE(mapping->Contains(kSize, 0));
  EXPECT_FALSE(mapping->Contains(1, kSize));
  EXPECT_FALSE(mapping->Contains(kSize + 1, 0));
  EXPECT_FALSE(mapping->Contains(UINT64_MAX, 2));
  EXPECT_FALSE(mapping->Contains(2, UINT64_MAX));
}

TEST(SegmentTest, PrefaultMakesEveryPageResident) {
  const UniqueFd fd = MakeSegment();
  const auto mapping = Mapping::Map(fd.get(), kSize);
  ASSERT_TRUE(mapping);
  ASSERT_TRUE(mapping->Prefault().ok());
  std::array<unsigned char, kSize / 4096> resident{};
  ASSERT_EQ(mincore(mapping->data(), kSize, resident.data()), 0);
  for (const unsigned char page : resident) EXPECT_TRUE(page & 1);
}

TEST(SegmentTest, AShortageOfAddressSpaceIsAnErrorNotACrash) {
  const pid_t child = fork();
  if (child == 0) {
    const rlimit limit{1 << 20, 1 << 20};
    setrlimit(RLIMIT_AS, &limit);
    const auto fd = CreateSealedMemfd("gradsync-test", 1 << 30);
    const auto mapping = Mapping::Map(fd->get(), 1 << 30);
    _exit(!mapping && mapping.error().code() == Code::kOutOfMemory ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace gradsync

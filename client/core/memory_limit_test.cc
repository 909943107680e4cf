#include "client/core/memory_limit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace gradsync {
namespace {

using ::testing::HasSubstr;

// A stand-in for /proc and /sys/fs/cgroup.
class MemoryLimitTest : public ::testing::Test {
 protected:
  MemoryLimitTest() {
    std::string name = ::testing::TempDir() + "memory_limit_XXXXXX";
    root_ = mkdtemp(name.data());
    files_ = {root_ + "/proc", root_ + "/cgroup"};
    Write("proc/meminfo", "MemTotal: 2000 kB\nMemFree: 1 kB\nMemAvailable: 1000 kB\n");
  }
  ~MemoryLimitTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& name, const std::string& text) const {
    const std::filesystem::path path = root_ + "/" + name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }

  std::string root_;
  MemoryFiles files_;
};

TEST_F(MemoryLimitTest, TheMachinesAvailableMemoryIsALimit) {
  EXPECT_TRUE(CheckMemoryAvailable(1000 * 1024, files_).ok());
  const Status status = CheckMemoryAvailable(1000 * 1024 + 1, files_);
  EXPECT_EQ(status.code(), Code::kOutOfMemory);
  EXPECT_THAT(status.message(), HasSubstr("1024001 bytes of shared memory"));
  EXPECT_THAT(status.message(), HasSubstr("1024000 bytes available"));
}

TEST_F(MemoryLimitTest, ACgroupsLimitCountsWhatTheKernelCanTakeBack) {
  Write("proc/self/cgroup", "0::/pod/trainer\n");
  Write("cgroup/pod/trainer/memory.max", "5000\n");
  Write("cgroup/pod/trainer/memory.current", "4000\n");
  Write("cgroup/pod/trainer/memory.stat", "anon 3000\ninactive_file 1000\n");
  EXPECT_TRUE(CheckMemoryAvailable(2000, files_).ok());
  const Status status = CheckMemoryAvailable(2001, files_);
  EXPECT_EQ(status.code(), Code::kOutOfMemory);
  EXPECT_THAT(status.message(), HasSubstr("2000 bytes are left of the 5000"));
  EXPECT_THAT(status.message(), HasSubstr("/pod/trainer"));
}

TEST_F(MemoryLimitTest, WhatIsLeftCanBeAskedFor) {
  MemoryRoom room = FindMemoryRoom(files_);
  EXPECT_EQ(room.available, 1000U * 1024);
  EXPECT_FALSE(room.left.has_value());

  Write("proc/self/cgroup", "0::/pod\n");
  Write("cgroup/pod/memory.max", "5000\n");
  Write("cgroup/pod/memory.current", "4000\n");
  room = FindMemoryRoom(files_);
  EXPECT_EQ(room.left, 1000U);
  EXPECT_EQ(room.limit, 5000U);
  EXPECT_THAT(room.cgroup, HasSubstr("/pod"));
}

TEST_F(MemoryLimitTest, TheTightestOfTheCgroupsAboveDecides) {
  Write("proc/self/cgroup", "0::/pod/trainer\n");
  Write("cgroup/pod/trainer/memory.max", "max\n");
  Write("cgroup/pod/trainer/memory.current", "10\n");
  Write("cgroup/pod/memory.max", "100\n");
  Write("cgroup/pod/memory.current", "90\n");
  EXPECT_TRUE(CheckMemoryAvailable(10, files_).ok());
  EXPECT_EQ(CheckMemoryAvailable(11, files_).code(), Code::kOutOfMemory);
}

TEST_F(MemoryLimitTest, AContainersOwnRootIsALimitThoughItsPathIsTheHosts) {
  Write("proc/self/cgroup", "0::/kubepods/pod1\n");
  Write("cgroup/memory.max", "100\n");
  Write("cgroup/memory.current", "40\n");
  EXPECT_TRUE(CheckMemoryAvailable(60, files_).ok());
  EXPECT_EQ(CheckMemoryAvailable(61, files_).code(), Code::kOutOfMemory);
}

TEST_F(MemoryLimitTest, TheFirstVersionOfCgroupsIsReadToo) {
  Write("proc/self/cgroup", "8:pids:/\n4:cpu,memory:/job\n0::/\n");
  Write("cgroup/memory/job/memory.limit_in_bytes", "100\n");
  Write("cgroup/memory/job/memory.usage_in_bytes", "100\n");
  Write("cgroup/memory/job/memory.stat", "inactive_file 1\ntotal_inactive_file 20\n");
  EXPECT_TRUE(CheckMemoryAvailable(20, files_).ok());
  EXPECT_EQ(CheckMemoryAvailable(21, files_).code(), Code::kOutOfMemory);
}

TEST_F(MemoryLimitTest, WhatCannotBeReadDoesNotLimit) {
  EXPECT_TRUE(CheckMemoryAvailable(1 << 30, {root_ + "/nothing", root_ + "/nothing"}).ok());
}

TEST_F(MemoryLimitTest, ThisMachineHasAPage) { EXPECT_TRUE(CheckMemoryAvailable(4096).ok()); }

}  // namespace
}  // namespace gradsync

#include "server/engine/cpu/cores.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace gradsync {
namespace {

class CoresTest : public testing::Test {
 protected:
  ~CoresTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  const std::string root_ = testing::TempDir() + "gradsync_cores_" +
                            testing::UnitTest::GetInstance()->current_test_info()->name();
};

TEST_F(CoresTest, NoQuotaFileIsNoQuota) {
  EXPECT_EQ(CgroupCpuQuota("0::/a\n", root_), std::nullopt);
  EXPECT_EQ(CgroupCpuQuota("", root_), std::nullopt);
  EXPECT_EQ(CgroupCpuQuota("nonsense\n::\n", root_), std::nullopt);
}

TEST_F(CoresTest, Version2QuotaIsQuotaOverPeriod) {
  Write("/a/b/cpu.max", "150000 100000\n");
  EXPECT_EQ(CgroupCpuQuota("0::/a/b\n", root_), 1.5);
}

TEST_F(CoresTest, MaxAndMinusOneAreNoQuota) {
  Write("/a/cpu.max", "max 100000\n");
  EXPECT_EQ(CgroupCpuQuota("0::/a\n", root_), std::nullopt);
  Write("/cpu,cpuacct/b/cpu.cfs_quota_us", "-1\n");
  Write("/cpu,cpuacct/b/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(CgroupCpuQuota("3:cpu,cpuacct:/b\n", root_), std::nullopt);
}

TEST_F(CoresTest, Version1QuotaIsReadFromTheCpuHierarchy) {
  Write("/cpu,cpuacct/b/cpu.cfs_quota_us", "300000\n");
  Write("/cpu,cpuacct/b/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(CgroupCpuQuota("7:memory:/b\n4:cpu,cpuacct:/b\n3:cpuset:/b\n", root_), 3.0);
}

TEST_F(CoresTest, LeastQuotaOnTheWayToTheRootCounts) {
  Write("/cpu.max", "max 100000\n");
  Write("/a/cpu.max", "200000 100000\n");
  Write("/a/b/cpu.max", "400000 100000\n");
  EXPECT_EQ(CgroupCpuQuota("0::/a/b/c\n", root_), 2.0);
}

TEST_F(CoresTest, PathOfTheHostInsideAContainerFallsBackToTheMountsRoot) {
  Write("/cpu.max", "100000 100000\n");
  EXPECT_EQ(CgroupCpuQuota("0::/docker/0123\n", root_), 1.0);
}

TEST_F(CoresTest, AvailableCoresFollowsTheAffinityMask) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  EXPECT_GE(AvailableCores(), 1);
  EXPECT_LE(AvailableCores(), CPU_COUNT(&before));
  cpu_set_t one;
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &before)) {
      CPU_SET(cpu, &one);
      break;
    }
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(AvailableCores(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
}

}  // namespace
}  // namespace gradsync

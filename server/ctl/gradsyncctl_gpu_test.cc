// The real gradsyncctl doctor over the stand-ins for the CUDA driver and NCCL.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "server/ctl/run_gradsyncctl.h"

namespace gradsync {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class GradsyncctlGpuTest : public ::testing::Test {
 protected:
  GradsyncctlGpuTest() {
    std::string pattern = ::testing::TempDir() + "gradsync-XXXXXX";
    directory_ = mkdtemp(pattern.data());
  }
  ~GradsyncctlGpuTest() override { std::filesystem::remove_all(directory_); }

  Outcome Ask(const std::string& settings = "", const std::string& arguments = "") const {
    return RunGradsyncctl("doctor " + arguments, "XDG_RUNTIME_DIR=" + directory_ +
                                                     " GRADSYNC_DAEMON=" GRADSYNC_DAEMON_BINARY
                                                     " CUDA_MPS_PIPE_DIRECTORY=" +
                                                     directory_ + "/mps " + settings);
  }

  std::string directory_;
};

TEST_F(GradsyncctlGpuTest, ShowsWhatIsThere) {
  const Outcome outcome = Ask();
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output,
              AllOf(ContainsRegex("ok +CUDA driver +for CUDA 13.0\n"),
                    ContainsRegex("ok +GPU 0 +Fake GPU 0, GPU-[-0-9a-f]{36}, 4.0 GiB\n"),
                    ContainsRegex("ok +GPU 1 +Fake GPU 1, GPU-"),
                    ContainsRegex("ok +peer access +between all GPUs\n"),
                    ContainsRegex("ok +NCCL +2\\.[0-9]+\\.[0-9]+, .*/libnccl.so.2\n"),
                    ContainsRegex("note +MPS +does not run; several trainers on one GPU overlap "),
                    ContainsRegex("ok +GPU engine +.*/gradsync_cuda.so\n")));
}

TEST_F(GradsyncctlGpuTest, AnOldDriverIsAProblem) {
  const Outcome outcome = Ask("GRADSYNC_FAKE_CUDA_VERSION=11040");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output,
              ContainsRegex("problem +CUDA driver +for CUDA 11.4; .*CUDA 12.0 or newer"));
  EXPECT_THAT(outcome.output, Not(HasSubstr("NCCL")));
}

TEST_F(GradsyncctlGpuTest, GpusWithoutPeerAccessAreNoted) {
  const Outcome outcome = Ask("GRADSYNC_FAKE_CUDA_PEER=0 GRADSYNC_FAKE_CUDA_DEVICES=3");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output,
              HasSubstr("peer access        not between GPUs 0 and 1, 0 and 2, 1 and 2;"));
}

TEST_F(GradsyncctlGpuTest, NoDeviceIsOneNote) {
  const Outcome outcome = Ask("GRADSYNC_FAKE_CUDA_DEVICES=0");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(ContainsRegex("note +GPU "), Not(HasSubstr("NCCL"))));
}

TEST_F(GradsyncctlGpuTest, NcclMayBeElsewhereOrMissing) {
  const std::string missing = directory_ + "/libnccl.so";
  Outcome outcome = Ask("", "--nccl " + missing);
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, ContainsRegex("problem +NCCL +NCCL .*" + missing));
  outcome = Ask("GRADSYNC_FAKE_CUDA_DEVICES=1 GRADSYNC_NCCL=" + missing);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, ContainsRegex("note +NCCL +.*" + missing));
}

TEST_F(GradsyncctlGpuTest, TheEngineIsLookedForBesideTheDaemon) {
  const std::string lone = directory_ + "/gradsyncd";
  std::ofstream(lone) << "#!/bin/sh\n";
  std::filesystem::permissions(lone, std::filesystem::perms::owner_all);
  Outcome outcome = Ask("GRADSYNC_DAEMON=" + lone);
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, ContainsRegex("problem +GPU engine +not there: neither .*"
                                            "/gradsync_cuda.so nor .*/lib/gradsync/"));
  std::ofstream(directory_ + "/engine.so") << "";
  outcome = Ask("GRADSYNC_DAEMON=" + lone + " GRADSYNC_CUDA_MODULE=" + directory_ + "/engine.so");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
}

TEST_F(GradsyncctlGpuTest, PipesOfMpsWithoutItsProcessAreNoted) {
  std::filesystem::create_directories(directory_ + "/mps");
  std::ofstream(directory_ + "/mps/control") << "";
  EXPECT_THAT(Ask().output, ContainsRegex("note +MPS +there are pipes in " + directory_ + "/mps"));
}

}  // namespace
}  // namespace gradsync

#include "client/core/environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace gradsync {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Environment Read(std::vector<const char*> entries) {
  entries.push_back(nullptr);
  return ReadEnvironment(entries.data());
}

Identity Resolved(const SessionRequest& request, const Environment& environment) {
  const auto identity = ResolveIdentity(request, environment);
  EXPECT_TRUE(identity) << (identity ? "" : identity.error().ToString());
  return identity.value_or(Identity());
}

std::string Refusal(const SessionRequest& request, const Environment& environment) {
  const auto identity = ResolveIdentity(request, environment);
  EXPECT_FALSE(identity);
  if (identity) return {};
  EXPECT_EQ(identity.error().code(), Code::kInvalidArgument);
  return identity.error().message();
}

TEST(EnvironmentTest, TakesWhoThisRankIsFromTorchrun) {
  const Identity identity =
      Resolved({}, Read({"RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2",
                         "TORCHELASTIC_RUN_ID=run-7", "TORCHELASTIC_RESTART_COUNT=3",
                         "MASTER_ADDR=host", "MASTER_PORT=29500"}));
  EXPECT_EQ(identity.job, "run-7");
  EXPECT_EQ(identity.generation, 3);
  EXPECT_EQ(identity.world_size, 2);
  EXPECT_EQ(identity.rank, 1);
  EXPECT_EQ(identity.local_rank, 1);
  EXPECT_EQ(identity.local_world_size, 2);
}

TEST(EnvironmentTest, OptionsComeBeforeTheEnvironment) {
  SessionRequest request;
  request.job = "mine";
  request.generation = 4;
  request.world_size = 8;
  request.rank = 5;
  const Identity identity = Resolved(request, Read({"RANK=1", "WORLD_SIZE=2", "GRADSYNC_JOB=other",
                                                    "TORCHELASTIC_RESTART_COUNT=3"}));
  EXPECT_EQ(identity.job, "mine");
  EXPECT_EQ(identity.generation, 4);
  EXPECT_EQ(identity.world_size, 8);
  EXPECT_EQ(identity.rank, 5);
  EXPECT_EQ(identity.local_rank, 5);
  EXPECT_EQ(identity.local_world_size, 8);
}

TEST(EnvironmentTest, GradsyncJobComesBeforeTheRunId) {
  EXPECT_EQ(
      Resolved({}, Read({"RANK=0", "WORLD_SIZE=1", "GRADSYNC_JOB=mine", "TORCHELASTIC_RUN_ID=run"}))
          .job,
      "mine");
}

TEST(EnvironmentTest, ARunWithoutAnIdIsToldApartByItsRendezvous) {
  EXPECT_EQ(Resolved({}, Read({"RANK=0", "WORLD_SIZE=1", "TORCHELASTIC_RUN_ID=none",
                               "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29500"}))
                .job,
            "none@127.0.0.1:29500");
  EXPECT_EQ(Resolved({}, Read({"RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=a", "MASTER_PORT=1"})).job,
            "job@a:1");
}

TEST(EnvironmentTest, WithoutLocalVariablesAllRanksAreOnThisNode) {
  const Identity identity = Resolved({}, Read({"RANK=2", "WORLD_SIZE=3", "GRADSYNC_JOB=j"}));
  EXPECT_EQ(identity.local_rank, 2);
  EXPECT_EQ(identity.local_world_size, 3);
}

TEST(EnvironmentTest, NamesTheVariableThatIsMissing) {
  EXPECT_THAT(Refusal({}, Read({"WORLD_SIZE=2", "GRADSYNC_JOB=j"})), HasSubstr("variable RANK is"));
  EXPECT_THAT(Refusal({}, Read({"RANK=0", "GRADSYNC_JOB=j"})), HasSubstr("variable WORLD_SIZE is"));
  EXPECT_THAT(Refusal({}, Read({"RANK=0", "WORLD_SIZE=4", "LOCAL_WORLD_SIZE=2", "GRADSYNC_JOB=j"})),
              HasSubstr("variable LOCAL_RANK is"));
  EXPECT_THAT(Refusal({}, Read({"RANK=0", "WORLD_SIZE=1"})), HasSubstr("MASTER_ADDR"));
  EXPECT_THAT(Refusal({}, Read({"RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=a"})),
              HasSubstr("MASTER_PORT"));
}

TEST(EnvironmentTest, NamesTheVariableThatIsNoNumber) {
  for (const char* bad : {"RANK=one", "RANK=-1", "RANK=1x", "RANK=99999999999"}) {
    EXPECT_THAT(Refusal({}, Read({bad, "WORLD_SIZE=2", "GRADSYNC_JOB=j"})), HasSubstr(bad + 5));
  }
}

TEST(EnvironmentTest, RefusesNumbersThatContradictEachOther) {
  EXPECT_THAT(Refusal({}, Read({"RANK=2", "WORLD_SIZE=2", "GRADSYNC_JOB=j"})),
              HasSubstr("rank 2 of job 'j' is not below its world size, 2"));
  EXPECT_THAT(Refusal({}, Read({"RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2",
                                "GRADSYNC_JOB=j"})),
              HasSubstr("local rank 2 of 2"));
}

TEST(EnvironmentTest, RefusesAJobNameThatTheProtocolWouldCut) {
  SessionRequest request;
  request.world_size = 1;
  request.job = std::string(127, 'x');
  EXPECT_EQ(Resolved(request, {}).job, request.job);
  request.job += 'x';
  EXPECT_THAT(Refusal(request, {}), HasSubstr("1 to 127 bytes"));
}

TEST(EnvironmentTest, EmptyValuesCountAsUnset) {
  EXPECT_FALSE(Read({"GRADSYNC_SOCKET="}).socket.has_value());
}

TEST(EnvironmentTest, TheDaemonGetsNothingOfTheTrainerThatCouldChangeIt) {
  EXPECT_THAT(Read({"PATH=/bin", "LD_PRELOAD=x.so", "OMP_NUM_THREADS=1",
                    "CUDA_VISIBLE_DEVICES=", "GRADSYNC_LOG_LEVEL=debug", "HOME=/h", "LANGUAGE=de"})
                  .for_daemon,
              ElementsAre("PATH=/bin", "GRADSYNC_LOG_LEVEL=debug", "HOME=/h"));
}

}  // namespace
}  // namespace gradsync

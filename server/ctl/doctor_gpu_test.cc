#include "server/ctl/doctor_gpu.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace gradsync {
namespace {

using Level = Finding::Level;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::SizeIs;

GpuDevice Device(uint8_t number) {
  GpuDevice device{"NVIDIA H200", {}, uint64_t{141} << 30, true};
  device.uuid.fill(number);
  return device;
}

GpuFacts TwoGpus() {
  GpuFacts facts;
  facts.has_device_file = true;
  facts.driver_version = 12040;
  facts.needed_version = 12000;
  facts.devices = {Device(1), Device(0xAB)};
  facts.nccl = {{}, "2.28.9", "/usr/lib/libnccl.so.2"};
  facts.mps = {"/tmp/nvidia-mps", true, true};
  facts.module = {true, {"/usr/bin/m.so", "/usr/lib/m.so"}, "/usr/lib/m.so"};
  return facts;
}

GpuFacts WithoutDriver() {
  GpuFacts facts;
  facts.needed_version = 12000;
  facts.driver = {Code::kUnsupported, "there is no CUDA driver on this machine: no such file"};
  facts.finds_no_device = true;
  return facts;
}

Finding Of(const std::string& check, const GpuFacts& facts) {
  for (const Finding& finding : JudgeGpu(facts)) {
    if (finding.check == check) return finding;
  }
  return {Level::kOk, "none of that name", "", ""};
}

TEST(DoctorGpuTest, AFineMachineIsOkThroughout) {
  const std::vector<Finding> findings = JudgeGpu(TwoGpus());
  EXPECT_THAT(findings,
              Each(AllOf(Field(&Finding::level, Level::kOk), Field(&Finding::advice, ""))));
  EXPECT_THAT(findings,
              ElementsAre(Field(&Finding::found, "for CUDA 12.4"),
                          Field(&Finding::found,
                                "NVIDIA H200, GPU-01010101-0101-0101-0101-010101010101, 141.0 GiB"),
                          Field(&Finding::found,
                                "NVIDIA H200, GPU-abababab-abab-abab-abab-abababababab, 141.0 GiB"),
                          Field(&Finding::check, "peer access"),
                          Field(&Finding::found, "2.28.9, /usr/lib/libnccl.so.2"),
                          Field(&Finding::check, "MPS"), Field(&Finding::found, "/usr/lib/m.so")));
}

TEST(DoctorGpuTest, WithoutAGpuThereIsOneNote) {
  GpuFacts not_built;
  not_built.is_built = false;
  EXPECT_THAT(JudgeGpu(not_built),
              ElementsAre(AllOf(Field(&Finding::level, Level::kNote),
                                Field(&Finding::found, "built without the CUDA toolkit"))));
  EXPECT_THAT(JudgeGpu(WithoutDriver()),
              ElementsAre(AllOf(Field(&Finding::level, Level::kNote),
                                Field(&Finding::found, "no CUDA driver on this machine"))));
  GpuFacts no_device = WithoutDriver();
  no_device.driver_version = 13000;
  EXPECT_THAT(JudgeGpu(no_device),
              ElementsAre(AllOf(Field(&Finding::level, Level::kNote),
                                Field(&Finding::found, "a CUDA driver, but no device"))));
  no_device.has_device_file = true;
  no_device.driver = {Code::kUnsupported, "CUDA_VISIBLE_DEVICES hides them all"};
  EXPECT_THAT(JudgeGpu(no_device),
              ElementsAre(AllOf(Field(&Finding::level, Level::kNote),
                                Field(&Finding::found, "CUDA_VISIBLE_DEVICES hides them all"))));
}

TEST(DoctorGpuTest, AGpuThatCannotBeReachedIsAProblem) {
  GpuFacts facts = WithoutDriver();
  facts.has_device_file = true;  // in a container without the driver's libraries
  EXPECT_THAT(JudgeGpu(facts), ElementsAre(AllOf(Field(&Finding::level, Level::kProblem),
                                                 Field(&Finding::advice, HasSubstr("container")))));
  facts.driver_version = 12040;
  facts.finds_no_device = false;
  facts.driver = {Code::kInternal, "cuInit: CUDA_ERROR_SYSTEM_NOT_READY (x)"};
  EXPECT_THAT(JudgeGpu(facts), ElementsAre(AllOf(Field(&Finding::level, Level::kProblem),
                                                 Field(&Finding::found, HasSubstr("NOT_READY")))));
}

TEST(DoctorGpuTest, AnOldDriverIsAProblem) {
  GpuFacts facts = WithoutDriver();
  facts.driver_version = 11040;
  EXPECT_THAT(JudgeGpu(facts),
              ElementsAre(AllOf(Field(&Finding::level, Level::kProblem),
                                Field(&Finding::found, "for CUDA 11.4"),
                                Field(&Finding::advice, HasSubstr("CUDA 12.0 or newer")))));
}

TEST(DoctorGpuTest, AGpuWhoseStreamsCannotWaitIsAProblem) {
  GpuFacts facts = TwoGpus();
  facts.devices[1].waits_for_words = false;
  EXPECT_EQ(Of("GPU 0", facts).level, Level::kOk);
  EXPECT_EQ(Of("GPU 1", facts).level, Level::kProblem);
  EXPECT_THAT(Of("GPU 1", facts).found, HasSubstr("stream memory operations"));
}

TEST(DoctorGpuTest, GpusThatAreApartAreNoted) {
  GpuFacts facts = TwoGpus();
  facts.devices.push_back(Device(3));
  facts.apart = {{0, 2}, {1, 2}};
  EXPECT_EQ(Of("peer access", facts).level, Level::kNote);
  EXPECT_EQ(Of("peer access", facts).found, "not between GPUs 0 and 2, 1 and 2");
}

TEST(DoctorGpuTest, OneGpuHasNoPeers) {
  GpuFacts facts = TwoGpus();
  facts.devices.pop_back();
  EXPECT_EQ(Of("peer access", facts).check, "none of that name");
  EXPECT_THAT(JudgeGpu(facts), SizeIs(5));
}

TEST(DoctorGpuTest, NcclIsNeededForSeveralGpusOnly) {
  GpuFacts facts = TwoGpus();
  facts.nccl.loaded = {Code::kUnsupported, "NCCL (x) could not be loaded; install it"};
  EXPECT_EQ(Of("NCCL", facts).level, Level::kProblem);
  EXPECT_THAT(Of("NCCL", facts).found, HasSubstr("could not be loaded"));
  facts.devices.pop_back();
  EXPECT_EQ(Of("NCCL", facts).level, Level::kNote);
}

TEST(DoctorGpuTest, SaysWhatMpsMeansWhereItDoesNotServe) {
  GpuFacts facts = TwoGpus();
  facts.mps = {"/tmp/nvidia-mps", false, false};
  EXPECT_EQ(Of("MPS", facts).found, "does not run");
  facts.mps.has_pipe = true;
  EXPECT_THAT(Of("MPS", facts).found, HasSubstr("no nvidia-cuda-mps-control is seen"));
  facts.mps = {"/tmp/nvidia-mps", false, true};
  EXPECT_THAT(Of("MPS", facts).found, HasSubstr("pipes are not in /tmp/nvidia-mps"));
  for (const bool has_pipe : {false, true}) {
    facts.mps = {"/tmp/nvidia-mps", has_pipe, !has_pipe};
    EXPECT_EQ(Of("MPS", facts).level, Level::kNote);
    EXPECT_THAT(Of("MPS", facts).advice,
                HasSubstr("several trainers on one GPU overlap only under MPS"));
  }
}

TEST(DoctorGpuTest, WithoutTheEngineGpusAreRefused) {
  GpuFacts facts = TwoGpus();
  facts.module.found = "";
  EXPECT_EQ(Of("GPU engine", facts).level, Level::kProblem);
  EXPECT_EQ(Of("GPU engine", facts).found, "not there: neither /usr/bin/m.so nor /usr/lib/m.so");
  facts.module = {};
  EXPECT_EQ(Of("GPU engine", facts).level, Level::kProblem);
  EXPECT_THAT(Of("GPU engine", facts).advice, HasSubstr("GRADSYNC_DAEMON"));
}

}  // namespace
}  // namespace gradsync

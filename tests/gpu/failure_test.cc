// Trouble with ranks on GPUs: what the survivors are told, how soon, and that no stream is left
// waiting for the dead.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/gpu/gpu_model.h"
#include "tests/gpu/gpu_rank.h"
#include "tests/integration/raw_client.h"

namespace gradsync::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kPromise{1};
const std::vector<int64_t> kSizes = {1000, 4096, 20000};

// An environment variable, for what is started while it lives.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    setenv(name, value.c_str(), 1);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() { unsetenv(name_); }

 private:
  const char* const name_;
};

// Iterations until one fails, and why; then every stream of the GPU must come to its end.
Status IterateUntilFailure(GpuRank& self, GpuModel& model) {
  for (uint32_t iteration = 0;; ++iteration) {
    const Status status = model.Iterate(iteration);
    if (!status.ok()) {
      EXPECT_EQ(self.cuda().cuCtxSynchronize(), CUDA_SUCCESS);
      return status;
    }
    // Not further ahead of the GPU than training is.
    EXPECT_EQ(self.cuda().cuStreamSynchronize(self.stream()), CUDA_SUCCESS);
  }
}

void TrainUntilFailure(const Channel& channel, GpuRank& self) {
  GpuModel model(&self, kSizes);
  const Status created = model.CreateDdp();
  channel.Say(created.ok() ? "training" : created.ToString());
  channel.Say(IterateUntilFailure(self, model));
}

class GpuFailureTest : public GpuTest, public ::testing::WithParamInterface<int> {
 protected:
  GpuFailureTest() : GpuTest(GetParam()) {}

  // A job of its own, to see that the daemon serves it.
  void ExpectAnotherJobWorks() const {
    RunRanks(
        2,
        [](GpuRank& self) {
          GpuModel model(&self, kSizes);
          ASSERT_EQ(model.CreateDdp().ToString(), "OK");
          ASSERT_EQ(model.Iterate(0).ToString(), "OK");
          EXPECT_EQ(model.Differences(2, 0), "");
        },
        "another");
  }
};

INSTANTIATE_TEST_SUITE_P(Gpus, GpuFailureTest, ::testing::Values(1, 2));

TEST_P(GpuFailureTest, ARankThatIsKilledIsNamedAndNoStreamWaitsForIt) {
  {
    auto ranks = StartRanks(3, TrainUntilFailure);
    for (const RankProcess& rank : ranks) EXPECT_EQ(rank.Hear(), "training");
    usleep(50000);
    const auto killed = Clock::now();
    ranks[1].Kill();
    for (const uint32_t survivor : {0U, 2U}) {
      EXPECT_THAT(ranks[survivor].Hear(), AllOf(StartsWith("RANK_LOST"), HasSubstr("rank 1")));
    }
    EXPECT_LT(Clock::now() - killed, kPromise);
    for (const uint32_t survivor : {0U, 2U}) EXPECT_EQ(ranks[survivor].Hear(), "ok");
  }
  ExpectAnotherJobWorks();
}

TEST_P(GpuFailureTest, ARankThatDiesBeforeItsStreamHasComeLetsTheOthersGo) {
  {
    auto ranks = StartRanks(2, [](const Channel& channel, GpuRank& self) {
      GpuModel model(&self, kSizes);
      EXPECT_TRUE(model.CreateDdp().ok());
      if (self.rank() == 1) {
        // Everything is submitted, and the stream never gets there.
        const auto word = self.session()->Allocate(4096, "never");
        EXPECT_EQ(
            self.cuda().cuMemHostRegister((*word)->data(), 4096, CU_MEMHOSTREGISTER_DEVICEMAP),
            CUDA_SUCCESS);
        EXPECT_EQ(self.cuda().cuStreamWaitValue64(self.stream(),
                                                  reinterpret_cast<CUdeviceptr>((*word)->data()), 1,
                                                  CU_STREAM_WAIT_VALUE_GEQ),
                  CUDA_SUCCESS);
        EXPECT_TRUE(model.Iterate(0).ok());
        channel.Say("submitted");
        pause();
      }
      EXPECT_TRUE(model.Iterate(0).ok());
      channel.Say("submitted");
      EXPECT_EQ(self.cuda().cuStreamSynchronize(self.stream()), CUDA_SUCCESS);
      channel.Say(model.Iterate(1));
    });
    for (const RankProcess& rank : ranks) EXPECT_EQ(rank.Hear(), "submitted");
    const auto killed = Clock::now();
    ranks[1].Kill();
    EXPECT_THAT(ranks[0].Hear(), AllOf(StartsWith("RANK_LOST"), HasSubstr("rank 1")));
    EXPECT_LT(Clock::now() - killed, kPromise);
    EXPECT_EQ(ranks[0].Hear(), "ok");
  }
  ExpectAnotherJobWorks();
}

TEST_P(GpuFailureTest, AStreamThatNeverComesIsNamedAtTheDeadline) {
  RunRanks(2, [](GpuRank& self) {
    GpuModel model(&self, kSizes);
    DdpOptions options;
    options.timeout = std::chrono::milliseconds(500);
    ASSERT_TRUE(model.CreateDdp(options).ok());
    const auto word = self.session()->Allocate(4096, "late");
    ASSERT_EQ(self.cuda().cuMemHostRegister((*word)->data(), 4096, CU_MEMHOSTREGISTER_DEVICEMAP),
              CUDA_SUCCESS);
    if (self.rank() == 1) {
      ASSERT_EQ(self.cuda().cuStreamWaitValue64(self.stream(),
                                                reinterpret_cast<CUdeviceptr>((*word)->data()), 1,
                                                CU_STREAM_WAIT_VALUE_GEQ),
                CUDA_SUCCESS);
    }
    EXPECT_TRUE(model.Iterate(0).ok());
    if (self.rank() == 0) {
      EXPECT_EQ(self.cuda().cuStreamSynchronize(self.stream()), CUDA_SUCCESS);
    } else {
      std::this_thread::sleep_for(std::chrono::seconds(1));
      *reinterpret_cast<volatile uint64_t*>((*word)->data()) = 1;
    }
    const Status status = model.Iterate(1);
    EXPECT_EQ(status.code(), Code::kDeadlineExceeded);
    EXPECT_THAT(status.message(), AllOf(HasSubstr("operation"), HasSubstr("rank 1")));
    EXPECT_EQ(self.cuda().cuStreamSynchronize(self.stream()), CUDA_SUCCESS);
    EXPECT_EQ(self.cuda().cuMemHostUnregister((*word)->data()), CUDA_SUCCESS);
  });
  ExpectAnotherJobWorks();
}

TEST_P(GpuFailureTest, ADaemonThatIsKilledLetsEveryStreamGo) {
  auto ranks = StartRanks(2, [](const Channel& channel, GpuRank& self) {
    GpuModel model(&self, kSizes);
    EXPECT_TRUE(model.CreateDdp().ok());
    channel.Say("training");
    EXPECT_EQ(channel.Hear(), "go");
    const Status status = IterateUntilFailure(self, model);
    channel.Say(status);
  });
  for (const RankProcess& rank : ranks) EXPECT_EQ(rank.Hear(), "training");
  for (const RankProcess& rank : ranks) rank.Say("go");
  usleep(50000);
  const auto killed = Clock::now();
  daemon().Signal(SIGKILL);
  EXPECT_EQ(daemon().WaitForEnd(), -SIGKILL);
  for (const RankProcess& rank : ranks) EXPECT_THAT(rank.Hear(), StartsWith("DAEMON_LOST"));
  EXPECT_LT(Clock::now() - killed, kPromise);
  for (const RankProcess& rank : ranks) EXPECT_EQ(rank.Hear(), "ok");
  daemon_ = std::make_unique<DaemonProcess>(std::vector<std::string>{"--socket=" + socket()});
  EXPECT_TRUE(daemon_->WaitUntilReady());
}

TEST_P(GpuFailureTest, AFullGpuIsToldToEveryRank) {
  RunRanks(2, [](GpuRank& self) {
    size_t bytes = 0;
    ASSERT_EQ(self.cuda().cuDeviceTotalMem(&bytes, static_cast<CUdevice>(self.device() - 1)),
              CUDA_SUCCESS);
    const auto quarter = static_cast<int64_t>(bytes / 4 / sizeof(float));
    GpuModel model(&self, {quarter, quarter, quarter, quarter, quarter});
    const Status status = model.CreateDdp();
    EXPECT_EQ(status.code(), Code::kOutOfMemory);
    EXPECT_THAT(status.message(), AllOf(HasSubstr("rank"), HasSubstr("bytes")));
    // Nobody is harmed by it.
    GpuModel small(&self, kSizes);
    ASSERT_EQ(small.CreateDdp().ToString(), "OK");
    ASSERT_EQ(small.Iterate(0).ToString(), "OK");
    EXPECT_EQ(small.Differences(2, 0), "");
  });
}

TEST_P(GpuFailureTest, ADaemonThatDrainsFinishesAndSaysSo) {
  auto ranks = StartRanks(2, TrainUntilFailure);
  for (const RankProcess& rank : ranks) EXPECT_EQ(rank.Hear(), "training");
  usleep(50000);
  daemon().Signal(SIGTERM);
  for (const RankProcess& rank : ranks) EXPECT_THAT(rank.Hear(), StartsWith("SHUTTING_DOWN"));
  EXPECT_EQ(daemon().WaitForEnd(), 0) << daemon().Output();
  for (const RankProcess& rank : ranks) EXPECT_EQ(rank.Hear(), "ok");
  daemon_ = std::make_unique<DaemonProcess>(std::vector<std::string>{"--socket=" + socket()});
  EXPECT_TRUE(daemon_->WaitUntilReady());
}

// ---- What the daemon lacks ----------------------------------------------------------------------

std::string CreationError(GpuRank& self) {
  GpuModel model(&self, kSizes);
  return model.CreateDdp().ToString();
}

class WithoutDriverTest : public GpuTest {
 protected:
  WithoutDriverTest() : WithoutDriverTest(std::getenv("LD_LIBRARY_PATH")) {}

  void SetUp() override {
    GRADSYNC_SKIP_WITHOUT_STAND_IN("a real driver cannot be hidden from the daemon alone");
  }

 private:
  explicit WithoutDriverTest(const char* path) : GpuTest(1) {
    const std::string kept = path != nullptr ? path : "";
    daemon_ = nullptr;
    unsetenv("LD_LIBRARY_PATH");
    daemon_ = std::make_unique<DaemonProcess>(std::vector<std::string>{"--socket=" + socket()});
    EXPECT_TRUE(daemon_->WaitUntilReady());
    setenv("LD_LIBRARY_PATH", kept.c_str(), 1);
  }
};

TEST_F(WithoutDriverTest, EveryRankIsTold) {
  RunRanks(2, [](GpuRank& self) {
    EXPECT_THAT(CreationError(self),
                AllOf(StartsWith("UNSUPPORTED"), HasSubstr("gradsyncd cannot use GPUs"),
                      HasSubstr("no CUDA driver")));
  });
}

class OldDriverTest : private Variable, public GpuTest {
 protected:
  OldDriverTest() : Variable("GRADSYNC_FAKE_CUDA_VERSION", "11040") {
    // Only the daemon's is old.
    unsetenv("GRADSYNC_FAKE_CUDA_VERSION");
  }
  void SetUp() override {
    GRADSYNC_SKIP_WITHOUT_STAND_IN("the version of a real driver is not to be chosen");
  }
};

TEST_F(OldDriverTest, EveryRankIsTold) {
  RunRanks(2, [](GpuRank& self) {
    EXPECT_THAT(CreationError(self),
                AllOf(HasSubstr("gradsyncd cannot use GPUs"), HasSubstr("too old")));
  });
}

class HiddenGpuTest : private Variable, public GpuTest {
 protected:
  HiddenGpuTest() : Variable("CUDA_VISIBLE_DEVICES", "0"), GpuTest(2) {
    unsetenv("CUDA_VISIBLE_DEVICES");
  }
};

TEST_F(HiddenGpuTest, AGpuThatTheDaemonDoesNotSeeIsNamedOnEveryRank) {
  RunRanks(2, [](GpuRank& self) {
    EXPECT_THAT(CreationError(self), AllOf(StartsWith("UNSUPPORTED"), HasSubstr("rank 1"),
                                           HasSubstr("GPU-"), HasSubstr("gradsyncd does not see")));
  });
}

class WithoutNcclTest : public GpuTest {
 protected:
  WithoutNcclTest() : GpuTest(2, {"--nccl=/nonexistent/libnccl.so.2"}) {}
};

TEST_F(WithoutNcclTest, OneGpuWorksAndSeveralAreRefusedOnEveryRank) {
  RunRanks(2, [](GpuRank& self) {
    GpuModel model(&self, kSizes);
    ASSERT_EQ(model.CreateDdp().ToString(), "OK");
    Status status = model.Iterate(0);
    EXPECT_EQ(self.cuda().cuStreamSynchronize(self.stream()), CUDA_SUCCESS);
    if (status.ok()) status = model.Iterate(1);
    EXPECT_EQ(status.code(), Code::kUnsupported);
    EXPECT_THAT(status.message(), AllOf(HasSubstr("NCCL"), HasSubstr("--nccl")));
  });
}

class NoImportsTest : public GpuTest {
 protected:
  NoImportsTest() : GpuTest(1, {"--import-gpu-memory=never"}) {}
};

TEST_F(NoImportsTest, MemoryOfTheTrainersIsCopiedInstead) {
  RunRanks(2, [](GpuRank& self) {
    const auto memory = self.Malloc(4000);
    EXPECT_EQ(self.session()->Register(self.device(), memory.get(), 4000).code(),
              Code::kPermissionDenied);
    self.Write(memory.get(), std::vector<float>(1000, 1.0F));
    Collective collective;
    collective.kind = OpKind::kAllReduce;
    collective.count = 1000;
    collective.input = memory.get();
    collective.output = memory.get();
    ASSERT_EQ(self.Perform(collective).ToString(), "OK");
    EXPECT_EQ(self.Read<float>(memory.get(), 1000), std::vector<float>(1000, 2.0F));
  });
}

class SmallLimitTest : public GpuTest {
 protected:
  SmallLimitTest() : GpuTest(1, {"--max-session-device-bytes=1048576"}) {}
};

TEST_F(SmallLimitTest, ALimitNamesItsFlag) {
  RunRanks(1, [](GpuRank& self) {
    EXPECT_THAT(self.session()->Allocate(2 << 20, "x", self.device()).error().message(),
                HasSubstr("--max-session-device-bytes"));
  });
}

// ---- NCCL's own trouble -------------------------------------------------------------------------

class NcclErrorTest : private Variable,
                      public GpuTest,
                      public ::testing::WithParamInterface<const char*> {
 protected:
  NcclErrorTest() : Variable("GRADSYNC_FAKE_NCCL_INJECT", GetParam()), GpuTest(2) {
    unsetenv("GRADSYNC_FAKE_NCCL_INJECT");
  }
  void SetUp() override {
    GRADSYNC_SKIP_WITHOUT_STAND_IN("the real NCCL does not fail when asked to");
  }
};

INSTANTIATE_TEST_SUITE_P(Injected, NcclErrorTest, ::testing::Values("3:async=6", "3:stall"));

TEST_P(NcclErrorTest, FailsTheGroupOnEveryRankAndTheNextJobWorks) {
  RunRanks(2, [](GpuRank& self) {
    GpuModel model(&self, kSizes);
    DdpOptions options;
    options.timeout = std::chrono::milliseconds(1500);
    ASSERT_TRUE(model.CreateDdp(options).ok());
    const Status status = IterateUntilFailure(self, model);
    EXPECT_THAT(status.code(), AnyOf(Code::kInternal, Code::kDeadlineExceeded));
    EXPECT_THAT(status.message(), AllOf(HasSubstr("group all"), HasSubstr("NCCL")));
  });
  RunRanks(
      2,
      [](GpuRank& self) {
        GpuModel model(&self, kSizes);
        ASSERT_EQ(model.CreateDdp().ToString(), "OK");
        ASSERT_EQ(model.Iterate(0).ToString(), "OK");
        EXPECT_EQ(model.Differences(2, 0), "");
      },
      "another");
}

// ---- Hostile trainers ---------------------------------------------------------------------------

class GpuHostileTest : public GpuTest {
 protected:
  static DeviceUuid FirstGpu() {
    // The daemon knows them; a driver in this process would have to be forked with.
    return ReadUuid();
  }

  // What a rank of a job of its own is told for one wrong frame; the daemon must live on.
  template <typename Message>
  std::string Ask(Message message, const std::vector<int>& fds = {}) {
    auto job = RawJob::Start(socket(), "hostile" + std::to_string(++jobs_), 1, 8192);
    EXPECT_TRUE(job) << job.error().ToString();
    if constexpr (requires { message.flags_segment; }) {
      message.group = job->groups[0];
      if (message.flags_segment == 0) message.flags_segment = job->segments[0].number;
    }
    message.header.request_id = 100;
    EXPECT_TRUE(job->ranks[0].SendRaw(AsBytes(message), fds).ok());
    const auto reply = job->ranks[0].template Receive<Done>();
    return reply ? "done" : reply.error().ToString();
  }

 private:
  static DeviceUuid ReadUuid() {
    DeviceUuid uuid{};
    RankProcess asker([](const Channel& channel) {
      const auto device = OpenDevice(1);
      const auto* bytes = reinterpret_cast<const char*>((*device)->uuid().data());
      channel.Say(std::string(bytes, sizeof(DeviceUuid)));
    });
    const std::string bytes = asker.Hear();
    EXPECT_EQ(bytes.size(), sizeof(uuid));
    std::memcpy(uuid.data(), bytes.data(), std::min(bytes.size(), sizeof(uuid)));
    return uuid;
  }

  int jobs_ = 0;
};

TEST_F(GpuHostileTest, WrongFramesEndTheSessionOrAreRefusedAndNobodyElseIsHarmed) {
  const DeviceUuid gpu = FirstGpu();
  auto allocate = MakeMessage<AllocateDeviceSegment>();
  allocate.bytes = 4096;
  EXPECT_THAT(Ask(allocate), AllOf(HasSubstr("UNSUPPORTED"), HasSubstr("does not see")));
  allocate.device = gpu;
  allocate.bytes = 0;
  EXPECT_THAT(Ask(allocate), HasSubstr("INVALID_ARGUMENT"));
  allocate.bytes = uint64_t{1} << 60;
  EXPECT_THAT(Ask(allocate), HasSubstr("OUT_OF_MEMORY"));

  auto import = MakeMessage<ImportDeviceSegment>();
  import.device = gpu;
  import.bytes = 4096;
  EXPECT_THAT(Ask(import), AllOf(HasSubstr("PROTOCOL"), HasSubstr("hand-over")));
  import.hand_over = static_cast<uint8_t>(HandOver::kExportedMemory);
  EXPECT_THAT(Ask(import), AllOf(HasSubstr("PROTOCOL"), HasSubstr("0 descriptors")));
  const auto no_gpu_memory = CreateSealedMemfd("none", 4096);
  EXPECT_THAT(Ask(import, {no_gpu_memory->get()}), HasSubstr("cuMemImportFromShareableHandle"));
  import.hand_over = static_cast<uint8_t>(HandOver::kLegacyHandle);
  EXPECT_THAT(Ask(import), HasSubstr("cuIpcOpenMemHandle"));

  auto use = MakeMessage<UseDevice>();
  EXPECT_THAT(Ask(use), AllOf(HasSubstr("UNSUPPORTED"), HasSubstr("does not see")));
  use.device = gpu;
  EXPECT_EQ(Ask(use), "done");
  use.flags_segment = 77;
  EXPECT_THAT(Ask(use), AllOf(HasSubstr("PROTOCOL"), HasSubstr("no flag page")));

  RunRanks(2, [](GpuRank& self) { EXPECT_EQ(self.Perform({}).ToString(), "OK"); });
}

TEST_F(GpuHostileTest, WrongEntriesEndTheSession) {
  const DeviceUuid gpu = FirstGpu();
  const auto last_error = [&](bool use_device, const std::function<void(Submission*)>& spoil) {
    static int number = 0;
    auto job = RawJob::Start(socket(), "entries" + std::to_string(++number), 1, 8192);
    EXPECT_TRUE(job);
    RawClient& client = job->ranks[0];
    if (use_device) {
      auto use = MakeMessage<UseDevice>(50);
      use.device = gpu;
      use.group = job->groups[0];
      use.flags_segment = job->segments[0].number;
      EXPECT_TRUE(client.SendRaw(AsBytes(use)).ok());
      EXPECT_TRUE(client.Receive<Done>());
    }
    Submission entry = MakeAllReduce(job->groups[0], 0, 16, job->segments[0]);
    entry.on_device = 1;
    spoil(&entry);
    client.Push(entry);
    return client.ReceiveLastError().ToString();
  };
  EXPECT_THAT(last_error(false, [](Submission*) {}), HasSubstr("the session uses none"));
  // The machine's memory, where a GPU's is said to be.
  EXPECT_THAT(last_error(true, [](Submission*) {}), HasSubstr("no segment"));
  EXPECT_THAT(last_error(true, [](Submission* entry) { entry->input.segment = 9999; }),
              HasSubstr("no segment"));
  RunRanks(2, [](GpuRank& self) { EXPECT_EQ(self.Perform({}).ToString(), "OK"); });
}

// A trainer may write what it likes into its own flag page: only its own job can come to harm.
TEST_F(GpuHostileTest, GarbageInAFlagPageHarmsNoOtherJob) {
  auto ranks = StartRanks(
      2,
      [](const Channel& channel, GpuRank& self) {
        GpuModel model(&self, kSizes);
        EXPECT_TRUE(model.CreateDdp().ok());
        channel.Say("training");
        for (uint32_t iteration = 0; iteration < 50; ++iteration) {
          EXPECT_EQ(model.Iterate(iteration).ToString(), "OK");
          EXPECT_EQ(model.Differences(2, iteration), "");
        }
      },
      "honest");
  for (const RankProcess& rank : ranks) EXPECT_EQ(rank.Hear(), "training");
  const DeviceUuid gpu = FirstGpu();
  auto job = RawJob::Start(socket(), "garbage", 1, 8192);
  ASSERT_TRUE(job);
  auto use = MakeMessage<UseDevice>(50);
  use.device = gpu;
  use.group = job->groups[0];
  use.flags_segment = job->segments[0].number;
  ASSERT_TRUE(job->ranks[0].SendRaw(AsBytes(use)).ok());
  ASSERT_TRUE(job->ranks[0].Receive<Done>());
  for (uint64_t sequence = 0; sequence < 100; ++sequence) {
    for (uint64_t& word : job->segments[0].As<uint64_t>()) word = sequence * 0x9e3779b97f4a7c15U;
    Submission entry = MakeBarrier(job->groups[0], sequence);
    entry.on_device = 1;
    job->ranks[0].Push(entry);
  }
  job->ranks[0].Disconnect();
  for (const RankProcess& rank : ranks) EXPECT_EQ(rank.Hear(), "ok");
}

}  // namespace
}  // namespace gradsync::testing

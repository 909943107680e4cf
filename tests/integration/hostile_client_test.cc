// One session sends noise of every kind while the job beside it keeps computing: that job must
// never notice, and the daemon must live.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <csignal>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/daemon_fixture.h"
#include "tests/integration/raw_client.h"

namespace gradsync::testing {
namespace {

using Random = std::mt19937_64;

uint64_t Below(Random* random, uint64_t limit) { return (*random)() % limit; }

void Scramble(Random* random, std::span<std::byte> bytes) {
  for (std::byte& byte : bytes) byte = static_cast<std::byte>((*random)());
}

// Values around which mistakes live.
uint64_t Interesting(Random* random) {
  constexpr std::array<uint64_t, 12> kValues = {
      0, 1, 2, 3, 4095, 4096, 4097, 0x7fffffff, 0xffffffff, 1ull << 62, (1ull << 63) - 1, ~0ull};
  return Below(random, 3) == 0 ? (*random)() : kValues[Below(random, kValues.size())];
}

// A message of a random request type: right but for some bytes, its length, or its header.
template <typename Message>
std::vector<std::byte> Spoiled(Random* random, Message message) {
  const auto bytes = AsBytes(message);
  std::vector<std::byte> frame(bytes.begin(), bytes.end());
  switch (Below(random, 4)) {
    case 0:
      frame.resize(1 + Below(random, frame.size()));
      break;
    case 1:
      frame.resize(frame.size() + 1 + Below(random, 1000));
      break;
    case 2:
      Scramble(random, std::span(frame).subspan(sizeof(FrameHeader)));
      break;
    default:
      frame[Below(random, frame.size())] = static_cast<std::byte>((*random)());
  }
  return frame;
}

std::vector<std::byte> RandomFrame(Random* random) {
  switch (Below(random, 9)) {
    case 0: {
      std::vector<std::byte> noise(1 + Below(random, kMaxFrameBytes));
      Scramble(random, noise);
      return noise;
    }
    case 1:
      return Spoiled(random, MakeHello("noise", static_cast<uint32_t>(Interesting(random)), 2));
    case 2: {
      auto request = MakeMessage<AllocateSegment>(1);
      request.bytes = Interesting(random);
      return Below(random, 2) == 0
                 ? Spoiled(random, request)
                 : std::vector<std::byte>(AsBytes(request).begin(), AsBytes(request).end());
    }
    case 3: {
      auto request = MakeMessage<FreeSegment>(1);
      request.segment = static_cast<uint32_t>(Interesting(random));
      return Spoiled(random, request);
    }
    case 4:
      return Spoiled(random, MakeCreateGroup("g", {0, 1}));
    case 5:
      return Spoiled(random, MakeMessage<DestroyGroup>(1));
    case 6:
      return Spoiled(random, MakeMessage<DescribeBucket>(1));
    case 7:
      return Spoiled(random, MakeMessage<AbortGroup>(1));
    default:
      return Spoiled(random, MakeMessage<Welcome>(1));
  }
}

Submission RandomEntry(Random* random, const RawSegment& segment, uint32_t group) {
  Submission entry = MakeAllReduce(group, Below(random, 4), Below(random, 2048), segment);
  if (Below(random, 8) == 0) {
    Scramble(random, std::as_writable_bytes(std::span(&entry, 1)));
    return entry;
  }
  switch (Below(random, 10)) {
    case 0:
      entry.sequence = Interesting(random);
      break;
    case 1:
      entry.count = Interesting(random);
      break;
    case 2:
      entry.group = static_cast<uint32_t>(Interesting(random));
      break;
    case 3:
      entry.timeout_ms = static_cast<uint32_t>(Interesting(random));
      break;
    case 4:
      entry.root = static_cast<uint32_t>(Interesting(random));
      break;
    case 5:
      entry.kind = static_cast<uint8_t>(Interesting(random));
      break;
    case 6:
      entry.dtype = static_cast<uint8_t>(Interesting(random));
      break;
    case 7:
      entry.reduce_op = static_cast<uint8_t>(Interesting(random));
      break;
    case 8:
      entry.input = {static_cast<uint32_t>(Interesting(random)), 0, Interesting(random)};
      break;
    default:
      entry.output = {segment.number, 0, Interesting(random)};
      break;
  }
  return entry;
}

// The job beside the noise: sums, checked, until told to stop.
class Bystanders {
 public:
  explicit Bystanders(const std::string& socket)
      : job_(RawJob::Start(socket, "bystanders", 2, 1 << 20)), thread_([this] { Run(); }) {}

  // What went wrong, if anything; and that the job was at work at all.
  Status Stop() {
    stop_ = true;
    thread_.join();
    if (status_.ok() && sums_ == 0) return {Code::kInternal, "the bystanders did nothing"};
    return status_;
  }

 private:
  void Run() {
    if (!job_) {
      status_ = job_.error();
      return;
    }
    while (!stop_ && status_.ok()) {
      status_ = job_->AllReduceAndCheck(sums_, sums_ % 8 == 0 ? 100000 : 1 + sums_ % 1000);
      if (status_.ok()) ++sums_;
    }
  }

  Result<RawJob> job_;
  uint64_t sums_ = 0;
  Status status_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

class HostileClientTest : public ::testing::TestWithParam<int> {
 protected:
  DaemonProcess& Start() {
    daemon_.emplace(std::vector<std::string>{"--socket=" + socket(), "--log-level=error",
                                             "--max-session-bytes=2000000"});
    EXPECT_TRUE(daemon_->WaitUntilReady()) << daemon_->Output();
    return *daemon_;
  }
  std::string socket() const { return directory_.File("s"); }

  Random random_{static_cast<uint64_t>(GetParam())};
  TemporaryDirectory directory_;
  std::optional<DaemonProcess> daemon_;
};

TEST_P(HostileClientTest, FramesOfNoiseDisturbNobodyElse) {
  DaemonProcess& daemon = Start();
  Bystanders bystanders(socket());
  for (int session = 0; session < 300; ++session) {
    auto client = RawClient::Connect(socket());
    ASSERT_TRUE(client.has_value()) << client.error().ToString();
    if (session % 4 != 0 && !client->SayHello(MakeHello("noise", 0, 2)).ok()) {
      continue;  // the session before it is not quite gone
    }
    for (int i = 0; i < 20; ++i) {
      if (!client->SendRaw(RandomFrame(&random_)).ok()) break;
    }
  }
  const Status status = bystanders.Stop();
  EXPECT_TRUE(status.ok()) << status.ToString();
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.WaitForEnd(), 0) << daemon.Output();
}

TEST_P(HostileClientTest, RingEntriesOfNoiseDisturbNobodyElse) {
  DaemonProcess& daemon = Start();
  Bystanders bystanders(socket());
  for (int session = 0; session < 100; ++session) {
    auto job = RawJob::Start(socket(), "noise" + std::to_string(session), 2, 8192);
    ASSERT_TRUE(job.has_value()) << job.error().ToString();
    for (int i = 0; i < 50; ++i) {
      for (size_t rank = 0; rank < 2; ++rank) {
        job->ranks[rank].Push(RandomEntry(&random_, job->segments[rank], job->groups[rank]));
      }
    }
    if (session % 3 == 0)
      Scramble(&random_, std::as_writable_bytes(std::span(job->ranks[0].layout()->ring.entries)));
    if (session % 5 == 0) job->ranks[0].layout()->ring.head.store(Interesting(&random_));
    job->ranks[0].RingDoorbell();
    job->ranks[1].RingDoorbell();
  }
  const Status status = bystanders.Stop();
  EXPECT_TRUE(status.ok()) << status.ToString();
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.WaitForEnd(), 0) << daemon.Output();
}

INSTANTIATE_TEST_SUITE_P(Seeds, HostileClientTest, ::testing::Range(1, 4));

}  // namespace
}  // namespace gradsync::testing

#include "server/local/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/mutex.h"
#include "shm/socket_lock.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/raw_client.h"

namespace gradsync {
namespace {

using ::testing::HasSubstr;
using testing::InProcessDaemon;
using testing::kPatience;
using testing::MakeAllReduce;
using testing::MakeBarrier;
using testing::MakeCreateGroup;
using testing::MakeHello;
using testing::RawClient;
using testing::RawJob;
using testing::RawSegment;

constexpr uint64_t kPage = 4096;

Time In(std::chrono::nanoseconds duration) { return std::chrono::steady_clock::now() + duration; }

// Sums float32 in place, at once; or, when held, on Release() and on another thread.
class FakeEngine : public Engine {
 public:
  explicit FakeEngine(bool hold = false) : hold_(hold) {}
  ~FakeEngine() override { Release(); }

  bool Run(std::shared_ptr<const Task> task, std::function<void()> done) override {
    const MutexLock lock(&mutex_);
    if (!hold_) {
      Sum(*task);
      return true;
    }
    held_.emplace_back(std::move(task), std::move(done));
    changed_.SignalAll();
    return false;
  }
  int threads() const override { return 1; }

  void WaitForTask() {
    const MutexLock lock(&mutex_);
    while (held_.empty()) changed_.Wait(&mutex_);
  }

  void Release() {
    std::vector<Held> held;
    {
      const MutexLock lock(&mutex_);
      held.swap(held_);
    }
    for (const auto& [task, done] : held) {
      Sum(*task);
      done();
    }
  }

 private:
  using Held = std::pair<std::shared_ptr<const Task>, std::function<void()>>;

  static void Sum(const Task& task) {
    for (uint64_t i = 0; i < task.count; ++i) {
      float sum = 0;
      for (const std::byte* input : task.inputs) sum += reinterpret_cast<const float*>(input)[i];
      for (std::byte* output : task.outputs) reinterpret_cast<float*>(output)[i] = sum;
    }
  }

  const bool hold_;
  Mutex mutex_;
  CondVar changed_;  // held_ has grown
  std::vector<Held> held_;
};

class ServerTest : public ::testing::Test {
 protected:
  // A daemon with a FakeEngine.
  InProcessDaemon& Start(ServerOptions options = {}, bool hold = false) {
    auto engine = std::make_unique<FakeEngine>(hold);
    engine_ = engine.get();
    daemon_ = std::make_unique<InProcessDaemon>(std::move(options), std::move(engine));
    return *daemon_;
  }

  std::string socket() const { return daemon_->socket(); }

  RawClient Connect() { return *RawClient::Connect(socket()); }
  RawClient Join(uint32_t rank, uint32_t world_size) {
    auto client = RawClient::Join(socket(), "job", rank, world_size);
    EXPECT_TRUE(client.has_value()) << client.error().ToString();
    return *std::move(client);
  }
  RawJob StartJob(uint32_t world_size) {
    auto job = RawJob::Start(socket(), "job", world_size, kPage);
    EXPECT_TRUE(job.has_value()) << job.error().ToString();
    return *std::move(job);
  }

  // The session ends with `code` and a text that contains `text`, and the daemon goes on.
  void ExpectEnds(RawClient* client, Code code, const std::string& text) {
    const Status last = client->ReceiveLastError();
    EXPECT_EQ(last.code(), code) << last.ToString();
    EXPECT_THAT(last.message(), HasSubstr(text));
    EXPECT_TRUE(RawClient::Join(socket(), "another job", 0, 1).has_value());
  }

  FakeEngine* engine_ = nullptr;
  std::unique_ptr<InProcessDaemon> daemon_;
};

// ---- Hello --------------------------------------------------------------------------------------

TEST_F(ServerTest, HelloIsAnsweredWithAControlSegment) {
  ServerOptions options;
  options.cores = 1;
  Start(std::move(options));
  const RawClient client = Join(0, 1);
  EXPECT_GT(client.welcome().session, 0);
  EXPECT_EQ(client.welcome().spin_us, 0);
  EXPECT_FALSE(client.welcome().daemon_version.Get().empty());
  EXPECT_EQ(client.layout()->magic, kControlMagic);
  EXPECT_EQ(client.layout()->version, kProtocolVersion);
  EXPECT_EQ(client.layout()->ring_entries, kRingEntries);
}

TEST_F(ServerTest, TrainersMaySpinWhereEveryRankHasACore) {
  ServerOptions options;
  options.cores = 3;
  Start(std::move(options));
  EXPECT_GT(Join(0, 2).welcome().spin_us, 0);
  auto larger = RawClient::Join(socket(), "larger", 0, 3);
  ASSERT_TRUE(larger.has_value());
  EXPECT_EQ(larger->welcome().spin_us, 0);
}

TEST_F(ServerTest, AnotherVersionOfTheProtocolIsRefusedWithBothVersions) {
  Start();
  RawClient client = Connect();
  Hello hello = MakeHello("job", 0, 1);
  hello.header.version = kProtocolVersion + 1;
  ASSERT_TRUE(client.SendRaw(AsBytes(hello)).ok());
  ExpectEnds(&client, Code::kProtocol,
             absl::StrCat("the client speaks protocol ", kProtocolVersion + 1, ", this daemon ",
                          kProtocolVersion));
}

TEST_F(ServerTest, NothingButHelloMayComeFirst) {
  Start();
  RawClient client = Connect();
  ASSERT_TRUE(client.SendRaw(AsBytes(MakeMessage<Goodbye>(1))).ok());
  ExpectEnds(&client, Code::kProtocol, "must be HELLO; this is GOODBYE");
}

TEST_F(ServerTest, ASecondHelloEndsTheSession) {
  Start();
  RawClient client = Join(0, 1);
  ASSERT_TRUE(client.SendRaw(AsBytes(MakeHello("job", 0, 1))).ok());
  ExpectEnds(&client, Code::kProtocol, "rank 0 of job 'job'");
}

TEST_F(ServerTest, AConnectionThatStaysSilentIsClosed) {
  ServerOptions options;
  options.hello_timeout = std::chrono::milliseconds(20);
  Start(std::move(options));
  RawClient silent = Connect();
  RawClient speaking = Join(0, 1);
  ExpectEnds(&silent, Code::kDeadlineExceeded, "no HELLO in time");
  EXPECT_TRUE(speaking.Allocate(1).has_value());
}

TEST_F(ServerTest, ATakenRankIsRefusedToTheNewcomerAlone) {
  Start();
  RawClient first = Join(0, 2);
  RawClient second = Connect();
  EXPECT_EQ(second.SayHello(MakeHello("job", 0, 2)).code(), Code::kAlreadyExists);
  EXPECT_TRUE(first.Allocate(1).has_value());
}

TEST_F(ServerTest, MoreSessionsThanAllowedAreRefusedByTheFlagsName) {
  ServerOptions options;
  options.max_sessions = 2;
  Start(std::move(options));
  RawClient first = Join(0, 1);
  auto second = std::make_unique<RawClient>(Connect());
  RawClient third = Connect();
  const Status last = third.ReceiveLastError();
  EXPECT_EQ(last.code(), Code::kOutOfMemory);
  EXPECT_THAT(last.message(), HasSubstr("--max-sessions"));
}

// ---- Frames -------------------------------------------------------------------------------------

TEST_F(ServerTest, FramesThatAreNoneEndTheirSession) {
  Start();
  {
    RawClient client = Join(0, 1);
    const std::string noise(64, 'x');
    ASSERT_TRUE(client.SendRaw(std::as_bytes(std::span(noise))).ok());
    ExpectEnds(&client, Code::kProtocol, "no frame of gradsync's protocol");
  }
  {
    RawClient client = Join(0, 1);
    ASSERT_TRUE(client.SendRaw(AsBytes(MakeMessage<AllocateSegment>(1)).first(20)).ok());
    ExpectEnds(&client, Code::kProtocol, "ALLOCATE_SEGMENT frame of 20 bytes");
  }
  {
    RawClient client = Join(0, 1);
    ASSERT_TRUE(client.SendRaw(AsBytes(MakeMessage<Welcome>(1))).ok());
    ExpectEnds(&client, Code::kProtocol, "WELCOME is no request");
  }
}

TEST_F(ServerTest, AFrameWithDescriptorsEndsItsSession) {
  Start();
  RawClient client = Join(0, 1);
  const std::array<int, 1> fds = {client.socket()};
  ASSERT_TRUE(client.SendRaw(AsBytes(MakeMessage<Goodbye>(1)), fds).ok());
  ExpectEnds(&client, Code::kProtocol, "carries descriptors");
}

TEST_F(ServerTest, AClientThatDoesNotReadItsRepliesIsClosed) {
  Start();
  RawClient deaf = Join(0, 2);
  Status sent;
  // Far more than any socket buffers; each is answered by an error.
  for (int i = 0; i < 100000 && sent.ok(); ++i) {
    sent = deaf.SendRaw(AsBytes(MakeMessage<AllocateSegment>(1)));
  }
  EXPECT_EQ(sent.code(), Code::kDaemonLost);
  EXPECT_TRUE(RawClient::Join(socket(), "another job", 0, 1).has_value());
}

TEST_F(ServerTest, GoodbyeIsAcknowledged) {
  Start();
  RawClient client = Join(0, 1);
  EXPECT_TRUE(client.Ask(MakeMessage<Goodbye>(9)).ok());
  EXPECT_TRUE(RawClient::Join(socket(), "job", 0, 1).has_value());
}

// ---- Segments -----------------------------------------------------------------------------------

TEST_F(ServerTest, AnAllocationOverTheLimitIsRefusedAndTheSessionGoesOn) {
  ServerOptions options;
  options.max_session_bytes = 4 * kPage;
  Start(std::move(options));
  RawClient client = Join(0, 1);
  const auto refused = client.Allocate(1ull << 50);
  EXPECT_EQ(refused.error().code(), Code::kOutOfMemory);
  EXPECT_THAT(refused.error().message(), HasSubstr("--max-session-bytes"));
  EXPECT_EQ(client.Allocate(0).error().code(), Code::kInvalidArgument);
  EXPECT_TRUE(client.Allocate(4 * kPage).has_value());
}

TEST_F(ServerTest, SegmentsOfASessionThatEndedNoLongerCount) {
  ServerOptions options;
  options.max_total_bytes = 4 * kPage;
  Start(std::move(options));
  for (int i = 0; i < 3; ++i) {
    RawClient client = Join(0, 1);
    ASSERT_TRUE(client.Allocate(4 * kPage).has_value());
    ASSERT_TRUE(client.Ask(MakeMessage<Goodbye>(1)).ok());
  }
}

TEST_F(ServerTest, FreeingAnUnknownSegmentEndsTheSession) {
  Start();
  RawClient client = Join(0, 1);
  const auto segment = client.Allocate(1);
  ASSERT_TRUE(segment.has_value());
  EXPECT_TRUE(client.Free(segment->number).ok());
  const Status again = client.Free(segment->number);
  EXPECT_EQ(again.code(), Code::kProtocol);
  EXPECT_THAT(again.message(), HasSubstr("FREE_SEGMENT"));
}

TEST_F(ServerTest, AUserHasNoMoreSessionsThanItMay) {
  ServerOptions options;
  options.max_user_sessions = 1;
  Start(std::move(options));
  {
    const RawClient first = Join(0, 1);
    const auto second = RawClient::Join(daemon_->socket(), "another", 0, 1);
    ASSERT_FALSE(second.has_value());
    EXPECT_EQ(second.error().code(), Code::kOutOfMemory);
    EXPECT_THAT(second.error().message(), HasSubstr("--max-user-sessions"));
  }
  while (!RawClient::Join(daemon_->socket(), "another", 0, 1)) std::this_thread::yield();
}

// ---- Operations ---------------------------------------------------------------------------------

TEST_F(ServerTest, AnAllReduceSumsOverTheRanks) {
  Start();
  RawJob job = StartJob(3);
  for (uint64_t sequence = 0; sequence < 50; ++sequence) {
    const Status status = job.AllReduceAndCheck(sequence, 1 + sequence);
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
}

TEST_F(ServerTest, AnEngineThatTakesItsTimeIsWaitedFor) {
  Start({}, /*hold=*/true);
  RawJob job = StartJob(2);
  std::thread engine([this] {
    engine_->WaitForTask();
    engine_->Release();
  });
  const Status status = job.AllReduceAndCheck(0, 10);
  EXPECT_TRUE(status.ok()) << status.ToString();
  engine.join();
}

TEST_F(ServerTest, ALongRunOfOperationsCompletesInOrder) {
  Start();
  RawJob job = StartJob(2);
  constexpr uint64_t kOperations = 20000;  // the ring is filled again and again
  for (size_t rank = 0; rank < 2; ++rank) {
    for (uint64_t sequence = 0; sequence < kOperations; ++sequence) {
      while (!job.ranks[rank].Push(MakeBarrier(job.groups[rank], sequence))) {
        std::this_thread::yield();
      }
    }
  }
  for (size_t rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(job.ranks[rank].Wait(job.groups[rank], kOperations - 1).ok());
  }
}

TEST_F(ServerTest, BucketsMayComeInAnyOrder) {
  Start();
  RawJob job = StartJob(2);
  for (const uint64_t sequence : {3, 0, 2, 1}) {
    ASSERT_TRUE(job.ranks[0].Push(MakeBarrier(job.groups[0], sequence)));
  }
  for (const uint64_t sequence : {0, 1, 2, 3}) {
    ASSERT_TRUE(job.ranks[1].Push(MakeBarrier(job.groups[1], sequence)));
  }
  EXPECT_TRUE(job.ranks[0].Wait(job.groups[0], 3).ok());
}

TEST_F(ServerTest, DaemonsOfOneProcessDoNotMeet) {
  Start();
  InProcessDaemon other(ServerOptions{}, std::make_unique<FakeEngine>());
  RawClient first = Join(0, 1);
  auto second = RawClient::Join(other.socket(), "job", 0, 1);
  ASSERT_TRUE(second.has_value());
  EXPECT_TRUE(first.Allocate(1).has_value());
  EXPECT_TRUE(second->Allocate(1).has_value());
}

// ---- Rings that are abused ----------------------------------------------------------------------

class RingAbuseTest : public ServerTest {
 protected:
  // Rank 0 does wrong: its session ends with `text`, and rank 1 is told that it lost rank 0.
  void ExpectOnlyRank0Ends(RawJob* job, const std::string& text) {
    const Status last = job->ranks[0].ReceiveLastError();
    EXPECT_EQ(last.code(), Code::kProtocol);
    EXPECT_THAT(last.message(), HasSubstr("ended the session of rank 0 of job 'job'"));
    EXPECT_THAT(last.message(), HasSubstr(text));
    ASSERT_TRUE(job->ranks[1].Push(MakeBarrier(job->groups[1], 0)));
    const Status other = job->ranks[1].Wait(job->groups[1], 0);
    EXPECT_EQ(other.code(), Code::kRankLost) << other.ToString();
    EXPECT_THAT(other.message(), HasSubstr("rank 0"));
    EXPECT_TRUE(job->ranks[1].Allocate(1).has_value());
  }
};

TEST_F(RingAbuseTest, ARegionOutsideItsSegment) {
  Start();
  RawJob job = StartJob(2);
  job.ranks[0].Push(MakeAllReduce(job.groups[0], 0, kPage, job.segments[0]));
  ExpectOnlyRank0Ends(&job, "lies outside segment");
}

TEST_F(RingAbuseTest, AGroupThatTheSessionIsNotIn) {
  Start();
  RawJob job = StartJob(2);
  job.ranks[0].Push(MakeBarrier(200, 0));
  ExpectOnlyRank0Ends(&job, "in no such group");
}

TEST_F(RingAbuseTest, ASegmentThatTheSessionHasNot) {
  Start();
  RawJob job = StartJob(2);
  Submission entry = MakeAllReduce(job.groups[0], 0, 1, job.segments[0]);
  entry.input.segment = 12345;
  job.ranks[0].Push(entry);
  ExpectOnlyRank0Ends(&job, "no segment 12345");
}

TEST_F(RingAbuseTest, AHeadFarAheadOfTheTail) {
  Start();
  RawJob job = StartJob(2);
  job.ranks[0].layout()->ring.head.store(kRingEntries + 1);
  job.ranks[0].RingDoorbell();
  ExpectOnlyRank0Ends(&job, "ring is corrupt");
}

TEST_F(RingAbuseTest, AHeadBehindTheTail) {
  Start();
  RawJob job = StartJob(2);
  job.ranks[0].layout()->ring.head.store(~uint64_t{0});
  job.ranks[0].RingDoorbell();
  ExpectOnlyRank0Ends(&job, "ring is corrupt");
}

TEST_F(RingAbuseTest, ASequenceNumberGivenTwice) {
  Start();
  RawJob job = StartJob(2);
  job.ranks[0].Push(MakeBarrier(job.groups[0], 0));
  job.ranks[0].Push(MakeBarrier(job.groups[0], 0));
  const Status last = job.ranks[0].ReceiveLastError();
  EXPECT_EQ(last.code(), Code::kProtocol) << last.ToString();
}

TEST_F(RingAbuseTest, WordsThatTheDaemonOwnsAreNotBelieved) {
  Start();
  RawJob job = StartJob(2);
  ASSERT_TRUE(job.AllReduceAndCheck(0, 8).ok());
  GroupWords& words = job.ranks[0].layout()->groups[job.groups[0]];
  words.completed.store(1000);
  words.state.store(77);
  words.waiters.store(~0u);
  ASSERT_TRUE(job.ranks[0].Push(MakeBarrier(job.groups[0], 1)));
  job.ranks[0].layout()->ring.tail.store(77);
  ASSERT_TRUE(job.ranks[1].Push(MakeBarrier(job.groups[1], 1)));
  EXPECT_TRUE(job.ranks[1].Wait(job.groups[1], 1).ok());
}

TEST_F(RingAbuseTest, ABellThatRingsForNothing) {
  Start();
  RawJob job = StartJob(2);
  for (int i = 0; i < 100; ++i) job.ranks[0].RingDoorbell();
  EXPECT_TRUE(job.AllReduceAndCheck(0, 8).ok());
}

// ---- Ranks that end -----------------------------------------------------------------------------

TEST_F(ServerTest, TheOthersAreToldWhichRankHungUp) {
  Start();
  RawJob job = StartJob(2);
  ASSERT_TRUE(job.ranks[0].Push(MakeBarrier(job.groups[0], 0)));
  job.ranks[1].Disconnect();
  const Status status = job.ranks[0].Wait(job.groups[0], 0);
  EXPECT_EQ(status.code(), Code::kRankLost);
  EXPECT_THAT(status.message(), HasSubstr("rank 1"));
}

TEST_F(ServerTest, WhatARankSubmittedBeforeItHungUpStillCounts) {
  Start();
  RawJob job = StartJob(2);
  ASSERT_TRUE(job.ranks[0].Push(MakeBarrier(job.groups[0], 0)));
  ASSERT_TRUE(job.ranks[1].Push(MakeBarrier(job.groups[1], 0)));
  job.ranks[1].Disconnect();
  const Status status = job.ranks[0].Wait(job.groups[0], 0);
  EXPECT_TRUE(status.ok()) << status.ToString();
}

TEST_F(ServerTest, AMissingRankIsNamedAtTheDeadline) {
  Start();
  RawJob job = StartJob(2);
  Submission barrier = MakeBarrier(job.groups[0], 0);
  barrier.timeout_ms = 20;
  ASSERT_TRUE(job.ranks[0].Push(barrier));
  const Status status = job.ranks[0].Wait(job.groups[0], 0);
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded);
  EXPECT_THAT(status.message(), HasSubstr("rank 1"));
}

TEST_F(ServerTest, AGroupThatIsAbortedFailsOnEveryRank) {
  Start();
  RawJob job = StartJob(2);
  auto abort = MakeMessage<AbortGroup>(3);
  abort.group = job.groups[0];
  abort.code = static_cast<int32_t>(Code::kMismatch);
  abort.text.Set("the models differ");
  EXPECT_TRUE(job.ranks[0].Ask(abort).ok());
  ASSERT_TRUE(job.ranks[1].Push(MakeBarrier(job.groups[1], 0)));
  const Status status = job.ranks[1].Wait(job.groups[1], 0);
  EXPECT_EQ(status.code(), Code::kMismatch);
  EXPECT_THAT(status.message(), HasSubstr("the models differ"));
}

TEST_F(ServerTest, AGroupNumberStartsAfreshWhenItIsUsedAgain) {
  Start();
  RawClient client = Join(0, 1);
  for (int round = 0; round < 3; ++round) {
    const auto group = client.MakeGroup(MakeCreateGroup("again", {0}));
    ASSERT_TRUE(group.has_value());
    EXPECT_EQ(*group, 0);
    EXPECT_EQ(client.layout()->groups[0].completed.load(), 0);
    ASSERT_TRUE(client.Push(MakeBarrier(*group, 0)));
    ASSERT_TRUE(client.Wait(*group, 0).ok());
    auto destroy = MakeMessage<DestroyGroup>(4);
    destroy.group = *group;
    ASSERT_TRUE(client.Ask(destroy).ok());
  }
}

// ---- Everybody gets a turn ----------------------------------------------------------------------

TEST_F(ServerTest, ARingThatIsNeverEmptyKeepsNobodyFromJoining) {
  Start();
  RawClient busy = Join(0, 1);
  const auto group = busy.MakeGroup(MakeCreateGroup("busy", {0}));
  ASSERT_TRUE(group.has_value());
  std::atomic<bool> stop{false};
  uint64_t sequence = 0;
  std::thread submit([&] {
    do {
      if (busy.Push(MakeBarrier(*group, sequence))) ++sequence;
    } while (!stop || sequence == 0);
  });
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(RawClient::Join(daemon_->socket(), absl::StrCat("job", i), 0, 1).has_value());
  }
  stop = true;
  submit.join();
  EXPECT_TRUE(busy.Wait(*group, sequence - 1).ok());
}

TEST_F(ServerTest, ThoseWhoConnectInALoopKeepNobodyFromWorking) {
  Start();
  RawJob job = StartJob(2);
  std::atomic<bool> stop{false};
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      while (!stop) static_cast<void>(RawClient::Connect(daemon_->socket()));
    });
  }
  for (uint64_t sequence = 0; sequence < 200; ++sequence) {
    const Status status = job.AllReduceAndCheck(sequence, 16);
    EXPECT_TRUE(status.ok()) << status.ToString();
    if (!status.ok()) break;
  }
  stop = true;
  for (std::thread& caller : callers) caller.join();
}

// ---- Calls and the end --------------------------------------------------------------------------

TEST_F(ServerTest, ACallSeesTheJobs) {
  Start();
  const RawJob job = StartJob(2);
  std::vector<JobSnapshot> jobs;
  const Status status = daemon_->server().Call(
      [&jobs](const JobTable& table, Time now) { jobs = table.Snapshot(now); }, In(kPatience));
  ASSERT_TRUE(status.ok()) << status.ToString();
  ASSERT_EQ(jobs.size(), 1);
  EXPECT_EQ(jobs[0].job, "job");
  EXPECT_EQ(jobs[0].uid, getuid());
  ASSERT_EQ(jobs[0].ranks.size(), 2);
  EXPECT_EQ(jobs[0].ranks[0].segment_bytes, kPage);
}

TEST_F(ServerTest, CallsAreRefusedOnceTheServerHasEnded) {
  Start();
  EXPECT_TRUE(daemon_->Stop().ok());
  const Status status = daemon_->server().Call([](const JobTable&, Time) {}, In(kPatience));
  EXPECT_EQ(status.code(), Code::kShuttingDown);
}

TEST_F(ServerTest, ACallThatIsNotServedInTimeIsNotMade) {
  const testing::TemporaryDirectory directory;
  ServerOptions options;
  options.socket = directory.File("s");
  auto server = *Server::Create(std::move(options), std::make_unique<FakeEngine>());
  const Status status = server->Call([](const JobTable&, Time) { FAIL(); }, In({}));
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded);
}

TEST_F(ServerTest, StopFinishesWhatRunsAndTellsTheClients) {
  Start({}, /*hold=*/true);
  RawJob job = StartJob(2);
  for (size_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(job.ranks[rank].Push(MakeAllReduce(job.groups[rank], 0, 1, job.segments[rank])));
    ASSERT_TRUE(job.ranks[rank].Push(MakeBarrier(job.groups[rank], 1)));
  }
  engine_->WaitForTask();
  daemon_->server().Stop();
  // Draining has begun when the socket file is gone.
  while (access(socket().c_str(), F_OK) == 0) std::this_thread::yield();
  EXPECT_EQ(job.ranks[0].layout()->groups[0].completed.load(), 0);
  engine_->Release();
  EXPECT_TRUE(daemon_->Join().ok());
  for (size_t rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(job.ranks[rank].Wait(job.groups[rank], 0).ok());
    EXPECT_EQ(job.ranks[rank].GroupFailure(job.groups[rank]).code(), Code::kShuttingDown);
    const Status last = job.ranks[rank].ReceiveLastError();
    EXPECT_EQ(last.code(), Code::kShuttingDown);
    EXPECT_THAT(last.message(), HasSubstr("gradsyncd is shutting down"));
  }
}

TEST_F(ServerTest, StopDoesNotWaitForEverForWhatRuns) {
  ServerOptions options;
  options.drain_timeout = std::chrono::milliseconds(20);
  Start(std::move(options), /*hold=*/true);
  RawJob job = StartJob(1);
  ASSERT_TRUE(job.ranks[0].Push(MakeBarrier(job.groups[0], 0)));
  engine_->WaitForTask();
  EXPECT_EQ(daemon_->Stop().code(), Code::kDeadlineExceeded);
  EXPECT_EQ(job.ranks[0].ReceiveLastError().code(), Code::kShuttingDown);
}

TEST_F(ServerTest, AnIdleServerEndsByItselfAndRemovesItsSocket) {
  ServerOptions options;
  options.idle_exit = std::chrono::milliseconds(20);
  Start(std::move(options));
  EXPECT_TRUE(daemon_->Join().ok());
  EXPECT_NE(access(socket().c_str(), F_OK), 0);
}

TEST_F(ServerTest, AServerWithASessionIsNotIdle) {
  ServerOptions options;
  options.idle_exit = std::chrono::milliseconds(1);
  const testing::TemporaryDirectory directory;
  options.socket = directory.File("s");
  auto server = *Server::Create(std::move(options), std::make_unique<FakeEngine>());
  auto client = *RawClient::Connect(directory.File("s"));
  std::thread run([&] { EXPECT_TRUE(server->Run().ok()); });
  ASSERT_TRUE(client.SayHello(MakeHello("job", 0, 1)).ok());
  // Each answer comes from a server that would have ended by now, had it looked idle.
  ASSERT_TRUE(client.MakeGroup(MakeCreateGroup("world", {0}, std::chrono::seconds(1))).has_value());
  EXPECT_TRUE(client.Allocate(1).has_value());
  client.Disconnect();
  run.join();
}

TEST_F(ServerTest, AnIdleServerStaysWhileSomebodyHoldsTheStartLock) {
  ServerOptions options;
  options.idle_exit = std::chrono::milliseconds(10);
  const testing::TemporaryDirectory directory;
  options.socket = directory.File("s");
  auto lock = *SocketLock::TryTake(options.socket, SocketLock::Right::kStarting);
  ASSERT_TRUE(lock.has_value());
  auto server = *Server::Create(std::move(options), std::make_unique<FakeEngine>());
  std::thread run([&] { EXPECT_TRUE(server->Run().ok()); });
  // Many times the idle time, in which it looked at the lock again and again.
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(RawClient::Join(directory.File("s"), "job" + std::to_string(i), 0, 1).has_value());
  }
  lock.reset();
  run.join();
}

TEST(ServerCreateTest, AnotherDaemonOnTheSocketIsAnError) {
  InProcessDaemon first(ServerOptions{}, std::make_unique<FakeEngine>());
  ServerOptions options;
  options.socket = first.socket();
  const auto second = Server::Create(std::move(options), std::make_unique<FakeEngine>());
  ASSERT_FALSE(second.has_value());
  EXPECT_EQ(second.error().code(), Code::kAlreadyExists);
}

TEST(ServerCreateTest, TheSocketFileHasTheModeThatWasAskedFor) {
  ServerOptions options;
  options.socket_mode = 0620;
  const InProcessDaemon daemon(std::move(options), std::make_unique<FakeEngine>());
  struct stat info {};
  ASSERT_EQ(stat(daemon.socket().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0620);
}

}  // namespace
}  // namespace gradsync

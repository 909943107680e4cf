#include "server/ctl/doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "shm/protocol.h"

namespace gradsync {
namespace {

using Level = Finding::Level;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr uint64_t kGiB = uint64_t{1} << 30;

HostFacts FineHost() {
  HostFacts facts;
  facts.kernel = "6.12.0-1-amd64";
  facts.cores = 8;
  facts.machine_cores = 16;
  facts.memory.available = 64 * kGiB;
  return facts;
}

SocketFacts Nobody(const std::string& path) {
  SocketFacts facts;
  facts.path = path;
  facts.connected = {Code::kDaemonLost, "nobody listens"};
  return facts;
}

SocketFacts Daemon(const std::string& path) {
  SocketFacts facts;
  facts.path = path;
  facts.exists = true;
  facts.owner = 7;
  facts.mode = 0660;
  facts.daemon_user = 7;
  facts.daemon_pid = 4242;
  facts.protocol = kProtocolVersion;
  return facts;
}

DaemonFacts FineDaemon() {
  DaemonFacts facts;
  facts.user = 7;
  facts.sockets = {Daemon("/run/s")};
  facts.program = "/usr/bin/gradsyncd";
  return facts;
}

DaemonFacts NoDaemon() {
  DaemonFacts facts = FineDaemon();
  facts.sockets = {Nobody("/run/s"), Nobody("/run/user/7/s")};
  return facts;
}

DirectoryFacts FineDirectory() {
  DirectoryFacts facts;
  facts.path = "/run/user/7/gradsync";
  facts.exists = true;
  facts.is_directory = true;
  facts.owner = 7;
  facts.mode = 0700;
  return facts;
}

Finding HostFinding(const HostFacts& facts, size_t index) { return JudgeHost(facts).at(index); }

TEST(DoctorHostTest, AFineMachineIsOkThroughout) {
  for (const Finding& finding : JudgeHost(FineHost())) {
    EXPECT_EQ(finding.level, Level::kOk) << finding.check;
    EXPECT_EQ(finding.advice, "") << finding.check;
  }
  EXPECT_THAT(JudgeHost(FineHost()),
              ElementsAre(Field(&Finding::found, "Linux 6.12.0-1-amd64"),
                          Field(&Finding::check, "shared memory"), Field(&Finding::check, "futex"),
                          Field(&Finding::found, "8 of 16 may be used"),
                          Field(&Finding::found, "64.0 GiB available")));
}

TEST(DoctorHostTest, OldKernelsAreNoted) {
  HostFacts facts = FineHost();
  const auto level_of = [&facts](const char* kernel) {
    facts.kernel = kernel;
    return HostFinding(facts, 0).level;
  };
  EXPECT_EQ(level_of("6.5.0"), Level::kOk);
  EXPECT_EQ(level_of("6.1.0-18-amd64"), Level::kNote);
  EXPECT_EQ(level_of("5.14.1"), Level::kNote);
  EXPECT_THAT(HostFinding(facts, 0).advice, HasSubstr("before 6.5"));
  EXPECT_EQ(level_of("5.4.0"), Level::kNote);
  EXPECT_THAT(HostFinding(facts, 0).advice, HasSubstr("before 5.14"));
  EXPECT_EQ(level_of("10.0"), Level::kOk);
  EXPECT_EQ(level_of("of an unknown version"), Level::kOk);
}

TEST(DoctorHostTest, WhatTheKernelRefusesIsAProblem) {
  HostFacts facts = FineHost();
  facts.memfd = {Code::kOutOfMemory, "cannot create segment x: Function not implemented"};
  facts.futex = {Code::kUnsupported, "cannot wait on a word: Operation not permitted"};
  EXPECT_EQ(HostFinding(facts, 1).level, Level::kProblem);
  EXPECT_THAT(HostFinding(facts, 1).found, HasSubstr("not implemented"));
  EXPECT_THAT(HostFinding(facts, 1).advice, HasSubstr("memfd_create"));
  EXPECT_EQ(HostFinding(facts, 2).level, Level::kProblem);
  EXPECT_THAT(HostFinding(facts, 2).advice, HasSubstr("seccomp"));
}

TEST(DoctorHostTest, OneCoreIsNoted) {
  HostFacts facts = FineHost();
  facts.cores = 1;
  EXPECT_EQ(HostFinding(facts, 3).level, Level::kNote);
}

TEST(DoctorHostTest, TheTighterOfMachineAndCgroupCounts) {
  HostFacts facts = FineHost();
  facts.memory.left = kGiB / 2;
  facts.memory.limit = 4 * kGiB;
  facts.memory.cgroup = "/sys/fs/cgroup/pod";
  Finding finding = HostFinding(facts, 4);
  EXPECT_EQ(finding.level, Level::kNote);
  EXPECT_EQ(finding.found,
            "512.0 MiB available, left of the 4.0 GiB that /sys/fs/cgroup/pod allows");
  EXPECT_THAT(finding.advice, HasSubstr("raise the limit"));

  facts.memory.left = 1000 * kGiB;  // more than the machine has: no limit
  finding = HostFinding(facts, 4);
  EXPECT_EQ(finding.found, "64.0 GiB available");

  facts.memory.available = kGiB / 4;
  EXPECT_EQ(HostFinding(facts, 4).level, Level::kNote);
  facts.memory = {};
  EXPECT_EQ(HostFinding(facts, 4).level, Level::kNote);
}

TEST(DoctorDaemonTest, ADaemonOfThisReleaseIsOk) {
  const Finding finding = JudgeDaemon(FineDaemon());
  EXPECT_EQ(finding.level, Level::kOk);
  EXPECT_EQ(finding.found,
            "/run/s (uid 7's, mode 0660), daemon of uid 7, pid 4242, answers with "
            "protocol " +
                std::to_string(kProtocolVersion));
}

TEST(DoctorDaemonTest, ADaemonOfAnotherReleaseIsAProblem) {
  DaemonFacts facts = FineDaemon();
  facts.sockets[0].protocol = kProtocolVersion + 1;
  const Finding finding = JudgeDaemon(facts);
  EXPECT_EQ(finding.level, Level::kProblem);
  EXPECT_THAT(finding.advice,
              AllOf(HasSubstr("this release speaks " + std::to_string(kProtocolVersion)),
                    HasSubstr("same release")));
}

TEST(DoctorDaemonTest, ADaemonThatDoesNotAnswerIsAProblem) {
  DaemonFacts facts = FineDaemon();
  facts.sockets[0].protocol = 0;
  facts.sockets[0].daemon_pid = 0;
  facts.sockets[0].answered = {Code::kDeadlineExceeded, "listens but did not answer"};
  const Finding finding = JudgeDaemon(facts);
  EXPECT_EQ(finding.level, Level::kProblem);
  EXPECT_THAT(finding.found, AllOf(HasSubstr("did not answer"), Not(HasSubstr("pid 0"))));
}

TEST(DoctorDaemonTest, ASocketThatMayNotBeUsedIsAProblem) {
  DaemonFacts facts = FineDaemon();
  facts.sockets[0].connected = {Code::kPermissionDenied, "denied"};
  Finding finding = JudgeDaemon(facts);
  EXPECT_EQ(finding.level, Level::kProblem);
  EXPECT_EQ(finding.found, "/run/s (uid 7's, mode 0660): this user may not connect");
  EXPECT_THAT(finding.advice, HasSubstr("the socket's group"));

  facts.sockets[0].connected = {Code::kDeadlineExceeded, "does not accept"};
  EXPECT_THAT(JudgeDaemon(facts).advice, HasSubstr("stopped"));

  facts.sockets[0].connected = {Code::kProtocol, "listens, but is no SEQPACKET socket"};
  finding = JudgeDaemon(facts);
  EXPECT_EQ(finding.level, Level::kProblem);
  EXPECT_THAT(finding.advice, HasSubstr("GRADSYNC_SOCKET"));
}

TEST(DoctorDaemonTest, NoDaemonIsFineIfATrainerCanStartOne) {
  DaemonFacts facts = NoDaemon();
  facts.sockets[0].exists = true;
  Finding finding = JudgeDaemon(facts);
  EXPECT_EQ(finding.level, Level::kOk);
  EXPECT_EQ(finding.found,
            "none runs at /run/s (left behind: nobody listens) or /run/user/7/s; the first trainer "
            "starts /usr/bin/gradsyncd");
  facts.program = Unexpected(Code::kDaemonLost, "install it");
  finding = JudgeDaemon(facts);
  EXPECT_EQ(finding.level, Level::kProblem);
  EXPECT_EQ(finding.advice, "install it");
}

TEST(DoctorDaemonTest, NoDaemonWhereOneIsNamedIsAProblem) {
  DaemonFacts facts = NoDaemon();
  facts.sockets.pop_back();
  facts.is_fixed = true;
  facts.fixed_by = "GRADSYNC_SOCKET";
  const Finding finding = JudgeDaemon(facts);
  EXPECT_EQ(finding.level, Level::kProblem);
  EXPECT_THAT(finding.advice, HasSubstr("GRADSYNC_SOCKET names this socket"));
}

TEST(DoctorDirectoryTest, OnesOwnIsOk) {
  EXPECT_EQ(JudgeDirectory(FineDirectory(), NoDaemon()).level, Level::kOk);
  DirectoryFacts facts;
  facts.path = "/tmp/gradsync-7";
  facts.may_be_made = true;
  const Finding finding = JudgeDirectory(facts, NoDaemon());
  EXPECT_EQ(finding.level, Level::kOk);
  EXPECT_EQ(finding.found, "/tmp/gradsync-7 (not there yet)");
}

TEST(DoctorDirectoryTest, WhatTrainersWouldNotTrustIsAProblem) {
  DirectoryFacts open = FineDirectory();
  open.mode = 0755;
  EXPECT_THAT(JudgeDirectory(open, NoDaemon()).found, HasSubstr("is open to others (mode 0755)"));
  DirectoryFacts other = FineDirectory();
  other.owner = 0;
  EXPECT_THAT(JudgeDirectory(other, NoDaemon()).found, HasSubstr("belongs to uid 0, not 7"));
  DirectoryFacts file = FineDirectory();
  file.is_directory = false;
  EXPECT_THAT(JudgeDirectory(file, NoDaemon()).found, HasSubstr("is not a directory"));
  const DirectoryFacts nowhere{.path = "/none/x"};
  EXPECT_THAT(JudgeDirectory(nowhere, NoDaemon()).found, HasSubstr("cannot be made"));
  for (const DirectoryFacts& facts : {open, other, file, nowhere}) {
    EXPECT_EQ(JudgeDirectory(facts, NoDaemon()).level, Level::kProblem) << facts.path;
    EXPECT_THAT(JudgeDirectory(facts, NoDaemon()).advice, Not(IsEmpty()));
  }
}

TEST(DoctorDirectoryTest, ItIsOnlyNotedWhereTheSystemsDaemonServes) {
  DirectoryFacts open = FineDirectory();
  open.mode = 0755;
  EXPECT_EQ(JudgeDirectory(open, FineDaemon()).level, Level::kNote);
}

TEST(DoctorTest, AsksAboutEverythingOnce) {
  DoctorFacts facts;
  facts.host = FineHost();
  facts.daemon = FineDaemon();
  facts.directory = FineDirectory();
  facts.gpu.is_built = false;
  EXPECT_THAT(
      Judge(facts),
      ElementsAre(Field(&Finding::check, "kernel"), Field(&Finding::check, "shared memory"),
                  Field(&Finding::check, "futex"), Field(&Finding::check, "cores"),
                  Field(&Finding::check, "memory"), Field(&Finding::check, "daemon"),
                  Field(&Finding::check, "private directory"), Field(&Finding::check, "GPU")));
  EXPECT_FALSE(HasProblem(Judge(facts)));
}

}  // namespace
}  // namespace gradsync

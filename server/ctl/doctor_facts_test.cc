#include "server/ctl/doctor_facts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <thread>

#include "server/ctl/doctor_gpu_facts.h"
#include "shm/frame_socket.h"
#include "shm/protocol.h"

namespace gradsync {
namespace {

using ::testing::HasSubstr;

class DoctorFactsTest : public ::testing::Test {
 protected:
  DoctorFactsTest() {
    std::string pattern = ::testing::TempDir() + "gradsync-XXXXXX";
    directory_ = mkdtemp(pattern.data());
  }
  ~DoctorFactsTest() override { std::filesystem::remove_all(directory_); }

  std::string File(const std::string& name) const { return directory_ + "/" + name; }

  // Listens, and answers the first frame by `answer`.
  SocketFacts LookAtPeerThatAnswers(std::span<const std::byte> answer) const {
    const auto listener = ListenAt(File("s"), 0640);
    EXPECT_TRUE(listener) << listener.error().ToString();
    std::thread peer([&listener, answer] {
      const Deadline deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
      UniqueFd accepted;
      while (!accepted.valid() && std::chrono::steady_clock::now() < deadline) {
        accepted = UniqueFd(accept(listener->get(), nullptr, nullptr));
      }
      EXPECT_TRUE(ReceiveFrame(accepted.get(), deadline));
      EXPECT_TRUE(SendFrame(accepted.get(), answer, {}, deadline).ok());
    });
    SocketFacts facts = LookAtSocket(File("s"));
    peer.join();
    return facts;
  }

  std::string directory_;
};

TEST_F(DoctorFactsTest, ThisMachineCanBeLookedAt) {
  const HostFacts facts = CollectHost();
  EXPECT_THAT(facts.kernel, HasSubstr("."));
  EXPECT_TRUE(facts.memfd.ok()) << facts.memfd.ToString();
  EXPECT_TRUE(facts.futex.ok()) << facts.futex.ToString();
  EXPECT_GE(facts.cores, 1);
  EXPECT_GE(facts.machine_cores, facts.cores);
  EXPECT_GT(facts.memory.available.value_or(0), 0U);
}

TEST_F(DoctorFactsTest, ASocketThatIsNotThere) {
  const SocketFacts facts = LookAtSocket(File("s"));
  EXPECT_FALSE(facts.exists);
  EXPECT_EQ(facts.connected.code(), Code::kDaemonLost);
  EXPECT_EQ(facts.protocol, 0);
}

TEST_F(DoctorFactsTest, ASocketThatWasLeftBehind) {
  EXPECT_TRUE(ListenAt(File("s"), 0600));  // closed at once
  const SocketFacts facts = LookAtSocket(File("s"));
  EXPECT_TRUE(facts.exists);
  EXPECT_EQ(facts.owner, geteuid());
  EXPECT_EQ(facts.mode, 0600U);
  EXPECT_EQ(facts.connected.code(), Code::kDaemonLost);
}

TEST_F(DoctorFactsTest, ADaemonOfAnotherVersionIsKnownByItsHeader) {
  auto answer = MakeMessage<ErrorReply>();
  answer.header.version = kProtocolVersion + 3;
  const SocketFacts facts = LookAtPeerThatAnswers(AsBytes(answer));
  EXPECT_TRUE(facts.connected.ok());
  EXPECT_EQ(facts.mode, 0640U);
  EXPECT_EQ(facts.daemon_user, geteuid());
  EXPECT_EQ(facts.daemon_pid, getpid());
  EXPECT_TRUE(facts.answered.ok()) << facts.answered.ToString();
  EXPECT_EQ(facts.protocol, kProtocolVersion + 3);
}

TEST_F(DoctorFactsTest, WhatIsNoDaemonIsToldApart) {
  const std::array<std::byte, 32> other{};
  const SocketFacts facts = LookAtPeerThatAnswers(other);
  EXPECT_EQ(facts.protocol, 0);
  EXPECT_THAT(facts.answered.message(), HasSubstr("not a gradsyncd"));
}

TEST_F(DoctorFactsTest, DirectoriesAreLookedAtAndNotMade) {
  DirectoryFacts facts = LookAtDirectory(File("private"));
  EXPECT_FALSE(facts.exists);
  EXPECT_TRUE(facts.may_be_made);
  EXPECT_FALSE(LookAtDirectory(File("none/private")).may_be_made);

  ASSERT_EQ(mkdir(File("private").c_str(), 0700), 0);
  facts = LookAtDirectory(File("private"));
  EXPECT_TRUE(facts.exists);
  EXPECT_TRUE(facts.is_directory);
  EXPECT_EQ(facts.owner, geteuid());
  EXPECT_EQ(facts.mode, 0700U);

  ASSERT_EQ(symlink(File("private").c_str(), File("link").c_str()), 0);
  EXPECT_FALSE(LookAtDirectory(File("link")).is_directory);
}

TEST_F(DoctorFactsTest, MpsIsKnownByItsPipeAndItsProcess) {
  const auto put_process = [this](const std::string& pid, const std::string& command) {
    std::filesystem::create_directories(File("proc/" + pid));
    std::ofstream(File("proc/" + pid + "/cmdline")) << command << '\0' << "-d" << '\0';
  };
  put_process("1", "/sbin/init");
  put_process("2", "less nvidia-cuda-mps-control");
  std::filesystem::create_directories(File("proc/sys"));
  MpsFacts facts = LookForMps(File("mps"), File("proc"));
  EXPECT_EQ(facts.pipe_directory, File("mps"));
  EXPECT_FALSE(facts.has_pipe);
  EXPECT_FALSE(facts.runs_control);

  put_process("3", "/usr/bin/nvidia-cuda-mps-control");
  ASSERT_EQ(mkdir(File("mps").c_str(), 0700), 0);
  ASSERT_EQ(mkfifo(File("mps/control").c_str(), 0600), 0);
  facts = LookForMps(File("mps"), File("proc"));
  EXPECT_TRUE(facts.has_pipe);
  EXPECT_TRUE(facts.runs_control);
  EXPECT_FALSE(LookForMps(File("mps"), File("nowhere")).runs_control);
}

}  // namespace
}  // namespace gradsync

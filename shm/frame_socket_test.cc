#include "shm/frame_socket.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <fstream>

#include "shm/protocol.h"

namespace gradsync {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

Deadline In(milliseconds time) { return std::chrono::steady_clock::now() + time; }

constexpr milliseconds kLong{5000};

class FrameSocketTest : public ::testing::Test {
 protected:
  FrameSocketTest() {
    std::string pattern = ::testing::TempDir() + "gradsync-XXXXXX";
    directory_ = mkdtemp(pattern.data());
    path_ = directory_ + "/socket";
  }
  ~FrameSocketTest() override {
    unlink(path_.c_str());
    rmdir(directory_.c_str());
  }

  // A connected pair through a real listener.
  void Connect() {
    auto listener = ListenAt(path_, 0600);
    ASSERT_TRUE(listener) << listener.error().ToString();
    listener_ = std::move(*listener);
    auto client = ConnectTo(path_);
    ASSERT_TRUE(client) << client.error().ToString();
    client_ = std::move(*client);
    server_ = UniqueFd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    ASSERT_TRUE(server_.valid());
  }

  std::string directory_;
  std::string path_;
  UniqueFd listener_;
  UniqueFd client_;
  UniqueFd server_;
};

TEST_F(FrameSocketTest, CarriesAFrameAndItsDescriptors) {
  Connect();
  auto hello = MakeMessage<Hello>(7);
  hello.job.Set("bert-7");
  std::array<int, 2> pipe_ends{};
  ASSERT_EQ(pipe2(pipe_ends.data(), O_CLOEXEC), 0);
  const UniqueFd read_end(pipe_ends[0]);
  UniqueFd write_end(pipe_ends[1]);
  const std::array<int, 1> passed = {write_end.get()};
  ASSERT_TRUE(SendFrame(client_.get(), AsBytes(hello), passed, In(kLong)).ok());
  write_end.Reset();

  auto frame = ReceiveFrame(server_.get(), In(kLong));
  ASSERT_TRUE(frame) << frame.error().ToString();
  const auto received = ReadMessage<Hello>(frame->bytes);
  ASSERT_TRUE(received.has_value());
  EXPECT_EQ(received->job.Get(), "bert-7");
  EXPECT_EQ(received->header.request_id, 7U);
  ASSERT_EQ(frame->fds.size(), 1U);
  EXPECT_TRUE(fcntl(frame->fds[0].get(), F_GETFD) & FD_CLOEXEC);
  ASSERT_EQ(write(frame->fds[0].get(), "x", 1), 1);
  char byte = 0;
  EXPECT_EQ(read(read_end.get(), &byte, 1), 1);
}

TEST_F(FrameSocketTest, AFrameThatIsTooLongIsReportedAndItsDescriptorsAreClosed) {
  Connect();
  const std::vector<std::byte> big(kMaxFrameBytes + 1);
  EXPECT_EQ(SendFrame(client_.get(), big, {}, In(kLong)).code(), Code::kInternal);
  ASSERT_EQ(send(client_.get(), big.data(), big.size(), 0), static_cast<ssize_t>(big.size()));
  const auto frame = ReceiveFrame(server_.get(), In(kLong));
  ASSERT_FALSE(frame);
  EXPECT_EQ(frame.error().code(), Code::kProtocol);
}

TEST_F(FrameSocketTest, AnEmptyPacketIsAHangUpAndItsDescriptorsAreClosed) {
  Connect();
  std::array<int, 2> pipe_ends{};
  ASSERT_EQ(pipe2(pipe_ends.data(), O_CLOEXEC), 0);
  const UniqueFd read_end(pipe_ends[0]);
  UniqueFd write_end(pipe_ends[1]);
  iovec nothing{nullptr, 0};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &nothing;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &pipe_ends[1], sizeof(int));
  ASSERT_EQ(sendmsg(client_.get(), &message, 0), 0);
  write_end.Reset();

  const auto frame = ReceiveFrame(server_.get(), In(kLong));
  ASSERT_FALSE(frame);
  EXPECT_EQ(frame.error().code(), Code::kDaemonLost);
  pollfd hang_up{read_end.get(), POLLIN, 0};
  ASSERT_EQ(poll(&hang_up, 1, 5000), 1);
  EXPECT_TRUE(hang_up.revents & POLLHUP) << "somebody still holds the pipe's other end";
}

TEST_F(FrameSocketTest, AListenerThatDoesNotAcceptIsNotTakenForADeadOne) {
  const auto listener = ListenAt(path_, 0600);
  ASSERT_TRUE(listener);
  std::vector<UniqueFd> waiting;
  auto connection = ConnectTo(path_);
  while (connection && waiting.size() < 10000) {
    waiting.push_back(std::move(*connection));
    connection = ConnectTo(path_);
  }
  ASSERT_FALSE(connection);
  EXPECT_EQ(connection.error().code(), Code::kDeadlineExceeded);
  EXPECT_EQ(ListenAt(path_, 0600).error().code(), Code::kAlreadyExists);
}

TEST_F(FrameSocketTest, ASilentPeerIsADeadlineAndAGonePeerIsNot) {
  Connect();
  EXPECT_EQ(ReceiveFrame(server_.get(), In(milliseconds(10))).error().code(),
            Code::kDeadlineExceeded);
  EXPECT_FALSE(HasHungUp(server_.get()));
  client_.Reset();
  EXPECT_TRUE(HasHungUp(server_.get()));
  EXPECT_EQ(ReceiveFrame(server_.get(), In(kLong)).error().code(), Code::kDaemonLost);
}

TEST_F(FrameSocketTest, WhatWasSentBeforeTheHangUpIsStillRead) {
  Connect();
  ASSERT_TRUE(SendFrame(client_.get(), AsBytes(MakeMessage<Goodbye>(1)), {}, In(kLong)).ok());
  client_.Reset();
  EXPECT_TRUE(HasHungUp(server_.get()));
  const auto frame = ReceiveFrame(server_.get(), In(kLong));
  ASSERT_TRUE(frame);
  EXPECT_TRUE(ReadMessage<Goodbye>(frame->bytes).has_value());
}

TEST_F(FrameSocketTest, SendingToAPeerThatDoesNotReadEndsAtTheDeadline) {
  Connect();
  Status status;
  for (int i = 0; i < 100000 && status.ok(); ++i) {
    status = SendFrame(client_.get(), AsBytes(MakeMessage<Hello>()), {}, In(milliseconds(10)));
  }
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded);
  EXPECT_THAT(status.message(), HasSubstr("does not read"));
}

TEST_F(FrameSocketTest, NobodyListeningIsDaemonLost) {
  EXPECT_EQ(ConnectTo(path_).error().code(), Code::kDaemonLost);
}

TEST_F(FrameSocketTest, AStaleSocketFileIsReplacedAndALiveOneIsNot) {
  { const auto dead = ListenAt(path_, 0600); }
  struct stat info {};
  ASSERT_EQ(stat(path_.c_str(), &info), 0) << "the file outlives its listener";
  EXPECT_EQ(ConnectTo(path_).error().code(), Code::kDaemonLost);
  const auto listener = ListenAt(path_, 0640);
  ASSERT_TRUE(listener) << listener.error().ToString();
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640U);
  EXPECT_EQ(ListenAt(path_, 0600).error().code(), Code::kAlreadyExists);
  EXPECT_TRUE(ConnectTo(path_)) << "the refused attempt has not disturbed the listener";
}

TEST_F(FrameSocketTest, AFileThatIsNoSocketIsLeftAlone) {
  std::ofstream(path_) << "precious";
  const auto listener = ListenAt(path_, 0600);
  ASSERT_FALSE(listener);
  EXPECT_THAT(listener.error().message(), HasSubstr("not a socket"));
  std::string text;
  std::ifstream(path_) >> text;
  EXPECT_EQ(text, "precious");
}

TEST_F(FrameSocketTest, APathThatIsTooLongIsAnErrorThatSaysSo) {
  const std::string path(200, 'x');
  EXPECT_EQ(ListenAt(path, 0600).error().code(), Code::kInvalidArgument);
  EXPECT_EQ(ConnectTo(path).error().code(), Code::kInvalidArgument);
}

TEST_F(FrameSocketTest, KnowsTheUserAtTheOtherEnd) {
  Connect();
  const auto uid = PeerUid(server_.get());
  ASSERT_TRUE(uid);
  EXPECT_EQ(*uid, getuid());
}

// A forked data-loader worker keeps its parent's socket open: the pidfd still tells of the death.
TEST_F(FrameSocketTest, TellsOfTheConnectingProcessesDeathWhileItsChildHoldsTheSocket) {
  auto listener = ListenAt(path_, 0600);
  ASSERT_TRUE(listener);
  const pid_t trainer = fork();
  if (trainer == 0) {
    const auto connection = ConnectTo(path_);  // NOLINT(clang-analyzer-deadcode.DeadStores)
    if (fork() == 0) {
      alarm(10);  // it ends by itself, whatever becomes of the test
      pause();
    }
    _exit(0);
  }
  pollfd incoming{listener->get(), POLLIN, 0};
  ASSERT_EQ(poll(&incoming, 1, 5000), 1);
  const UniqueFd accepted(accept4(listener->get(), nullptr, nullptr, SOCK_CLOEXEC));
  const UniqueFd pidfd = PeerPidFd(accepted.get());
  ASSERT_EQ(waitpid(trainer, nullptr, 0), trainer);
  EXPECT_FALSE(HasHungUp(accepted.get())) << "the grandchild holds the socket";
  if (!pidfd.valid()) GTEST_SKIP() << "this kernel has no SO_PEERPIDFD (Linux 6.5)";
  pollfd ended{pidfd.get(), POLLIN, 0};
  EXPECT_EQ(poll(&ended, 1, 5000), 1);
}

TEST(ProtocolTest, RefusesOtherVersionsSizesAndTypes) {
  auto goodbye = MakeMessage<Goodbye>(3);
  EXPECT_TRUE(ReadMessage<Goodbye>(AsBytes(goodbye)).has_value());
  EXPECT_FALSE(ReadMessage<Done>(AsBytes(goodbye)).has_value());
  EXPECT_FALSE(ReadMessage<Goodbye>(AsBytes(goodbye).first(8)).has_value());
  goodbye.header.version = kProtocolVersion + 1;
  EXPECT_FALSE(ReadMessage<Goodbye>(AsBytes(goodbye)).has_value());
  ASSERT_TRUE(ReadHeader(AsBytes(goodbye)).has_value()) << "versions can tell each other apart";
  EXPECT_EQ(ReadHeader(AsBytes(goodbye))->version, kProtocolVersion + 1);
  goodbye.header.magic = 0;
  EXPECT_FALSE(ReadHeader(AsBytes(goodbye)).has_value());
}

TEST(ProtocolTest, TextIsCutAndNeverReadBeyondItsArray) {
  Text<4> text{};
  text.Set("abcdef");
  EXPECT_EQ(text.Get(), "abc");
  std::memset(text.bytes.data(), 'x', 4);
  EXPECT_EQ(text.Get(), "xxxx");
  text.Set("");
  EXPECT_EQ(text.Get(), "");
}

}  // namespace
}  // namespace gradsync

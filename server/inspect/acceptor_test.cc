#include "server/inspect/acceptor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <future>
#include <string>

#include "shm/frame_socket.h"

namespace gradsync {
namespace {

class AcceptorTest : public ::testing::Test {
 protected:
  AcceptorTest() {
    std::string pattern = ::testing::TempDir() + "gradsync-XXXXXX";
    directory_ = mkdtemp(pattern.data());
    path_ = directory_ + "/inspect";
  }
  ~AcceptorTest() override {
    acceptor_.reset();
    unlink(path_.c_str());
    rmdir(directory_.c_str());
  }

  void Start() {
    auto acceptor = Acceptor::Start(
        path_, [this](UniqueFd connection) { accepted_.set_value(std::move(connection)); });
    ASSERT_TRUE(acceptor) << acceptor.error().ToString();
    acceptor_ = std::move(*acceptor);
  }

  bool FileExists() const { return access(path_.c_str(), F_OK) == 0; }

  std::string directory_;
  std::string path_;
  std::promise<UniqueFd> accepted_;
  std::unique_ptr<Acceptor> acceptor_;
};

TEST_F(AcceptorTest, HandsOverConnections) {
  Start();
  auto client = ConnectTo(path_, SOCK_STREAM);
  ASSERT_TRUE(client) << client.error().ToString();
  const UniqueFd server = accepted_.get_future().get();
  ASSERT_EQ(write(client->get(), "x", 1), 1);
  char byte = 0;
  EXPECT_EQ(recv(server.get(), &byte, 1, 0), 1);
  EXPECT_EQ(byte, 'x');
}

TEST_F(AcceptorTest, OnlyItsUserMayOpenTheFile) {
  Start();
  struct stat info {};
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600U);
  EXPECT_EQ(info.st_uid, geteuid());
}

TEST_F(AcceptorTest, RemovesItsFileAtTheEnd) {
  Start();
  EXPECT_TRUE(FileExists());
  acceptor_.reset();
  EXPECT_FALSE(FileExists());
}

TEST_F(AcceptorTest, LeavesTheFileOfItsSuccessor) {
  Start();
  ASSERT_EQ(unlink(path_.c_str()), 0);
  auto successor = ListenAt(path_, 0600, SOCK_STREAM);
  ASSERT_TRUE(successor);
  acceptor_.reset();
  EXPECT_TRUE(FileExists());
}

TEST_F(AcceptorTest, ReplacesAStaleSocketButNotALiveOne) {
  {
    auto stale = ListenAt(path_, 0600, SOCK_STREAM);
    ASSERT_TRUE(stale);
  }
  ASSERT_TRUE(FileExists());
  Start();
  auto second = Acceptor::Start(path_, [](UniqueFd) {});
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code(), Code::kAlreadyExists);
}

TEST_F(AcceptorTest, DoesNotReplaceALiveSocketOfAnotherType) {
  auto trainers = ListenAt(path_, 0600);
  ASSERT_TRUE(trainers);
  auto acceptor = Acceptor::Start(path_, [](UniqueFd) {});
  ASSERT_FALSE(acceptor);
  EXPECT_EQ(acceptor.error().code(), Code::kAlreadyExists);
  EXPECT_TRUE(ConnectTo(path_));
}

TEST(MayInspectTest, AdmitsTheDaemonsUserAndRoot) {
  EXPECT_TRUE(MayInspect(1000, 1000));
  EXPECT_TRUE(MayInspect(0, 1000));
  EXPECT_FALSE(MayInspect(1001, 1000));
  EXPECT_FALSE(MayInspect(1000, 0));
}

// The file's mode is the first lock; this is the second, for a mode that somebody has loosened.
TEST_F(AcceptorTest, HangsUpOnAnotherUser) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  Start();
  ASSERT_EQ(chmod(directory_.c_str(), 0755), 0);
  ASSERT_EQ(chmod(path_.c_str(), 0666), 0);
  const pid_t child = fork();
  if (child == 0) {
    if (setuid(65534) != 0) _exit(2);
    auto client = ConnectTo(path_, SOCK_STREAM);
    if (!client) _exit(3);
    pollfd entry{client->get(), POLLIN, 0};
    if (poll(&entry, 1, 10000) != 1) _exit(4);
    char byte = 0;
    _exit(recv(client->get(), &byte, 1, 0) == 0 ? 0 : 5);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(accepted_.get_future().wait_for(std::chrono::seconds(0)), std::future_status::timeout);
}

}  // namespace
}  // namespace gradsync

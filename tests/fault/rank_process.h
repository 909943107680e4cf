// Ranks as processes of their own, for tests that kill them; and where they find their daemon.
#ifndef GRADSYNC_TESTS_FAULT_RANK_PROCESS_H_
#define GRADSYNC_TESTS_FAULT_RANK_PROCESS_H_

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "client/core/daemon_group.h"
#include "client/core/session.h"
#include "client/core/starter.h"
#include "shm/status.h"
#include "shm/unique_fd.h"

namespace gradsync::testing {

// Where a process stands towards its test: lines of text both ways.
class Channel {
 public:
  explicit Channel(UniqueFd socket) : socket_(std::move(socket)) {}

  void Say(const std::string& text) const;
  void Say(const Status& status) const { Say(status.ToString()); }
  // The next text from the other side; empty when that has ended, or says nothing for long.
  std::string Hear() const;

 private:
  UniqueFd socket_;
};

// A forked child that runs `body` and then ends without running what the test program would at its
// end. So no thread may be running in the test when it is made. Killed by the destructor.
class RankProcess {
 public:
  explicit RankProcess(const std::function<void(const Channel&)>& body);
  RankProcess(RankProcess&& other) noexcept;
  RankProcess& operator=(RankProcess&&) = delete;
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;
  ~RankProcess();

  void Say(const std::string& text) const { channel_->Say(text); }
  std::string Hear() const { return channel_->Hear(); }
  void Kill() const;  // kill -9
  // Its exit status, or minus the signal that killed it.
  int WaitForEnd();

 private:
  pid_t pid_ = -1;
  std::optional<Channel> channel_;
};

// A session of `rank`, found through `discovery`; or an error.
Result<std::shared_ptr<Session>> OpenSession(const Discovery& discovery, uint32_t rank,
                                             uint32_t world_size, const std::string& job = "job");

// The discovery of a socket, and nothing else.
Discovery At(const std::string& socket);

// The discovery of a user alone on a machine: no system daemon, a private one in
// `directory`/private, which ends after `idle_exit`.
Discovery PrivateIn(const std::string& directory, const std::string& idle_exit = "60s");

// Ends the private daemon of `discovery` (kill -9), if there is one.
void KillPrivateDaemon(const Discovery& discovery);

// How often a private daemon was started, by its log.
int PrivateStarts(const Discovery& discovery);

}  // namespace gradsync::testing

#endif  // GRADSYNC_TESTS_FAULT_RANK_PROCESS_H_

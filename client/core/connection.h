// One connection to the daemon, as one rank of a job: requests and their replies over the socket,
// submissions through the control segment, and whether the daemon is still there.
#ifndef GRADSYNC_CLIENT_CORE_CONNECTION_H_
#define GRADSYNC_CLIENT_CORE_CONNECTION_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "client/core/environment.h"
#include "client/core/fork_guard.h"
#include "shm/frame_socket.h"
#include "shm/protocol.h"
#include "shm/ring_writer.h"
#include "shm/segment.h"
#include "shm/session_layout.h"
#include "shm/status.h"

namespace gradsync {

// A request that waits for other ranks, and a wait for an operation, end at the daemon's deadline,
// which knows who was missing. The client waits this much longer before it gives up on the daemon.
inline constexpr std::chrono::seconds kDaemonGrace{5};

// Thread-safe. Once lost (hung up, closed, or silent beyond a deadline), it stays lost and every
// call returns why. In a forked child every call returns kFailedPrecondition.
class Connection {
 public:
  // Greets the daemon at the other end of `socket`, which was found at `path`. kDaemonLost if it
  // hung up before it said anything: it was just ending, so look for another one.
  static Result<std::shared_ptr<Connection>> Open(UniqueFd socket, std::string path,
                                                  const Identity& identity, Deadline deadline);

  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection();

  // Sends `request` (its request id is filled in) and waits for the reply that belongs to it, whose
  // descriptors go to `fds` if that is not null. The daemon's ErrorReply is returned as its Status.
  template <typename Reply, typename Request>
  Result<Reply> Call(Request request, Deadline deadline, std::vector<UniqueFd>* fds = nullptr);

  // The same in two steps, for requests whose replies depend on other ranks: Post sends (`fds` are
  // borrowed) and returns the request's id, Await waits for its reply. AwaitAny waits until one of
  // `ids` has its reply, and returns its index; or until any other frame has come, and returns the
  // number of `ids`. A reply that nobody will await must be forgotten.
  template <typename Request>
  Result<uint32_t> Post(Request request, std::span<const int> fds, Deadline deadline);
  Result<Frame> Await(uint32_t id, Deadline deadline);
  Result<size_t> AwaitAny(std::span<const uint32_t> ids, Deadline deadline);
  void Forget(uint32_t id);

  // Puts one operation into the ring and wakes the daemon if it sleeps.
  Status Submit(const Submission& submission, Deadline deadline);

  // OK while the daemon is there; cheap enough for every futex slice.
  Status CheckAlive();

  // Says goodbye. From then on the connection is lost to a closed session.
  void Close();

  // Gives up on a daemon that does not answer or makes no sense: closes the connection, so that the
  // daemon, should it be there after all, tells the other ranks. Returns why, as all later calls
  // do.
  Status GiveUp(Code code, const std::string& what);
  Status GiveUpSilentDaemon();

  bool in_child() const { return guard_.in_child(); }
  // Whether it is known to be lost; CheckAlive says why, and looks at the socket.
  bool is_lost() const { return is_lost_.load(std::memory_order_relaxed); }
  GroupWords* group_words(uint32_t group) const { return &layout()->groups[group]; }
  std::chrono::microseconds spin() const { return spin_; }
  const std::string& path() const { return path_; }
  int socket() const { return guard_.socket(); }  // to look at, for as long as the connection lives
  const Identity& identity() const { return identity_; }

 private:
  Connection(UniqueFd socket, std::string path, const Identity& identity);

  Status Greet(Deadline deadline);
  Status AdoptControlSegment(const Welcome& welcome, std::vector<UniqueFd> fds);
  SessionLayout* layout() const { return reinterpret_cast<SessionLayout*>(control_.data()); }

  Status ForkedStatus() const;
  std::string Who() const;  // "rank 1 of job 'x'"
  uint32_t NextRequestId();
  Result<Frame> Exchange(uint32_t request_id, std::span<const std::byte> bytes, Deadline deadline);
  std::optional<Frame> TakeReply(uint32_t request_id);
  bool HasReply(uint32_t request_id) const;
  Status SendRequest(std::span<const std::byte> bytes, std::span<const int> fds, Deadline deadline);
  // With `lock` on mutex_: reads a frame, or waits until another thread has, or until `until`. An
  // error when the connection is lost or the deadline is over.
  Status NextFrame(std::unique_lock<std::mutex>* lock, Deadline deadline, Deadline until);
  void Dispatch(Result<Frame> frame);
  void Lose(const Status& why);
  Status HungUpStatus() const;

  const std::string path_;
  const Identity identity_;
  ForkGuard guard_;
  Mapping control_;
  std::chrono::microseconds spin_{0};

  std::mutex ring_mutex_;  // guards writer_
  std::optional<RingWriter> writer_;

  // Guards what follows. Replies may come in another order than their requests (a group waits for
  // other ranks), and there is no thread to receive them: of the threads that wait, one reads for
  // all (`reading_`) and puts what is not its own into `replies_`.
  std::mutex mutex_;
  std::condition_variable replied_;
  bool reading_ = false;
  bool closing_ = false;
  uint32_t last_request_id_ = 0;
  std::vector<Frame> replies_;
  std::vector<uint32_t> forgotten_;
  Status lost_;
  std::atomic<bool> is_lost_{false};
};

// The reply as a `Reply`, or the Status that it carries or deserves.
Status CheckReply(const Frame& frame, const std::string& path, FrameType expected);

template <typename Request>
Result<uint32_t> Connection::Post(Request request, std::span<const int> fds, Deadline deadline) {
  if (in_child()) return Unexpected(ForkedStatus());
  request.header.request_id = NextRequestId();
  GRADSYNC_RETURN_IF_ERROR(SendRequest(AsBytes(request), fds, deadline));
  return request.header.request_id;
}

template <typename Reply, typename Request>
Result<Reply> Connection::Call(Request request, Deadline deadline, std::vector<UniqueFd>* fds) {
  if (in_child()) return Unexpected(ForkedStatus());
  request.header.request_id = NextRequestId();
  Result<Frame> frame = Exchange(request.header.request_id, AsBytes(request), deadline);
  if (!frame) return Unexpected(frame.error());
  GRADSYNC_RETURN_IF_ERROR(CheckReply(*frame, path_, Reply::kType));
  const std::optional<Reply> reply = ReadMessage<Reply>(frame->bytes);
  if (!reply) return Unexpected(GiveUp(Code::kProtocol, "gradsyncd sent a malformed reply"));
  if (fds != nullptr) *fds = std::move(frame->fds);
  return *reply;
}

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_CORE_CONNECTION_H_

// One trainer's connection: its socket, its control segment, its segments. Acts, decides nothing.
#ifndef GRADSYNC_SERVER_LOCAL_TRAINER_SESSION_H_
#define GRADSYNC_SERVER_LOCAL_TRAINER_SESSION_H_

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "server/job/actions.h"
#include "server/job/job_table.h"
#include "server/local/poller.h"
#include "server/local/segments.h"
#include "server/local/submissions.h"
#include "shm/completion.h"
#include "shm/frame_socket.h"
#include "shm/protocol.h"
#include "shm/ring_reader.h"
#include "shm/segment.h"
#include "shm/status.h"
#include "shm/unique_fd.h"

namespace gradsync {

// Sends a last ErrorReply and closes in such a way that the trainer can still read it.
void CloseWithError(UniqueFd socket, const Status& why);

// The reactor's thread only.
class TrainerSession {
 public:
  // `place` is what the session takes of its user's; given back by the destructor.
  TrainerSession(SessionId id, UniqueFd socket, uid_t uid, Charge place, SegmentTable segments);

  SessionId id() const { return id_; }
  uid_t uid() const { return uid_; }
  SegmentTable& segments() { return segments_; }

  // Watches the socket, and the process behind it where the kernel can.
  Status Watch(Poller* poller);

  // After a good Hello: makes the control segment and the doorbell that Welcome carries.
  Status OpenControl(Poller* poller);
  void MarkJoined(JoinRequest who) { who_ = std::move(who); }
  bool joined() const { return who_.has_value(); }
  // "rank 1 of job 'x'"; "a client that has not said HELLO" before it has joined.
  std::string Describe() const;
  const JoinRequest& who() const { return *who_; }  // joined only

  // Does not block: what a trainer is slow to read waits here. One that does not read kMaxUnsent
  // frames is as good as gone.
  template <typename Message>
  Status Send(const Message& message, std::span<const int> fds = {}) {
    return SendOrKeep(AsBytes(message), fds);
  }
  // Sends what waits, as far as the trainer has made room. Cheap when there is nothing. A hang-up
  // is for Receive to find, behind the trainer's last frames.
  void Flush();
  Status SendWelcome(Welcome welcome);
  Status SendError(uint32_t request_id, const Status& why);
  // kDeadlineExceeded when there is no frame.
  Result<Frame> Receive() { return ReceiveFrame(socket_.get(), Deadline{}); }

  // With a control segment only.
  RingReader& ring() { return *ring_; }
  // Null if `number` is out of range.
  CompletionWriter* group_words(uint32_t number);

  // The GPU of the session's group `number`, and its flag page; null if it uses none.
  const DeviceUse* device_use(uint32_t number) const {
    return number < device_uses_.size() && device_uses_[number].flags != nullptr
               ? &device_uses_[number]
               : nullptr;
  }
  void UseDevice(uint32_t number, DeviceUse use);
  // No stream of the trainer waits for the group any more. What it has submitted it still owes: the
  // engine goes on waiting for its streams, until they come or the group fails.
  void EndDeviceUse(uint32_t number);

  // Ends the connection, saying why unless the trainer has hung up (OK status). What the trainer
  // and the engine still use stays mapped until the destructor.
  void Close(Poller* poller, const Status& why);
  bool closed() const { return !socket_.valid(); }

 private:
  static constexpr size_t kMaxUnsent = 2 * kMaxSessionMessages;

  Status SendOrKeep(std::span<const std::byte> bytes, std::span<const int> fds);

  SessionLayout* layout() const { return reinterpret_cast<SessionLayout*>(control_.data()); }

  const SessionId id_;
  const uid_t uid_;
  const Charge place_;
  UniqueFd socket_;
  Poller* poller_ = nullptr;  // once watched
  std::deque<Frame> unsent_;
  UniqueFd process_;
  UniqueFd doorbell_;
  UniqueFd control_fd_;  // until Welcome is sent
  Mapping control_;
  std::optional<RingReader> ring_;
  std::vector<CompletionWriter> group_words_;  // by the session's number of the group; as needed
  std::vector<DeviceUse> device_uses_;         // by the same
  SegmentTable segments_;
  std::optional<JoinRequest> who_;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_LOCAL_TRAINER_SESSION_H_

// A message on its way: what was asked of the daemon, and its answer.
#ifndef GRADSYNC_CLIENT_CORE_MESSAGE_REQUEST_H_
#define GRADSYNC_CLIENT_CORE_MESSAGE_REQUEST_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "client/core/session.h"
#include "shm/frame_socket.h"
#include "shm/protocol.h"
#include "shm/status.h"

namespace gradsync {

// One thread at a time, but for Cancel. Movable; one that is dropped is cancelled.
class MessageRequest {
 public:
  // Copies `data`. `request` says to whom; its size and bytes are filled in here.
  static Result<MessageRequest> Send(std::shared_ptr<Session> session, SendMessage request,
                                     const std::byte* data, uint64_t bytes, Deadline deadline);
  static Result<MessageRequest> Receive(std::shared_ptr<Session> session,
                                        const ReceiveMessage& request, Deadline deadline);

  MessageRequest(MessageRequest&& other) noexcept
      : session_(std::move(other.session_)),
        id_(std::exchange(other.id_, 0)),
        group_(other.group_),
        receives_(other.receives_),
        deadline_(other.deadline_) {}
  MessageRequest& operator=(MessageRequest&&) = delete;
  MessageRequest(const MessageRequest&) = delete;
  MessageRequest& operator=(const MessageRequest&) = delete;
  ~MessageRequest();

  // The index of the first of `requests`, all of one session and none ended, that has been
  // answered; or their number, when another one has. Errors: of the session.
  static Result<size_t> WaitAny(std::span<const MessageRequest* const> requests);

  // Waits for the answer. Of a receive: copies the message, which must have `bytes`, to `data`, and
  // returns its sender.
  Result<uint32_t> End(std::byte* data, uint64_t bytes);

  // Any thread: if it has not been answered, it is now, with an error.
  void Cancel() const;

 private:
  MessageRequest(std::shared_ptr<Session> session, uint32_t id, uint32_t group, bool receives,
                 Deadline deadline)
      : session_(std::move(session)),
        id_(id),
        group_(group),
        receives_(receives),
        deadline_(deadline) {}

  Result<uint32_t> Take(const Frame& answer, std::byte* data, uint64_t bytes) const;

  std::shared_ptr<Session> session_;
  uint32_t id_;  // 0: ended
  uint32_t group_;
  bool receives_;
  Deadline deadline_;  // of a daemon that does not even say that the time is over
};

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_CORE_MESSAGE_REQUEST_H_

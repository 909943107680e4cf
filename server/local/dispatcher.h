// From what trainers send to events of the JobTable: connections, frames, ring entries, hang-ups.
#ifndef GRADSYNC_SERVER_LOCAL_DISPATCHER_H_
#define GRADSYNC_SERVER_LOCAL_DISPATCHER_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "server/local/executor.h"
#include "server/local/options.h"
#include "server/local/poller.h"
#include "server/local/segments.h"
#include "server/local/trainer_session.h"
#include "shm/frame_socket.h"
#include "shm/session_layout.h"
#include "shm/status.h"
#include "shm/unique_fd.h"

namespace gradsync {

// The reactor's thread only. Borrows everything; the options' zeros have been replaced.
class Dispatcher {
 public:
  Dispatcher(const ServerOptions& options, Executor* executor, Poller* poller);

  void Accept(UniqueFd socket, Time now);
  // Of a session: its socket, its process.
  void HandleEvent(const PollEvent& event, Time now);
  // Takes what the rings hold, a bounded number of entries from each. Whether there was any.
  bool DrainRings();

  // Before and after the reactor sleeps. False: an entry came in meanwhile, do not sleep.
  bool PrepareToSleep();
  void WakeUp();

  void CloseSilent(Time now);  // those that should have said Hello by now
  // Answers those that wait for the engine to let go of their memory.
  void AnswerReleased(Time now);
  std::optional<Time> NextDeadline() const;

 private:
  // What the sessions of one user share. Forgotten when nothing of it is used.
  struct User {
    std::shared_ptr<Budget> sessions;
    std::shared_ptr<Budget> bytes;
    std::shared_ptr<Budget> messages;  // those that take a descriptor
  };

  const User& UserOf(uid_t uid);
  // Charges the session's user with a message that has memory of its own; kOutOfMemory.
  Status ChargeMessage(uid_t uid, Message* message);
  bool DrainRings(uint32_t limit);
  bool DrainRing(TrainerSession* session, uint32_t limit);
  void CatchUp();
  void HandleEntry(TrainerSession* session, const Submission& entry);
  void ReceiveFrames(TrainerSession* session, Time now);
  void HandleFrame(TrainerSession* session, Frame frame, Time now);
  Status HandleRequest(TrainerSession* session, const FrameHeader& header, Frame frame, Time now);

  // One per request. An error ends the session; what the trainer may go on after is answered here.
  Status HandleHello(TrainerSession* session, std::span<const std::byte> frame, Time now);
  Status HandleAllocate(TrainerSession* session, std::span<const std::byte> frame);
  Status HandleFree(TrainerSession* session, std::span<const std::byte> frame, Time now);
  Status HandleCreateGroup(TrainerSession* session, std::span<const std::byte> frame, Time now);
  Status HandleDestroyGroup(TrainerSession* session, std::span<const std::byte> frame, Time now);
  Status HandleAbortGroup(TrainerSession* session, std::span<const std::byte> frame, Time now);
  Status HandleDescribeBucket(TrainerSession* session, std::span<const std::byte> frame);
  Status HandleSendMessage(TrainerSession* session, Frame frame, Time now);
  Status HandleReceiveMessage(TrainerSession* session, std::span<const std::byte> frame, Time now);
  Status HandleCancelMessage(TrainerSession* session, std::span<const std::byte> frame);
  Status HandleStandAside(TrainerSession* session, std::span<const std::byte> frame, Time now);
  // dispatcher_devices.cc
  Status HandleAllocateOnDevice(TrainerSession* session, std::span<const std::byte> frame);
  Status HandleImportFromDevice(TrainerSession* session, Frame frame);
  Status HandleUseDevice(TrainerSession* session, std::span<const std::byte> frame);
  Result<uint32_t> FindDevice(const TrainerSession& session, const DeviceUuid& uuid,
                              DeviceEngine** engine);
  void AnswerSegment(TrainerSession* session, uint32_t request_id,
                     const Result<SegmentTable::NewSegment>& segment);

  Status HandleGoodbye(TrainerSession* session, std::span<const std::byte> frame);

  void Acknowledge(TrainerSession* session, uint32_t request_id);
  void ReplyError(TrainerSession* session, uint32_t request_id, const Status& why);
  void LoseUnlessSent(TrainerSession* session, const Status& sent);
  uint32_t SpinMicroseconds(uint32_t local_world_size) const;

  const ServerOptions& options_;
  Executor* executor_;
  Poller* poller_;
  std::shared_ptr<Budget> total_bytes_;
  absl::flat_hash_map<uid_t, User> users_;
  SessionId last_session_ = 0;
  // A trainer's own GPU memory that it wants back, and that an operation may still hold.
  struct Release {
    SessionId session = 0;
    uint32_t request_id = 0;
    std::shared_ptr<const std::atomic<bool>> closed;
  };
  std::vector<Release> releases_;
  Time next_release_check_{};
  std::deque<std::pair<Time, SessionId>> silent_;  // connections by the time they must say Hello
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_LOCAL_DISPATCHER_H_

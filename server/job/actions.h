// What server/job asks the outside world to do. Values only: whoever drives the state machines
// (server/local) carries them out, in order.
#ifndef GRADSYNC_SERVER_JOB_ACTIONS_H_
#define GRADSYNC_SERVER_JOB_ACTIONS_H_

#include <cstdint>
#include <memory>
#include <variant>

#include "absl/container/inlined_vector.h"
#include "server/engine/engine.h"
#include "server/job/asides.h"
#include "server/job/operation.h"
#include "shm/status.h"

namespace gradsync {

using SessionId = uint64_t;  // never used again
using GroupId = uint64_t;    // daemon-wide, never used again

// Run `task`; then call JobTable::Finished(group, sequence).
struct StartTask {
  GroupId group = 0;
  uint64_t sequence = 0;
  std::shared_ptr<const Task> task;
  Duration timeout{};  // of a task on GPUs (DeviceEngine::Run)
};

// What the GPU engine has of the group is to end soon (DeviceEngine::Abandon).
struct AbandonTasks {
  GroupId group = 0;
};

// The group is over, and had tasks on GPUs (DeviceEngine::Forget).
struct ForgetGroup {
  GroupId group = 0;
};

// Tell the session that the operations of its group `number` below `completed` are complete.
struct CompleteOperations {
  SessionId session = 0;
  uint32_t number = 0;
  uint64_t completed = 0;
};

// Tell the session that its group `number` has failed for good, and why.
struct FailGroup {
  SessionId session = 0;
  uint32_t number = 0;
  Status status;
};

// Answer a CreateGroup request: `number` if `status` is OK.
struct ReplyCreateGroup {
  SessionId session = 0;
  uint32_t request_id = 0;
  uint32_t number = 0;
  Status status;
};

// Answer a request to send or to receive a message: with `status`, or the message that has come, or
// (null) that the one sent was taken.
struct AnswerMessage {
  SessionId session = 0;
  uint32_t request_id = 0;
  Status status;
  std::shared_ptr<const Message> message;
};

// Answer a request to stand aside.
struct AnswerAside {
  SessionId session = 0;
  AsideAnswer answer;
};

// The session broke the rules, or its job cannot go on: send it `status` and close it. The session
// has left already; do not call JobTable::Leave for it.
struct CloseSession {
  SessionId session = 0;
  Status status;
};

using Action = std::variant<StartTask, CompleteOperations, FailGroup, ReplyCreateGroup,
                            AnswerMessage, AnswerAside, CloseSession, AbandonTasks, ForgetGroup>;
using Actions = absl::InlinedVector<Action, 4>;

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_JOB_ACTIONS_H_

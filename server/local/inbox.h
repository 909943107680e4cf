// What other threads have for the reactor: finished operations, and calls.
#ifndef GRADSYNC_SERVER_LOCAL_INBOX_H_
#define GRADSYNC_SERVER_LOCAL_INBOX_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "server/engine/mutex.h"
#include "server/job/actions.h"
#include "server/job/job_table.h"
#include "server/job/operation.h"
#include "shm/status.h"
#include "shm/unique_fd.h"

namespace gradsync {

// The engine has finished a StartTask.
struct OperationDone {
  GroupId group = 0;
  uint64_t sequence = 0;
  Status result{};  // why it could not
};

// A look at the jobs that a thread waits for. Shared by that thread and the reactor; exactly one of
// Run and Refuse is called, by the reactor.
class PostedCall {
 public:
  using Function = std::function<void(const JobTable&, Time)>;

  explicit PostedCall(Function function) : function_(std::move(function)) {}

  // The caller's side: waits until the call was made (OK) or refused (why). At `deadline` the call
  // is withdrawn, kDeadlineExceeded: the function does not run after this has returned.
  Status Wait(Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);

  // The reactor's side.
  void Run(const JobTable& table, Time now) ABSL_LOCKS_EXCLUDED(mutex_);
  void Refuse(const Status& why) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  Mutex mutex_;
  CondVar changed_;  // answered_ has become true
  Function function_ ABSL_GUARDED_BY(mutex_);
  bool answered_ ABSL_GUARDED_BY(mutex_) = false;
  bool withdrawn_ ABSL_GUARDED_BY(mutex_) = false;
  Status status_ ABSL_GUARDED_BY(mutex_);
};

// Many posters, one reader: the reactor, which sleeps on fd() among others.
class Inbox {
 public:
  using Message = std::variant<OperationDone, std::shared_ptr<PostedCall>>;

  static Result<std::unique_ptr<Inbox>> Create();

  // Any thread. False once closed: nobody will read the message.
  bool Post(Message message) ABSL_LOCKS_EXCLUDED(mutex_);

  // Wakes the reactor without a message. Any thread, and signal handlers.
  void Ring();

  // The rest is the reactor's.

  // Polls readable, edge-triggered, after a Ring and after a Post to a sleeping reactor.
  int fd() const { return event_.get(); }

  // Cheap when there is nothing.
  bool empty() const { return count_.load(std::memory_order_seq_cst) == 0; }

  // Swaps all messages, oldest first, into `*messages`, which must be empty.
  void Take(std::vector<Message>* messages) ABSL_LOCKS_EXCLUDED(mutex_);

  // Announces that the reactor is about to sleep. False: a message came in meanwhile, do not sleep.
  bool PrepareToSleep();
  void WakeUp() { asleep_.store(false, std::memory_order_relaxed); }

  void Close() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  explicit Inbox(UniqueFd event) : event_(std::move(event)) {}

  UniqueFd event_;
  Mutex mutex_;
  std::vector<Message> messages_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<size_t> count_{0};
  std::atomic<bool> asleep_{false};
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_LOCAL_INBOX_H_

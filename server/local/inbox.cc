#include "server/local/inbox.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace gradsync {

Status PostedCall::Wait(Time deadline) {
  const MutexLock lock(&mutex_);
  while (!answered_ && changed_.WaitUntil(&mutex_, deadline)) {
  }
  if (answered_) return status_;
  withdrawn_ = true;
  return {Code::kDeadlineExceeded, "gradsyncd did not get to answer in time; it is busy"};
}

void PostedCall::Run(const JobTable& table, Time now) {
  // Locked throughout: a caller whose time is up waits for the function to end, because it may own
  // what the function writes to.
  const MutexLock lock(&mutex_);
  if (withdrawn_) return;
  function_(table, now);
  answered_ = true;
  changed_.SignalAll();
}

void PostedCall::Refuse(const Status& why) {
  const MutexLock lock(&mutex_);
  status_ = why;
  answered_ = true;
  changed_.SignalAll();
}

Result<std::unique_ptr<Inbox>> Inbox::Create() {
  UniqueFd event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event.valid()) {
    return Unexpected(ErrnoStatus(Code::kInternal, errno, "cannot create an eventfd"));
  }
  return std::unique_ptr<Inbox>(new Inbox(std::move(event)));
}

bool Inbox::Post(Message message) {
  {
    const MutexLock lock(&mutex_);
    if (closed_) return false;
    messages_.push_back(std::move(message));
    // Sequentially consistent with PrepareToSleep: either the reactor sees the message, or we see
    // that it sleeps.
    count_.store(messages_.size(), std::memory_order_seq_cst);
  }
  if (asleep_.load(std::memory_order_seq_cst) && asleep_.exchange(false)) Ring();
  return true;
}

void Inbox::Ring() {
  // Nobody reads the counter (the reactor listens for edges), and it never gets near its limit.
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(event_.get(), &one, sizeof(one));
}

void Inbox::Take(std::vector<Message>* messages) {
  if (empty()) return;
  const MutexLock lock(&mutex_);
  messages_.swap(*messages);
  count_.store(0, std::memory_order_seq_cst);
}

bool Inbox::PrepareToSleep() {
  asleep_.store(true, std::memory_order_seq_cst);
  return empty();
}

void Inbox::Close() {
  const MutexLock lock(&mutex_);
  closed_ = true;
}

}  // namespace gradsync

#include "shm/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace gradsync {
namespace {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// Not FUTEX_PRIVATE_FLAG: the word lies in memory that two processes share. The result is of no
// use: callers look at the word again whatever woke them.
void Futex(const std::atomic<uint32_t>& word, int operation, uint32_t value,
           const timespec* timeout) {
  syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

}  // namespace

void FutexWait(const std::atomic<uint32_t>& word, uint32_t expected,
               std::chrono::nanoseconds timeout) {
  if (timeout <= std::chrono::nanoseconds::zero()) return;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  timespec relative{};
  relative.tv_sec = seconds.count();
  relative.tv_nsec = (timeout - seconds).count();
  Futex(word, FUTEX_WAIT, expected, &relative);
}

void FutexWakeAll(const std::atomic<uint32_t>& word) { Futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

}  // namespace gradsync

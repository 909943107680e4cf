// Waiting on, and waking waiters of, a 32-bit word that several processes map (futex(2)).
#ifndef GRADSYNC_SHM_FUTEX_H_
#define GRADSYNC_SHM_FUTEX_H_

#include <atomic>
#include <chrono>
#include <cstdint>

namespace gradsync {

// Sleeps while `word` holds `expected`, for at most `timeout`. May return early for no reason: the
// caller looks at the word again.
void FutexWait(const std::atomic<uint32_t>& word, uint32_t expected,
               std::chrono::nanoseconds timeout);

// Wakes every waiter on `word`, in whichever process.
void FutexWakeAll(const std::atomic<uint32_t>& word);

}  // namespace gradsync

#endif  // GRADSYNC_SHM_FUTEX_H_

#include "shm/completion.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "shm/futex.h"
#include "shm/spin.h"

namespace gradsync {
namespace {

// The longest prefix of `text` of at most `limit` bytes that does not end inside a UTF-8 character.
size_t PrefixBytes(std::string_view text, size_t limit) {
  if (text.size() <= limit) return text.size();
  size_t bytes = limit;
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xc0) == 0x80) --bytes;
  return bytes;
}

}  // namespace

void CompletionWriter::Reset() {
  words_->completed.store(0, std::memory_order_relaxed);
  words_->code = 0;
  words_->text_bytes = 0;
  words_->state.store(static_cast<uint32_t>(GroupState::kActive), std::memory_order_release);
  failed_ = false;
}

void CompletionWriter::Complete(uint64_t completed) {
  words_->completed.store(completed, std::memory_order_release);
  Announce();
}

void CompletionWriter::Fail(const Status& status) {
  if (failed_) return;
  failed_ = true;
  const size_t bytes = PrefixBytes(status.message(), kErrorTextBytes);
  std::memcpy(words_->text.data(), status.message().data(), bytes);
  words_->text_bytes = static_cast<uint32_t>(bytes);
  words_->code = static_cast<int32_t>(status.code());
  words_->state.store(static_cast<uint32_t>(GroupState::kFailed), std::memory_order_release);
  Announce();
}

void CompletionWriter::Announce() {
  // Sequentially consistent with the waiter's increment of `waiters` and its read of `epoch`:
  // either it sees the new epoch and does not sleep, or we see that it is about to.
  words_->epoch.store(++epoch_, std::memory_order_seq_cst);
  if (words_->waiters.load(std::memory_order_seq_cst) != 0) FutexWakeAll(words_->epoch);
}

uint64_t CompletionReader::Completed() const {
  return words_->completed.load(std::memory_order_acquire);
}

Status CompletionReader::Failure() const {
  const uint32_t state = words_->state.load(std::memory_order_acquire);
  if (state == static_cast<uint32_t>(GroupState::kActive)) return OkStatus();
  const size_t bytes = std::min<size_t>(words_->text_bytes, kErrorTextBytes);
  return {ErrorCodeFrom(words_->code).value_or(Code::kProtocol),
          std::string(words_->text.data(), bytes)};
}

Status CompletionReader::Wait(uint64_t sequence, Deadline deadline, std::chrono::nanoseconds spin,
                              const std::function<Status()>& check_alive) const {
  if (spin.count() > 0) {
    const Deadline until = std::min(deadline, std::chrono::steady_clock::now() + spin);
    do {
      for (int i = 0; i < 32; ++i) {
        if (IsComplete(sequence)) return OkStatus();
        SpinPause();
      }
    } while (std::chrono::steady_clock::now() < until);
  }
  for (;;) {
    words_->waiters.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t epoch = words_->epoch.load(std::memory_order_seq_cst);
    const bool complete = IsComplete(sequence);
    Status failure = complete ? OkStatus() : Failure();
    if (!complete && failure.ok()) {
      const auto left = deadline - std::chrono::steady_clock::now();
      FutexWait(words_->epoch, epoch, std::min<std::chrono::nanoseconds>(left, kLivenessInterval));
    }
    words_->waiters.fetch_sub(1, std::memory_order_seq_cst);
    // Complete wins over failed: an operation that finished before the failure did finish.
    if (complete || IsComplete(sequence)) return OkStatus();
    if (!failure.ok()) return failure;
    if (Status late = Failure(); !late.ok()) return late;
    GRADSYNC_RETURN_IF_ERROR(check_alive());
    if (std::chrono::steady_clock::now() >= deadline) {
      return {Code::kDeadlineExceeded, "the daemon did not answer in time"};
    }
  }
}

}  // namespace gradsync

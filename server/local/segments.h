// The segments of one session: numbers, memory, limits.
#ifndef GRADSYNC_SERVER_LOCAL_SEGMENTS_H_
#define GRADSYNC_SERVER_LOCAL_SEGMENTS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shm/segment.h"
#include "shm/status.h"
#include "shm/unique_fd.h"

namespace gradsync {

// An amount that may be handed out up to a limit. Thread-safe: the last holder of a segment may be
// a thread of the engine.
class Budget {
 public:
  explicit Budget(uint64_t limit) : limit_(limit) {}

  bool TryTake(uint64_t amount);
  void GiveBack(uint64_t amount) { used_.fetch_sub(amount, std::memory_order_relaxed); }
  uint64_t used() const { return used_.load(std::memory_order_relaxed); }
  uint64_t limit() const { return limit_; }

 private:
  const uint64_t limit_;
  std::atomic<uint64_t> used_{0};
};

// A part of a budget, given back by the destructor.
class Charge {
 public:
  Charge(Charge&& other) noexcept
      : budget_(std::move(other.budget_)), amount_(std::exchange(other.amount_, 0)) {}
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;
  Charge& operator=(Charge&&) = delete;
  ~Charge() {
    if (budget_ != nullptr) budget_->GiveBack(amount_);
  }

  static std::optional<Charge> Take(const std::shared_ptr<Budget>& budget, uint64_t amount) {
    if (!budget->TryTake(amount)) return std::nullopt;
    return Charge(budget, amount);
  }

 private:
  Charge(std::shared_ptr<Budget> budget, uint64_t amount)
      : budget_(std::move(budget)), amount_(amount) {}

  std::shared_ptr<Budget> budget_;
  uint64_t amount_;
};

struct SegmentLimits {
  uint32_t segments = 0;  // of a session
  uint64_t bytes = 0;     // of a session
};

// What sessions share: bytes of segments of one user, and of all.
struct SharedBudgets {
  std::shared_ptr<Budget> user;
  std::shared_ptr<Budget> total;
};

// One thread. What it hands out by shared_ptr outlives it: memory that an operation still needs
// stays mapped, and counts against the limits, until the operation lets go of it.
class SegmentTable {
 public:
  SegmentTable(SegmentLimits limits, SharedBudgets shared_bytes);

  struct NewSegment {
    uint32_t number = 0;
    uint64_t bytes = 0;  // whole pages
    UniqueFd fd;
  };
  // Makes and maps a segment of at least `bytes`. kInvalidArgument for 0; kOutOfMemory if a limit
  // is reached (the text names the flag that raises it) or the system refuses.
  Result<NewSegment> Allocate(uint64_t bytes, const std::string& label);

  // The number may be given to the next segment. False if there is no such segment.
  bool Free(uint32_t number);

  // Null if there is no such segment.
  const std::shared_ptr<const Mapping>* Find(uint32_t number) const {
    return number < segments_.size() && segments_[number] != nullptr ? &segments_[number] : nullptr;
  }

  uint64_t bytes() const { return bytes_->used(); }

 private:
  struct Segment;

  uint32_t TakeNumber();

  std::shared_ptr<Budget> count_;
  std::shared_ptr<Budget> bytes_;
  SharedBudgets shared_bytes_;
  std::vector<std::shared_ptr<const Mapping>> segments_;  // by number; null: free
  std::vector<uint32_t> free_numbers_;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_LOCAL_SEGMENTS_H_

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

#include "server/engine/device_engine.h"
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

// Of a session.
struct SegmentLimits {
  uint32_t segments = 0;
  uint64_t bytes = 0;
  uint64_t device_bytes = 0;  // that the daemon allocated on GPUs
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

  // Allocates a segment on a GPU. kOutOfMemory as above.
  Result<NewSegment> AllocateOn(DeviceEngine* engine, uint32_t device, uint64_t bytes);
  // Makes a segment of GPU memory that is there already.
  Result<NewSegment> Adopt(std::shared_ptr<const DeviceMemory> memory);

  // Becomes true when the memory of a trainer's that segment `number` is made of has been closed,
  // after it was freed and no operation needs it any more. Null if the segment is no such memory.
  std::shared_ptr<const std::atomic<bool>> ClosedMark(uint32_t number) const;

  // The number may be given to the next segment. False if there is no such segment.
  bool Free(uint32_t number);

  // Null if there is no such segment in the machine's memory, or on a GPU.
  const std::shared_ptr<const Mapping>* Find(uint32_t number) const {
    const Entry* entry = FindEntry(number);
    return entry != nullptr && entry->host != nullptr ? &entry->host : nullptr;
  }
  const std::shared_ptr<const DeviceMemory>* FindOnDevice(uint32_t number) const {
    const Entry* entry = FindEntry(number);
    return entry != nullptr && entry->device != nullptr ? &entry->device : nullptr;
  }

  uint64_t bytes() const { return bytes_->used(); }

 private:
  struct Segment;
  struct DeviceSegment;
  // One of the two; neither: the number is free.
  struct Entry {
    std::shared_ptr<const Mapping> host;
    std::shared_ptr<const DeviceMemory> device;
    std::shared_ptr<const std::atomic<bool>> closed;  // of a trainer's memory on a GPU
  };

  const Entry* FindEntry(uint32_t number) const {
    return number < segments_.size() ? &segments_[number] : nullptr;
  }
  Result<Charge> TakePlace();
  uint32_t Number(Entry entry);

  std::shared_ptr<Budget> count_;
  std::shared_ptr<Budget> bytes_;
  SharedBudgets shared_bytes_;
  std::shared_ptr<Budget> device_bytes_;
  std::vector<Entry> segments_;  // by number
  std::vector<uint32_t> free_numbers_;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_LOCAL_SEGMENTS_H_

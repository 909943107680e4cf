#include "server/local/segments.h"

#include <unistd.h>

#include <limits>

#include "absl/strings/str_cat.h"

namespace gradsync {
namespace {

// 0 if the sum does not fit: nothing that large can be allocated.
uint64_t RoundUpToPages(uint64_t bytes) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (bytes > std::numeric_limits<uint64_t>::max() - page) return 0;
  return (bytes + page - 1) / page * page;
}

Status OverLimit(uint64_t bytes, const Budget& budget, const char* whose, const char* flag) {
  return {Code::kOutOfMemory, absl::StrCat("a segment of ", bytes, " bytes does not fit: ", whose,
                                           " hold ", budget.used(), " of at most ", budget.limit(),
                                           " bytes; free segments or raise gradsyncd's ", flag)};
}

}  // namespace

bool Budget::TryTake(uint64_t amount) {
  uint64_t used = used_.load(std::memory_order_relaxed);
  do {
    if (amount > limit_ || used > limit_ - amount) return false;
  } while (!used_.compare_exchange_weak(used, used + amount, std::memory_order_relaxed));
  return true;
}

// A mapping with what it costs. The charges are given back after the memory.
struct SegmentTable::Segment {
  Charge count;
  Charge bytes;
  Charge user_bytes;
  Charge total_bytes;
  Mapping mapping;
};

struct SegmentTable::DeviceSegment {
  // Set by the destructor, once all below is gone.
  struct Mark {
    std::shared_ptr<std::atomic<bool>> closed = std::make_shared<std::atomic<bool>>(false);
    Mark() = default;
    Mark(Mark&& other) noexcept : closed(std::exchange(other.closed, nullptr)) {}
    Mark(const Mark&) = delete;
    Mark& operator=(const Mark&) = delete;
    Mark& operator=(Mark&&) = delete;
    ~Mark() {
      if (closed != nullptr) closed->store(true, std::memory_order_release);
    }
  };
  Mark mark;
  Charge count;
  std::optional<Charge> bytes;
  std::shared_ptr<const DeviceMemory> memory;
};

SegmentTable::SegmentTable(SegmentLimits limits, SharedBudgets shared_bytes)
    : count_(std::make_shared<Budget>(limits.segments)),
      bytes_(std::make_shared<Budget>(limits.bytes)),
      shared_bytes_(std::move(shared_bytes)),
      device_bytes_(std::make_shared<Budget>(limits.device_bytes)) {}

Result<Charge> SegmentTable::TakePlace() {
  std::optional<Charge> place = Charge::Take(count_, 1);
  if (place) return *std::move(place);
  return Unexpected(Code::kOutOfMemory,
                    absl::StrCat("this session holds ", count_->limit(),
                                 " segments already, which is the most that a session may have; "
                                 "free some, or allocate fewer and larger ones"));
}

Result<SegmentTable::NewSegment> SegmentTable::Allocate(uint64_t bytes, const std::string& label) {
  if (bytes == 0) return Unexpected(Code::kInvalidArgument, "a segment must have at least 1 byte");
  const uint64_t rounded = RoundUpToPages(bytes);
  if (rounded == 0) {
    return Unexpected(OverLimit(bytes, *shared_bytes_.total, "all sessions", "--max-total-bytes"));
  }
  Result<Charge> count = TakePlace();
  if (!count) return Unexpected(count.error());
  std::optional<Charge> session = Charge::Take(bytes_, rounded);
  if (!session) {
    return Unexpected(
        OverLimit(rounded, *bytes_, "this session's segments", "--max-session-bytes"));
  }
  std::optional<Charge> user = Charge::Take(shared_bytes_.user, rounded);
  if (!user) {
    return Unexpected(OverLimit(rounded, *shared_bytes_.user,
                                "the segments of this user's sessions", "--max-user-bytes"));
  }
  std::optional<Charge> total = Charge::Take(shared_bytes_.total, rounded);
  if (!total) {
    return Unexpected(OverLimit(rounded, *shared_bytes_.total, "the segments of all sessions",
                                "--max-total-bytes"));
  }
  Result<UniqueFd> fd = CreateSealedMemfd("gradsync:" + label, rounded);
  if (!fd) return Unexpected(fd.error());
  Result<Mapping> mapping = Mapping::Map(fd->get(), rounded);
  if (!mapping) return Unexpected(mapping.error());
  auto segment =
      std::make_shared<Segment>(Segment{std::move(*count), std::move(*session), std::move(*user),
                                        std::move(*total), std::move(*mapping)});
  const std::shared_ptr<const Mapping> host(segment, &segment->mapping);
  return NewSegment{Number({.host = host, .device = nullptr, .closed = nullptr}), rounded,
                    std::move(*fd)};
}

Result<SegmentTable::NewSegment> SegmentTable::AllocateOn(DeviceEngine* engine, uint32_t device,
                                                          uint64_t bytes) {
  if (bytes == 0) return Unexpected(Code::kInvalidArgument, "a segment must have at least 1 byte");
  Result<Charge> count = TakePlace();
  if (!count) return Unexpected(count.error());
  std::optional<Charge> charge = Charge::Take(device_bytes_, bytes);
  if (!charge) {
    return Unexpected(OverLimit(bytes, *device_bytes_, "this session's segments on GPUs",
                                "--max-session-device-bytes"));
  }
  Result<DeviceEngine::Exported> exported = engine->Allocate(device, bytes);
  if (!exported) return Unexpected(exported.error());
  const uint64_t size = exported->memory->size();
  auto segment = std::make_shared<DeviceSegment>(
      DeviceSegment{{}, *std::move(count), *std::move(charge), std::move(exported->memory)});
  std::shared_ptr<const DeviceMemory> memory(segment, segment->memory.get());
  return NewSegment{Number({.host = nullptr, .device = std::move(memory), .closed = nullptr}), size,
                    std::move(exported->fd)};
}

Result<SegmentTable::NewSegment> SegmentTable::Adopt(std::shared_ptr<const DeviceMemory> memory) {
  Result<Charge> count = TakePlace();
  if (!count) return Unexpected(count.error());
  const uint64_t size = memory->size();
  auto segment = std::make_shared<DeviceSegment>(
      DeviceSegment{{}, *std::move(count), std::nullopt, std::move(memory)});
  std::shared_ptr<const DeviceMemory> adopted(segment, segment->memory.get());
  const std::shared_ptr<const std::atomic<bool>> closed = segment->mark.closed;
  return NewSegment{Number({.host = nullptr, .device = std::move(adopted), .closed = closed}), size,
                    UniqueFd()};
}

uint32_t SegmentTable::Number(Entry entry) {
  if (free_numbers_.empty()) {
    segments_.push_back(std::move(entry));
    return static_cast<uint32_t>(segments_.size() - 1);
  }
  const uint32_t number = free_numbers_.back();
  free_numbers_.pop_back();
  segments_[number] = std::move(entry);
  return number;
}

std::shared_ptr<const std::atomic<bool>> SegmentTable::ClosedMark(uint32_t number) const {
  const Entry* entry = FindEntry(number);
  return entry == nullptr ? nullptr : entry->closed;
}

bool SegmentTable::Free(uint32_t number) {
  if (Find(number) == nullptr && FindOnDevice(number) == nullptr) return false;
  segments_[number] = {};
  free_numbers_.push_back(number);
  return true;
}

}  // namespace gradsync

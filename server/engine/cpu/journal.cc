#include "server/engine/cpu/journal.h"

#include <cstring>
#include <new>

#include "server/engine/cpu/reduction.h"

namespace gradsync {
namespace {

template <typename T>
T* At(std::byte* memory, size_t offset) {
  return std::launder(static_cast<T*>(static_cast<void*>(memory + offset)));
}

size_t SlotOffset(uint32_t index) { return sizeof(JournalHeader) + index * sizeof(JournalSlot); }

size_t RecordOffset(uint32_t slots, uint32_t index) {
  return SlotOffset(slots) + index * sizeof(JournalRecord);
}

}  // namespace

size_t Journal::BytesFor(uint32_t slots) { return RecordOffset(slots, kJournalRecords); }

Journal Journal::Format(std::span<std::byte> memory, uint32_t slots) {
  const Journal journal(memory.data(), slots);
  // Only the words that say what is valid: touching the rest would allocate it.
  for (uint32_t i = 0; i < slots; ++i) {
    auto* slot = new (memory.data() + SlotOffset(i)) JournalSlot;
    slot->claim.store(0, std::memory_order_relaxed);
    slot->progress.store(0, std::memory_order_relaxed);
  }
  for (uint32_t i = 0; i < kJournalRecords; ++i) {
    auto* record = At<JournalRecord>(memory.data(), RecordOffset(slots, i));
    record->state.store(static_cast<uint32_t>(RecordState::kUnused), std::memory_order_relaxed);
  }
  const JournalHeader header{kJournalMagic,   kJournalVersion, slots,
                             kJournalRecords, kTileBytes,      {}};
  std::memcpy(memory.data(), &header, sizeof(header));
  return journal;
}

Result<Journal> Journal::Open(std::span<std::byte> memory) {
  JournalHeader header{};
  if (memory.size() >= sizeof(header)) std::memcpy(&header, memory.data(), sizeof(header));
  if (header.magic != kJournalMagic || header.version != kJournalVersion ||
      header.records != kJournalRecords || header.tile_bytes != kTileBytes ||
      memory.size() < BytesFor(header.slots)) {
    return Unexpected(
        Code::kProtocol,
        "no journal that this version of gradsyncd can read: the reductions that were "
        "interrupted cannot be finished");
  }
  return Journal(memory.data(), header.slots);
}

JournalSlot& Journal::slot(uint32_t index) const {
  return *At<JournalSlot>(memory_, SlotOffset(index));
}

JournalRecord& Journal::record(uint32_t index) const {
  return *At<JournalRecord>(memory_, RecordOffset(slots_, index));
}

void Journal::BeginRecord(uint32_t index, const Task& task, uint64_t tiles_per_batch) const {
  JournalRecord& record = this->record(index);
  record.state.store(static_cast<uint32_t>(RecordState::kUnused), std::memory_order_relaxed);
  // As in BatchJournal: the old task must be gone before the new one's words appear.
  std::atomic_thread_fence(std::memory_order_release);
  record.dtype = static_cast<uint8_t>(task.dtype);
  record.reduce_op = static_cast<uint8_t>(task.reduce_op);
  record.id = task.id;
  record.ranks = task.inputs.size();
  record.count = task.count;
  record.tiles_per_batch = tiles_per_batch;
  const uint64_t batches = BatchCount(task, tiles_per_batch);
  for (uint64_t i = 0; i < batches; ++i) record.done[i].store(0, std::memory_order_relaxed);
  record.state.store(static_cast<uint32_t>(RecordState::kActive), std::memory_order_release);
}

void Journal::FinishRecord(uint32_t index) const {
  record(index).state.store(static_cast<uint32_t>(RecordState::kFinished),
                            std::memory_order_release);
}

}  // namespace gradsync

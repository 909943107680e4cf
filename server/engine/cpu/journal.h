// The behaviour over journal_layout.h: making and opening a journal, and writing down how far a
// reduction is. What reads it after a death is recovery.h.
#ifndef GRADSYNC_SERVER_ENGINE_CPU_JOURNAL_H_
#define GRADSYNC_SERVER_ENGINE_CPU_JOURNAL_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "server/engine/cpu/journal_layout.h"
#include "server/engine/engine.h"
#include "shm/status.h"

namespace gradsync {

// A view of a journal in memory that somebody else owns; copies are views of the same one.
class Journal {
 public:
  // Bytes of a journal with `slots` slots. Most of them are never touched, so take no memory.
  static size_t BytesFor(uint32_t slots);

  // Makes `memory` an empty journal, whatever it held. It must have BytesFor(slots) bytes and start
  // at a cache line.
  static Journal Format(std::span<std::byte> memory, uint32_t slots);

  // The journal that is in `memory`; kProtocol if there is none of this version.
  static Result<Journal> Open(std::span<std::byte> memory);

  uint32_t slot_count() const { return slots_; }
  JournalSlot& slot(uint32_t index) const;
  JournalRecord& record(uint32_t index) const;

  // Makes record `index` that of `task`, which now begins, in batches of `tiles_per_batch`.
  void BeginRecord(uint32_t index, const Task& task, uint64_t tiles_per_batch) const;
  // Every output of the record's task is written.
  void FinishRecord(uint32_t index) const;

 private:
  Journal(std::byte* memory, uint32_t slots) : memory_(memory), slots_(slots) {}

  std::byte* memory_;
  uint32_t slots_;
};

// What a worker writes down while it does one batch of a journaled reduction, in this order:
// Begin, then for each tile Valid and Done, then End. Offsets of tiles count from the batch's
// first.
class BatchJournal {
 public:
  BatchJournal(const Journal& journal, uint32_t record, uint32_t slot, uint64_t batch)
      : record_(&journal.record(record)),
        slot_(&journal.slot(slot)),
        claim_(Claim(record, batch)),
        batch_(batch) {}

  // What JournalSlot::claim holds for a batch; and back.
  static uint64_t Claim(uint32_t record, uint64_t batch) {
    return (uint64_t{record} + 1) << 48 | batch;
  }
  static bool ClaimsRecord(uint64_t claim, uint32_t record) { return claim >> 48 == record + 1; }
  static uint64_t ClaimedBatch(uint64_t claim) { return claim & ((uint64_t{1} << 48) - 1); }

  // Where a tile is combined.
  std::byte* result() const { return slot_->result.data(); }

  void Begin() {
    slot_->progress.store(0, std::memory_order_relaxed);
    slot_->claim.store(claim_, std::memory_order_release);
    FenceResult();
  }
  void Valid(uint64_t tile) { slot_->progress.store(2 * tile + 1, std::memory_order_release); }
  void Done(uint64_t tile) {
    slot_->progress.store(2 * (tile + 1), std::memory_order_release);
    FenceResult();
  }
  void End() {
    record_->done[batch_].store(1, std::memory_order_release);
    slot_->claim.store(0, std::memory_order_release);
  }

 private:
  // Nothing may be written to `result` before the word that says it is no longer needed: a release
  // store keeps what precedes it from moving down, this keeps what follows from moving up.
  static void FenceResult() { std::atomic_thread_fence(std::memory_order_release); }

  JournalRecord* record_;
  JournalSlot* slot_;
  uint64_t claim_;
  uint64_t batch_;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_ENGINE_CPU_JOURNAL_H_

#include "server/engine/cpu/recovery.h"

#include <algorithm>
#include <optional>
#include <string>

namespace gradsync {
namespace {

RecordState StateOf(const JournalRecord& record) {
  return static_cast<RecordState>(record.state.load(std::memory_order_acquire));
}

std::optional<uint32_t> FindRecord(const Journal& journal, uint64_t id, RecordState state) {
  for (uint32_t i = 0; i < kJournalRecords; ++i) {
    const JournalRecord& record = journal.record(i);
    if (StateOf(record) == state && record.id == id) return i;
  }
  return std::nullopt;
}

Status CheckShape(const JournalRecord& record, const Task& task) {
  if (record.dtype != static_cast<uint8_t>(task.dtype) ||
      record.reduce_op != static_cast<uint8_t>(task.reduce_op) ||
      record.ranks != task.inputs.size() || record.count != task.count) {
    return {Code::kMismatch,
            "interrupted operation " + std::to_string(task.id) + " was " +
                ReduceOpName(static_cast<ReduceOp>(record.reduce_op)) + " of " +
                std::to_string(record.count) + " x " + DTypeName(static_cast<DType>(record.dtype)) +
                " over " + std::to_string(record.ranks) + " ranks, not " +
                ReduceOpName(task.reduce_op) + " of " + std::to_string(task.count) + " x " +
                DTypeName(task.dtype) + " over " + std::to_string(task.inputs.size())};
  }
  if (record.tiles_per_batch == 0 || BatchCount(task, record.tiles_per_batch) > kMaxBatches) {
    return {Code::kProtocol, "the journal's record of operation " + std::to_string(task.id) +
                                 " has impossible batches"};
  }
  return OkStatus();
}

Status ResumeBegunBatches(const Journal& journal, uint32_t index, const Reduction& reduction,
                          StepObserver* observer) {
  for (uint32_t i = 0; i < journal.slot_count(); ++i) {
    const uint64_t claim = journal.slot(i).claim.load(std::memory_order_acquire);
    if (!BatchJournal::ClaimsRecord(claim, index)) continue;
    const uint64_t batch = BatchJournal::ClaimedBatch(claim);
    const uint64_t progress = journal.slot(i).progress.load(std::memory_order_acquire);
    if (batch >= reduction.batches() || progress > 2 * reduction.TilesIn(batch)) {
      return {Code::kProtocol, "the journal's slot " + std::to_string(i) +
                                   " claims what operation " +
                                   std::to_string(journal.record(index).id) + " does not have"};
    }
    // Also where it died after the last tile or the batch's mark: then only the slot is freed.
    reduction.ResumeBatch(journal, index, i, observer);
  }
  return OkStatus();
}

std::optional<uint32_t> FindFreeSlot(const Journal& journal) {
  for (uint32_t i = 0; i < journal.slot_count(); ++i) {
    if (journal.slot(i).claim.load(std::memory_order_acquire) == 0) return i;
  }
  return std::nullopt;
}

}  // namespace

std::vector<uint64_t> InterruptedTasks(const Journal& journal) {
  std::vector<uint64_t> ids;
  for (uint32_t i = 0; i < kJournalRecords; ++i) {
    const JournalRecord& record = journal.record(i);
    if (StateOf(record) == RecordState::kActive) ids.push_back(record.id);
  }
  return ids;
}

Result<Recovered> Recover(const Journal& journal, const Task& task, StepObserver* observer) {
  const std::optional<uint32_t> index = FindRecord(journal, task.id, RecordState::kActive);
  if (!index) {
    return FindRecord(journal, task.id, RecordState::kFinished) ? Recovered::kAlreadyFinished
                                                                : Recovered::kNotBegun;
  }
  const JournalRecord& record = journal.record(*index);
  GRADSYNC_RETURN_IF_ERROR(CheckShape(record, task));
  const Reduction reduction(task, record.tiles_per_batch);
  GRADSYNC_RETURN_IF_ERROR(ResumeBegunBatches(journal, *index, reduction, observer));
  const std::optional<uint32_t> slot = FindFreeSlot(journal);
  if (!slot) {
    return Unexpected(Code::kFailedPrecondition,
                      "every slot of the journal belongs to another interrupted operation; recover "
                      "those first");
  }
  for (uint64_t batch = 0; batch < reduction.batches(); ++batch) {
    if (record.done[batch].load(std::memory_order_acquire) == 0) {
      reduction.RunBatch(batch, journal, *index, *slot, observer);
    }
  }
  journal.FinishRecord(*index);
  return Recovered::kFinishedNow;
}

}  // namespace gradsync

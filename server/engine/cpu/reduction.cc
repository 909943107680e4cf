#include "server/engine/cpu/reduction.h"

#include <algorithm>

namespace gradsync {
namespace {

uint64_t DivideUp(uint64_t value, uint64_t divisor) { return (value + divisor - 1) / divisor; }

// How far in front of the stores the inputs are fetched. Far enough to come in time, and so near
// that they do not push what is being worked on out of the first-level cache, where buffers that
// start at pages compete for the same sets.
constexpr uint64_t kTilesAhead = 3;

// The same calls as BatchJournal, for a task that needs no journal.
class NoJournal {
 public:
  explicit NoJournal(std::byte* result) : result_(result) {}
  std::byte* result() const { return result_; }
  void Begin() {}
  void Combined() {}
  void Valid(uint64_t) {}
  void Stored() {}
  void Done(uint64_t) {}
  void End() {}

 private:
  std::byte* result_;
};

class PlainJournal : public BatchJournal {
 public:
  using BatchJournal::BatchJournal;
  void Combined() {}
  void Stored() {}
};

class ObservedJournal {
 public:
  ObservedJournal(const BatchJournal& journal, JournalSlot* slot, StepObserver* observer)
      : journal_(journal), slot_(slot), observer_(observer) {}

  std::byte* result() const { return journal_.result(); }
  void Begin() {
    journal_.Begin();
    observer_->At(Step::kBatchBegun, *slot_);
  }
  void Combined() { observer_->At(Step::kTileCombined, *slot_); }
  void Valid(uint64_t tile) {
    journal_.Valid(tile);
    observer_->At(Step::kTileValid, *slot_);
  }
  void Stored() { observer_->At(Step::kTileStored, *slot_); }
  void Done(uint64_t tile) {
    journal_.Done(tile);
    observer_->At(Step::kTileDone, *slot_);
  }
  void End() {
    journal_.End();
    observer_->At(Step::kBatchEnded, *slot_);
  }

 private:
  BatchJournal journal_;
  JournalSlot* slot_;
  StepObserver* observer_;
};

}  // namespace

uint64_t InputBytes(const Task& task) { return task.count * DTypeSize(task.dtype); }

size_t DivisorOf(const Task& task) { return task.divisor > 0 ? task.divisor : task.inputs.size(); }

bool IsInPlace(const Task& task) {
  for (size_t rank = 0; rank < task.inputs.size(); ++rank) {
    if (task.outputs[rank] == task.inputs[rank]) return true;
  }
  return false;
}

std::vector<Task> PartsOfReduceScatter(const Task& task) {
  std::vector<Task> parts(task.outputs.size());
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    Task& part = parts[rank];
    part.kind = OpKind::kReduce;
    part.dtype = task.dtype;
    part.reduce_op = task.reduce_op;
    part.divisor = task.divisor;
    part.root = static_cast<uint32_t>(rank);
    part.count = task.count;
    for (const std::byte* input : task.inputs) {
      part.inputs.push_back(input + rank * InputBytes(task));
    }
    part.outputs = task.outputs;
  }
  return parts;
}

uint64_t BatchCount(const Task& task, uint64_t tiles_per_batch) {
  return DivideUp(InputBytes(task), tiles_per_batch * kTileBytes);
}

Reduction::Reduction(const Task& task, uint64_t tiles_per_batch)
    : task_(task),
      outputs_(task.outputs.data() + (task.kind == OpKind::kReduce ? task.root : 0)),
      output_count_(task.kind == OpKind::kReduce ? 1 : task.outputs.size()),
      tiles_per_batch_(tiles_per_batch),
      bytes_(InputBytes(task)),
      tiles_(DivideUp(bytes_, kTileBytes)),
      combine_(FindCombineKernel(task.dtype, task.reduce_op, task.inputs.size(), DivisorOf(task))),
      spread_(FindSpreadKernel()) {}

uint64_t Reduction::TilesIn(uint64_t batch) const {
  return std::min(tiles_per_batch_, tiles_ - batch * tiles_per_batch_);
}

template <class Progress>
void Reduction::StoreTile(uint64_t batch, uint64_t tile, Progress& progress) const {
  const uint64_t number = batch * tiles_per_batch_ + tile;
  const uint64_t offset = number * kTileBytes;
  const uint64_t bytes = std::min<uint64_t>(kTileBytes, bytes_ - offset);
  // Near the end there is nothing to fetch; the tile itself is in the cache already.
  const uint64_t ahead = number + kTilesAhead + 1 < tiles_ ? kTilesAhead * kTileBytes : 0;
  spread_(progress.result(), outputs_, output_count_, offset, bytes, task_.inputs.data(),
          offset + ahead);
  progress.Stored();
  progress.Done(tile);
}

template <class Progress>
void Reduction::RunTiles(uint64_t batch, uint64_t first, Progress& progress) const {
  const uint64_t count = TilesIn(batch);
  for (uint64_t tile = first; tile < count; ++tile) {
    const uint64_t offset = (batch * tiles_per_batch_ + tile) * kTileBytes;
    const uint64_t bytes = std::min<uint64_t>(kTileBytes, bytes_ - offset);
    combine_(task_.inputs.data(), task_.inputs.size(), DivisorOf(task_), offset, bytes,
             progress.result());
    progress.Combined();
    progress.Valid(tile);
    StoreTile(batch, tile, progress);
  }
  progress.End();
}

void Reduction::RunBatch(uint64_t batch, std::byte* result) const {
  NoJournal progress(result);
  RunTiles(batch, 0, progress);
}

void Reduction::RunBatch(uint64_t batch, const Journal& journal, uint32_t record, uint32_t slot,
                         StepObserver* observer) const {
  PlainJournal progress(journal, record, slot, batch);
  if (observer == nullptr) {
    progress.Begin();
    RunTiles(batch, 0, progress);
  } else {
    ObservedJournal observed(progress, &journal.slot(slot), observer);
    observed.Begin();
    RunTiles(batch, 0, observed);
  }
}

template <class Progress>
void Reduction::Resume(uint64_t batch, uint64_t progress_word, Progress& progress) const {
  uint64_t tile = progress_word / 2;
  const bool is_valid = progress_word % 2 == 1;
  if (is_valid) StoreTile(batch, tile++, progress);
  RunTiles(batch, tile, progress);
}

void Reduction::ResumeBatch(const Journal& journal, uint32_t record, uint32_t slot,
                            StepObserver* observer) const {
  const JournalSlot& begun = journal.slot(slot);
  const uint64_t batch = BatchJournal::ClaimedBatch(begun.claim.load(std::memory_order_acquire));
  const uint64_t progress_word = begun.progress.load(std::memory_order_acquire);
  PlainJournal progress(journal, record, slot, batch);
  if (observer == nullptr) {
    Resume(batch, progress_word, progress);
  } else {
    ObservedJournal observed(progress, &journal.slot(slot), observer);
    Resume(batch, progress_word, observed);
  }
}

}  // namespace gradsync

// One all-reduce over memory, cut into batches that any thread may do.
#ifndef GRADSYNC_SERVER_ENGINE_CPU_REDUCTION_H_
#define GRADSYNC_SERVER_ENGINE_CPU_REDUCTION_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "server/engine/cpu/journal.h"
#include "server/engine/cpu/kernels.h"
#include "server/engine/engine.h"

namespace gradsync {

// Bytes of one block: of one rank's input, where that is not one for each rank.
uint64_t InputBytes(const Task& task);

// By what an average is divided.
size_t DivisorOf(const Task& task);

// Whether an output of `task` is its input: then only a journal makes it safe against a death.
bool IsInPlace(const Task& task);

// The kReduce for each rank that a kReduceScatter consists of. None is in place: whoever does them
// again after a death finds every input whole.
std::vector<Task> PartsOfReduceScatter(const Task& task);

// Batches of `tiles_per_batch` tiles that `task`'s result is cut into.
uint64_t BatchCount(const Task& task, uint64_t tiles_per_batch);

// The points of a journaled reduction at which a test may look at it, or die.
enum class Step : uint8_t {
  kBatchBegun,    // the batch is claimed
  kTileCombined,  // a result is in the slot, not declared valid yet
  kTileValid,     // it is, and no rank has it
  kTileStored,    // every rank has it, not declared done yet
  kTileDone,      // it is
  kBatchEnded,    // the batch is marked, the slot free
};

class StepObserver {
 public:
  virtual ~StepObserver() = default;
  // Called on the thread that did the step, with the slot that it uses.
  virtual void At(Step step, JournalSlot& slot) = 0;
};

class Reduction {
 public:
  // `task`, which is borrowed, is an all_reduce, bucket_reduce or reduce of a supported type and
  // operation, with at least one rank and one element.
  Reduction(const Task& task, uint64_t tiles_per_batch);

  uint64_t batches() const { return BatchCount(task_, tiles_per_batch_); }

  // Tiles of a batch; all but the last have the same number.
  uint64_t TilesIn(uint64_t batch) const;

  // Does a batch of an out-of-place task. `result` is kTileBytes of scratch.
  void RunBatch(uint64_t batch, std::byte* result) const;

  // Does a batch and writes it down in `record` and `slot` of `journal`. `observer`, for tests, may
  // be null: then it costs nothing.
  void RunBatch(uint64_t batch, const Journal& journal, uint32_t record, uint32_t slot,
                StepObserver* observer) const;

  // Finishes the batch that `slot` of `journal` has begun, for `record`.
  void ResumeBatch(const Journal& journal, uint32_t record, uint32_t slot,
                   StepObserver* observer) const;

 private:
  template <class Progress>
  void RunTiles(uint64_t batch, uint64_t first, Progress& progress) const;
  template <class Progress>
  void Resume(uint64_t batch, uint64_t progress_word, Progress& progress) const;
  template <class Progress>
  void StoreTile(uint64_t batch, uint64_t tile, Progress& progress) const;

  const Task& task_;
  std::byte* const* outputs_;  // that the result is stored to
  size_t output_count_;
  uint64_t tiles_per_batch_;
  uint64_t bytes_;  // of one rank
  uint64_t tiles_;
  CombineKernel combine_;
  SpreadKernel spread_;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_ENGINE_CPU_REDUCTION_H_

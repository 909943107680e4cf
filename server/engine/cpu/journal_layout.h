// The journal of the CPU engine, as bytes: plain data only. Behaviour is in journal.h.
//
// It says, at every instant, how far each in-place reduction has come, so that after the death of
// the process another one can finish it (recovery.h). It lies in shared memory that outlives the
// process; only the engine's process maps it. Offsets and pointers into trainers' memory are not in
// it: who recovers knows the task.
//
// A reduction is cut into tiles of kTileBytes of result, and consecutive tiles into batches. A
// worker takes a batch, and does its tiles in order: combine the inputs into its slot's `result`,
// declare it valid, store it to every rank, declare the tile done. So at any instant a batch is
//   done            marked so in the record;
//   begun           claimed by a slot: tiles below `progress` are done, and the next is either
//   intact
//                   in its inputs or whole in the slot's `result`;
//   not begun       neither: its inputs are intact.
#ifndef GRADSYNC_SERVER_ENGINE_CPU_JOURNAL_LAYOUT_H_
#define GRADSYNC_SERVER_ENGINE_CPU_JOURNAL_LAYOUT_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace gradsync {

inline constexpr uint64_t kJournalMagic = 0x6c6e726a63647267;  // "grdcjrnl"
inline constexpr uint32_t kJournalVersion = 1;                 // raised whenever this file changes

// Small enough that tile, result and the tiles fetched ahead share the first-level cache, and that
// the processor overlaps the stores of one tile with the loads of the next (engine_bench).
inline constexpr size_t kTileBytes = 1024;
inline constexpr uint32_t kJournalRecords = 64;  // in-place reductions at one time
inline constexpr uint32_t kMaxBatches =
    64 * 1024;  // of one reduction; greater ones: greater batches

struct JournalHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t slots;
  uint32_t records;
  uint32_t tile_bytes;
  std::array<uint8_t, 40> reserved;
};
static_assert(sizeof(JournalHeader) == 64);

// What one worker is at. Written by that worker only.
struct JournalSlot {
  // 0: nothing. Else the batch it has begun: (record + 1) << 48 | batch. Stored with release after
  // `progress` was set to 0; cleared with release after the batch's mark.
  alignas(64) std::atomic<uint64_t> claim;
  // Of the claimed batch: tiles done x 2, plus 1 while `result` holds the next one whole. Stored
  // with release after what it declares.
  std::atomic<uint64_t> progress;
  // Keeps the words of two workers two lines apart: lines are fetched in pairs.
  std::array<std::byte, 112> padding;
  std::array<std::byte, kTileBytes> result;
};
static_assert(sizeof(JournalSlot) == 128 + kTileBytes && offsetof(JournalSlot, result) == 128);

enum class RecordState : uint32_t {
  kUnused = 0,    // the rest of the record says nothing
  kActive = 1,    // the reduction has begun
  kFinished = 2,  // every output is written; kept until the record is needed again
};

// One in-place reduction. Written by the thread that begins it, then (`done`) by the workers, then
// (`state`) by the last of them.
struct JournalRecord {
  alignas(64) std::atomic<uint32_t> state;  // RecordState, stored with release after the rest
  uint8_t dtype;                            // DType
  uint8_t reduce_op;                        // ReduceOp
  uint16_t reserved;
  uint64_t id;     // Task::id
  uint64_t ranks;  // Task::inputs.size()
  uint64_t count;  // Task::count
  uint64_t tiles_per_batch;
  // 1 for each batch that is done, stored with release.
  alignas(64) std::array<std::atomic<uint8_t>, kMaxBatches> done;
};
static_assert(sizeof(JournalRecord) == 64 + kMaxBatches);

// In the journal follow: header, slots, records.
static_assert(std::is_trivially_copyable_v<JournalHeader>);
static_assert(std::is_standard_layout_v<JournalSlot> && std::is_standard_layout_v<JournalRecord>);
static_assert(std::is_trivially_destructible_v<JournalSlot> &&
              std::is_trivially_destructible_v<JournalRecord>);
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint64_t>) == 8);
static_assert(std::atomic<uint8_t>::is_always_lock_free && sizeof(std::atomic<uint8_t>) == 1);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_ENGINE_CPU_JOURNAL_LAYOUT_H_

// How a collective over ordinary memory is cut into pieces that pass through a small staging
// buffer.
#ifndef GRADSYNC_CLIENT_CORE_PIECES_H_
#define GRADSYNC_CLIENT_CORE_PIECES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace gradsync {

// A small staging buffer stays in cache, so that what is staged does not cost memory bandwidth
// twice; but every piece costs the daemon a hand-over of some 20 us. The window lets this rank copy
// one piece in and another out while the daemon is at a third. For an all-reduce of 25 MiB by two
// ranks on two cores with 2 MiB of second-level cache each, in ms (the same in shared memory in
// brackets): 64 KiB x 4: 7.8 (5.6), 256 KiB x 3: 7.6 (4.4), 512 KiB x 3: 7.4 (3.3), 1 MiB x 2: 6.7
// (2.6), 1 MiB x 3: 6.3 (2.2), 1 MiB x 4: 7.6 (2.5), 2 MiB x 3: 6.2 (2.0), one piece: 8 (1.8).
inline constexpr uint64_t kPieceBytes = 1024 * 1024;
inline constexpr uint64_t kWindow = 3;
inline constexpr uint64_t kStagingBytes = kPieceBytes * kWindow;

// Operations up to this (input and output together) use a staging buffer of this size instead, so
// that a process that only agrees on a few numbers does not pay for the large one.
inline constexpr uint64_t kSmallStagingBytes = 64 * 1024;

inline constexpr uint64_t kPieceAlignment = 64;

// Every rank must come to the same plan, since each piece is an operation of its own: it depends
// only on what the ranks of a collective agree on, not on where a rank's memory lies.
struct PiecePlan {
  uint64_t count = 0;     // elements of the whole collective
  uint64_t elements = 0;  // of every piece but the last
  uint64_t pieces = 0;
  uint64_t element_size = 1;
  uint64_t blocks = 1;        // of `elements`, in one piece's share of the staging buffer
  uint64_t input_blocks = 1;  // of those; the others are the output's

  uint64_t first_element(uint64_t piece) const { return piece * elements; }
  uint64_t elements_of(uint64_t piece) const {
    return std::min(elements, count - first_element(piece));
  }
  // Where the output begins, after the input; and what a piece takes in all.
  uint64_t input_stride() const {
    const uint64_t bytes = input_blocks * elements * element_size;
    return (bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
  }
  uint64_t slot_bytes() const {
    return input_stride() + (blocks - input_blocks) * elements * element_size;
  }
};

// For blocks of `count` > 0 elements of `element_size` bytes. `blocks` is 1 where the result takes
// the input's place, and 1 + the group's size for an all-gather.
inline PiecePlan PlanPieces(uint64_t count, uint64_t element_size, uint64_t blocks,
                            uint64_t input_blocks = 1, uint64_t piece_bytes = kPieceBytes) {
  const uint64_t room = piece_bytes / blocks / kPieceAlignment * kPieceAlignment / element_size;
  PiecePlan plan;
  plan.count = count;
  plan.elements = std::min(count, std::max<uint64_t>(room, 1));
  plan.pieces = (count - 1) / plan.elements + 1;
  plan.element_size = element_size;
  plan.blocks = blocks;
  plan.input_blocks = input_blocks;
  return plan;
}

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_CORE_PIECES_H_

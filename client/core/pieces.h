// How a collective over ordinary memory is cut into pieces that pass through a small staging
// buffer.
#ifndef GRADSYNC_CLIENT_CORE_PIECES_H_
#define GRADSYNC_CLIENT_CORE_PIECES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace gradsync {

// A piece of every rank fits the second-level cache of the core that combines them, so what is
// staged never reaches main memory; smaller ones cost more hand-overs than they save. The window
// lets this rank copy one piece in and another out while the daemon is at a third. Measured with
// tests/bench: see there before you change either.
inline constexpr uint64_t kPieceBytes = 256 * 1024;
inline constexpr uint64_t kWindow = 4;
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
  uint64_t blocks = 1;  // of `elements`, in one piece's share of the staging buffer

  uint64_t first_element(uint64_t piece) const { return piece * elements; }
  uint64_t elements_of(uint64_t piece) const {
    return std::min(elements, count - first_element(piece));
  }
  // Where the output of an all-gather begins, after the input; and what a piece takes in all.
  uint64_t input_stride() const {
    return (elements * element_size + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
  }
  uint64_t slot_bytes() const { return input_stride() + (blocks - 1) * elements * element_size; }
};

// For `count` > 0 elements of `element_size` bytes. `blocks` is 1 where the result takes the
// input's place, and 1 + the group's size for an all-gather.
inline PiecePlan PlanPieces(uint64_t count, uint64_t element_size, uint64_t blocks) {
  const uint64_t room = kPieceBytes / blocks / kPieceAlignment * kPieceAlignment / element_size;
  PiecePlan plan;
  plan.count = count;
  plan.elements = std::min(count, std::max<uint64_t>(room, 1));
  plan.pieces = (count - 1) / plan.elements + 1;
  plan.element_size = element_size;
  plan.blocks = blocks;
  return plan;
}

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_CORE_PIECES_H_

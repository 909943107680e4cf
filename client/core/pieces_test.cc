#include "client/core/pieces.h"

#include <gtest/gtest.h>

#include <utility>

namespace gradsync {
namespace {

TEST(PiecesTest, ASmallCollectiveIsOnePieceOfItsOwnSize) {
  const PiecePlan plan = PlanPieces(3, 4, 1);
  EXPECT_EQ(plan.pieces, 1);
  EXPECT_EQ(plan.elements_of(0), 3);
  EXPECT_LE(plan.slot_bytes(), kPieceAlignment);
}

TEST(PiecesTest, EveryElementIsInExactlyOnePiece) {
  for (const uint64_t element_size : {1, 2, 4, 8, 16}) {
    for (const uint64_t blocks : {1, 2, 3, 5, 257}) {
      for (const uint64_t count : {1, 2, 1000, 65535, 65536, 65537, 1000003}) {
        const PiecePlan plan = PlanPieces(count, element_size, blocks);
        uint64_t next = 0;
        for (uint64_t piece = 0; piece < plan.pieces; ++piece) {
          EXPECT_EQ(plan.first_element(piece), next);
          EXPECT_GT(plan.elements_of(piece), 0);
          next += plan.elements_of(piece);
        }
        EXPECT_EQ(next, count);
      }
    }
  }
}

TEST(PiecesTest, APieceFitsItsSlotWithInputAndOutput) {
  for (const uint64_t element_size : {1, 2, 4, 8, 16}) {
    for (const uint64_t blocks : {1, 2, 3, 5, 257}) {
      const PiecePlan plan = PlanPieces(1 << 24, element_size, blocks);
      EXPECT_LE(plan.slot_bytes(), kPieceBytes);
      EXPECT_GE(plan.slot_bytes(),
                plan.elements * element_size * blocks);  // and the blocks do not overlap
      EXPECT_EQ(plan.input_stride() % kPieceAlignment, 0);
    }
  }
}

TEST(PiecesTest, APieceFitsItsSlotWhateverTheBlocksOfInputAndOutput) {
  for (const uint64_t element_size : {1, 2, 16}) {
    for (const uint64_t ranks : {1, 2, 3, 7, 256}) {
      for (const uint64_t count : {1, 3, 1000, 1 << 20}) {
        for (const auto& [in, out] : {std::pair(ranks, uint64_t{1}), std::pair(ranks, ranks)}) {
          const PiecePlan plan = PlanPieces(count, element_size, in + out, in);
          EXPECT_LE(plan.slot_bytes(), kPieceBytes);
          EXPECT_GE(plan.input_stride(), in * plan.elements * element_size);
          EXPECT_EQ(plan.slot_bytes() - plan.input_stride(), out * plan.elements * element_size);
        }
      }
    }
  }
}

TEST(PiecesTest, PiecesOfACollectiveBeginAlignedInItsMemory) {
  const PiecePlan plan = PlanPieces(1 << 24, 2, 3);
  EXPECT_EQ(plan.elements * 2 % kPieceAlignment, 0);
}

}  // namespace
}  // namespace gradsync

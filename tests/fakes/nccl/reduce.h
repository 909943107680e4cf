// The arithmetic of reductions.
#ifndef GRADSYNC_TESTS_FAKES_NCCL_REDUCE_H_
#define GRADSYNC_TESTS_FAKES_NCCL_REDUCE_H_

#include <cstddef>
#include <vector>

#include "tests/fakes/nccl/nccl_api.h"

namespace gradsync::fake_nccl {

// 0 for what is no type.
size_t TypeBytes(ncclDataType_t type);

// One rank's input, and what it is multiplied by first; or NULL.
struct Input {
  const std::byte* data = nullptr;
  const std::byte* scalar = nullptr;
};

// Reduces `count` elements of each input, from its element `first` on, to each of `outputs`,
// likewise. Inputs and outputs may be the same. Starts with the input of rank `start`: the order
// that a ring has for a chunk, and so what is rounded. For PreMulSum, `op` is ncclSum.
void Reduce(ncclDataType_t type, ncclRedOp_t op, const std::vector<Input>& inputs, size_t start,
            size_t first, size_t count, const std::vector<std::byte*>& outputs);

}  // namespace gradsync::fake_nccl

#endif  // GRADSYNC_TESTS_FAKES_NCCL_REDUCE_H_

// What c10d hands to a collective, checked before any other rank hears of it. Each throws
// ValueError or TypeError.
#ifndef GRADSYNC_CLIENT_TORCH_COLLECTIVE_CHECKS_H_
#define GRADSYNC_CLIENT_TORCH_COLLECTIVE_CHECKS_H_

#include <ATen/ATen.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "gradsync/gradsync.h"

namespace gradsync::torch {

// A process group, to a check.
struct GroupSize {
  int size;
  int rank;
};

// NotImplementedError for what there is no reduction for, on that device.
gradsync_reduce_op ToReduceOp(const c10d::ReduceOp& op, c10::Device device);

// Whether gradsync can calculate with the tensor's elements.
void CheckReduces(const at::Tensor& tensor, const char* operation);

// The one dense tensor of a list that c10d keeps for backends with several devices.
const at::Tensor& OnlyOne(const std::vector<at::Tensor>& tensors, const char* operation);
const std::vector<at::Tensor>& OnlyList(const std::vector<std::vector<at::Tensor>>& lists,
                                        const char* operation);

// That of all of them, or the CPU for none. Each must be dense.
c10::Device CheckOneDevice(const std::vector<at::Tensor>& tensors, const char* operation);

uint32_t CheckRoot(int64_t root, int size, const char* operation);

// `large` has, on the same device, one block as large as
// `small` for each rank.
void CheckBlocks(const at::Tensor& large, const at::Tensor& small, int size, const char* operation);

// One tensor for each rank, of `like`'s type and on its device, and dense; the rank's own of
// `like`'s sizes.
void CheckList(const std::vector<at::Tensor>& tensors, const at::Tensor& like, GroupSize group,
               const char* operation);
// The same, and all of `like`'s sizes.
void CheckEqualList(const std::vector<at::Tensor>& tensors, const at::Tensor& like, GroupSize group,
                    const char* operation);

// Splits of the first dimension: none, or one for each rank that add up to it.
void CheckSplits(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size,
                 const char* operation);

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_COLLECTIVE_CHECKS_H_

// The collectives of c10d over tensors, carried out by the calling thread: from tensors in any
// layout to the memory that a group takes. What a group does not offer is composed of what it does.
// Those that are given Collectives work on a GPU too, in the order of streams. Arguments have been
// checked (collective_checks.h).
#ifndef GRADSYNC_CLIENT_TORCH_COLLECTIVES_H_
#define GRADSYNC_CLIENT_TORCH_COLLECTIVES_H_

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "client/torch/group_collectives.h"
#include "client/torch/session.h"

namespace gradsync::torch {

using Tensors = std::vector<at::Tensor>;

void AllReduceOne(Collectives& group, const at::Tensor& tensor, gradsync_reduce_op op,
                  Timeout timeout);

// The sum of sparse (COO) tensors of the same sizes, each with as many elements as it likes.
void AllReduceSparse(const Group& group, const at::Tensor& tensor, Timeout timeout);

void BroadcastOne(Collectives& group, const at::Tensor& tensor, uint32_t root, Timeout timeout);

// The tensors of ranks other than the root stay as they are.
void ReduceOne(Collectives& group, const at::Tensor& tensor, gradsync_reduce_op op, uint32_t root,
               Timeout timeout);

// `output` holds one block for each rank.
void GatherIntoOne(Collectives& group, const at::Tensor& output, const at::Tensor& input,
                   Timeout timeout);
// One output for each rank; they may differ in size if they do so alike on every rank.
void AllGatherIntoList(Collectives& group, const Tensors& outputs, const at::Tensor& input,
                       Timeout timeout);

// `output` and `outputs` are the root's.
void GatherIntoOneAt(const Group& group, const at::Tensor& output, const at::Tensor& input,
                     uint32_t root, Timeout timeout);
void GatherIntoListAt(const Group& group, const Tensors& outputs, const at::Tensor& input,
                      uint32_t root, Timeout timeout);
void ScatterList(const Group& group, const at::Tensor& output, const Tensors& inputs, uint32_t root,
                 Timeout timeout);

void ReduceScatterOne(Collectives& group, const at::Tensor& output, const at::Tensor& input,
                      gradsync_reduce_op op, Timeout timeout);
// The inputs may differ in size if they do so alike on every rank.
void ReduceScatterList(Collectives& group, const at::Tensor& output, const Tensors& inputs,
                       gradsync_reduce_op op, Timeout timeout);

// Equal blocks of the first dimension.
void AllToAllOne(const Group& group, const at::Tensor& output, const at::Tensor& input,
                 Timeout timeout);
// Block r goes to rank r and comes from it. Sizes may differ from pair to pair; both sides of each
// pair are compared first, and a difference is MismatchError on every rank.
void AllToAllList(const Group& group, const Tensors& outputs, const Tensors& inputs,
                  Timeout timeout);

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_COLLECTIVES_H_

// Averages sparse gradients, of which every rank has other rows.
#ifndef GRADSYNC_CLIENT_TORCH_SPARSE_AVERAGE_H_
#define GRADSYNC_CLIENT_TORCH_SPARSE_AVERAGE_H_

#include <ATen/ATen.h>

#include "client/torch/session.h"

namespace gradsync::torch {

// The average of every rank's `gradient`, coalesced; bitwise the same on every rank. An undefined
// one stands for no rows. `parameter` says the type and the sizes. Each rank of `group` must call
// it at the same point of the group's order.
at::Tensor AverageSparse(const Group& group, const at::Tensor& parameter,
                         const at::Tensor& gradient, Timeout timeout);

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_SPARSE_AVERAGE_H_

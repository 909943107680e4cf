// A parameter's place in the buckets, as a tensor, and what goes between it and the gradient.
#ifndef GRADSYNC_CLIENT_TORCH_GRADIENT_SLOT_H_
#define GRADSYNC_CLIENT_TORCH_GRADIENT_SLOT_H_

#include <ATen/ATen.h>

#include <string>

#include "gradsync/gradsync.h"

namespace gradsync::torch {

// Row-major, unless the parameter's own order of dimensions is dense (channels last, say): then
// that, so that a gradient and its slot have the same layout.
at::DimVector SlotStrides(const at::Tensor& parameter);

// A slot as a tensor of `type`, which keeps its memory mapped.
at::Tensor ViewOf(const gradsync_slot& slot, const at::Tensor& parameter, at::ScalarType type);

bool IsAlias(const at::Tensor& gradient, const at::Tensor& view);

// On a GPU both of these are enqueued on the current stream.
void Copy(const at::Tensor& target, const at::Tensor& source);

// `gradient` becomes equal to `view`, but stays the tensor that it is, if it is one.
void CopyOut(const at::Tensor& view, at::Tensor& gradient);

// Memory for what `view` holds, in the same layout.
at::Tensor NewLike(const at::Tensor& view);

// For libgradsync, which borrows `name`. `type`: of the gradient.
gradsync_parameter Describe(const at::Tensor& parameter, const std::string& name,
                            at::ScalarType type);

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_GRADIENT_SLOT_H_

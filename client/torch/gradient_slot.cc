#include "client/torch/gradient_slot.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "client/torch/device.h"
#include "client/torch/tensors.h"

namespace gradsync::torch {
namespace {

bool SameLayout(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a.strides() == b.strides() || (a.is_contiguous() && b.is_contiguous())) && !a.is_neg() &&
         !a.is_conj();
}

}  // namespace

at::DimVector SlotStrides(const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) return at::DimVector(parameter.strides());
  at::DimVector strides(static_cast<size_t>(parameter.dim()));
  int64_t stride = 1;
  for (size_t i = strides.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(parameter.size(static_cast<int64_t>(i)), 1);
  }
  return strides;
}

at::Tensor ViewOf(const gradsync_slot& slot, const at::Tensor& parameter, at::ScalarType type) {
  gradsync_buffer_retain(slot.buffer);
  return TensorOver(slot.data, parameter.sizes(), SlotStrides(parameter),
                    at::TensorOptions(parameter.device()).dtype(type),
                    [buffer = slot.buffer](void*) { gradsync_buffer_release(buffer); });
}

bool IsAlias(const at::Tensor& gradient, const at::Tensor& view) {
  return gradient.is_same(view) ||
         (gradient.const_data_ptr() == view.const_data_ptr() && SameLayout(gradient, view));
}

void Copy(const at::Tensor& target, const at::Tensor& source) {
  if (target.is_cpu() && SameLayout(target, source)) {
    CopyBytes(target.data_ptr(), source.const_data_ptr(), target.nbytes());
  } else {
    const at::NoGradGuard no_grad;
    target.copy_(source, /*non_blocking=*/true);
  }
}

at::Tensor NewLike(const at::Tensor& view) {
  return at::empty_strided(view.sizes(), view.strides(), view.options());
}

void CopyOut(const at::Tensor& view, at::Tensor& gradient) {
  if (!gradient.defined()) gradient = NewLike(view);
  Copy(gradient, view);
  // A copy by memcpy is a change like any other.
  gradient.unsafeGetTensorImpl()->bump_version();
}

gradsync_parameter Describe(const at::Tensor& parameter, const std::string& name,
                            at::ScalarType type) {
  gradsync_parameter description{};
  description.name = name.c_str();
  const auto dtype = DTypeOf(type);
  TORCH_CHECK_TYPE(dtype.has_value(), "gradsync: the gradient of parameter \"", name,
                   "\" cannot be averaged: its type is ", type);
  description.dtype = *dtype;
  description.device = NumberOf(parameter.device());
  description.ndim = static_cast<uint32_t>(std::min<int64_t>(parameter.dim(), GRADSYNC_MAX_DIMS));
  for (int64_t i = 0; i < parameter.dim(); ++i) {
    const size_t at = static_cast<size_t>(std::min<int64_t>(i, GRADSYNC_MAX_DIMS - 1));
    const int64_t before = i < GRADSYNC_MAX_DIMS ? 1 : description.shape[at];
    description.shape[at] = before * parameter.size(i);
  }
  return description;
}

}  // namespace gradsync::torch

#include "client/torch/tensors.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>
#include <utility>

#include "client/torch/device.h"

namespace gradsync::torch {

std::optional<gradsync_dtype> DTypeOf(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return GRADSYNC_FLOAT32;
    case at::kDouble:
      return GRADSYNC_FLOAT64;
    case at::kHalf:
      return GRADSYNC_FLOAT16;
    case at::kBFloat16:
      return GRADSYNC_BFLOAT16;
    case at::kChar:
      return GRADSYNC_INT8;
    case at::kByte:
      return GRADSYNC_UINT8;
    case at::kShort:
      return GRADSYNC_INT16;
    case at::kInt:
      return GRADSYNC_INT32;
    case at::kLong:
      return GRADSYNC_INT64;
    case at::kBool:
      return GRADSYNC_BOOL;
    case at::kComplexFloat:
      return GRADSYNC_COMPLEX64;
    case at::kComplexDouble:
      return GRADSYNC_COMPLEX128;
    default:
      return std::nullopt;
  }
}

void CheckDense(const at::Tensor& tensor, const char* operation) {
  TORCH_CHECK_VALUE(tensor.defined(), "gradsync: ", operation, " was given an undefined tensor");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "gradsync: ", operation,
                    " takes dense tensors, but was given one of layout ", tensor.layout());
  TORCH_CHECK_VALUE(tensor.device().is_cpu() || tensor.device().is_cuda(), "gradsync: ", operation,
                    " takes tensors in the memory of the CPU or of a CUDA device, but was given "
                    "one on ",
                    tensor.device());
}

void CheckOnCpu(const at::Tensor& tensor, const char* operation) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !tensor.defined() || tensor.device().is_cpu(), "gradsync: ", operation,
      " is not offered for tensors on a GPU, and was given one on ", tensor.device(),
      ": use a group of another backend for it, made by torch.distributed.new_group with "
      "backend=\"nccl\" or \"gloo\", or move the tensor to the CPU first");
}

at::Tensor TensorOver(void* data, at::IntArrayRef sizes, at::OptionalIntArrayRef strides,
                      const at::TensorOptions& options, std::function<void(void*)> release) {
  // Told where it is, torch need not ask CUDA's runtime, which does not know memory of the
  // driver's.
  return at::for_blob(data, sizes)
      .strides(strides)
      .deleter(std::move(release))
      .options(options)
      .target_device(options.device())
      .make_tensor();
}

bool IsPlain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor NewPlain(const at::Tensor& like) { return at::empty(like.sizes(), like.options()); }

void KeepForCurrentStream(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return;
  // As Tensor::record_stream, without the dispatcher: this is done for every gradient.
  c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA)
      .recordDataPtrOnStream(tensor.storage().data_ptr(), CurrentStream(tensor.device()));
}

void CopyOnCurrentStream(const at::Tensor& target, const at::Tensor& source) {
  KeepForCurrentStream(target);
  KeepForCurrentStream(source);
  target.copy_(source, /*non_blocking=*/true);
}

at::Tensor PlainInput(const at::Tensor& tensor) {
  if (IsPlain(tensor)) return tensor;
  at::Tensor plain = NewPlain(tensor);
  CopyOnCurrentStream(plain, tensor);
  return plain;
}

Elements ElementsToMove(const at::Tensor& tensor) {
  if (const auto dtype = DTypeOf(tensor.scalar_type())) {
    return {*dtype, static_cast<uint64_t>(tensor.numel())};
  }
  return {GRADSYNC_UINT8, static_cast<uint64_t>(tensor.nbytes())};
}

void CopyBytes(void* target, const void* source, size_t bytes) {
  constexpr int64_t kGrain = int64_t{1} << 20;
  if (static_cast<int64_t>(bytes) <= kGrain) {
    if (bytes > 0) std::memcpy(target, source, bytes);
    return;
  }
  at::parallel_for(0, static_cast<int64_t>(bytes), kGrain, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<std::byte*>(target) + begin,
                static_cast<const std::byte*>(source) + begin, static_cast<size_t>(end - begin));
  });
}

}  // namespace gradsync::torch

// What the adapter needs to know of tensors: gradsync's types for torch's, and memory in one piece.
#ifndef GRADSYNC_CLIENT_TORCH_TENSORS_H_
#define GRADSYNC_CLIENT_TORCH_TENSORS_H_

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

#include "gradsync/gradsync.h"

namespace gradsync::torch {

// Nothing for types that gradsync cannot calculate with.
std::optional<gradsync_dtype> DTypeOf(at::ScalarType type);

// Throws unless `tensor` lies densely in memory of the CPU or of a CUDA device; `operation` is for
// the message.
void CheckDense(const at::Tensor& tensor, const char* operation);

// NotImplementedError for a tensor on a GPU, for operations that are not offered there.
void CheckOnCpu(const at::Tensor& tensor, const char* operation);

// Memory of somebody else's as a tensor; `release` is called when nobody uses it any more.
at::Tensor TensorOver(void* data, at::IntArrayRef sizes, at::OptionalIntArrayRef strides,
                      const at::TensorOptions& options, std::function<void(void*)> release);

// Whether the elements lie row-major in one piece, as they are (not lazily conjugated or negated).
bool IsPlain(const at::Tensor& tensor);

// To be called where work on the current stream uses a GPU's tensor that is made for another, or
// may be: its memory, if it is freed, then stays as it is until that work is done. Nothing for the
// CPU.
void KeepForCurrentStream(const at::Tensor& tensor);

// A new plain tensor of the same type and sizes; its content is undefined.
at::Tensor NewPlain(const at::Tensor& like);

// `tensor`, or a plain copy of it.
at::Tensor PlainInput(const at::Tensor& tensor);

// target.copy_(source), where either may be freed before that is done.
void CopyOnCurrentStream(const at::Tensor& target, const at::Tensor& source);

// Calls `operation` on `tensor`, or on a plain copy that is copied back.
template <typename Operation>
void InPlace(const at::Tensor& tensor, Operation operation) {
  if (IsPlain(tensor)) {
    operation(tensor);
    return;
  }
  const at::Tensor plain = PlainInput(tensor);
  operation(plain);
  CopyOnCurrentStream(tensor, plain);
}

// Any memory as elements of one byte or of the tensor's own type, for operations that only move it.
struct Elements {
  gradsync_dtype dtype;
  uint64_t count;
};
Elements ElementsToMove(const at::Tensor& tensor);

// memcpy, by as many threads as torch may use where that pays.
void CopyBytes(void* target, const void* source, size_t bytes);

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_TENSORS_H_

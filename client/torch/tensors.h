// What the adapter needs to know of tensors: gradsync's types for torch's, and memory in one piece.
#ifndef GRADSYNC_CLIENT_TORCH_TENSORS_H_
#define GRADSYNC_CLIENT_TORCH_TENSORS_H_

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "gradsync/gradsync.h"

namespace gradsync::torch {

// Nothing for types that gradsync cannot calculate with.
std::optional<gradsync_dtype> DTypeOf(at::ScalarType type);

// Throws unless `tensor` lies densely in CPU memory; `operation` is for the message.
void CheckDenseCpu(const at::Tensor& tensor, const char* operation);

// Whether the elements lie row-major in one piece, as they are (not lazily conjugated or negated).
bool IsPlain(const at::Tensor& tensor);

// A new plain tensor of the same type and sizes; its content is undefined.
at::Tensor NewPlain(const at::Tensor& like);

// `tensor`, or a plain copy of it.
at::Tensor PlainInput(const at::Tensor& tensor);

// Calls `operation` on `tensor`, or on a plain copy that is copied back.
template <typename Operation>
void InPlace(const at::Tensor& tensor, Operation operation) {
  if (IsPlain(tensor)) {
    operation(tensor);
    return;
  }
  const at::Tensor plain = PlainInput(tensor);
  operation(plain);
  tensor.copy_(plain);
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

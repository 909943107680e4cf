// A parameter as the DDP core knows it: not a tensor, only what must be agreed and planned.
#ifndef GRADSYNC_CLIENT_DDP_PARAMETER_H_
#define GRADSYNC_CLIENT_DDP_PARAMETER_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "shm/status.h"
#include "shm/types.h"

namespace gradsync {

// With more dimensions than this the last one stands for the product of the rest.
inline constexpr size_t kMaxDims = 8;

struct ParameterSpec {
  std::string name{};  // "encoder.5.weight": in every message about it
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape{};  // empty for a scalar; at most kMaxDims long
  uint32_t device = 0;           // as in client/core/device.h
};

// Whether the specifications make sense: valid dtypes that have an average, shapes without negative
// dimensions, and sizes that fit into an address space all together. kInvalidArgument names the
// first that does not.
Status CheckParameters(std::span<const ParameterSpec> parameters);

// Of checked parameters: elements, and bytes of the gradient.
uint64_t ElementCount(const ParameterSpec& parameter);
uint64_t GradientBytes(const ParameterSpec& parameter);

// "float32 [4, 2]", as in messages.
std::string DescribeType(DType dtype, std::span<const int64_t> shape);

// The name in at most `limit` bytes (more than 3): its end, which tells more than its beginning.
std::string ShortName(const std::string& name, size_t limit);

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_DDP_PARAMETER_H_

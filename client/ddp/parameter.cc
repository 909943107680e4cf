#include "client/ddp/parameter.h"

#include <limits>

namespace gradsync {
namespace {

// Far above any machine's memory, and far enough below 2^64 that sums of plans cannot overflow.
constexpr uint64_t kMaxGradientBytes = uint64_t{1} << 52;

bool HasTooManyElements(const ParameterSpec& parameter) {
  uint64_t elements = 1;
  for (const int64_t extent : parameter.shape) {
    if (extent == 0) return false;
    if (elements > kMaxGradientBytes / static_cast<uint64_t>(extent)) return true;
    elements *= static_cast<uint64_t>(extent);
  }
  return elements > kMaxGradientBytes / DTypeSize(parameter.dtype);
}

// What is wrong with one parameter; null if nothing is.
const char* FindFault(const ParameterSpec& parameter) {
  if (static_cast<uint8_t>(parameter.dtype) >= kDTypeCount) return "has an unknown dtype";
  if (!IsSupported(parameter.dtype, ReduceOp::kAvg)) {
    return "has a dtype whose values have no average: only floating-point and complex ones do";
  }
  if (parameter.shape.size() > kMaxDims) return "has too many dimensions: fold the last ones";
  for (const int64_t extent : parameter.shape) {
    if (extent < 0) return "has a negative dimension";
  }
  if (HasTooManyElements(parameter)) return "is larger than any memory";
  return nullptr;
}

}  // namespace

Status CheckParameters(std::span<const ParameterSpec> parameters) {
  if (parameters.empty()) {
    return {Code::kInvalidArgument, "there is no parameter whose gradient could be averaged"};
  }
  if (parameters.size() > std::numeric_limits<int32_t>::max()) {
    return {Code::kInvalidArgument, "there are more than 2147483647 parameters"};
  }
  uint64_t total = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const char* fault = FindFault(parameters[i]);
    if (fault == nullptr && parameters[i].device != parameters[0].device) {
      fault = "is on another device than parameter 0: the parameters of one Ddp are on one device";
    }
    if (fault == nullptr) {
      total += GradientBytes(parameters[i]);
      if (total > kMaxGradientBytes) fault = "makes the whole larger than any memory";
    }
    if (fault != nullptr) {
      return {Code::kInvalidArgument,
              "parameter " + std::to_string(i) + " (" + parameters[i].name + ", " +
                  DescribeType(parameters[i].dtype, parameters[i].shape) + ") " + fault};
    }
  }
  return OkStatus();
}

uint64_t ElementCount(const ParameterSpec& parameter) {
  uint64_t elements = 1;
  for (const int64_t extent : parameter.shape) elements *= static_cast<uint64_t>(extent);
  return elements;
}

uint64_t GradientBytes(const ParameterSpec& parameter) {
  return ElementCount(parameter) * DTypeSize(parameter.dtype);
}

std::string DescribeType(DType dtype, std::span<const int64_t> shape) {
  std::string text = DTypeName(dtype);
  text += " [";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

std::string ShortName(const std::string& name, size_t limit) {
  static constexpr char kCut[] = "...";
  constexpr size_t kCutLength = sizeof(kCut) - 1;
  if (name.size() <= limit || limit <= kCutLength) return name;
  return kCut + name.substr(name.size() - (limit - kCutLength));
}

}  // namespace gradsync

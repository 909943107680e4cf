#include "tests/fakes/nccl/reduce.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace gradsync::fake_nccl {
namespace {

// Elements that are reduced at a time, in a buffer of the stack.
constexpr size_t kBlock = 2048;

// How an element is computed with: integers wrap around, the 16-bit floats are computed in 32 bits
// and rounded after each step.
template <typename T>
struct Integer {
  using Stored = T;
  using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  static Wide Load(Stored x) { return x; }
  static Stored Store(Wide x) { return static_cast<Stored>(x); }
  static Wide Add(Wide a, Wide b) {
    return static_cast<Wide>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
  static Wide Multiply(Wide a, Wide b) {
    return static_cast<Wide>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  }
  static Wide Max(Wide a, Wide b) { return std::max(a, b); }
  static Wide Min(Wide a, Wide b) { return std::min(a, b); }
  static Wide Divide(Wide a, size_t n) { return a / static_cast<Wide>(n); }
};

template <typename T>
struct Real {
  using Wide = T;
  static T Add(T a, T b) { return a + b; }
  static T Multiply(T a, T b) { return a * b; }
  static T Max(T a, T b) { return std::fmax(a, b); }
  static T Min(T a, T b) { return std::fmin(a, b); }
  static T Divide(T a, size_t n) { return a / static_cast<T>(n); }
};

template <typename T>
struct Float : Real<T> {
  using Stored = T;
  static T Load(T x) { return x; }
  static T Store(T x) { return x; }
};

struct Half : Real<float> {
  using Stored = __half;
  static float Load(Stored x) { return __half2float(x); }
  static Stored Store(float x) { return __float2half(x); }
};

struct Bfloat16 : Real<float> {
  using Stored = __nv_bfloat16;
  static float Load(Stored x) { return __bfloat162float(x); }
  static Stored Store(float x) { return __float2bfloat16(x); }
};

template <typename Kind>
typename Kind::Wide Load(const std::byte* data, size_t index) {
  typename Kind::Stored stored;
  std::memcpy(&stored, data + index * sizeof(stored), sizeof(stored));
  return Kind::Load(stored);
}

template <typename Kind>
typename Kind::Wide Rounded(typename Kind::Wide x) {
  return Kind::Load(Kind::Store(x));
}

// Element `index` of an input, as it goes into the reduction.
template <typename Kind>
typename Kind::Wide Element(const Input& input, size_t index) {
  const auto x = Load<Kind>(input.data, index);
  if (input.scalar == nullptr) return x;
  return Rounded<Kind>(Kind::Multiply(x, Load<Kind>(input.scalar, 0)));
}

template <typename Kind, typename Combine>
void Fold(const std::vector<Input>& inputs, size_t start, size_t first, size_t count,
          typename Kind::Wide* result, Combine combine) {
  const size_t ranks = inputs.size();
  for (size_t i = 0; i < count; ++i) result[i] = Element<Kind>(inputs[start], first + i);
  for (size_t step = 1; step < ranks; ++step) {
    const Input& input = inputs[(start + step) % ranks];
    for (size_t i = 0; i < count; ++i) {
      result[i] = Rounded<Kind>(combine(result[i], Element<Kind>(input, first + i)));
    }
  }
}

template <typename Kind>
void ReduceBlock(ncclRedOp_t op, const std::vector<Input>& inputs, size_t start, size_t first,
                 size_t count, const std::vector<std::byte*>& outputs) {
  std::array<typename Kind::Wide, kBlock> result;
  switch (op) {
    case ncclProd:
      Fold<Kind>(inputs, start, first, count, result.data(), Kind::Multiply);
      break;
    case ncclMax:
      Fold<Kind>(inputs, start, first, count, result.data(), Kind::Max);
      break;
    case ncclMin:
      Fold<Kind>(inputs, start, first, count, result.data(), Kind::Min);
      break;
    default:
      Fold<Kind>(inputs, start, first, count, result.data(), Kind::Add);
  }
  std::array<typename Kind::Stored, kBlock> stored;
  for (size_t i = 0; i < count; ++i) {
    // User guide, ncclAvg: a sum across all ranks, divided by the number of ranks.
    stored[i] = Kind::Store(op == ncclAvg ? Kind::Divide(result[i], inputs.size()) : result[i]);
  }
  constexpr size_t kBytes = sizeof(typename Kind::Stored);
  for (std::byte* output : outputs) {
    std::memcpy(output + first * kBytes, stored.data(), count * kBytes);
  }
}

template <typename Kind>
void ReduceAll(ncclRedOp_t op, const std::vector<Input>& inputs, size_t start, size_t first,
               size_t count, const std::vector<std::byte*>& outputs) {
  for (size_t done = 0; done < count; done += kBlock) {
    ReduceBlock<Kind>(op, inputs, start, first + done, std::min(kBlock, count - done), outputs);
  }
}

}  // namespace

size_t TypeBytes(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

void Reduce(ncclDataType_t type, ncclRedOp_t op, const std::vector<Input>& inputs, size_t start,
            size_t first, size_t count, const std::vector<std::byte*>& outputs) {
  const auto with = [&]<typename Kind>(Kind) {
    ReduceAll<Kind>(op, inputs, start, first, count, outputs);
  };
  switch (type) {
    case ncclInt8:
      return with(Integer<int8_t>());
    case ncclUint8:
      return with(Integer<uint8_t>());
    case ncclInt32:
      return with(Integer<int32_t>());
    case ncclUint32:
      return with(Integer<uint32_t>());
    case ncclInt64:
      return with(Integer<int64_t>());
    case ncclUint64:
      return with(Integer<uint64_t>());
    case ncclFloat16:
      return with(Half());
    case ncclFloat32:
      return with(Float<float>());
    case ncclFloat64:
      return with(Float<double>());
    case ncclBfloat16:
      return with(Bfloat16());
    default:
      return;
  }
}

}  // namespace gradsync::fake_nccl

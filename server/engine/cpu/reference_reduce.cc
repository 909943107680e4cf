#include "server/engine/cpu/reference_reduce.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>

namespace gradsync {
namespace {

// A 16-bit floating-point format in terms of arithmetic, not of bits.
struct Format {
  int mantissa_bits;
  int min_exponent;  // of the smallest normal number
  int max_exponent;
};
constexpr Format kFloat16{10, -14, 15};
constexpr Format kBFloat16{7, -126, 127};

float Decode(const Format& format, uint16_t bits) {
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int exponent = (bits & 0x7fff) >> format.mantissa_bits;
  const float sign = (bits & 0x8000) != 0 ? -1.0F : 1.0F;
  if (exponent == format.max_exponent - format.min_exponent + 2) {
    return mantissa != 0 ? std::numeric_limits<float>::quiet_NaN()
                         : sign * std::numeric_limits<float>::infinity();
  }
  const int units = exponent == 0 ? mantissa : mantissa + (1 << format.mantissa_bits);
  const int scale = std::max(exponent, 1) - 1 + format.min_exponent - format.mantissa_bits;
  return sign * std::ldexp(static_cast<float>(units), scale);
}

uint16_t Encode(const Format& format, float value) {
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const int infinity = (format.max_exponent - format.min_exponent + 2) << format.mantissa_bits;
  if (std::isnan(value)) {
    return static_cast<uint16_t>(sign | infinity | (1 << (format.mantissa_bits - 1)));
  }
  if (std::isinf(value)) return static_cast<uint16_t>(sign | infinity);
  const double magnitude = std::fabs(static_cast<double>(value));
  int exponent = magnitude == 0 ? format.min_exponent : std::ilogb(magnitude);
  exponent = std::max(exponent, format.min_exponent);
  // Exact: nearbyint rounds to even, and the units carry into the exponent as they should.
  const auto units =
      static_cast<int>(std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent)));
  const int bits = ((exponent - format.min_exponent) << format.mantissa_bits) + units;
  return static_cast<uint16_t>(sign | std::min(bits, infinity));
}

template <typename T>
constexpr bool kIsComplex = false;
template <typename T>
constexpr bool kIsComplex<std::complex<T>> = true;

template <typename T>
T Multiply(T a, T b) {
  if constexpr (kIsComplex<T>) {
    return T(a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real());
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

template <typename T>
T Add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  } else {
    return a + b;
  }
}

// Whether min or max goes over from `best` to `x`.
template <typename T>
bool Takes(ReduceOp op, T best, T x) {
  if constexpr (kIsComplex<T>) {
    return false;
  } else {
    return x != x || (op == ReduceOp::kMin ? x < best : x > best);
  }
}

template <typename T>
T CombineBits(ReduceOp op, T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    if (op == ReduceOp::kBitAnd) return static_cast<T>(a & b);
    return static_cast<T>(op == ReduceOp::kBitOr ? a | b : a ^ b);
  } else {
    return a;
  }
}

template <typename T>
T Combine(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return Add(a, b);
    case ReduceOp::kProduct:
      return Multiply(a, b);
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return Takes(op, a, b) ? b : a;
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      return CombineBits(op, a, b);
  }
  return a;
}

// How elements of `Stored` bits are read, computed as `T`, and written.
template <typename Stored, typename T, typename Read, typename Write>
Bytes Reduce(ReduceOp op, const std::vector<Bytes>& inputs, bool divides_first, Read read,
             Write write) {
  Bytes result(inputs[0].size());
  const size_t ranks = inputs.size();
  for (size_t i = 0; i < result.size() / sizeof(Stored); ++i) {
    T value{};
    for (size_t rank = 0; rank < ranks; ++rank) {
      Stored stored{};
      std::memcpy(&stored, inputs[rank].data() + i * sizeof(Stored), sizeof(Stored));
      T x = read(stored);
      if constexpr (!std::is_integral_v<T>) {
        using Real = decltype(std::abs(x));
        if (op == ReduceOp::kAvg && divides_first) x *= Real{1} / static_cast<Real>(ranks);
      }
      value = rank == 0 ? x : Combine(op, value, x);
    }
    if constexpr (!std::is_integral_v<T>) {
      using Real = decltype(std::abs(value));
      if (op == ReduceOp::kAvg && !divides_first) value /= static_cast<Real>(ranks);
    }
    const Stored stored = write(value);
    std::memcpy(result.data() + i * sizeof(Stored), &stored, sizeof(Stored));
  }
  return result;
}

template <typename T>
Bytes ReduceAs(ReduceOp op, const std::vector<Bytes>& inputs, bool divides_first) {
  const auto same = [](T x) { return x; };
  return Reduce<T, T>(op, inputs, divides_first, same, same);
}

Bytes ReduceBool(ReduceOp op, const std::vector<Bytes>& inputs) {
  if (op == ReduceOp::kBitXor) return ReduceAs<uint8_t>(op, inputs, false);
  const bool is_or = op == ReduceOp::kSum || op == ReduceOp::kMax || op == ReduceOp::kBitOr;
  return ReduceAs<uint8_t>(is_or ? ReduceOp::kMax : ReduceOp::kMin, inputs, false);
}

// Lanes of floating-point numbers, for NaN; 0 for types that have none.
size_t FloatBytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kComplex64:
      return 4;
    case DType::kFloat64:
    case DType::kComplex128:
      return 8;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    default:
      return 0;
  }
}

template <typename T>
T ReadAs(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

bool IsNan(DType dtype, const std::byte* lane) {
  switch (FloatBytes(dtype)) {
    case 4:
      return std::isnan(ReadAs<float>(lane));
    case 8:
      return std::isnan(ReadAs<double>(lane));
    case 2: {
      const auto bits = ReadAs<uint16_t>(lane);
      return std::isnan(dtype == DType::kFloat16 ? Float16ToFloat(bits) : BFloat16ToFloat(bits));
    }
    default:
      return false;
  }
}

template <typename T>
void Write(Bytes& bytes, size_t index, T value) {
  std::memcpy(bytes.data() + index * sizeof(T), &value, sizeof(T));
}

// Numbers near 1, where sums and products round, and now and then a special one.
template <typename T, typename Convert>
void FillFloats(Bytes& bytes, std::mt19937_64& random, bool finite, Convert convert) {
  std::normal_distribution<double> normal;
  const std::vector<double> special = {0.0,
                                       -0.0,
                                       std::numeric_limits<double>::infinity(),
                                       -std::numeric_limits<double>::infinity(),
                                       std::numeric_limits<double>::quiet_NaN(),
                                       6e-8,
                                       1e-40,
                                       -6e4,
                                       3e38};
  for (size_t i = 0; i < bytes.size() / sizeof(T); ++i) {
    const bool is_special = !finite && random() % 16 == 0;
    Write<T>(bytes, i, convert(is_special ? special[random() % special.size()] : normal(random)));
  }
}

}  // namespace

float Float16ToFloat(uint16_t bits) { return Decode(kFloat16, bits); }
uint16_t FloatToFloat16(float value) { return Encode(kFloat16, value); }
float BFloat16ToFloat(uint16_t bits) { return Decode(kBFloat16, bits); }
uint16_t FloatToBFloat16(float value) { return Encode(kBFloat16, value); }

Bytes RandomElements(DType dtype, size_t count, uint64_t seed, bool finite) {
  std::mt19937_64 random(seed);
  Bytes bytes(count * DTypeSize(dtype));
  const auto to_float = [](double x) { return static_cast<float>(x); };
  switch (dtype) {
    case DType::kFloat32:
    case DType::kComplex64:
      FillFloats<float>(bytes, random, finite, to_float);
      break;
    case DType::kFloat64:
    case DType::kComplex128:
      FillFloats<double>(bytes, random, finite, [](double x) { return x; });
      break;
    case DType::kFloat16:
      FillFloats<uint16_t>(bytes, random, finite,
                           [&](double x) { return FloatToFloat16(to_float(x)); });
      break;
    case DType::kBFloat16:
      FillFloats<uint16_t>(bytes, random, finite,
                           [&](double x) { return FloatToBFloat16(to_float(x)); });
      break;
    default:
      for (std::byte& byte : bytes) {
        byte = static_cast<std::byte>(dtype == DType::kBool ? random() % 2 : random());
      }
  }
  return bytes;
}

Bytes ReferenceReduce(DType dtype, ReduceOp op, const std::vector<Bytes>& inputs) {
  switch (dtype) {
    case DType::kFloat32:
      return ReduceAs<float>(op, inputs, false);
    case DType::kFloat64:
      return ReduceAs<double>(op, inputs, true);
    case DType::kFloat16:
      return Reduce<uint16_t, float>(op, inputs, false, Float16ToFloat, FloatToFloat16);
    case DType::kBFloat16:
      return Reduce<uint16_t, float>(op, inputs, false, BFloat16ToFloat, FloatToBFloat16);
    case DType::kInt8:
      return ReduceAs<int8_t>(op, inputs, false);
    case DType::kUInt8:
      return ReduceAs<uint8_t>(op, inputs, false);
    case DType::kInt16:
      return ReduceAs<int16_t>(op, inputs, false);
    case DType::kInt32:
      return ReduceAs<int32_t>(op, inputs, false);
    case DType::kInt64:
      return ReduceAs<int64_t>(op, inputs, false);
    case DType::kBool:
      return ReduceBool(op, inputs);
    case DType::kComplex64:
      return ReduceAs<std::complex<float>>(op, inputs, true);
    case DType::kComplex128:
      return ReduceAs<std::complex<double>>(op, inputs, true);
  }
  return {};
}

std::string Difference(DType dtype, const std::byte* actual, const Bytes& expected) {
  const size_t lane = FloatBytes(dtype) != 0 ? FloatBytes(dtype) : DTypeSize(dtype);
  for (size_t at = 0; at < expected.size(); at += lane) {
    if (std::memcmp(actual + at, expected.data() + at, lane) == 0) continue;
    if (IsNan(dtype, actual + at) && IsNan(dtype, expected.data() + at)) continue;
    std::string text =
        "byte " + std::to_string(at) + " of " + std::to_string(expected.size()) + ":";
    for (size_t i = 0; i < lane; ++i)
      text += " " + std::to_string(static_cast<int>(actual[at + i]));
    text += " instead of";
    for (size_t i = 0; i < lane; ++i) {
      text += " " + std::to_string(static_cast<int>(expected[at + i]));
    }
    return text;
  }
  return "";
}

}  // namespace gradsync

// This file is compiled once for each instruction set (foreach_target.h includes it again), with
// -ffp-contract=off: a fused multiply-add would round differently from one set to another.
#include "server/engine/cpu/kernels.h"

#include <algorithm>
#include <bit>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/engine/cpu/kernels.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h, which clang-format would sort behind it.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace gradsync::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
HWY_INLINE const T* As(const std::byte* bytes) {
  return static_cast<const T*>(static_cast<const void*>(bytes));
}
template <typename T>
HWY_INLINE T* As(std::byte* bytes) {
  return static_cast<T*>(static_cast<void*>(bytes));
}

// ---- Elements: how they lie in memory, and as what they are computed.

template <typename T>
struct Plain {
  using Lane = T;
  static constexpr size_t kBytes = sizeof(T);

  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const std::byte* from) {
    return hn::LoadU(d, As<T>(from));
  }
  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> value, std::byte* to) {
    hn::StoreU(value, d, As<T>(to));
  }
};

// Stores the low halves of 32-bit lanes.
template <class D32, class V32>
HWY_INLINE void StoreLow16([[maybe_unused]] D32 d32, V32 bits, std::byte* to) {
  const hn::Rebind<uint16_t, D32> d16;
  const hn::RebindToSigned<D32> signed32;
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(signed32, bits)), d16, As<uint16_t>(to));
}

struct BFloat16 {
  using Lane = float;
  static constexpr size_t kBytes = 2;

  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const std::byte* from) {
    const hn::RebindToUnsigned<D> d32;
    const hn::Rebind<uint16_t, D> d16;
    return hn::BitCast(d,
                       hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, As<uint16_t>(from)))));
  }

  // Rounds to nearest even; Highway's own conversion truncates.
  template <class D>
  static HWY_INLINE void Store([[maybe_unused]] D d, hn::Vec<D> value, std::byte* to) {
    const hn::RebindToUnsigned<D> d32;
    const auto bits = hn::BitCast(d32, value);
    const auto high = hn::ShiftRight<16>(bits);
    const auto half = hn::Add(hn::Set(d32, 0x7fff), hn::And(high, hn::Set(d32, 1)));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, half));
    const auto quiet_nan = hn::Or(high, hn::Set(d32, 0x40));
    const auto is_nan = hn::RebindMask(d32, hn::IsNaN(value));
    StoreLow16(d32, hn::IfThenElse(is_nan, quiet_nan, rounded), to);
  }
};

// Where the machine converts float16 itself, rounding to nearest even. Highway's substitute for the
// others truncates and knows no infinities.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
struct Float16 {
  using Lane = float;
  static constexpr size_t kBytes = 2;

  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const std::byte* from) {
    const hn::Rebind<uint16_t, D> d16;
    const hn::Rebind<hwy::float16_t, D> half;
    return hn::PromoteTo(d, hn::BitCast(half, hn::LoadU(d16, As<uint16_t>(from))));
  }
  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> value, std::byte* to) {
    const hn::Rebind<uint16_t, D> d16;
    const hn::Rebind<hwy::float16_t, D> half;
    hn::StoreU(hn::BitCast(d16, hn::DemoteTo(half, value)), d16, As<uint16_t>(to));
  }
};
#else
struct Float16 {
  using Lane = float;
  static constexpr size_t kBytes = 2;

  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const std::byte* from) {
    const hn::RebindToUnsigned<D> d32;
    const hn::Rebind<uint16_t, D> d16;
    const auto half = hn::PromoteTo(d32, hn::LoadU(d16, As<uint16_t>(from)));
    const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(d32, 0x8000)));
    // Exponent and mantissa in float32's places; the multiplication by 2^112 corrects the
    // exponent's bias, subnormal numbers included.
    const auto shifted = hn::ShiftLeft<13>(hn::And(half, hn::Set(d32, 0x7fff)));
    const auto scaled = hn::BitCast(
        d32, hn::Mul(hn::BitCast(d, shifted), hn::BitCast(d, hn::Set(d32, 0x77800000))));
    // Infinity and NaN: the greatest exponent stays the greatest.
    const auto special = hn::Or(shifted, hn::Set(d32, 0x7f800000));
    const auto is_special = hn::Gt(shifted, hn::Set(d32, 0x0f7fffff));
    return hn::BitCast(d, hn::Or(sign, hn::IfThenElse(is_special, special, scaled)));
  }

  template <class D>
  static HWY_INLINE void Store([[maybe_unused]] D d, hn::Vec<D> value, std::byte* to) {
    const hn::RebindToUnsigned<D> d32;
    const auto bits = hn::BitCast(d32, value);
    const auto sign = hn::And(bits, hn::Set(d32, 0x80000000));
    const auto magnitude = hn::Xor(bits, sign);
    // Normal numbers: the exponent's bias from 127 to 15, then round to nearest even; a carry out
    // of the mantissa raises the exponent, up to infinity.
    const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d32, 1));
    const auto rebias = hn::Set(d32, 0xc8000fff);  // ((15 - 127) << 23) + 0xfff
    const auto normal = hn::ShiftRight<13>(hn::Add(hn::Add(magnitude, rebias), odd));
    // Below 2^-14: adding 0.5 makes the addition itself round at float16's last place.
    const auto magic = hn::Set(d32, 0x3f000000);
    const auto sum = hn::Add(hn::BitCast(d, magnitude), hn::BitCast(d, magic));
    const auto subnormal = hn::Sub(hn::BitCast(d32, sum), magic);
    const auto nan =
        hn::Or(hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d32, 0x3ff)), hn::Set(d32, 0x7e00));
    const auto infinity = hn::Set(d32, 0x7c00);
    auto half = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d32, 0x38800000)), subnormal, normal);
    half = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d32, 0x477fffff)), infinity, half);
    half = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d32, 0x7f800000)), nan, half);
    StoreLow16(d32, hn::Or(half, hn::ShiftRight<16>(sign)), to);
  }
};
#endif

// ---- Operations: First takes rank 0's vector, Next each further rank's, Last makes the result.

struct Fold {
  explicit Fold(size_t /*divisor*/) {}
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V First(D, V x) const {
    return x;
  }
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Last(D, V result) const {
    return result;
  }
};

struct Sum : Fold {
  using Fold::Fold;
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Next(D, V sum, V x) const {
    return hn::Add(sum, x);
  }
};

struct Product : Fold {
  using Fold::Fold;
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Next(D, V product, V x) const {
    return hn::Mul(product, x);
  }
};

// Of a power of two the reciprocal is exact, and multiplying is dividing.
struct SumThenScale : Sum {
  explicit SumThenScale(size_t divisor) : Sum(divisor), scale(1.0F / static_cast<float>(divisor)) {}
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Last(D d, V sum) const {
    return hn::Mul(sum, hn::Set(d, scale));
  }
  float scale;
};

struct SumThenDivide : Sum {
  explicit SumThenDivide(size_t by) : Sum(by), divisor(static_cast<float>(by)) {}
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Last(D d, V sum) const {
    return hn::Div(sum, hn::Set(d, divisor));
  }
  float divisor;
};

template <typename T>
struct ScaleThenSum : Sum {
  explicit ScaleThenSum(size_t divisor)
      : Sum(divisor), scale(static_cast<T>(1) / static_cast<T>(divisor)) {}
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V First(D d, V x) const {
    return hn::Mul(x, hn::Set(d, scale));
  }
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Next(D d, V sum, V x) const {
    return hn::Add(sum, hn::Mul(x, hn::Set(d, scale)));
  }
  T scale;
};

// By comparison, not by the machine's own minimum: those differ over NaN and the sign of zero.
struct FloatMin : Fold {
  using Fold::Fold;
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Next(D, V least, V x) const {
    return hn::IfThenElse(hn::Or(hn::Lt(x, least), hn::IsNaN(x)), x, least);
  }
};

struct FloatMax : Fold {
  using Fold::Fold;
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Next(D, V greatest, V x) const {
    return hn::IfThenElse(hn::Or(hn::Gt(x, greatest), hn::IsNaN(x)), x, greatest);
  }
};

struct IntegerMin : Fold {
  using Fold::Fold;
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Next(D, V least, V x) const {
    return hn::Min(least, x);
  }
};

struct IntegerMax : Fold {
  using Fold::Fold;
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Next(D, V greatest, V x) const {
    return hn::Max(greatest, x);
  }
};

struct BitAnd : Fold {
  using Fold::Fold;
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Next(D, V bits, V x) const {
    return hn::And(bits, x);
  }
};

struct BitOr : Fold {
  using Fold::Fold;
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Next(D, V bits, V x) const {
    return hn::Or(bits, x);
  }
};

struct BitXor : Fold {
  using Fold::Fold;
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Next(D, V bits, V x) const {
    return hn::Xor(bits, x);
  }
};

// ---- The loops.

// Combines as many whole vectors of `d` as there are in [begin, bytes) and returns where it
// stopped. Four vectors at a time stay in registers while all ranks are gone through: an input byte
// is read once, a result byte written once.
template <class Element, size_t kRanks, class D, class Op>
HWY_INLINE size_t CombineVectors(D d, const Op& op, const std::byte* const* inputs, size_t ranks,
                                 size_t offset, size_t begin, size_t bytes, std::byte* result) {
  const size_t n = kRanks == 0 ? ranks : kRanks;
  const size_t step = hn::Lanes(d) * Element::kBytes;
  size_t at = begin;
  for (; bytes - at >= 4 * step; at += 4 * step) {
    const std::byte* from = inputs[0] + offset + at;
    auto v0 = op.First(d, Element::Load(d, from));
    auto v1 = op.First(d, Element::Load(d, from + step));
    auto v2 = op.First(d, Element::Load(d, from + 2 * step));
    auto v3 = op.First(d, Element::Load(d, from + 3 * step));
    for (size_t rank = 1; rank < n; ++rank) {
      from = inputs[rank] + offset + at;
      v0 = op.Next(d, v0, Element::Load(d, from));
      v1 = op.Next(d, v1, Element::Load(d, from + step));
      v2 = op.Next(d, v2, Element::Load(d, from + 2 * step));
      v3 = op.Next(d, v3, Element::Load(d, from + 3 * step));
    }
    Element::Store(d, op.Last(d, v0), result + at);
    Element::Store(d, op.Last(d, v1), result + at + step);
    Element::Store(d, op.Last(d, v2), result + at + 2 * step);
    Element::Store(d, op.Last(d, v3), result + at + 3 * step);
  }
  for (; bytes - at >= step; at += step) {
    auto v = op.First(d, Element::Load(d, inputs[0] + offset + at));
    for (size_t rank = 1; rank < n; ++rank) {
      v = op.Next(d, v, Element::Load(d, inputs[rank] + offset + at));
    }
    Element::Store(d, op.Last(d, v), result + at);
  }
  return at;
}

// The tail goes through the same operations, one lane at a time: the same bits.
template <class Element, class Op, size_t kRanks>
void Combine(const std::byte* const* inputs, size_t ranks, size_t divisor, size_t offset,
             size_t bytes, std::byte* result) {
  using Lane = typename Element::Lane;
  const Op op(divisor);
  const hn::ScalableTag<Lane> all;
  const hn::CappedTag<Lane, 1> one;
  const size_t at =
      CombineVectors<Element, kRanks>(all, op, inputs, ranks, offset, 0, bytes, result);
  CombineVectors<Element, kRanks>(one, op, inputs, ranks, offset, at, bytes, result);
}

// Products of integers modulo 2^n. Too rare to be worth more than a plain loop: instruction sets
// multiply few widths of integers.
template <typename T>
void CombineIntegerProduct(const std::byte* const* inputs, size_t ranks, size_t /*divisor*/,
                           size_t offset, size_t bytes, std::byte* result) {
  for (size_t i = 0; i < bytes / sizeof(T); ++i) {
    uint64_t product = As<T>(inputs[0] + offset)[i];
    for (size_t rank = 1; rank < ranks; ++rank) product *= As<T>(inputs[rank] + offset)[i];
    As<T>(result)[i] = static_cast<T>(product);
  }
}

// (a + bi)(c + di), by the schoolbook formula.
template <typename T, class D>
HWY_INLINE size_t ComplexProductVectors(D d, const std::byte* const* inputs, size_t ranks,
                                        size_t offset, size_t begin, size_t bytes,
                                        std::byte* result) {
  const size_t step = hn::Lanes(d) * 2 * sizeof(T);
  size_t at = begin;
  for (; bytes - at >= step; at += step) {
    hn::Vec<D> real;
    hn::Vec<D> imaginary;
    hn::LoadInterleaved2(d, As<T>(inputs[0] + offset + at), real, imaginary);
    for (size_t rank = 1; rank < ranks; ++rank) {
      hn::Vec<D> c;
      hn::Vec<D> id;
      hn::LoadInterleaved2(d, As<T>(inputs[rank] + offset + at), c, id);
      const auto new_real = hn::Sub(hn::Mul(real, c), hn::Mul(imaginary, id));
      imaginary = hn::Add(hn::Mul(real, id), hn::Mul(imaginary, c));
      real = new_real;
    }
    hn::StoreInterleaved2(real, imaginary, d, As<T>(result + at));
  }
  return at;
}

template <typename T>
void CombineComplexProduct(const std::byte* const* inputs, size_t ranks, size_t /*divisor*/,
                           size_t offset, size_t bytes, std::byte* result) {
  const hn::ScalableTag<T> all;
  const hn::CappedTag<T, 1> one;
  const size_t at = ComplexProductVectors<T>(all, inputs, ranks, offset, 0, bytes, result);
  ComplexProductVectors<T>(one, inputs, ranks, offset, at, bytes, result);
}

void Spread(const std::byte* result, std::byte* const* outputs, size_t ranks, size_t offset,
            size_t bytes, const std::byte* const* inputs, size_t ahead) {
  constexpr size_t kLine = 64;
  const hn::ScalableTag<uint8_t> d;
  const size_t step = hn::Lanes(d);
  size_t at = 0;
  for (; bytes - at >= 4 * step; at += 4 * step) {
    const auto v0 = hn::LoadU(d, As<uint8_t>(result + at));
    const auto v1 = hn::LoadU(d, As<uint8_t>(result + at + step));
    const auto v2 = hn::LoadU(d, As<uint8_t>(result + at + 2 * step));
    const auto v3 = hn::LoadU(d, As<uint8_t>(result + at + 3 * step));
    for (size_t rank = 0; rank < ranks; ++rank) {
      for (size_t line = 0; line < 4 * step; line += kLine) {
        hwy::Prefetch(inputs[rank] + ahead + at + line);
      }
      std::byte* to = outputs[rank] + offset + at;
      hn::StoreU(v0, d, As<uint8_t>(to));
      hn::StoreU(v1, d, As<uint8_t>(to + step));
      hn::StoreU(v2, d, As<uint8_t>(to + 2 * step));
      hn::StoreU(v3, d, As<uint8_t>(to + 3 * step));
    }
  }
  for (size_t rank = 0; rank < ranks && at < bytes; ++rank) {
    std::memcpy(outputs[rank] + offset + at, result + at, bytes - at);
  }
}

// ---- Which loop for what.

// Two and four ranks, which most machines run, get loops that the compiler unrolls.
template <class Element, class Op>
CombineKernel ForRanks(size_t ranks) {
  switch (ranks) {
    case 2:
      return &Combine<Element, Op, 2>;
    case 4:
      return &Combine<Element, Op, 4>;
    default:
      return &Combine<Element, Op, 0>;
  }
}

// Elements that are computed as float32.
template <class Element>
CombineKernel ForFloat32(ReduceOp op, size_t ranks, size_t divisor) {
  switch (op) {
    case ReduceOp::kSum:
      return ForRanks<Element, Sum>(ranks);
    case ReduceOp::kAvg:
      return std::has_single_bit(divisor) ? ForRanks<Element, SumThenScale>(ranks)
                                          : &Combine<Element, SumThenDivide, 0>;
    case ReduceOp::kMin:
      return &Combine<Element, FloatMin, 0>;
    case ReduceOp::kMax:
      return &Combine<Element, FloatMax, 0>;
    case ReduceOp::kProduct:
      return &Combine<Element, Product, 0>;
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      return nullptr;
  }
  return nullptr;
}

CombineKernel ForFloat64(ReduceOp op, size_t ranks) {
  using Element = Plain<double>;
  switch (op) {
    case ReduceOp::kSum:
      return ForRanks<Element, Sum>(ranks);
    case ReduceOp::kAvg:
      return ForRanks<Element, ScaleThenSum<double>>(ranks);
    case ReduceOp::kMin:
      return &Combine<Element, FloatMin, 0>;
    case ReduceOp::kMax:
      return &Combine<Element, FloatMax, 0>;
    case ReduceOp::kProduct:
      return &Combine<Element, Product, 0>;
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      return nullptr;
  }
  return nullptr;
}

template <typename T>
CombineKernel ForComplexOf(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return &Combine<Plain<T>, Sum, 0>;
    case ReduceOp::kAvg:
      return &Combine<Plain<T>, ScaleThenSum<T>, 0>;
    case ReduceOp::kProduct:
      return &CombineComplexProduct<T>;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      return nullptr;
  }
  return nullptr;
}

// Bits are combined alike whatever the width: one loop serves every integer type.
using Bits = Plain<uint8_t>;

template <typename T>
CombineKernel ForInteger(ReduceOp op) {
  using Unsigned = hwy::MakeUnsigned<T>;
  switch (op) {
    case ReduceOp::kSum:
      return &Combine<Plain<Unsigned>, Sum, 0>;
    case ReduceOp::kMin:
      return &Combine<Plain<T>, IntegerMin, 0>;
    case ReduceOp::kMax:
      return &Combine<Plain<T>, IntegerMax, 0>;
    case ReduceOp::kProduct:
      return &CombineIntegerProduct<Unsigned>;
    case ReduceOp::kBitAnd:
      return &Combine<Bits, BitAnd, 0>;
    case ReduceOp::kBitOr:
      return &Combine<Bits, BitOr, 0>;
    case ReduceOp::kBitXor:
      return &Combine<Bits, BitXor, 0>;
    case ReduceOp::kAvg:
      return nullptr;
  }
  return nullptr;
}

// As unsigned bytes "or" is the greater and "and" the lesser, also where true is not 1.
CombineKernel ForBool(ReduceOp op) {
  switch (op) {
    case ReduceOp::kBitXor:
      return &Combine<Bits, BitXor, 0>;
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBitOr:
      return &Combine<Plain<uint8_t>, IntegerMax, 0>;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBitAnd:
      return &Combine<Plain<uint8_t>, IntegerMin, 0>;
    case ReduceOp::kAvg:
      return nullptr;
  }
  return nullptr;
}

CombineKernel FindCombine(DType dtype, ReduceOp op, size_t ranks, size_t divisor) {
  switch (dtype) {
    case DType::kFloat32:
      return ForFloat32<Plain<float>>(op, ranks, divisor);
    case DType::kFloat64:
      return ForFloat64(op, ranks);
    case DType::kFloat16:
      return ForFloat32<Float16>(op, ranks, divisor);
    case DType::kBFloat16:
      return ForFloat32<BFloat16>(op, ranks, divisor);
    case DType::kInt8:
      return ForInteger<int8_t>(op);
    case DType::kUInt8:
      return ForInteger<uint8_t>(op);
    case DType::kInt16:
      return ForInteger<int16_t>(op);
    case DType::kInt32:
      return ForInteger<int32_t>(op);
    case DType::kInt64:
      return ForInteger<int64_t>(op);
    case DType::kBool:
      return ForBool(op);
    case DType::kComplex64:
      return ForComplexOf<float>(op);
    case DType::kComplex128:
      return ForComplexOf<double>(op);
  }
  return nullptr;
}

SpreadKernel FindSpread() { return &Spread; }

}  // namespace
}  // namespace gradsync::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradsync {
namespace {
HWY_EXPORT(FindCombine);
HWY_EXPORT(FindSpread);
}  // namespace

CombineKernel FindCombineKernel(DType dtype, ReduceOp op, size_t ranks, size_t divisor) {
  return HWY_DYNAMIC_DISPATCH(FindCombine)(dtype, op, ranks, divisor);
}

SpreadKernel FindSpreadKernel() { return HWY_DYNAMIC_DISPATCH(FindSpread)(); }

}  // namespace gradsync
#endif  // HWY_ONCE

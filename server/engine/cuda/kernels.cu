// The GPU's side of server/engine/cpu/kernels.h, bit for bit: each element is r0 op r1 op r2 ... in
// rank order, nothing fused (nvcc runs with -fmad=false). Every kernel reads all inputs of an
// element before it writes any output of it, so that an output may be an input.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "server/engine/cuda/kernel_arguments.h"

namespace {

using gradsync::cuda::KernelArguments;
using gradsync::cuda::kPackBytes;

// ---- Elements: how they lie in memory, and as what they are computed.

template <typename T, typename ComputedAs = T>
struct Plain {
  using Stored = T;
  using Value = ComputedAs;
  static __device__ Value Read(Stored stored) { return static_cast<Value>(stored); }
  static __device__ Stored Write(Value value) { return static_cast<Stored>(value); }
};

struct Float16 {
  using Stored = unsigned short;
  using Value = float;
  static __device__ Value Read(Stored stored) {
    __half_raw raw;
    raw.x = stored;
    return __half2float(__half(raw));
  }
  static __device__ Stored Write(Value value) {
    return static_cast<__half_raw>(__float2half_rn(value)).x;
  }
};

struct BFloat16 {
  using Stored = unsigned short;
  using Value = float;
  static __device__ Value Read(Stored stored) {
    __nv_bfloat16_raw raw;
    raw.x = stored;
    return __bfloat162float(__nv_bfloat16(raw));
  }
  static __device__ Stored Write(Value value) {
    return static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(value)).x;
  }
};

struct Bool {
  using Stored = unsigned char;
  using Value = unsigned;
  static __device__ Value Read(Stored stored) { return stored != 0 ? 1 : 0; }
  static __device__ Stored Write(Value value) { return static_cast<Stored>(value); }
};

template <typename T>
struct Complex {
  T real;
  T imaginary;
};

// ---- Operations: First takes rank 0's value, Next each further rank's, Last makes the result.

template <typename T>
struct Fold {
  explicit __device__ Fold(double /*divisor*/) {}
  __device__ T First(T x) const { return x; }
  __device__ T Last(T result) const { return result; }
};

template <typename T>
struct Sum : Fold<T> {
  using Fold<T>::Fold;
  __device__ T Next(T sum, T x) const { return sum + x; }
};

template <typename T>
struct SumThenDivide : Sum<T> {
  explicit __device__ SumThenDivide(double by) : Sum<T>(by), divisor(static_cast<T>(by)) {}
  __device__ T Last(T sum) const { return sum / divisor; }
  T divisor;
};

template <typename T>
struct ScaleThenSum : Sum<T> {
  explicit __device__ ScaleThenSum(double divisor)
      : Sum<T>(divisor), scale(static_cast<T>(1) / static_cast<T>(divisor)) {}
  __device__ T First(T x) const { return x * scale; }
  __device__ T Next(T sum, T x) const { return sum + x * scale; }
  T scale;
};

template <typename T>
struct Product : Fold<T> {
  using Fold<T>::Fold;
  __device__ T Next(T product, T x) const { return product * x; }
};

template <typename T>
struct ComplexProduct : Fold<T> {
  using Fold<T>::Fold;
  __device__ T Next(T a, T b) const {
    return {a.real * b.real - a.imaginary * b.imaginary,
            a.real * b.imaginary + a.imaginary * b.real};
  }
};

// NaN if any rank has one.
template <typename T>
struct Min : Fold<T> {
  using Fold<T>::Fold;
  __device__ T Next(T best, T x) const { return x != x || x < best ? x : best; }
};

template <typename T>
struct Max : Fold<T> {
  using Fold<T>::Fold;
  __device__ T Next(T best, T x) const { return x != x || x > best ? x : best; }
};

template <typename T>
struct BitAnd : Fold<T> {
  using Fold<T>::Fold;
  __device__ T Next(T bits, T x) const { return bits & x; }
};

template <typename T>
struct BitOr : Fold<T> {
  using Fold<T>::Fold;
  __device__ T Next(T bits, T x) const { return bits | x; }
};

template <typename T>
struct BitXor : Fold<T> {
  using Fold<T>::Fold;
  __device__ T Next(T bits, T x) const { return bits ^ x; }
};

// ---- The loop over elements, by packs of several and then one by one.

template <typename Stored, unsigned kLanes>
struct alignas(kLanes * sizeof(Stored)) Pack {
  Stored lanes[kLanes];
};

template <typename Element, typename Op, unsigned kLanes>
__device__ void ReduceOne(const KernelArguments& arguments, Op op, unsigned long long index) {
  using Value = typename Element::Value;
  using Packed = Pack<typename Element::Stored, kLanes>;
  Packed pack = static_cast<const Packed*>(arguments.inputs[0])[index];
  Value values[kLanes];
#pragma unroll
  for (unsigned i = 0; i < kLanes; ++i) values[i] = op.First(Element::Read(pack.lanes[i]));
    // Loads of several ranks are under way at once; a lane more is as much code again, which the
    // driver has to compile.
#pragma unroll(kLanes == 1 ? 1 : kLanes == 16 ? 2 : 4)
  for (unsigned rank = 1; rank < arguments.input_count; ++rank) {
    pack = static_cast<const Packed*>(arguments.inputs[rank])[index];
#pragma unroll
    for (unsigned i = 0; i < kLanes; ++i) {
      values[i] = op.Next(values[i], Element::Read(pack.lanes[i]));
    }
  }
#pragma unroll
  for (unsigned i = 0; i < kLanes; ++i) pack.lanes[i] = Element::Write(op.Last(values[i]));
  for (unsigned rank = 0; rank < arguments.output_count; ++rank) {
    static_cast<Packed*>(arguments.outputs[rank])[index] = pack;
  }
}

template <typename Element, typename Op>
__device__ void Reduce(const KernelArguments& arguments) {
  constexpr unsigned kLanes = kPackBytes / sizeof(typename Element::Stored);
  const Op op(arguments.divisor);
  const unsigned long long threads = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
  const unsigned long long thread =
      static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (unsigned long long pack = thread; pack < arguments.packs; pack += threads) {
    ReduceOne<Element, Op, kLanes>(arguments, op, pack);
  }
  for (unsigned long long i = arguments.packs * kLanes + thread; i < arguments.elements;
       i += threads) {
    ReduceOne<Element, Op, 1>(arguments, op, i);
  }
}

using Float32 = Plain<float>;
using Float64 = Plain<double>;
using Complex64 = Plain<Complex<float>>;
using Complex128 = Plain<Complex<double>>;
using Int8 = Plain<signed char, int>;
using Int16 = Plain<short, int>;
using Int32 = Plain<int>;
using Int64 = Plain<long long>;
// Sums and products wrap, and have the same bits whatever the sign.
using UInt8 = Plain<unsigned char, unsigned>;
using UInt16 = Plain<unsigned short, unsigned>;
using UInt32 = Plain<unsigned>;
using UInt64 = Plain<unsigned long long>;

// What there is: name, element, operation.
// clang-format off
#define GRADSYNC_KERNELS(X) \
  X(sum_f32, Float32, Sum) X(sum_f64, Float64, Sum) \
  X(sum_f16, Float16, Sum) X(sum_bf16, BFloat16, Sum) \
  X(sum_u8, UInt8, Sum) X(sum_u16, UInt16, Sum) X(sum_u32, UInt32, Sum) X(sum_u64, UInt64, Sum) \
  X(avg_f32, Float32, SumThenDivide) \
  X(avg_f16, Float16, SumThenDivide) X(avg_bf16, BFloat16, SumThenDivide) \
  X(scaled_sum_f32, Float32, ScaleThenSum) X(scaled_sum_f64, Float64, ScaleThenSum) \
  X(product_f32, Float32, Product) X(product_f64, Float64, Product) \
  X(product_f16, Float16, Product) X(product_bf16, BFloat16, Product) \
  X(product_u8, UInt8, Product) X(product_u16, UInt16, Product) \
  X(product_u32, UInt32, Product) X(product_u64, UInt64, Product) \
  X(product_c64, Complex64, ComplexProduct) X(product_c128, Complex128, ComplexProduct) \
  X(min_f32, Float32, Min) X(min_f64, Float64, Min) \
  X(min_f16, Float16, Min) X(min_bf16, BFloat16, Min) \
  X(min_i8, Int8, Min) X(min_u8, UInt8, Min) \
  X(min_i16, Int16, Min) X(min_i32, Int32, Min) X(min_i64, Int64, Min) \
  X(max_f32, Float32, Max) X(max_f64, Float64, Max) \
  X(max_f16, Float16, Max) X(max_bf16, BFloat16, Max) \
  X(max_i8, Int8, Max) X(max_u8, UInt8, Max) \
  X(max_i16, Int16, Max) X(max_i32, Int32, Max) X(max_i64, Int64, Max) \
  X(and_bool, Bool, BitAnd) X(or_bool, Bool, BitOr) \
  X(bit_and, UInt8, BitAnd) X(bit_or, UInt8, BitOr) X(bit_xor, UInt8, BitXor)
// clang-format on

}  // namespace

// Without __grid_constant__ every thread would copy the arguments, to index them by rank.
#define GRADSYNC_KERNEL(name, element, operation)                    \
  extern "C" __global__ void gradsync_##name(                        \
      const __grid_constant__ gradsync::cuda::KernelArguments arguments) { \
    Reduce<element, operation<typename element::Value>>(arguments);  \
  }
GRADSYNC_KERNELS(GRADSYNC_KERNEL)

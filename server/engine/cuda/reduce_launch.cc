#include "server/engine/cuda/reduce_launch.h"

#include <algorithm>
#include <utility>

#include "server/engine/cuda/kernel_arguments.h"
#include "server/engine/cuda/kernels_ptx.h"

namespace gradsync::cuda {
namespace {

static_assert(kMaxRanksPerDevice == kMaxKernelPointers);

constexpr unsigned kThreadsPerBlock = 512;
// Enough to load at the memory's full speed, and few enough to leave room to the trainers' kernels.
constexpr unsigned kBlocksPerMultiprocessor = 2;

struct Kernel {
  std::string name;
  size_t element_bytes;
};

const char* Suffix(DType dtype, bool is_signed) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kComplex64:
      return "f32";
    case DType::kFloat64:
    case DType::kComplex128:
      return "f64";
    case DType::kFloat16:
      return "f16";
    case DType::kBFloat16:
      return "bf16";
    case DType::kInt8:
      return is_signed ? "i8" : "u8";
    case DType::kUInt8:
    case DType::kBool:
      return "u8";
    case DType::kInt16:
      return is_signed ? "i16" : "u16";
    case DType::kInt32:
      return is_signed ? "i32" : "u32";
    case DType::kInt64:
      return is_signed ? "i64" : "u64";
  }
  return "";
}

Kernel BoolKernel(ReduceOp op) {
  if (op == ReduceOp::kBitXor) return {"bit_xor", 1};
  const bool is_or = op == ReduceOp::kSum || op == ReduceOp::kMax || op == ReduceOp::kBitOr;
  return {is_or ? "or_bool" : "and_bool", 1};
}

// Sums of complex numbers are sums of their parts, and bits are the same in any type.
Kernel KernelFor(DType dtype, ReduceOp op) {
  if (dtype == DType::kBool) return BoolKernel(op);
  const bool is_complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  const size_t bytes = DTypeSize(dtype);
  const size_t lane_bytes = is_complex ? bytes / 2 : bytes;
  const std::string of_bits = Suffix(dtype, false);
  switch (op) {
    case ReduceOp::kSum:
      return {"sum_" + of_bits, lane_bytes};
    case ReduceOp::kAvg:
      return {(is_complex || dtype == DType::kFloat64 ? "scaled_sum_" : "avg_") + of_bits,
              lane_bytes};
    case ReduceOp::kProduct:
      if (is_complex) return {bytes == 8 ? "product_c64" : "product_c128", bytes};
      return {"product_" + of_bits, bytes};
    case ReduceOp::kMin:
      return {std::string("min_") + Suffix(dtype, true), bytes};
    case ReduceOp::kMax:
      return {std::string("max_") + Suffix(dtype, true), bytes};
    case ReduceOp::kBitAnd:
      return {"bit_and", 1};
    case ReduceOp::kBitOr:
      return {"bit_or", 1};
    case ReduceOp::kBitXor:
      return {"bit_xor", 1};
  }
  return {};
}

uint64_t Resolve(Place place, CUdeviceptr scratch) {
  return place.in_scratch ? scratch + place.at : place.at;
}

KernelArguments ArgumentsOf(const ReduceStep& step, size_t element_bytes, CUdeviceptr scratch) {
  KernelArguments arguments{};
  uint64_t bits = 0;
  for (const Place& input : step.inputs) {
    const uint64_t address = Resolve(input, scratch);
    bits |= address;
    arguments.inputs[arguments.input_count++] = reinterpret_cast<const void*>(address);
  }
  for (const Place& output : step.outputs) {
    const uint64_t address = Resolve(output, scratch);
    bits |= address;
    arguments.outputs[arguments.output_count++] = reinterpret_cast<void*>(address);
  }
  const uint64_t bytes = step.count * DTypeSize(step.dtype);
  arguments.elements = bytes / element_bytes;
  arguments.packs = bits % kPackBytes == 0 ? bytes / kPackBytes : 0;
  arguments.divisor = step.divisor;
  return arguments;
}

}  // namespace

Result<std::unique_ptr<ReduceKernels>> ReduceKernels::Load(
    std::shared_ptr<const PrimaryContext> context, int multiprocessors) {
  const CudaDriver& driver = context->driver();
  std::unique_ptr<ReduceKernels> kernels(new ReduceKernels(std::move(context), multiprocessors));
  GRADSYNC_RETURN_IF_ERROR(
      driver.Check(driver.cuModuleLoadData(&kernels->module_, kKernelsPtx), "cuModuleLoadData"));
  return kernels;
}

ReduceKernels::~ReduceKernels() {
  if (module_ != nullptr) context_->driver().cuModuleUnload(module_);
}

Result<CUfunction> ReduceKernels::Find(const std::string& name) {
  const auto found = functions_.find(name);
  if (found != functions_.end()) return found->second;
  const CudaDriver& driver = context_->driver();
  CUfunction function = nullptr;
  GRADSYNC_RETURN_IF_ERROR(
      driver.Check(driver.cuModuleGetFunction(&function, module_, ("gradsync_" + name).c_str()),
                   "cuModuleGetFunction"));
  functions_.emplace(name, function);
  return function;
}

Status ReduceKernels::Launch(const ReduceStep& step, CUdeviceptr scratch, CUstream stream) {
  const Kernel kernel = KernelFor(step.dtype, step.op);
  const Result<CUfunction> function = Find(kernel.name);
  if (!function) return function.error();
  KernelArguments arguments = ArgumentsOf(step, kernel.element_bytes, scratch);
  const uint64_t work = arguments.packs > 0 ? arguments.packs : arguments.elements;
  const uint64_t blocks =
      std::clamp<uint64_t>((work + kThreadsPerBlock - 1) / kThreadsPerBlock, 1,
                           static_cast<uint64_t>(multiprocessors_) * kBlocksPerMultiprocessor);
  void* parameters[] = {&arguments};
  const CudaDriver& driver = context_->driver();
  return driver.Check(driver.cuLaunchKernel(*function, static_cast<unsigned>(blocks), 1, 1,
                                            kThreadsPerBlock, 1, 1, 0, stream, parameters, nullptr),
                      "cuLaunchKernel");
}

}  // namespace gradsync::cuda

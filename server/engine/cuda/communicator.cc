#include "server/engine/cuda/communicator.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

namespace gradsync::cuda {
namespace {

using std::chrono::microseconds;

constexpr microseconds kFirstPause{20};
constexpr microseconds kLongestPause{1000};

// A scalar in the type that NCCL multiplies in.
union Scalar {
  float f32;
  double f64;
  uint16_t bits;
};

Scalar ScalarOf(double value, ncclDataType_t type) {
  Scalar scalar{};
  const auto narrow = static_cast<float>(value);
  switch (type) {
    case ncclFloat16:
      scalar.bits = static_cast<__half_raw>(__float2half_rn(narrow)).x;
      break;
    case ncclBfloat16:
      scalar.bits = static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(narrow)).x;
      break;
    case ncclFloat64:
      scalar.f64 = value;
      break;
    default:
      scalar.f32 = narrow;
  }
  return scalar;
}

}  // namespace

Result<std::unique_ptr<Communicator>> Communicator::Join(const NcclLibrary& nccl,
                                                         const ncclUniqueId& meeting_point,
                                                         int size, int rank,
                                                         const Patience& patience) {
  std::unique_ptr<Communicator> communicator(new Communicator(nccl));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const ncclResult_t result =
      nccl.ncclCommInitRankConfig(&communicator->handle_, size, meeting_point, rank, &config);
  GRADSYNC_RETURN_IF_ERROR(communicator->Await(result, "ncclCommInitRankConfig", patience));
  return communicator;
}

Communicator::~Communicator() {
  if (handle_ != nullptr) nccl_.ncclCommAbort(handle_);
}

Status Communicator::Error(ncclResult_t result, const char* call) const {
  std::string text = std::string(call) + ": " + nccl_.ncclGetErrorString(result);
  const char* const last = nccl_.ncclGetLastError(handle_);
  if (last != nullptr && *last != '\0') text += std::string(" (") + last + ")";
  return {Code::kInternal, text};
}

Status Communicator::Await(ncclResult_t result, const char* call, const Patience& patience) const {
  microseconds pause = kFirstPause;
  while (result == ncclInProgress) {
    ncclResult_t state = ncclSuccess;
    result = nccl_.ncclCommGetAsyncError(handle_, &state);
    if (result == ncclSuccess) result = state;
    if (result != ncclInProgress) break;
    if (patience.IsOver()) {
      return {Code::kDeadlineExceeded, std::string(call) + " did not come to an end in time"};
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
  return result == ncclSuccess ? OkStatus() : Error(result, call);
}

Status Communicator::Check() const {
  ncclResult_t state = ncclSuccess;
  ncclResult_t result = nccl_.ncclCommGetAsyncError(handle_, &state);
  if (result == ncclSuccess) result = state;
  if (result == ncclSuccess || result == ncclInProgress) return OkStatus();
  return Error(result, "NCCL");
}

Result<ncclRedOp_t> Communicator::OpOf(const Collective& call, ncclRedOp_t* made) const {
  switch (call.op) {
    case Collective::Op::kSum:
      return ncclSum;
    case Collective::Op::kProduct:
      return ncclProd;
    case Collective::Op::kMin:
      return ncclMin;
    case Collective::Op::kMax:
      return ncclMax;
    case Collective::Op::kAverage:
      return ncclAvg;
    case Collective::Op::kScaledSum:
      break;
  }
  Scalar scalar = ScalarOf(call.scale, call.type);
  const ncclResult_t result =
      nccl_.ncclRedOpCreatePreMulSum(made, &scalar, call.type, ncclScalarHostImmediate, handle_);
  if (result != ncclSuccess) return Unexpected(Error(result, "ncclRedOpCreatePreMulSum"));
  return *made;
}

ncclResult_t Communicator::Call(const Collective& call, ncclRedOp_t op, CUdeviceptr scratch,
                                CUstream stream) const {
  const auto pointer = [&](Place place) {
    return reinterpret_cast<void*>(place.in_scratch ? scratch + place.at : place.at);
  };
  void* const from = pointer(call.from);
  void* const to = pointer(call.to);
  switch (call.kind) {
    case Collective::Kind::kAllReduce:
      return nccl_.ncclAllReduce(from, to, call.count, call.type, op, handle_, stream);
    case Collective::Kind::kAllGather:
      return nccl_.ncclAllGather(from, to, call.count, call.type, handle_, stream);
    case Collective::Kind::kReduceScatter:
      return nccl_.ncclReduceScatter(from, to, call.count, call.type, op, handle_, stream);
    case Collective::Kind::kBroadcast:
      return nccl_.ncclBroadcast(from, to, call.count, call.type, call.root, handle_, stream);
  }
  return ncclInvalidArgument;
}

Status Communicator::Enqueue(const std::vector<Collective>& calls, CUdeviceptr scratch,
                             CUstream stream, const Patience& patience) {
  // A plan has several calls only where none reduces: one op does for all.
  ncclRedOp_t made = ncclNumOps;
  const Result<ncclRedOp_t> op = OpOf(calls.front(), &made);
  if (!op) return op.error();
  ncclResult_t result = nccl_.ncclGroupStart();
  for (const Collective& call : calls) {
    if (result != ncclSuccess && result != ncclInProgress) break;
    result = Call(call, *op, scratch, stream);
  }
  const ncclResult_t ended = nccl_.ncclGroupEnd();
  if (result == ncclSuccess || result == ncclInProgress) result = ended;
  const Status status = Await(result, "the NCCL call", patience);
  if (made != ncclNumOps && status.ok()) nccl_.ncclRedOpDestroy(made, handle_);
  return status;
}

void Communicator::Close(const Patience& patience) {
  if (!Await(nccl_.ncclCommFinalize(handle_), "ncclCommFinalize", patience).ok()) return;
  nccl_.ncclCommDestroy(handle_);
  handle_ = nullptr;
}

}  // namespace gradsync::cuda

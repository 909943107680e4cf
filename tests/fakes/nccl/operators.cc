// Operators that users make, and memory that NCCL allocates or knows about.
#include <cstring>

#include "tests/fakes/nccl/call.h"
#include "tests/fakes/nccl/reduce.h"

namespace gradsync::fake_nccl {
namespace {

ncclResult_t Create(const char* call, ncclRedOp_t* op, const void* scalar, ncclDataType_t type,
                    ncclScalarResidence_t residence, ncclComm* comm) {
  if (TypeBytes(type) == 0 || type == ncclFloat8e4m3 || type == ncclFloat8e5m2) {
    return Fail(ncclInvalidArgument, Text(call, " : type ", TypeName(type), " is not supported"));
  }
  PreMulSum made;
  made.type = type;
  made.on_device = residence == ncclScalarDevice;
  made.address = reinterpret_cast<CUdeviceptr>(scalar);
  if (!made.on_device) std::memcpy(made.scalar.data(), scalar, TypeBytes(type));
  const Lock lock(TheWorld().mutex);
  const ncclResult_t ready = CheckReady(call, *comm);
  if (ready != ncclSuccess) return ready;
  // Other communicators' operators have other numbers.
  const int number = ncclNumOps + static_cast<int>(TheWorld().next_id++);
  comm->ops[number] = made;
  *op = static_cast<ncclRedOp_t>(number);
  return ncclSuccess;
}

}  // namespace
}  // namespace gradsync::fake_nccl

using namespace gradsync::fake_nccl;

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  constexpr char kName[] = "ncclRedOpCreatePreMulSum";
  const Call call(kName, comm, Use::kOperate);
  if (call.result() != ncclSuccess) return call.result();
  for (const ncclResult_t pointer :
       {CheckPointer(kName, op, "op"), CheckPointer(kName, scalar, "scalar")}) {
    if (pointer != ncclSuccess) return pointer;
  }
  return Create(kName, op, scalar, datatype, residence, comm);
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  const Call call("ncclRedOpDestroy", comm, Use::kOperate);
  if (call.result() != ncclSuccess) return call.result();
  const Lock lock(TheWorld().mutex);
  if (comm->ops.erase(op) == 1) return ncclSuccess;
  return FailLocked(ncclInvalidArgument, Text("ncclRedOpDestroy : operator ", static_cast<int>(op),
                                              " was not created with this communicator"));
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle) {
  const Call call("ncclCommRegister", comm, Use::kOperate);
  if (call.result() != ncclSuccess) return call.result();
  const ncclResult_t pointer = CheckPointer("ncclCommRegister", handle, "handle");
  if (pointer != ncclSuccess) return pointer;
  const auto address = reinterpret_cast<CUdeviceptr>(buff);
  if (size == 0 || Cuda().kernel_address(address, size, comm->device) == nullptr) {
    return Fail(ncclInvalidArgument, Text("ncclCommRegister : invalid buffer ", buff));
  }
  const Lock lock(TheWorld().mutex);
  const ncclResult_t ready = CheckReady("ncclCommRegister", *comm);
  if (ready != ncclSuccess) return ready;
  const uint64_t number = TheWorld().next_id++;
  comm->registrations.insert(number);
  *handle = reinterpret_cast<void*>(number);
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  const Call call("ncclCommDeregister", comm, Use::kOperate);
  if (call.result() != ncclSuccess) return call.result();
  const Lock lock(TheWorld().mutex);
  if (comm->registrations.erase(reinterpret_cast<uint64_t>(handle)) == 1) return ncclSuccess;
  return FailLocked(ncclInvalidArgument, "ncclCommDeregister : Deregister NULL or unknown handle");
}

ncclResult_t ncclMemAlloc(void** ptr, size_t size) {
  const Call call("ncclMemAlloc");
  if (call.result() != ncclSuccess) return call.result();
  if (ptr == nullptr || size == 0) {
    return Fail(ncclInvalidArgument, "ncclMemAlloc : no pointer, or no size");
  }
  CUdeviceptr address = 0;
  const CUresult result = Cuda().cuMemAlloc(&address, size);
  if (result != CUDA_SUCCESS) {
    return Fail(ncclUnhandledCudaError, Text("ncclMemAlloc : Cuda failure ", result));
  }
  *ptr = reinterpret_cast<void*>(address);
  return ncclSuccess;
}

ncclResult_t ncclMemFree(void* ptr) {
  const Call call("ncclMemFree");
  if (call.result() != ncclSuccess) return call.result();
  if (ptr == nullptr) return ncclSuccess;
  const CUresult result = Cuda().cuMemFree(reinterpret_cast<CUdeviceptr>(ptr));
  if (result == CUDA_SUCCESS) return ncclSuccess;
  return Fail(ncclUnhandledCudaError, Text("ncclMemFree : Cuda failure ", result));
}

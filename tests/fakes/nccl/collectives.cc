// The operations: their arguments.
#include "tests/fakes/nccl/call.h"
#include "tests/fakes/nccl/group.h"
#include "tests/fakes/nccl/inject.h"
#include "tests/fakes/nccl/kernel.h"
#include "tests/fakes/nccl/launch.h"
#include "tests/fakes/nccl/reduce.h"

namespace gradsync::fake_nccl {
namespace {

ncclResult_t Invalid(const Request& request, const std::string& text) {
  return FailLocked(ncclInvalidArgument, Text(request.name, " : ", text));
}

ncclResult_t CheckOp(Request* request) {
  if (request->op >= 0 && request->op < ncclNumOps) return ncclSuccess;
  const auto made = request->comm->ops.find(request->op);
  if (made == request->comm->ops.end()) {
    return Invalid(*request, Text("reduction operation ", static_cast<int>(request->op),
                                  " unknown to this communicator"));
  }
  if (made->second.type != request->type) {
    return Invalid(*request,
                   "Data type supplied to user-created ncclRedOp_t does not match type given to "
                   "reduction operation");
  }
  request->pre_mul_sum = made->second;  // it may be destroyed before the launch
  return ncclSuccess;
}

ncclResult_t CheckArguments(Request* request) {
  const int ranks = request->comm->clique->ranks;
  if (request->root < 0 || request->root >= ranks) {
    return Invalid(*request, Text("invalid root ", request->root, " (root should be in the 0..",
                                  ranks, " range)"));
  }
  if (TypeBytes(request->type) == 0) {
    return Invalid(*request, Text("invalid type ", static_cast<int>(request->type)));
  }
  if (request->type == ncclFloat8e4m3 || request->type == ncclFloat8e5m2) {
    return Invalid(*request, "the stand-in for NCCL has no fp8");
  }
  if (SendBytes(*request) > 0 && request->send == 0) {
    return Invalid(*request, "sendbuff argument is NULL");
  }
  if (ReceiveBytes(*request) > 0 && request->receive == 0) {
    return Invalid(*request, "recvbuff argument is NULL");
  }
  return CheckOp(request);
}

// Where in the receive buffer an in-place operation's send buffer begins; negative offsets are the
// other way around. (User guide, In-place Operations.)
int64_t InPlaceOffset(const Request& request) {
  const auto block = static_cast<int64_t>(request.count * TypeBytes(request.type));
  if (request.function == Function::kAllGather) return request.comm->rank * block;
  if (request.function == Function::kReduceScatter) return -request.comm->rank * block;
  return 0;
}

void CheckOverlap(const Request& request) {
  const size_t send = SendBytes(request);
  const size_t receive = ReceiveBytes(request);
  if (send == 0 || receive == 0) return;
  const bool apart =
      request.send + send <= request.receive || request.receive + receive <= request.send;
  const auto offset = static_cast<int64_t>(request.send - request.receive);
  if (apart || offset == InPlaceOffset(request)) return;
  Breach(Text(request.name, " on ", Name(*request.comm), " with buffers that overlap, send at ",
              reinterpret_cast<void*>(request.send), ", receive at ",
              reinterpret_cast<void*>(request.receive)),
         "NCCL user guide, In-place Operations: sendBuff == recvBuff, or the per-rank pointer is "
         "located at the rank offset of the global buffer");
}

// A kernel cannot be launched into a stream of another device.
ncclResult_t CheckStream(const Request& request) {
  const int device = Cuda().stream_device(request.stream);
  if (device == request.comm->device) return ncclSuccess;
  if (device < 0) {
    Breach(Text(request.name, " on ", Name(*request.comm), " to what is not a stream"),
           "CUDA driver API, cuLaunchKernel: hStream is a stream (the stand-in for NCCL takes no "
           "default stream)");
  }
  request.comm->error = FailLocked(
      ncclUnhandledCudaError, Text(request.name, " : the stream of device ", device, " is not on ",
                                   "the device of ", Name(*request.comm)));
  return request.comm->error;
}

ncclResult_t CheckRequest(Request* request) {
  const Lock lock(TheWorld().mutex);
  ncclComm& comm = *request->comm;
  const ncclResult_t ready = CheckReady(request->name, comm);
  if (ready != ncclSuccess) return ready;
  const ncclResult_t arguments = CheckArguments(request);
  if (arguments != ncclSuccess) {
    // NCCL's own code: a non-blocking communicator keeps any error of an operation, although the
    // user guide says that it "is still functioning normally" (Error handling, 3).
    if (!comm.blocking) comm.error = arguments;
    return arguments;
  }
  CheckOverlap(*request);
  return CheckStream(*request);
}

ncclResult_t Enqueue(Request request) {
  Group& group = ThisGroup();
  if (!group.inits.empty()) {
    return Fail(ncclInvalidUsage,
                Text(request.name, " : calls to ncclCommInitRank() cannot be merged with others"));
  }
  const ncclResult_t checked = CheckRequest(&request);
  if (checked != ncclSuccess) return checked;
  const ncclResult_t mode = CheckGroupMode(request.name, *request.comm);
  if (mode != ncclSuccess) return mode;
  const bool collective =
      request.function != Function::kSend && request.function != Function::kRecv;
  if (collective) {
    request.injected = NextCollective();
    if (request.count == 0) return ncclSuccess;  // as NCCL: there is nothing to launch
  }
  if (group.depth == 0) return Issue({std::move(request)});
  const Lock lock(TheWorld().mutex);
  request.comm->group_owner = ThisThread();
  group.requests.push_back(std::move(request));
  return ncclSuccess;
}

ncclResult_t Operate(Request request) {
  const Call call(request.name, request.comm, Use::kOperate);
  if (call.result() != ncclSuccess) return ForGroup(call.result());
  return ForGroup(Enqueue(std::move(request)));
}

Request Make(Function function, const char* name, const void* send, void* receive, size_t count,
             ncclDataType_t type, ncclComm* comm, CUstream stream) {
  Request request;
  request.function = function;
  request.name = name;
  request.send = reinterpret_cast<CUdeviceptr>(send);
  request.receive = reinterpret_cast<CUdeviceptr>(receive);
  request.count = count;
  request.type = type;
  request.comm = comm;
  request.stream = stream;
  return request;
}

}  // namespace
}  // namespace gradsync::fake_nccl

using namespace gradsync::fake_nccl;

ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  Request request = Make(Function::kAllReduce, "ncclAllReduce", sendbuff, recvbuff, count, datatype,
                         comm, stream);
  request.op = op;
  return Operate(std::move(request));
}

ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  Request request =
      Make(Function::kReduce, "ncclReduce", sendbuff, recvbuff, count, datatype, comm, stream);
  request.op = op;
  request.root = root;
  return Operate(std::move(request));
}

ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  Request request = Make(Function::kReduceScatter, "ncclReduceScatter", sendbuff, recvbuff,
                         recvcount, datatype, comm, stream);
  request.op = op;
  return Operate(std::move(request));
}

ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count,
                           ncclDataType_t datatype, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  Request request = Make(Function::kBroadcast, "ncclBroadcast", sendbuff, recvbuff, count, datatype,
                         comm, stream);
  request.root = root;
  return Operate(std::move(request));
}

ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount,
                           ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream) {
  return Operate(Make(Function::kAllGather, "ncclAllGather", sendbuff, recvbuff, sendcount,
                      datatype, comm, stream));
}

ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  Request request =
      Make(Function::kSend, "ncclSend", sendbuff, nullptr, count, datatype, comm, stream);
  request.root = peer;
  return Operate(std::move(request));
}

ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  Request request =
      Make(Function::kRecv, "ncclRecv", nullptr, recvbuff, count, datatype, comm, stream);
  request.root = peer;
  return Operate(std::move(request));
}

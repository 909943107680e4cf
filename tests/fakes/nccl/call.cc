#include "tests/fakes/nccl/call.h"

namespace gradsync::fake_nccl {
namespace {

// Locked.
void CheckHandle(const char* call, const ncclComm* comm) {
  const auto found = TheWorld().comms.find(comm);
  if (found == TheWorld().comms.end()) {
    Breach(Text(call, " of what is not a communicator"), "nccl.h, ncclComm_t");
  }
  if (comm->life == Life::kLive) return;
  Breach(Text(call, " of ", Name(*comm), ", which was destroyed, aborted, or never initialised"),
         "NCCL user guide, Destroying a communicator: it should no longer be accessed; nccl.h, "
         "ncclCommAbort: frees resources associated with communicator object");
}

// Locked.
void CheckAlone(const char* call, const ncclComm& comm, Use use) {
  const uint64_t thread = ThisThread();
  const bool other_user = comm.user_depth > 0 && comm.user != thread;
  if (use == Use::kEnd && (other_user || comm.pollers > 0)) {
    Breach(Text(call, " of ", Name(comm), " while another thread is inside a call on it"),
           "NCCL user guide, Fault Tolerance: make sure no thread is calling any NCCL operations "
           "while calling ncclCommAbort");
  }
  const bool other_group = comm.group_owner != 0 && comm.group_owner != thread;
  if (use == Use::kOperate && (other_user || other_group)) {
    Breach(Text(call, " of ", Name(comm), " while another thread operates it"),
           "NCCL user guide, Thread Safety: it is not allowed to issue NCCL operations to a single "
           "communicator in parallel with multiple threads; only one thread issues all the "
           "operations in a group");
  }
  if (comm.ending) {
    Breach(Text(call, " of ", Name(comm), " while another thread ends it"),
           "NCCL user guide, Destroying a communicator: it should no longer be accessed");
  }
}

}  // namespace

Inside::Inside(const char* call, ncclComm* comm, Use use) : comm_(comm), use_(use) {
  const Lock lock(TheWorld().mutex);
  CheckHandle(call, comm);
  CheckAlone(call, *comm, use);
  if (use == Use::kAsk) {
    ++comm->pollers;
  } else if (use == Use::kOperate) {
    comm->user = ThisThread();
    ++comm->user_depth;
  } else {
    comm->ending = true;
  }
}

Inside::~Inside() {
  const Lock lock(TheWorld().mutex);
  if (use_ == Use::kAsk) {
    --comm_->pollers;
  } else if (use_ == Use::kOperate) {
    --comm_->user_depth;
  } else {
    comm_->ending = false;
  }
}

Call::Call(const char* name) { Enter(name); }

Call::Call(const char* name, ncclComm* comm, Use use) {
  if (comm != nullptr) inside_.emplace(name, comm, use);
  Enter(name);
  if (result_ == ncclSuccess && comm == nullptr) result_ = CheckPointer(name, comm, "comm");
}

void Call::Enter(const char* name) {
  const CUresult entered = Cuda().enter(name);
  if (entered == CUDA_SUCCESS) return;
  result_ = Fail(ncclUnhandledCudaError, Text(name, " : Cuda failure ", entered));
}

ncclResult_t CheckReady(const char* call, const ncclComm& comm) {
  if (comm.unseen) {
    Breach(Text(call, " of ", Name(comm),
                " before ncclCommGetAsyncError had shown the end of what returned ncclInProgress"),
           "NCCL user guide, ncclCommGetAsyncError: users must query the states of the "
           "communicators until all the states become ncclSuccess before calling another NCCL "
           "function");
  }
  if (comm.error != ncclSuccess) {
    return FailLocked(comm.error, Text(call, " : ", Name(comm), " has had an error before"));
  }
  if (comm.finalized) {
    return FailLocked(ncclInvalidUsage, Text(call, " : ", Name(comm), " was finalized"));
  }
  return ncclSuccess;
}

ncclResult_t CheckPointer(const char* call, const void* pointer, const char* name) {
  if (pointer != nullptr) return ncclSuccess;
  return Fail(ncclInvalidArgument, Text(call, " : ", name, " argument is NULL"));
}

}  // namespace gradsync::fake_nccl

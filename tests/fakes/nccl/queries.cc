// What can be asked about NCCL, and about a communicator.
#include <array>

#include "tests/fakes/nccl/call.h"
#include "tests/fakes/nccl/group.h"

namespace gradsync::fake_nccl {
namespace {

// An attribute of a communicator; not before it is initialised (CheckReady).
ncclResult_t Ask(const char* name, ncclComm* comm, int* out, int ncclComm::*attribute) {
  const Call call(name, comm, Use::kOperate);
  if (call.result() != ncclSuccess) return call.result();
  const ncclResult_t pointer = CheckPointer(name, out, "out");
  if (pointer != ncclSuccess) return pointer;
  const ncclResult_t grouped = CheckNotGrouped(name, comm);
  if (grouped != ncclSuccess) return grouped;
  const Lock lock(TheWorld().mutex);
  const ncclResult_t ready = CheckReady(name, *comm);
  if (ready != ncclSuccess) return ready;
  *out = attribute == nullptr ? comm->clique->ranks : comm->*attribute;
  return ncclSuccess;
}

}  // namespace
}  // namespace gradsync::fake_nccl

using namespace gradsync::fake_nccl;

ncclResult_t ncclGetVersion(int* version) {
  const Call call("ncclGetVersion");
  if (call.result() != ncclSuccess) return call.result();
  const ncclResult_t pointer = CheckPointer("ncclGetVersion", version, "version");
  if (pointer != ncclSuccess) return pointer;
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  static constexpr std::array<const char*, ncclNumResults> kTexts = {
      "no error",
      "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
      "unhandled system error (run with NCCL_DEBUG=INFO for details)",
      "internal error - please report this issue to the NCCL developers",
      "invalid argument (run with NCCL_DEBUG=WARN for details)",
      "invalid usage (run with NCCL_DEBUG=WARN for details)",
      "remote process exited or there was a network error",
      "NCCL operation in progress"};
  return result >= 0 && result < ncclNumResults ? kTexts[result] : "unknown result code";
}

// "The comm argument is currently unused" (user guide, 2.17): the last error of any.
const char* ncclGetLastError(ncclComm_t) {
  const Lock lock(TheWorld().mutex);
  return TheWorld().last_error == nullptr ? "" : TheWorld().last_error->c_str();
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError) {
  const Call call("ncclCommGetAsyncError", comm, Use::kAsk);
  if (call.result() != ncclSuccess) return call.result();
  const ncclResult_t pointer = CheckPointer("ncclCommGetAsyncError", asyncError, "asyncError");
  if (pointer != ncclSuccess) return pointer;
  const ncclResult_t grouped = CheckNotGrouped("ncclCommGetAsyncError", comm);
  if (grouped != ncclSuccess) return grouped;
  const Lock lock(TheWorld().mutex);
  if (comm->error == ncclSuccess && comm->in_progress) {
    *asyncError = ncclInProgress;
    return ncclSuccess;
  }
  *asyncError = comm->error;
  comm->unseen = comm->launch_unseen = false;
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return Ask("ncclCommCount", comm, count, nullptr);
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return Ask("ncclCommCuDevice", comm, device, &ncclComm::device);
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return Ask("ncclCommUserRank", comm, rank, &ncclComm::rank);
}

// How communicators end: finalized, destroyed, aborted.
#include "tests/fakes/nccl/call.h"
#include "tests/fakes/nccl/communicators.h"
#include "tests/fakes/nccl/group.h"

namespace gradsync::fake_nccl {
namespace {

// User guide, Finalizing a communicator: completes all operations in the background, and
// synchronizes with other ranks.
bool IsQuiescent(const ncclComm& comm) {
  return comm.unfinished == 0 && comm.clique->finalizing == comm.clique->ranks;
}

// Looks again for as long as it must: what it waits for may never come.
void FinishSoon(ncclComm* comm) {
  RunSoon([comm] {
    if (comm->aborted) return;
    if (!IsQuiescent(*comm)) return FinishSoon(comm);
    comm->in_progress = false;
    TheWorld().changed.notify_all();
  });
}

ncclResult_t Finalize(const char* call, ncclComm* comm) {
  const Lock lock(TheWorld().mutex);
  if (comm->finalized && !comm->unseen) {
    return FailLocked(ncclInvalidArgument, Text(call, " : ", Name(*comm), " is finalized already"));
  }
  const ncclResult_t ready = CheckReady(call, *comm);
  if (ready != ncclSuccess) return ready;
  comm->finalized = true;
  ++comm->clique->finalizing;
  TheWorld().changed.notify_all();
  if (comm->blocking) return ncclSuccess;
  comm->in_progress = comm->unseen = true;
  FinishSoon(comm);
  return ncclInProgress;
}

void WaitForQuiescence(ncclComm* comm) {
  Lock lock(TheWorld().mutex);
  WaitPatiently(
      &lock, [comm] { return IsQuiescent(*comm); },
      Text("a blocking finalization of ", Name(*comm), " hangs"),
      "NCCL user guide, Finalizing a communicator: synchronize with other ranks");
}

ncclResult_t Destroy(const char* call, ncclComm* comm) {
  const Lock lock(TheWorld().mutex);
  if (comm->unseen) CheckReady(call, *comm);  // a breach
  if (comm->error != ncclSuccess) {
    Breach(
        Text(call, " destroys ", Name(*comm), ", which has had an error"),
        "NCCL user guide, ncclCommGetAsyncError: if there has been an error on the communicator, "
        "user should destroy the communicator with ncclCommAbort()");
  }
  if (comm->unfinished > 0) {
    Breach(Text(call, " destroys ", Name(*comm), " while it has operations that are not complete"),
           "NCCL user guide, Destroying a communicator: otherwise ncclCommDestroy might block");
  }
  comm->life = Life::kDestroyed;
  return ncclSuccess;
}

ncclResult_t Abort(ncclComm* comm) {
  Lock lock(TheWorld().mutex);
  comm->aborted = true;
  comm->clique->aborted = true;
  TheWorld().changed.notify_all();
  WaitPatiently(
      &lock, [comm] { return comm->running == 0; },
      Text("the kernels of ", Name(*comm), " do not end"), "the stand-in for NCCL itself");
  comm->life = Life::kAborted;
  return ncclSuccess;
}

ncclResult_t Do(const char* name, ncclComm* comm, End end, Use use) {
  // As in NCCL, all of these take NULL.
  if (comm == nullptr) return Call(name).result();
  const Call call(name, comm, use);
  if (call.result() != ncclSuccess) return call.result();
  const ncclResult_t grouped = CheckNotGrouped(name, comm);
  if (grouped != ncclSuccess) return grouped;
  Group& group = ThisGroup();
  if (group.depth == 0) return EndAll(name, {{comm, end}});
  if (!group.inits.empty()) {
    return Fail(ncclInvalidUsage,
                Text(name, " : calls to ncclCommInitRank() cannot be merged with others"));
  }
  group.ends.emplace_back(comm, end);
  return ncclSuccess;
}

}  // namespace

ncclResult_t EndAll(const char* call, const std::vector<std::pair<ncclComm*, End>>& ends) {
  ncclResult_t first = ncclSuccess;
  const auto note = [&first](ncclResult_t result) {
    if (first == ncclSuccess) first = result;
    return result;
  };
  std::vector<ncclComm*> finalizing;
  for (const auto& [comm, end] : ends) {
    if (end == End::kDestroy) note(Destroy(call, comm));
    if (end == End::kAbort) note(Abort(comm));
    if (end != End::kFinalize) continue;
    if (note(Finalize(call, comm)) == ncclSuccess) finalizing.push_back(comm);
  }
  for (ncclComm* comm : finalizing) WaitForQuiescence(comm);
  return first;
}

}  // namespace gradsync::fake_nccl

using namespace gradsync::fake_nccl;

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  return ForGroup(Do("ncclCommFinalize", comm, End::kFinalize, Use::kOperate));
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return ForGroup(Do("ncclCommDestroy", comm, End::kDestroy, Use::kEnd));
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return ForGroup(Do("ncclCommAbort", comm, End::kAbort, Use::kEnd));
}

#include "tests/fakes/nccl/group.h"

#include <algorithm>

#include "tests/fakes/nccl/call.h"
#include "tests/fakes/nccl/communicators.h"
#include "tests/fakes/nccl/launch.h"

namespace gradsync::fake_nccl {
namespace {

std::set<ncclComm*> Operated(const Group& group) {
  std::set<ncclComm*> comms;
  for (const Request& request : group.requests) comms.insert(request.comm);
  return comms;
}

// The requests are no longer this thread's alone to add to.
void Disown(const Group& group) {
  const Lock lock(TheWorld().mutex);
  for (ncclComm* comm : Operated(group)) comm->group_owner = 0;
}

// User guide, Error handling (6): dynamic errors apply to all operations within the group, and all
// its communicators must be aborted.
ncclResult_t EndWithError(const Group& group) {
  Disown(group);
  for (const auto& [comm, out] : group.inits) Discard(comm, out);
  const Lock lock(TheWorld().mutex);
  for (ncclComm* comm : Operated(group)) {
    if (group.error != ncclInvalidArgument && comm->error == ncclSuccess) comm->error = group.error;
  }
  return group.error;
}

ncclResult_t EndRequests(Group* group) {
  std::deque<Inside> inside;
  for (ncclComm* comm : Operated(*group)) inside.emplace_back("ncclGroupEnd", comm, Use::kOperate);
  Disown(*group);
  return Issue(std::move(group->requests));
}

ncclResult_t EndEnds(const Group& group) {
  std::deque<Inside> inside;
  for (const auto& [comm, end] : group.ends) {
    inside.emplace_back("ncclGroupEnd", comm, end == End::kFinalize ? Use::kOperate : Use::kEnd);
  }
  return EndAll("ncclGroupEnd", group.ends);
}

}  // namespace

Group& ThisGroup() {
  thread_local Group group;
  return group;
}

ncclResult_t ForGroup(ncclResult_t result) {
  Group& group = ThisGroup();
  if (group.depth > 0 && result != ncclSuccess && result != ncclInProgress) group.error = result;
  return result;
}

ncclResult_t CheckGroupMode(const char* call, const ncclComm& comm) {
  Group& group = ThisGroup();
  if (group.depth == 0) return ncclSuccess;
  if (!group.blocking) group.blocking = comm.blocking;
  if (*group.blocking == comm.blocking) return ncclSuccess;
  return Fail(ncclInvalidArgument,
              Text(call,
                   " : Blocking and nonblocking communicators are not allowed in the same "
                   "group."));
}

ncclResult_t CheckNotGrouped(const char* call, const ncclComm* comm) {
  const Group& group = ThisGroup();
  const bool operated = std::any_of(group.requests.begin(), group.requests.end(),
                                    [comm](const Request& one) { return one.comm == comm; });
  const bool created = std::any_of(group.inits.begin(), group.inits.end(),
                                   [comm](const auto& one) { return one.first == comm; });
  const bool ended = std::any_of(group.ends.begin(), group.ends.end(),
                                 [comm](const auto& one) { return one.first == comm; });
  if (!operated && !created && !ended) return ncclSuccess;
  return Fail(ncclInvalidUsage,
              Text(call, " : the communicator has operations in this thread's open group"));
}

}  // namespace gradsync::fake_nccl

using namespace gradsync::fake_nccl;

ncclResult_t ncclGroupStart() {
  const Call call("ncclGroupStart");
  if (call.result() != ncclSuccess) return call.result();
  ++ThisGroup().depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  const Call call("ncclGroupEnd");
  Group& current = ThisGroup();
  if (current.depth == 0) {
    return Fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
  }
  if (call.result() != ncclSuccess) ForGroup(call.result());
  if (--current.depth > 0) return call.result();
  Group group = std::exchange(current, Group());
  if (group.error != ncclSuccess) return EndWithError(group);
  if (!group.inits.empty()) return EndInits(group.inits);
  const ncclResult_t issued = group.requests.empty() ? ncclSuccess : EndRequests(&group);
  const ncclResult_t ended = EndEnds(group);
  return issued != ncclSuccess ? issued : ended;
}

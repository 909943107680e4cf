// Groups: what a thread has asked for since its outermost ncclGroupStart.
#ifndef GRADSYNC_TESTS_FAKES_NCCL_GROUP_H_
#define GRADSYNC_TESTS_FAKES_NCCL_GROUP_H_

#include "tests/fakes/nccl/world.h"

namespace gradsync::fake_nccl {

enum class End { kFinalize, kDestroy, kAbort };

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;  // of a call in it
  std::optional<bool> blocking;      // of its communicators
  std::vector<Request> requests;
  std::vector<std::pair<ncclComm*, ncclComm_t*>> inits;
  std::vector<std::pair<ncclComm*, End>> ends;
};

Group& ThisGroup();

// Returns `result`, and remembers an error for ncclGroupEnd if this thread has a group open.
//
// NCCL's ncclGroupEnd then returns it and launches nothing, whatever the error; the user guide says
// otherwise of ncclInvalidArgument (Error handling, 3). This is the stricter of the two.
ncclResult_t ForGroup(ncclResult_t result);

// Whether a communicator may join this thread's group. NCCL refuses blocking and non-blocking ones
// in one group with ncclInvalidArgument.
ncclResult_t CheckGroupMode(const char* call, const ncclComm& comm);

// Whether this thread's open group has operations of `comm`: ncclInvalidUsage for a call that has
// no place among them. (NCCL user guide, Group Calls: nothing is started until ncclGroupEnd.)
ncclResult_t CheckNotGrouped(const char* call, const ncclComm* comm);

}  // namespace gradsync::fake_nccl

#endif  // GRADSYNC_TESTS_FAKES_NCCL_GROUP_H_

// The life of communicators.
#ifndef GRADSYNC_TESTS_FAKES_NCCL_COMMUNICATORS_H_
#define GRADSYNC_TESTS_FAKES_NCCL_COMMUNICATORS_H_

#include "tests/fakes/nccl/group.h"

namespace gradsync::fake_nccl {

// Brings together what ncclCommInitRank... was called for, outside or at the end of a group: waits
// for all ranks if they are blocking, else returns ncclInProgress.
ncclResult_t EndInits(const std::vector<std::pair<ncclComm*, ncclComm_t*>>& inits);

// A communicator that its caller gets NULL for.
void Discard(ncclComm* comm, ncclComm_t* out);

// Ends communicators together: those that must wait for each other do. Returns the first error.
ncclResult_t EndAll(const char* call, const std::vector<std::pair<ncclComm*, End>>& ends);

}  // namespace gradsync::fake_nccl

#endif  // GRADSYNC_TESTS_FAKES_NCCL_COMMUNICATORS_H_

// From requests to kernels on streams.
#ifndef GRADSYNC_TESTS_FAKES_NCCL_LAUNCH_H_
#define GRADSYNC_TESTS_FAKES_NCCL_LAUNCH_H_

#include "tests/fakes/nccl/world.h"

namespace gradsync::fake_nccl {

// Launches what one call outside a group, or one group, asked for: of each communicator as one
// kernel. For non-blocking communicators every third time in the background: ncclInProgress.
ncclResult_t Issue(std::vector<Request> requests);

}  // namespace gradsync::fake_nccl

#endif  // GRADSYNC_TESTS_FAKES_NCCL_LAUNCH_H_

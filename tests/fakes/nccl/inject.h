// GRADSYNC_FAKE_NCCL_INJECT: what is to go wrong with a collective, by its number among those that
// this process calls (a rank's call each), from 1. "3:async=6": its communicator gets the error
// ncclRemoteError; "3:stall": nothing says why. Neither completes until its communicator is
// aborted. Several are separated by commas.
#ifndef GRADSYNC_TESTS_FAKES_NCCL_INJECT_H_
#define GRADSYNC_TESTS_FAKES_NCCL_INJECT_H_

#include "tests/fakes/nccl/world.h"

namespace gradsync::fake_nccl {

// Counts one collective, and says what is injected at it.
Injected NextCollective();

// GRADSYNC_FAKE_NCCL_MISMATCH=hang: ranks that differ about a collective wait for ever, as with
// real NCCL, instead of ending the process.
bool MismatchHangs();

}  // namespace gradsync::fake_nccl

#endif  // GRADSYNC_TESTS_FAKES_NCCL_INJECT_H_

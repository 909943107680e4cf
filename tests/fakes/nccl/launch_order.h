// One order of launches on all devices, across communicators: kernels of two communicators that
// start in one order on a device and in the other on a second device wait for each other.
#ifndef GRADSYNC_TESTS_FAKES_NCCL_LAUNCH_ORDER_H_
#define GRADSYNC_TESTS_FAKES_NCCL_LAUNCH_ORDER_H_

#include "tests/fakes/nccl/world.h"

namespace gradsync::fake_nccl {

// Notes that `comm` launches its collective `number` now. A breach if another clique has launched
// one before it on this device, but after it on another that both span. Locked.
void NoteLaunch(const ncclComm& comm, uint64_t number);

}  // namespace gradsync::fake_nccl

#endif  // GRADSYNC_TESTS_FAKES_NCCL_LAUNCH_ORDER_H_

// What runs on a stream for a launch: a rank's part of its operations.
#ifndef GRADSYNC_TESTS_FAKES_NCCL_KERNEL_H_
#define GRADSYNC_TESTS_FAKES_NCCL_KERNEL_H_

#include "tests/fakes/nccl/world.h"

namespace gradsync::fake_nccl {

// For fakeCudaLaunch; `launch` is the number of one in World::launches. The kernel itself runs on
// the stream of the first operation; a gate holds each other stream of the launch, as the NCCL user
// guide has it ("Mixing Multiple Streams within the same group": a dependency of all streams before
// the kernel starts, and all are blocked until it completes).
void RunKernel(void* launch, const volatile int* abandoned);
void RunGate(void* launch, const volatile int* abandoned);

// What a rank reads and writes, in bytes; 0 if it does not.
size_t SendBytes(const Request& request);
size_t ReceiveBytes(const Request& request);

}  // namespace gradsync::fake_nccl

#endif  // GRADSYNC_TESTS_FAKES_NCCL_KERNEL_H_

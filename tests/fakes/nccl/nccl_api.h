// nccl.h, its functions visible outside this library: the project hides all else.
#ifndef GRADSYNC_TESTS_FAKES_NCCL_NCCL_API_H_
#define GRADSYNC_TESTS_FAKES_NCCL_NCCL_API_H_

#pragma GCC visibility push(default)
#include <nccl.h>
#pragma GCC visibility pop

#endif  // GRADSYNC_TESTS_FAKES_NCCL_NCCL_API_H_

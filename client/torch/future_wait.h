// Waiting for a future that somebody else completes, or does not.
#ifndef GRADSYNC_CLIENT_TORCH_FUTURE_WAIT_H_
#define GRADSYNC_CLIENT_TORCH_FUTURE_WAIT_H_

#include <ATen/core/ivalue.h>

#include <string>

#include "client/torch/session.h"

namespace gradsync::torch {

// Waits until `future` is completed, and throws what it was completed with, if that is an error. Of
// a value on a GPU, what comes next on the current stream then finds it.
// Throws Error (GRADSYNC_DEADLINE_EXCEEDED), which calls the future `what`, after `timeout`. To be
// called without the interpreter's lock.
void WaitFor(c10::ivalue::Future& future, const std::string& what, Timeout timeout);

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_FUTURE_WAIT_H_

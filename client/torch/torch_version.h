// Torch's interface for backends grows from version to version.
#ifndef GRADSYNC_CLIENT_TORCH_TORCH_VERSION_H_
#define GRADSYNC_CLIENT_TORCH_TORCH_VERSION_H_

#include <torch/version.h>

// Whether this is torch 2.`minor`, or a later one.
#define GRADSYNC_TORCH_SINCE_2(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= (minor))

#endif  // GRADSYNC_CLIENT_TORCH_TORCH_VERSION_H_

// Torch's CUDA devices and streams as libgradsync wants them. By torch's own interface for whatever
// accelerator there is, so that neither CUDA's headers nor its libraries are needed.
#ifndef GRADSYNC_CLIENT_TORCH_DEVICE_H_
#define GRADSYNC_CLIENT_TORCH_DEVICE_H_

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>

#include "gradsync/gradsync.h"

namespace gradsync::torch {

// GRADSYNC_CPU, or GRADSYNC_CUDA of it.
uint32_t NumberOf(c10::Device device);

// Of this thread, on a CUDA device.
c10::Stream CurrentStream(c10::Device device);

// One of torch's pool, which others may come to use, too.
c10::Stream PoolStream(c10::Device device);

// The CUDA device that is current on this thread.
c10::Device CurrentCudaDevice();

// What comes next on `stream` waits for what is on `before` by now.
void MakeWait(const c10::Stream& stream, const c10::Stream& before);

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_DEVICE_H_

// Memory of GPUs as server/local has it: allocated here or imported from a trainer.
//
// Giving it back takes the driver's lock, and closing a legacy handle may wait for what runs on the
// GPU: never on a thread that others wait for to get on.
#ifndef GRADSYNC_SERVER_ENGINE_CUDA_DEVICE_MEMORY_H_
#define GRADSYNC_SERVER_ENGINE_CUDA_DEVICE_MEMORY_H_

#include <cstdint>
#include <memory>

#include "server/engine/cuda/device.h"
#include "server/engine/device_engine.h"
#include "shm/status.h"
#include "shm/unique_fd.h"

namespace gradsync::cuda {

// As DeviceEngine's functions of these names.
Result<DeviceEngine::Exported> AllocateOn(Device& device, uint64_t bytes);
Result<std::shared_ptr<const DeviceMemory>> ImportExportedOn(Device& device, UniqueFd fd,
                                                             uint64_t bytes);
Result<std::shared_ptr<const DeviceMemory>> ImportLegacyOn(Device& device,
                                                           const LegacyHandle& handle,
                                                           uint64_t bytes);

}  // namespace gradsync::cuda

#endif  // GRADSYNC_SERVER_ENGINE_CUDA_DEVICE_MEMORY_H_

#include "client/torch/device.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace gradsync::torch {
namespace {

c10::impl::VirtualGuardImpl Cuda() { return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA); }

}  // namespace

uint32_t NumberOf(c10::Device device) {
  if (device.is_cpu()) return GRADSYNC_CPU;
  return static_cast<uint32_t>(device.index()) + 1;  // GRADSYNC_CUDA, whose cast is one of C's
}

c10::Stream CurrentStream(c10::Device device) { return Cuda().getStream(device); }

c10::Stream PoolStream(c10::Device device) { return Cuda().getStreamFromGlobalPool(device); }

c10::Device CurrentCudaDevice() { return Cuda().getDevice(); }

void MakeWait(const c10::Stream& stream, const c10::Stream& before) {
  if (stream == before) return;
  c10::Event reached(c10::DeviceType::CUDA);
  reached.record(before);
  reached.block(stream);
}

}  // namespace gradsync::torch

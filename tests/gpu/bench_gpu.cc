#include "tests/gpu/bench_gpu.h"

#include <utility>

namespace gradsync::bench {

Result<std::unique_ptr<BenchGpu>> BenchGpu::Open(int ordinal) {
  const Result<const CudaDriver*> driver = CudaDriver::Load();
  if (!driver) return Unexpected(driver.error());
  const CudaDriver& cuda = **driver;
  CUdevice device = 0;
  GRADSYNC_RETURN_IF_ERROR(cuda.Check(cuda.cuDeviceGet(&device, ordinal), "cuDeviceGet"));
  auto context = PrimaryContext::Retain(cuda, device);
  if (!context) return Unexpected(context.error());
  std::unique_ptr<BenchGpu> gpu(new BenchGpu(cuda, *std::move(context), ordinal));
  GRADSYNC_RETURN_IF_ERROR(gpu->Prepare());
  return gpu;
}

BenchGpu::~BenchGpu() {
  if (!MakeCurrent().ok()) return;
  cuda_.cuCtxSynchronize();
  for (const CUdeviceptr memory : memory_) cuda_.cuMemFree(memory);
  for (CUevent event : {begin_, end_}) {
    if (event != nullptr) cuda_.cuEventDestroy(event);
  }
  if (stream_ != nullptr) cuda_.cuStreamDestroy(stream_);
  cuda_.cuCtxSetCurrent(nullptr);
}

Status BenchGpu::MakeCurrent() const {
  return cuda_.Check(cuda_.cuCtxSetCurrent(context_->get()), "cuCtxSetCurrent");
}

Status BenchGpu::Prepare() {
  GRADSYNC_RETURN_IF_ERROR(MakeCurrent());
  GRADSYNC_RETURN_IF_ERROR(
      cuda_.Check(cuda_.cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0),
                  "cuStreamCreateWithPriority"));
  GRADSYNC_RETURN_IF_ERROR(
      cuda_.Check(cuda_.cuEventCreate(&begin_, CU_EVENT_DEFAULT), "cuEventCreate"));
  return cuda_.Check(cuda_.cuEventCreate(&end_, CU_EVENT_DEFAULT), "cuEventCreate");
}

Result<CUdeviceptr> BenchGpu::Allocate(uint64_t bytes) {
  CUdeviceptr address = 0;
  GRADSYNC_RETURN_IF_ERROR(cuda_.Check(cuda_.cuMemAlloc(&address, bytes), "cuMemAlloc"));
  memory_.push_back(address);
  GRADSYNC_RETURN_IF_ERROR(
      cuda_.Check(cuda_.cuMemsetD8Async(address, 0, bytes, stream_), "cuMemsetD8Async"));
  GRADSYNC_RETURN_IF_ERROR(Synchronize());
  return address;
}

Status BenchGpu::Copy(CUdeviceptr to, CUdeviceptr from, uint64_t bytes) const {
  return cuda_.Check(cuda_.cuMemcpyDtoDAsync(to, from, bytes, stream_), "cuMemcpyDtoDAsync");
}

Status BenchGpu::Synchronize() const {
  return cuda_.Check(cuda_.cuStreamSynchronize(stream_), "cuStreamSynchronize");
}

Result<double> BenchGpu::Time(const std::function<Status()>& enqueue) const {
  GRADSYNC_RETURN_IF_ERROR(cuda_.Check(cuda_.cuEventRecord(begin_, stream_), "cuEventRecord"));
  GRADSYNC_RETURN_IF_ERROR(enqueue());
  GRADSYNC_RETURN_IF_ERROR(cuda_.Check(cuda_.cuEventRecord(end_, stream_), "cuEventRecord"));
  GRADSYNC_RETURN_IF_ERROR(Synchronize());
  float milliseconds = 0;
  GRADSYNC_RETURN_IF_ERROR(
      cuda_.Check(cuda_.cuEventElapsedTime(&milliseconds, begin_, end_), "cuEventElapsedTime"));
  return 1e-3 * static_cast<double>(milliseconds);
}

Result<int> BenchGpu::Multiprocessors() const {
  int count = 0;
  GRADSYNC_RETURN_IF_ERROR(
      cuda_.Check(cuda_.cuDeviceGetAttribute(&count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                                             context_->device()),
                  "cuDeviceGetAttribute"));
  return count;
}

}  // namespace gradsync::bench

#include "server/engine/cuda/stream.h"

namespace gradsync::cuda {

Result<Stream> Stream::Create(std::shared_ptr<const PrimaryContext> context) {
  const CudaDriver& driver = context->driver();
  const CurrentContext current(driver, context->get());
  int least = 0;
  int greatest = 0;
  GRADSYNC_RETURN_IF_ERROR(driver.Check(driver.cuCtxGetStreamPriorityRange(&least, &greatest),
                                        "cuCtxGetStreamPriorityRange"));
  CUstream stream = nullptr;
  GRADSYNC_RETURN_IF_ERROR(
      driver.Check(driver.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, greatest),
                   "cuStreamCreateWithPriority"));
  return Stream(std::move(context), stream);
}

Stream::~Stream() {
  if (stream_ == nullptr) return;
  const CurrentContext current(context_->driver(), context_->get());
  context_->driver().cuStreamDestroy(stream_);
}

}  // namespace gradsync::cuda

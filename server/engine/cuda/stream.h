// A stream of a GPU that waits for no other: not for the null stream either.
#ifndef GRADSYNC_SERVER_ENGINE_CUDA_STREAM_H_
#define GRADSYNC_SERVER_ENGINE_CUDA_STREAM_H_

#include <cuda.h>

#include <memory>
#include <utility>

#include "shm/cuda/device_memory.h"
#include "shm/cuda/driver.h"
#include "shm/status.h"

namespace gradsync::cuda {

class Stream {
 public:
  // Of the highest priority: what trainers wait for goes first.
  static Result<Stream> Create(std::shared_ptr<const PrimaryContext> context);
  Stream(Stream&& other) noexcept
      : context_(std::move(other.context_)), stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&&) = delete;
  // Does not wait: the driver ends what is in it first.
  ~Stream();

  CUstream get() const { return stream_; }
  const PrimaryContext& context() const { return *context_; }

 private:
  Stream(std::shared_ptr<const PrimaryContext> context, CUstream stream)
      : context_(std::move(context)), stream_(stream) {}

  std::shared_ptr<const PrimaryContext> context_;
  CUstream stream_;
};

}  // namespace gradsync::cuda

#endif  // GRADSYNC_SERVER_ENGINE_CUDA_STREAM_H_

// What the module exports (../cuda_module.h); exports.map keeps everything else in.
#include "server/engine/cuda/cuda_engine.h"
#include "server/engine/cuda_module.h"

extern "C" __attribute__((visibility("default"))) void gradsync_make_cuda_engine(
    const gradsync::CudaOptions& options, std::unique_ptr<gradsync::DeviceEngine>* engine,
    gradsync::Status* error) {
  gradsync::Result<std::unique_ptr<gradsync::DeviceEngine>> made =
      gradsync::cuda::CudaEngine::Create(options);
  if (made) {
    *engine = std::move(*made);
  } else {
    *error = std::move(made.error());
  }
}

// kernels.cu as nvcc compiled it, for the driver to compile on.
#ifndef GRADSYNC_SERVER_ENGINE_CUDA_KERNELS_PTX_H_
#define GRADSYNC_SERVER_ENGINE_CUDA_KERNELS_PTX_H_

namespace gradsync::cuda {

extern const char kKernelsPtx[];  // ends with a zero

}  // namespace gradsync::cuda

#endif  // GRADSYNC_SERVER_ENGINE_CUDA_KERNELS_PTX_H_

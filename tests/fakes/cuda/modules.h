// Modules, and the kernels that were asked for.
#ifndef GRADSYNC_TESTS_FAKES_CUDA_MODULES_H_
#define GRADSYNC_TESTS_FAKES_CUDA_MODULES_H_

#include <set>
#include <string>

#include "tests/fakes/cuda/kernel_abi.h"
#include "tests/fakes/cuda/process.h"

namespace gradsync::fake_cuda {

struct Module {
  Context* context = nullptr;
  std::set<std::string> entries;
};

struct Function {
  Context* context = nullptr;
  CUmodule module = nullptr;
  FakeKernel run = nullptr;
  const FakeKernelParams* params = nullptr;
};

}  // namespace gradsync::fake_cuda

#endif  // GRADSYNC_TESTS_FAKES_CUDA_MODULES_H_

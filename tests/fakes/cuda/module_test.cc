// Modules, and kernels that run on the host (test_kernels.cu).
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <vector>

#include "tests/fakes/cuda/test_support.h"

namespace gradsync::fake_cuda {
namespace {

constexpr char kPtx[] =
    ".version 8.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry AddScaled(\n.param .u64 AddScaled_param_0\n)\n{\nret;\n}\n"
    ".visible .entry ToBfloat16(\n)\n{\nret;\n}\n.visible .entry CopyPair()\n{\nret;\n}\n"
    ".visible .entry WithoutCode()\n{\nret;\n}\n";

class ModuleTest : public FakeCudaTest {
 protected:
  ModuleTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }

  void SetUp() override {
    setenv("GRADSYNC_FAKE_CUDA_KERNELS", FAKE_CUDA_TEST_KERNELS, 1);
    FakeCudaTest::SetUp();
    ASSERT_EQ(cuModuleLoadData(&module_, kPtx), CUDA_SUCCESS);
    ASSERT_EQ(cuMemAlloc(&memory_, 4096), CUDA_SUCCESS);
    ASSERT_EQ(cuMemsetD8(memory_, 0, 4096), CUDA_SUCCESS);
  }
  void TearDown() override {
    EXPECT_EQ(cuMemFree(memory_), CUDA_SUCCESS);
    EXPECT_EQ(cuModuleUnload(module_), CUDA_SUCCESS);
    FakeCudaTest::TearDown();
  }

  CUfunction Function(const char* name) {
    CUfunction function = nullptr;
    EXPECT_EQ(cuModuleGetFunction(&function, module_, name), CUDA_SUCCESS);
    return function;
  }

  static CUresult Launch(CUfunction function, unsigned grid, unsigned block, void** params,
                         CUstream stream = nullptr) {
    return cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, params, nullptr);
  }

  CUmodule module_ = nullptr;
  CUdeviceptr memory_ = 0;
};

TEST_F(ModuleTest, AFunctionIsFoundOnlyIfThePtxHasIt) {
  CUfunction function = nullptr;
  EXPECT_EQ(cuModuleGetFunction(&function, module_, "AddScaled"), CUDA_SUCCESS);
  EXPECT_EQ(cuModuleGetFunction(&function, module_, "Add"), CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(cuModuleGetFunction(&function, module_, "WithoutCode"), CUDA_ERROR_NOT_FOUND);
}

TEST_F(ModuleTest, OnlyPtxIsLoaded) {
  CUmodule module = nullptr;
  EXPECT_EQ(cuModuleLoadData(&module, "hello"), CUDA_ERROR_INVALID_PTX);
  EXPECT_EQ(cuModuleLoadData(&module,
                             "\x7f"
                             "ELF..."),
            CUDA_ERROR_NO_BINARY_FOR_GPU);
  EXPECT_EQ(cuModuleUnload(module), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(ModuleTest, AKernelRunsItsWholeGrid) {
  std::vector<float> values(512, 2.0F);
  CUdeviceptr in = memory_ + 2048;
  float scale = 1.5F;
  unsigned count = 500;
  ASSERT_EQ(cuMemcpyHtoD(in, values.data(), 2048), CUDA_SUCCESS);
  std::array<void*, 4> params = {&memory_, &in, &scale, &count};
  ASSERT_EQ(Launch(Function("AddScaled"), 4, 128, params.data()), CUDA_SUCCESS);
  ASSERT_EQ(cuMemcpyDtoH(values.data(), memory_, 2048), CUDA_SUCCESS);
  EXPECT_EQ(values[0], 3.0F);
  EXPECT_EQ(values[499], 3.0F);
  EXPECT_EQ(values[500], 0.0F);
}

TEST_F(ModuleTest, ParametersAreCopiedByTheLaunch) {
  CUstream stream = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWaitValue64(stream, memory_, 1, 0), CUDA_SUCCESS);
  {
    const float one = 1.0F;
    CUdeviceptr in = memory_ + 8;
    CUdeviceptr out = memory_ + 16;
    float scale = 2.0F;
    unsigned count = 1;
    ASSERT_EQ(cuMemcpyHtoD(in, &one, sizeof(one)), CUDA_SUCCESS);
    std::array<void*, 4> params = {&out, &in, &scale, &count};
    ASSERT_EQ(Launch(Function("AddScaled"), 1, 1, params.data(), stream), CUDA_SUCCESS);
    in = out = 0;
    scale = 100;
    count = 0;
  }
  WriteWord(memory_, 1);
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_SUCCESS);
  float result = 0;
  EXPECT_EQ(cuMemcpyDtoH(&result, memory_ + 16, sizeof(result)), CUDA_SUCCESS);
  EXPECT_EQ(result, 2.0F);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
}

TEST_F(ModuleTest, HalfPrecisionAndStructuresOfPointersWork) {
  const float value = 1.0F;
  CUdeviceptr out = memory_ + 64;
  unsigned count = 1;
  ASSERT_EQ(cuMemcpyHtoD(memory_, &value, sizeof(value)), CUDA_SUCCESS);
  std::array<void*, 3> params = {&out, &memory_, &count};
  ASSERT_EQ(Launch(Function("ToBfloat16"), 1, 32, params.data()), CUDA_SUCCESS);
  EXPECT_EQ(ReadWord(out), 0x3f80U);
  std::array<CUdeviceptr, 2> pair = {memory_, memory_ + 128};
  unsigned long long pairs = 1;
  std::array<void*, 2> pair_params = {pair.data(), &pairs};
  ASSERT_EQ(Launch(Function("CopyPair"), 2, 32, pair_params.data()), CUDA_SUCCESS);
  EXPECT_EQ(ReadWord(memory_ + 128), 0x3f800000U);
}

TEST_F(ModuleTest, ALaunchKeepsToTheLimits) {
  const CUfunction function = Function("AddScaled");
  CUdeviceptr nothing = 0;
  float scale = 0;
  unsigned count = 0;
  std::array<void*, 4> params = {&nothing, &nothing, &scale, &count};
  void** const p = params.data();
  const auto launch = [&](unsigned gx, unsigned gy, unsigned bx, unsigned by, unsigned shared) {
    return cuLaunchKernel(function, gx, gy, 1, bx, by, 1, shared, nullptr, p, nullptr);
  };
  EXPECT_EQ(launch(1, 1, 1024, 1, 0), CUDA_SUCCESS);
  EXPECT_EQ(launch(1, 1, 1025, 1, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(launch(1, 1, 512, 4, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(launch(0, 1, 1, 1, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(launch(1, 1, 0, 1, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(launch(1, 65536, 1, 1, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(launch(1, 1, 1, 1, 49 * 1024), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Launch(function, 1, 1, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Launch(nullptr, 1, 1, p), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(ModuleTest, ALaunchWantsAStreamOfTheCurrentContext) {
  CUcontext other = nullptr;
  CUstream far = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&other, 1), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxPushCurrent(other), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamCreate(&far, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxPopCurrent(&other), CUDA_SUCCESS);
  CUdeviceptr nothing = 0;
  float scale = 0;
  unsigned count = 0;
  std::array<void*, 4> params = {&nothing, &nothing, &scale, &count};
  EXPECT_EQ(Launch(Function("AddScaled"), 1, 1, params.data(), far), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(cuStreamDestroy(far), CUDA_SUCCESS);
  EXPECT_EQ(cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
}

TEST_F(ModuleTest, ABadPointerIsAnIllegalAddress) {
  const auto misbehave = [&] {
    float scale = 0;
    unsigned count = 1;
    CUdeviceptr freed = 0;
    bool ok = cuMemAlloc(&freed, 64) == CUDA_SUCCESS && cuMemFree(freed) == CUDA_SUCCESS;
    std::array<void*, 4> params = {&memory_, &freed, &scale, &count};
    ok = ok && Launch(Function("AddScaled"), 1, 1, params.data()) == CUDA_SUCCESS;
    ok = ok && cuCtxSynchronize() == CUDA_ERROR_ILLEGAL_ADDRESS;
    ok = ok && cuModuleUnload(module_) == CUDA_ERROR_ILLEGAL_ADDRESS;
    _exit(ok ? 0 : 1);
  };
  EXPECT_EXIT(misbehave(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace gradsync::fake_cuda

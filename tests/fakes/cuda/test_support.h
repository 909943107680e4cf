// For the tests of the stand-in: a context, and other processes.
#ifndef GRADSYNC_TESTS_FAKES_CUDA_TEST_SUPPORT_H_
#define GRADSYNC_TESTS_FAKES_CUDA_TEST_SUPPORT_H_

#include <cuda.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "tests/fakes/cuda/fake_cuda.h"

namespace gradsync::fake_cuda {

inline constexpr size_t kMiB = size_t{1} << 20;

// The primary context of device 0 is current; nothing may be left at the end.
class FakeCudaTest : public testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  CUcontext context_ = nullptr;
};

// What is still there, as fakeCudaDescribeLive says it.
std::string Live();

CUmemAllocationProp Properties(int device, CUmemAllocationHandleType type);

// Memory of cuMemCreate, mapped and accessible from its device.
struct Mapped {
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr address = 0;
  size_t size = 0;
};
Mapped MapNew(size_t size, int device = 0, bool access = true);
void Unmap(const Mapped& mapped);
CUresult SetAccess(CUdeviceptr address, size_t size, int device,
                   CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE);

uint64_t ReadWord(CUdeviceptr address);
void WriteWord(CUdeviceptr address, uint64_t value);

// Waits until it holds, for at most ten seconds; false if it never did.
bool Eventually(const std::function<bool()>& holds);

// A directory of its own for each test that has several processes; gone at the end.
class Directory {
 public:
  Directory();
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  ~Directory();

  const std::string& path() const { return path_; }
  // "" if there is no such file.
  std::string Read(const std::string& file) const;

 private:
  std::string path_;
};

// A process of fake_cuda_test_helper, which does what it is told; inherits the descriptors given.
class Helper {
 public:
  using Environment = std::vector<std::pair<std::string, std::string>>;

  explicit Helper(const Environment& environment = {}, const std::vector<int>& inherited = {});
  Helper(const Helper&) = delete;
  Helper& operator=(const Helper&) = delete;
  ~Helper();

  pid_t pid() const { return pid_; }
  // What it answers to a command; "" if it ended instead.
  std::string Do(const std::string& command);
  // The same for several, of which each but the last succeeds.
  std::string Do(std::initializer_list<const char*> commands);
  // Tells it to end as it would anyway; its exit code, or minus the signal.
  int Exit();
  void Kill();
  // For its end: the same.
  int Wait();
  // What it wrote to stderr, after Wait().
  std::string Errors();

 private:
  std::string ReadLine();

  pid_t pid_ = -1;
  int input_ = -1;
  int output_ = -1;
  int errors_ = -1;
};

}  // namespace gradsync::fake_cuda

#endif  // GRADSYNC_TESTS_FAKES_CUDA_TEST_SUPPORT_H_

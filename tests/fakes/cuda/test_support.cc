#include "tests/fakes/cuda/test_support.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

namespace gradsync::fake_cuda {

void FakeCudaTest::SetUp() {
  ASSERT_EQ(cuInit(0), CUDA_SUCCESS);
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&context_, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
}

void FakeCudaTest::TearDown() {
  EXPECT_EQ(Live(), "");
  EXPECT_EQ(fakeCudaLiveObjects(), 0U);
  EXPECT_EQ(cuCtxSetCurrent(nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
}

std::string Live() {
  std::array<char, 4096> text{};
  fakeCudaDescribeLive(text.data(), text.size());
  return text.data();
}

CUmemAllocationProp Properties(int device, CUmemAllocationHandleType type) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = type;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  return prop;
}

CUresult SetAccess(CUdeviceptr address, size_t size, int device, CUmemAccess_flags flags) {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = flags;
  return cuMemSetAccess(address, size, &access, 1);
}

Mapped MapNew(size_t size, int device, bool access) {
  Mapped mapped;
  mapped.size = size;
  const CUmemAllocationProp prop = Properties(device, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  EXPECT_EQ(cuMemCreate(&mapped.handle, size, &prop, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemAddressReserve(&mapped.address, size, 0, 0, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemMap(mapped.address, size, 0, mapped.handle, 0), CUDA_SUCCESS);
  if (access) {
    EXPECT_EQ(SetAccess(mapped.address, size, device), CUDA_SUCCESS);
  }
  return mapped;
}

void Unmap(const Mapped& mapped) {
  EXPECT_EQ(cuMemUnmap(mapped.address, mapped.size), CUDA_SUCCESS);
  EXPECT_EQ(cuMemAddressFree(mapped.address, mapped.size), CUDA_SUCCESS);
  EXPECT_EQ(cuMemRelease(mapped.handle), CUDA_SUCCESS);
}

uint64_t ReadWord(CUdeviceptr address) {
  uint64_t value = 0;
  EXPECT_EQ(cuMemcpyDtoH(&value, address, sizeof(value)), CUDA_SUCCESS);
  return value;
}

void WriteWord(CUdeviceptr address, uint64_t value) {
  EXPECT_EQ(cuMemcpyHtoD(address, &value, sizeof(value)), CUDA_SUCCESS);
}

bool Eventually(const std::function<bool()>& holds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

Directory::Directory() {
  std::string path = (std::filesystem::temp_directory_path() / "fake-cuda-XXXXXX").string();
  EXPECT_NE(mkdtemp(path.data()), nullptr);
  path_ = path;
}

Directory::~Directory() { std::filesystem::remove_all(path_); }

std::string Directory::Read(const std::string& file) const {
  const std::ifstream in(path_ + "/" + file);
  std::stringstream text;
  if (in) text << in.rdbuf();
  return text.str();
}

Helper::Helper(const Environment& environment, const std::vector<int>& inherited) {
  std::array<int, 2> in{};
  std::array<int, 2> out{};
  EXPECT_EQ(pipe2(in.data(), O_CLOEXEC), 0);
  EXPECT_EQ(pipe2(out.data(), O_CLOEXEC), 0);
  errors_ = memfd_create("errors", MFD_CLOEXEC);
  pid_ = fork();
  if (pid_ == 0) {
    dup2(in[0], 0);
    dup2(out[1], 1);
    dup2(errors_, 2);
    for (const int fd : inherited) fcntl(fd, F_SETFD, 0);
    for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
    execl(FAKE_CUDA_TEST_HELPER, FAKE_CUDA_TEST_HELPER, nullptr);
    _exit(127);
  }
  close(in[0]);
  close(out[1]);
  input_ = in[1];
  output_ = out[0];
}

Helper::~Helper() {
  if (pid_ > 0) {
    Kill();
    Wait();
  }
  if (input_ >= 0) close(input_);
  close(output_);
  close(errors_);
}

std::string Helper::ReadLine() {
  std::string line;
  char next = 0;
  while (read(output_, &next, 1) == 1 && next != '\n') line += next;
  return line;
}

std::string Helper::Do(const std::string& command) {
  const std::string text = command + "\n";
  EXPECT_EQ(write(input_, text.data(), text.size()), static_cast<ssize_t>(text.size()));
  return ReadLine();
}

std::string Helper::Do(std::initializer_list<const char*> commands) {
  std::string answer;
  for (const char* const command : commands) {
    if (!answer.empty()) {
      EXPECT_EQ(answer.substr(0, 1), "0") << "before " << command;
    }
    answer = Do(std::string(command));
  }
  return answer;
}

int Helper::Exit() {
  Do(std::string("exit"));
  return Wait();
}

void Helper::Kill() { kill(pid_, SIGKILL); }

int Helper::Wait() {
  close(input_);  // what it still wants to read, it does not get
  input_ = -1;
  int status = 0;
  EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

std::string Helper::Errors() {
  std::string text(static_cast<size_t>(lseek(errors_, 0, SEEK_END)), '\0');
  EXPECT_EQ(pread(errors_, text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  return text;
}

}  // namespace gradsync::fake_cuda

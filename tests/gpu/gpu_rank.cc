#include "tests/gpu/gpu_rank.h"

#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/gpu/injected_trainer.h"
#include "tests/integration/raw_client.h"

namespace gradsync::testing {
namespace {

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::abort();
}

const CudaDriver& Driver() {
  const Result<const CudaDriver*> driver = CudaDriver::Load();
  if (!driver) Die(driver.error().ToString());
  return **driver;
}

CUdeviceptr ToPointer(const void* address) { return reinterpret_cast<CUdeviceptr>(address); }

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::optional<std::string> ReadVariable(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
}

// The first `count` of CUDA_VISIBLE_DEVICES, or of all.
std::string FirstDevices(const std::optional<std::string>& visible, int count) {
  std::istringstream names(visible.value_or("0,1,2,3,4,5,6,7"));
  std::string first;
  for (std::string name; count > 0 && std::getline(names, name, ','); --count) {
    first += (first.empty() ? "" : ",") + name;
  }
  return first;
}

// Asked by a process of its own: one that has loaded the driver cannot fork ranks.
int CountDevices() {
  const RankProcess asker([](const Channel& channel) {
    int count = 0;
    if (const auto driver = CudaDriver::Load()) (*driver)->cuDeviceGetCount(&count);
    channel.Say(std::to_string(count));
  });
  return std::atoi(asker.Hear().c_str());
}

}  // namespace

bool IsStandIn() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  return library != nullptr && dlsym(library, "fakeCudaEnter") != nullptr;
}

GpuRank::GpuRank(std::shared_ptr<Session> session, std::shared_ptr<DaemonGroup> group)
    : session_(std::move(session)), group_(std::move(group)), cuda_(Driver()) {
  int count = 0;
  EXPECT_EQ(cuda_.cuDeviceGetCount(&count), CUDA_SUCCESS);
  const int ordinal = static_cast<int>(group_->rank()) % count;
  device_ = static_cast<uint32_t>(ordinal) + 1;
  CUdevice device = 0;
  EXPECT_EQ(cuda_.cuDeviceGet(&device, ordinal), CUDA_SUCCESS);
  auto context = PrimaryContext::Retain(cuda_, device);
  if (!context) Die(context.error().ToString());
  context_ = *std::move(context);
  EXPECT_EQ(cuda_.cuCtxSetCurrent(context_->get()), CUDA_SUCCESS);
  stream_ = MakeStream();
}

GpuRank::~GpuRank() {
  cuda_.cuStreamDestroy(stream_);
  cuda_.cuCtxSetCurrent(nullptr);
}

CUstream GpuRank::MakeStream() const {
  CUstream stream = nullptr;
  EXPECT_EQ(cuda_.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS);
  return stream;
}

void GpuRank::Write(void* to, const void* from, size_t bytes) const {
  EXPECT_EQ(cuda_.cuMemcpyHtoDAsync(ToPointer(to), from, bytes, stream_), CUDA_SUCCESS);
  EXPECT_EQ(cuda_.cuStreamSynchronize(stream_), CUDA_SUCCESS);
}

void GpuRank::Read(void* to, const void* from, size_t bytes) const {
  EXPECT_EQ(cuda_.cuMemcpyDtoHAsync(to, ToPointer(from), bytes, stream_), CUDA_SUCCESS);
  EXPECT_EQ(cuda_.cuStreamSynchronize(stream_), CUDA_SUCCESS);
}

std::shared_ptr<std::byte> GpuRank::Malloc(size_t bytes) const {
  CUdeviceptr address = 0;
  EXPECT_EQ(cuda_.cuMemAlloc(&address, bytes), CUDA_SUCCESS);
  const CudaDriver* cuda = &cuda_;
  return {
      reinterpret_cast<std::byte*>(address),  // NOLINT(performance-no-int-to-ptr)
      [cuda](std::byte* memory) { EXPECT_EQ(cuda->cuMemFree(ToPointer(memory)), CUDA_SUCCESS); }};
}

Status GpuRank::Perform(const Collective& collective, Timeout timeout) const {
  const auto work = group_->Enqueue(collective, device_, stream_, timeout);
  if (!work) return work.error();
  GRADSYNC_RETURN_IF_ERROR((*work)->Wait(stream_));
  return (*work)->Synchronize();
}

GpuTest::GpuTest(int devices, std::vector<std::string> daemon_flags)
    : devices_(devices), visible_(ReadVariable("CUDA_VISIBLE_DEVICES")) {
  setenv("CUDA_VISIBLE_DEVICES", FirstDevices(visible_, devices).c_str(), 1);
  const std::string machine = directory_.File("machine");
  std::filesystem::create_directory(machine);
  setenv("GRADSYNC_FAKE_CUDA_DIR", machine.c_str(), 1);
  setenv("GRADSYNC_FAKE_CUDA_DEVICES", std::to_string(devices).c_str(), 1);
  daemon_flags.push_back("--socket=" + socket());
  daemon_ = std::make_unique<DaemonProcess>(std::move(daemon_flags));
  EXPECT_TRUE(daemon_->WaitUntilReady());
}

void GpuTest::SetUp() {
  if (IsStandIn() || devices_ == 1) return;
  const int count = CountDevices();
  if (count < devices_) {
    GTEST_SKIP() << "needs " << devices_ << " GPUs, and there are " << count;
  }
}

GpuTest::~GpuTest() {
  if (visible_) {
    setenv("CUDA_VISIBLE_DEVICES", visible_->c_str(), 1);
  } else {
    unsetenv("CUDA_VISIBLE_DEVICES");
  }
  daemon_->Signal(SIGTERM);
  EXPECT_EQ(daemon_->WaitForEnd(), 0) << daemon_->Output();
  EXPECT_EQ(Complaints(), "");
}

std::string GpuTest::Complaints() const {
  std::string text;
  for (const auto& entry : std::filesystem::directory_iterator(directory_.File("machine"))) {
    const std::string name = entry.path().filename();
    if (name == "breaches" || name.starts_with("leaks.")) {
      text += name + ":\n" + ReadFile(entry.path());
    }
  }
  return text;
}

std::vector<RankProcess> GpuTest::StartRanks(
    uint32_t world_size, const std::function<void(const Channel&, GpuRank&)>& body,
    const std::string& job) const {
  std::vector<RankProcess> ranks;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    ranks.emplace_back([&, rank](const Channel& channel) {
      {
        auto session = OpenSession(At(socket()), rank, world_size, job);
        if (!session) return channel.Say(session.error());
        auto group = DaemonGroup::Create(*session, "all", {}, kPatience);
        if (!group) return channel.Say(group.error());
        GpuRank self(*std::move(session), *std::move(group));
        channel.Say("ready");
        body(channel, self);
      }
      EXPECT_EQ(LiveObjects(), "") << "rank " << rank << " has not given back";
      channel.Say(::testing::Test::HasFailure() ? "failed" : "ok");
    });
  }
  for (const RankProcess& rank : ranks) EXPECT_EQ(rank.Hear(), "ready");
  return ranks;
}

void GpuTest::RunRanks(uint32_t world_size, const std::function<void(GpuRank&)>& body,
                       const std::string& job) const {
  std::vector<RankProcess> ranks = StartRanks(
      world_size, [&body](const Channel&, GpuRank& self) { body(self); }, job);
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    EXPECT_EQ(ranks[rank].Hear(), "ok") << "rank " << rank;
    EXPECT_EQ(ranks[rank].WaitForEnd(), 0) << "rank " << rank;
  }
}

}  // namespace gradsync::testing

#include "server/engine/cuda/engine_fixture.h"

#include <array>
#include <cstdlib>
#include <utility>

#include "server/engine/cuda/cuda_engine.h"
#include "server/engine/cuda/stream.h"
#include "tests/fakes/cuda/fake_cuda.h"

namespace gradsync::cuda {
namespace {

constexpr seconds kPatience{20};

// Before the driver is loaded.
const bool kIsSet = [] {
  setenv("GRADSYNC_FAKE_CUDA_DEVICES", "4", 0);
  setenv("GRADSYNC_FAKE_CUDA_KERNELS", GRADSYNC_HOST_KERNELS, 0);
  return true;
}();

std::string Live() {
  std::array<char, 4096> text{};
  fakeCudaDescribeLive(text.data(), text.size());
  return text.data();
}

}  // namespace

DeviceEngine::Done Answers::Next() {
  return [state = state_, number = next_++](const Status& status) {
    const std::lock_guard<std::mutex> lock(state->mutex);
    EXPECT_EQ(number, state->statuses.size()) << "out of order, or twice";
    state->statuses.push_back(status);
    state->changed.notify_all();
  };
}

std::vector<Status> Answers::Wait(size_t count) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  const bool came =
      state_->changed.wait_for(lock, kPatience, [&] { return state_->statuses.size() >= count; });
  EXPECT_TRUE(came) << state_->statuses.size() << " answers of " << count;
  // So that a test may look at each.
  std::vector<Status> statuses = state_->statuses;
  statuses.resize(std::max(count, statuses.size()), {Code::kInternal, "no answer"});
  return statuses;
}

size_t Answers::count() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->statuses.size();
}

CudaEngineTest::CudaEngineTest() {
  const Result<const CudaDriver*> driver = CudaDriver::Load();
  if (!driver) {
    ADD_FAILURE() << driver.error().ToString();
    std::abort();
  }
  driver_ = *driver;
}

CudaEngineTest::~CudaEngineTest() {
  engine_ = nullptr;
  contexts_.clear();
  EXPECT_EQ(Live(), "");
}

CudaOptions CudaEngineTest::WithNccl() {
  CudaOptions options;
  options.nccl = GRADSYNC_FAKE_NCCL;
  return options;
}

void CudaEngineTest::Start(const CudaOptions& options) {
  Result<std::unique_ptr<DeviceEngine>> engine = CudaEngine::Create(options);
  ASSERT_TRUE(engine) << engine.error().ToString();
  engine_ = std::move(*engine);
}

DeviceEngine& CudaEngineTest::engine() {
  if (engine_ == nullptr) Start(WithNccl());
  return *engine_;
}

std::vector<TestRank> CudaEngineTest::MakeRanks(const std::vector<uint32_t>& devices) {
  std::vector<TestRank> ranks;
  for (uint32_t device : devices) {
    TestRank rank;
    rank.device = device;
    const Result<UniqueFd> fd = CreateSealedMemfd("flags", kFlagPageBytes);
    EXPECT_TRUE(fd);
    Result<Mapping> mapping = Mapping::Map(fd->get(), kFlagPageBytes);
    EXPECT_TRUE(mapping && mapping->Prefault().ok());
    rank.mapping = std::make_shared<const Mapping>(std::move(*mapping));
    const Result<std::shared_ptr<DeviceFlags>> flags = engine().PinFlags(rank.mapping);
    EXPECT_TRUE(flags) << flags.error().ToString();
    rank.flags = *flags;
    for (std::shared_ptr<const DeviceMemory>* memory : {&rank.input, &rank.output}) {
      const Result<DeviceEngine::Exported> made = engine().Allocate(device, kRoom);
      if (!made) {
        ADD_FAILURE() << made.error().ToString();
        return {};
      }
      *memory = made->memory;
    }
    ranks.push_back(std::move(rank));
  }
  return ranks;
}

const PrimaryContext& CudaEngineTest::ContextOf(uint32_t device) {
  std::shared_ptr<const PrimaryContext>& context = contexts_[device];
  if (context == nullptr) {
    CUdevice handle = 0;
    EXPECT_EQ(driver_->cuDeviceGet(&handle, static_cast<int>(device)), CUDA_SUCCESS);
    context = *PrimaryContext::Retain(*driver_, handle);
  }
  return *context;
}

void CudaEngineTest::Write(const DeviceMemory& memory, const Bytes& bytes, uint64_t offset) {
  ContextOf(memory.device());
  const Result<Stream> stream = Stream::Create(contexts_[memory.device()]);
  const CurrentContext current(*driver_, stream->context().get());
  const auto address = reinterpret_cast<CUdeviceptr>(memory.address()) + offset;
  EXPECT_EQ(driver_->cuMemcpyHtoDAsync(address, bytes.data(), bytes.size(), stream->get()),
            CUDA_SUCCESS);
  EXPECT_EQ(driver_->cuStreamSynchronize(stream->get()), CUDA_SUCCESS);
}

Bytes CudaEngineTest::Read(const DeviceMemory& memory, uint64_t bytes, uint64_t offset) {
  ContextOf(memory.device());
  const Result<Stream> stream = Stream::Create(contexts_[memory.device()]);
  const CurrentContext current(*driver_, stream->context().get());
  Bytes result(bytes);
  const auto address = reinterpret_cast<CUdeviceptr>(memory.address()) + offset;
  EXPECT_EQ(driver_->cuMemcpyDtoHAsync(result.data(), address, bytes, stream->get()), CUDA_SUCCESS);
  EXPECT_EQ(driver_->cuStreamSynchronize(stream->get()), CUDA_SUCCESS);
  return result;
}

std::shared_ptr<Task> CudaEngineTest::MakeTask(const std::vector<TestRank>& ranks, OpKind kind,
                                               uint64_t sequence, uint64_t count, uint64_t group) {
  auto task = std::make_shared<Task>();
  task->kind = kind;
  task->count = count;
  task->device = std::make_shared<DeviceSide>();
  task->device->group = group;
  task->device->sequence = sequence;
  uint32_t number = 0;
  for (const TestRank& rank : ranks) {
    task->inputs.push_back(rank.input->address());
    task->outputs.push_back(rank.output->address());
    task->keep_alive.push_back(rank.input);
    task->keep_alive.push_back(rank.output);
    task->device->parts.push_back({rank.device, number++, rank.flags});
  }
  return task;
}

void CudaEngineTest::MakeInPlace(Task& task) {
  for (size_t rank = 0; rank < task.inputs.size(); ++rank) task.inputs[rank] = task.outputs[rank];
}

Status CudaEngineTest::Finish(const std::vector<TestRank>& ranks,
                              std::shared_ptr<const Task> task) {
  for (const TestRank& rank : ranks) rank.ComeTo(task->device->sequence);
  Answers answers;
  engine().Run(std::move(task), seconds(20), answers.Next());
  return answers.Wait(1)[0];
}

}  // namespace gradsync::cuda

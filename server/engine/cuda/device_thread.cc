#include "server/engine/cuda/device_thread.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <utility>

#include "server/engine/cuda/flags.h"
#include "shm/device.h"

namespace gradsync::cuda {
namespace {

using std::chrono::steady_clock;

// What one call of cuStreamBatchMemOp takes.
constexpr size_t kMaxWords = 255;

// How often streams and communicators at work are asked for errors.
constexpr std::chrono::milliseconds kLookEvery{10};

// The watcher's sentence on what is overdue says more than NCCL's: it comes first.
constexpr std::chrono::seconds kBehindWatcher{1};

// For the other GPUs' threads to come to close a communicator too.
constexpr std::chrono::seconds kCloseTimeout{10};

Patience PatienceFor(const Operation& operation) {
  return {operation.deadline + kBehindWatcher, &operation.group->failed_word()};
}

std::vector<uint32_t> DevicesOf(const Plan& plan) {
  std::vector<uint32_t> devices;
  for (const DevicePlan& device : plan.devices) devices.push_back(device.device);
  return devices;
}

CUstreamBatchMemOpParams Wait(CUdeviceptr word, uint64_t value) {
  CUstreamBatchMemOpParams params{};
  params.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
  params.waitValue.address = word;
  params.waitValue.value64 = value;
  params.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
  return params;
}

CUstreamBatchMemOpParams Write(CUdeviceptr word, uint64_t value) {
  CUstreamBatchMemOpParams params{};
  params.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
  params.writeValue.address = word;
  params.writeValue.value64 = value;
  params.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  return params;
}

}  // namespace

DeviceThread::DeviceThread(Device& device, std::shared_ptr<const PrimaryContext> context,
                           const NcclLibrary* nccl, Fail fail)
    : device_(device),
      context_(std::move(context)),
      driver_(context_->driver()),
      nccl_(nccl),
      fail_(std::move(fail)),
      thread_([this] { Loop(); }) {}

DeviceThread::~DeviceThread() {
  {
    const MutexLock lock(&mutex_);
    is_ending_ = true;
  }
  wake_.SignalOne();
  thread_.join();
}

void DeviceThread::Launch(std::shared_ptr<Operation> operation, size_t side) {
  const uint64_t group = operation->group->id();
  Push({Command::Kind::kLaunch, group, std::move(operation), side}, false);
}

void DeviceThread::Abort(uint64_t group) { Push({Command::Kind::kAbort, group, nullptr, 0}, true); }

void DeviceThread::Drop(uint64_t group) { Push({Command::Kind::kDrop, group, nullptr, 0}, false); }

void DeviceThread::Push(Command command, bool is_first) {
  const MutexLock lock(&mutex_);
  if (is_first) {
    commands_.push_front(std::move(command));
  } else {
    commands_.push_back(std::move(command));
  }
  wake_.SignalOne();
}

void DeviceThread::Loop() {
  const Status current = driver_.Check(driver_.cuCtxSetCurrent(context_->get()), "cuCtxSetCurrent");
  if (!current.ok()) device_.MarkLost(current.message());
  // Before anything waits on this GPU: loading code may take until all streams are through.
  static_cast<void>(LoadKernels());
  Command command;
  while (Next(&command)) {
    switch (command.kind) {
      case Command::Kind::kLaunch:
        LaunchNow(command.operation, command.side);
        break;
      case Command::Kind::kAbort:
        if (const auto found = holdings_.find(command.group); found != holdings_.end()) {
          found->second.communicators.clear();
        }
        break;
      case Command::Kind::kDrop:
        DropNow(command.group);
        break;
    }
    command = Command();
  }
  holdings_.clear();
  kernels_ = nullptr;
}

// Once they are there, nothing; what failed before may work now.
Status DeviceThread::LoadKernels() {
  if (kernels_ != nullptr) return OkStatus();
  Result<std::unique_ptr<ReduceKernels>> loaded =
      ReduceKernels::Load(context_, device_.multiprocessors());
  if (!loaded) return loaded.error();
  kernels_ = std::move(*loaded);
  return OkStatus();
}

bool DeviceThread::Next(Command* command) {
  while (true) {
    const bool looks = HasWorkUnderWay();
    if (looks && steady_clock::now() >= next_look_) {
      LookAfterStreams();
      next_look_ = steady_clock::now() + kLookEvery;
    }
    const MutexLock lock(&mutex_);
    bool is_time = false;
    while (commands_.empty() && !is_ending_ && !is_time) {
      if (looks) {
        is_time = !wake_.WaitUntil(&mutex_, next_look_);
      } else {
        wake_.Wait(&mutex_);
      }
    }
    if (!commands_.empty()) {
      *command = std::move(commands_.front());
      commands_.pop_front();
      return true;
    }
    if (is_ending_) return false;
  }
}

bool DeviceThread::HasWorkUnderWay() const {
  return !device_.is_lost() &&
         std::any_of(holdings_.begin(), holdings_.end(), [](const auto& entry) {
           const GroupStream& stream = *entry.second.stream;
           return stream.ended->value() < stream.launched;
         });
}

void DeviceThread::LookAfterStreams() {
  for (const auto& [id, holding] : holdings_) {
    if (holding.stream->ended->value() == holding.stream->launched) continue;
    if (device_.IsLostFor(holding.stream->stream.get())) {
      fail_(holding.group, device_.lost());
      continue;
    }
    for (const auto& [devices, communicator] : holding.communicators) {
      const Status status = communicator->Check();
      if (!status.ok()) fail_(holding.group, OnDevice(status));
    }
  }
}

Status DeviceThread::OnDevice(const Status& status) const {
  return {status.code(), device_.text() + ": " + status.message()};
}

void DeviceThread::DropNow(uint64_t group) {
  const auto found = holdings_.find(group);
  if (found == holdings_.end()) return;
  const Patience patience{steady_clock::now() + kCloseTimeout, nullptr};
  for (const auto& [devices, communicator] : found->second.communicators) {
    communicator->Close(patience);
  }
  holdings_.erase(found);
}

void DeviceThread::LaunchNow(const std::shared_ptr<Operation>& operation, size_t side_index) {
  Side& side = operation->sides[side_index];
  const std::shared_ptr<Group>& group = operation->group;
  const auto end = [&](const Status& why) {
    fail_(group, why);
    side.state.store(Side::State::kEnded, std::memory_order_release);
  };
  if (group->IsFailed()) return end(group->failure());
  if (device_.is_lost()) return end(device_.lost());
  const Result<Holding*> holding = HoldingOf(*operation);
  if (!holding) return end(holding.error());

  GroupStream& stream = *(*holding)->stream;
  const auto enqueue = [&]() -> Status {
    const Result<CUdeviceptr> scratch =
        ScratchFor(operation->plan.devices[side_index], &side, &stream);
    if (!scratch) return scratch.error();
    return EnqueueWork(*operation, side_index, *holding, *scratch);
  };
  const Status status = enqueue();
  if (!status.ok()) {
    const bool is_lost = device_.IsLostFor(stream.stream.get());
    fail_(group, is_lost ? device_.lost() : OnDevice(status));
  }
  // Also after an error: what is in the stream already must end before the memory goes.
  ++stream.launched;
  const Status ended = EnqueueEnd(*operation, side_index, status.ok(), stream);
  if (!ended.ok()) {
    device_.MarkLost(ended.message());
    fail_(group, device_.lost());
  }
  side.stream = (*holding)->stream;
  side.number = stream.launched;
  side.state.store(Side::State::kLaunched, std::memory_order_release);
}

Result<DeviceThread::Holding*> DeviceThread::HoldingOf(const Operation& operation) {
  Holding& holding = holdings_[operation.group->id()];
  if (holding.stream != nullptr) return &holding;
  const auto failed = [&](Status status) {
    holdings_.erase(operation.group->id());
    return Unexpected(OnDevice(status));
  };
  Result<std::unique_ptr<CompletionWord>> word = CompletionWord::Create(context_);
  if (!word) return failed(std::move(word.error()));
  Result<Stream> stream = Stream::Create(context_);
  if (!stream) return failed(std::move(stream.error()));
  holding.group = operation.group;
  holding.stream =
      std::make_shared<GroupStream>(GroupStream{std::move(*word), std::move(*stream), 0, nullptr});
  return &holding;
}

Result<Communicator*> DeviceThread::CommunicatorOf(const Operation& operation, size_t side,
                                                   Holding* holding) {
  const std::vector<uint32_t> devices = DevicesOf(operation.plan);
  if (const auto found = holding->communicators.find(devices);
      found != holding->communicators.end()) {
    return found->second.get();
  }
  const Result<ncclUniqueId> meeting_point = operation.group->MeetingPoint(*nccl_, devices);
  if (!meeting_point) return Unexpected(meeting_point.error());
  Result<std::unique_ptr<Communicator>> joined =
      Communicator::Join(*nccl_, *meeting_point, static_cast<int>(devices.size()),
                         static_cast<int>(side), PatienceFor(operation));
  if (!joined) return Unexpected(std::move(joined.error()));
  // Only one that works: others are asked for errors, and closed.
  return holding->communicators.emplace(devices, std::move(*joined)).first->second.get();
}

Result<CUdeviceptr> DeviceThread::ScratchFor(const DevicePlan& plan, Side* side,
                                             GroupStream* stream) {
  if (plan.scratch_bytes == 0) return CUdeviceptr{0};
  if (stream->scratch == nullptr || stream->scratch->size() < plan.scratch_bytes) {
    Result<MappedDeviceMemory> memory = MappedDeviceMemory::Create(context_, plan.scratch_bytes);
    if (!memory) return Unexpected(std::move(memory.error()));
    stream->scratch = std::make_shared<MappedDeviceMemory>(std::move(*memory));
  }
  side->scratch = stream->scratch;
  return stream->scratch->address();
}

Status DeviceThread::EnqueueWork(const Operation& operation, size_t side, Holding* holding,
                                 CUdeviceptr scratch) {
  const DevicePlan& plan = operation.plan.devices[side];
  CUstream stream = holding->stream->stream.get();
  Communicator* communicator = nullptr;
  if (!plan.collectives.empty()) {
    const Result<Communicator*> found = CommunicatorOf(operation, side, holding);
    if (!found) return found.error();
    communicator = *found;
  }
  GRADSYNC_RETURN_IF_ERROR(EnqueueWaits(operation, stream));
  GRADSYNC_RETURN_IF_ERROR(EnqueueSteps(plan.before, scratch, stream));
  if (communicator != nullptr) {
    GRADSYNC_RETURN_IF_ERROR(
        communicator->Enqueue(plan.collectives, scratch, stream, PatienceFor(operation)));
  }
  return EnqueueSteps(plan.after, scratch, stream);
}

// For the ranks of the other GPUs too: so NCCL's kernels, which would wait for them on the
// multiprocessors, start when every GPU can go on, and a rank that never comes is never waited for
// inside NCCL.
Status DeviceThread::EnqueueWaits(const Operation& operation, CUstream stream) {
  const DeviceSide& side = *operation.task->device;
  const size_t slot = side.sequence % kFlagSlots;
  std::vector<CUstreamBatchMemOpParams> words;
  for (const DevicePart& part : side.parts) {
    const Result<CUdeviceptr> flags = FlagsOf(part);
    if (!flags) return flags.error();
    words.push_back(
        Wait(*flags + offsetof(FlagPage, ready) + slot * sizeof(uint64_t), side.sequence + 1));
  }
  return EnqueueWords(&words, stream);
}

Status DeviceThread::EnqueueSteps(const std::vector<Step>& steps, CUdeviceptr scratch,
                                  CUstream stream) {
  const auto address = [&](Place place) {
    return place.in_scratch ? scratch + place.at : place.at;
  };
  for (const Step& step : steps) {
    if (const auto* copy = std::get_if<CopyStep>(&step)) {
      GRADSYNC_RETURN_IF_ERROR(driver_.Check(
          driver_.cuMemcpyDtoDAsync(address(copy->to), address(copy->from), copy->bytes, stream),
          "cuMemcpyDtoDAsync"));
      continue;
    }
    GRADSYNC_RETURN_IF_ERROR(LoadKernels());
    GRADSYNC_RETURN_IF_ERROR(kernels_->Launch(std::get<ReduceStep>(step), scratch, stream));
  }
  return OkStatus();
}

// The trainers' words of this GPU, if the operation `is_done` then, and last the engine's own.
Status DeviceThread::EnqueueEnd(const Operation& operation, size_t side, bool is_done,
                                const GroupStream& stream) {
  const DeviceSide& parts = *operation.task->device;
  std::vector<CUstreamBatchMemOpParams> words;
  for (uint32_t rank : operation.plan.devices[side].ranks) {
    if (!is_done) break;
    const Result<CUdeviceptr> flags = FlagsOf(parts.parts[rank]);
    if (!flags) return flags.error();
    words.push_back(Write(*flags + offsetof(FlagPage, done), parts.sequence + 1));
  }
  words.push_back(Write(stream.ended->address(), stream.launched));
  return EnqueueWords(&words, stream.stream.get());
}

Status DeviceThread::EnqueueWords(std::vector<CUstreamBatchMemOpParams>* words,
                                  CUstream stream) const {
  for (size_t at = 0; at < words->size(); at += kMaxWords) {
    const size_t count = std::min(kMaxWords, words->size() - at);
    GRADSYNC_RETURN_IF_ERROR(driver_.Check(
        driver_.cuStreamBatchMemOp(stream, static_cast<unsigned>(count), words->data() + at, 0),
        "cuStreamBatchMemOp"));
  }
  return OkStatus();
}

Result<CUdeviceptr> DeviceThread::FlagsOf(const DevicePart& part) const {
  return static_cast<PinnedFlags&>(*part.flags).AddressOn(device_, context_);
}

}  // namespace gradsync::cuda

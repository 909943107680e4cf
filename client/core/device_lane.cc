#include "client/core/device_lane.h"

#include <chrono>
#include <thread>
#include <utility>

#include "shm/protocol.h"

namespace gradsync {
namespace {

// Opening a GPU takes the daemon a driver to load, and a context to make.
constexpr std::chrono::seconds kFirstUseWait{60};
constexpr std::chrono::microseconds kSlotPause{50};

}  // namespace

DeviceLane::DeviceLane(std::shared_ptr<Session> session, std::shared_ptr<Device> device)
    : session_(std::move(session)), device_(std::move(device)) {}

Result<std::unique_ptr<DeviceLane>> DeviceLane::Open(const std::shared_ptr<Session>& session,
                                                     uint32_t group, uint32_t device) {
  Result<std::shared_ptr<Device>> opened = session->GetDevice(device);
  if (!opened) return Unexpected(opened.error());
  std::unique_ptr<DeviceLane> lane(new DeviceLane(session, *std::move(opened)));
  Result<std::shared_ptr<SharedBuffer>> flags = session->Allocate(kFlagPageBytes, "flags");
  if (!flags) return Unexpected(flags.error());
  lane->flags_ = *std::move(flags);
  Result<std::unique_ptr<PinnedFlags>> pinned =
      lane->device_->Pin(lane->flags_->data(), lane->flags_->size());
  if (!pinned) return Unexpected(pinned.error());
  lane->pinned_ = *std::move(pinned);
  Result<Stream> stream = lane->device_->CreateStream();
  if (!stream) return Unexpected(stream.error());
  lane->own_stream_ = *stream;
  auto request = MakeMessage<UseDevice>();
  request.device = lane->device_->uuid();
  request.group = group;
  request.flags_segment = session->Find(lane->flags_->data(), kFlagPageBytes)->segment;
  const auto reply =
      session->connection().Call<Done>(request, std::chrono::steady_clock::now() + kFirstUseWait);
  if (!reply) return Unexpected(reply.error());
  GRADSYNC_RETURN_IF_ERROR(session->Watch(lane->page()));
  lane->is_watched_ = true;
  return lane;
}

DeviceLane::~DeviceLane() {
  if (session_->connection().in_child()) return;
  if (pinned_ != nullptr) device_->SynchronizeAll();
  if (own_stream_ != nullptr) device_->DestroyStream(own_stream_);
  if (is_watched_) session_->Unwatch(page());
}

Status DeviceLane::MarkReady(uint64_t sequence, Stream stream, Deadline deadline) {
  const auto has_room = [this, sequence] {
    return page()->done.load(std::memory_order_acquire) + kFlagSlots > sequence;
  };
  while (!has_room()) {
    GRADSYNC_RETURN_IF_ERROR(session_->connection().CheckAlive());
    if (std::chrono::steady_clock::now() >= deadline) {
      return {Code::kDeadlineExceeded,
              "operation " + std::to_string(sequence) +
                  " could not be submitted: " + std::to_string(kFlagSlots) +
                  " operations of the group are under way on this GPU and none has ended in time"};
    }
    std::this_thread::sleep_for(kSlotPause);
  }
  return device_->WriteWord(stream, &page()->ready[sequence % kFlagSlots], sequence + 1);
}

Status DeviceLane::EnqueueWait(uint64_t sequence, Stream stream) {
  return device_->WaitForWord(stream, &page()->done, sequence + 1);
}

Result<std::shared_ptr<SharedBuffer>> DeviceLane::Staging(uint64_t bytes) {
  if (staging_ != nullptr && staging_->size() >= bytes) return staging_;
  // The stream may still be at the old one.
  GRADSYNC_RETURN_IF_ERROR(device_->Synchronize(own_stream_));
  staging_ = nullptr;
  Result<std::shared_ptr<SharedBuffer>> grown =
      session_->Allocate(bytes, "staging", device_->device());
  if (grown) staging_ = *grown;
  return grown;
}

}  // namespace gradsync

// What trainers ask for on GPUs.
#include <unistd.h>

#include <array>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/local/dispatcher.h"
#include "server/local/frames.h"
#include "shm/protocol.h"

namespace gradsync {
namespace {

std::string UuidText(const DeviceUuid& uuid) {
  return absl::StrCat("GPU-", absl::BytesToHexString(absl::string_view(
                                  reinterpret_cast<const char*>(uuid.data()), uuid.size())));
}

std::string ListOf(const std::vector<DeviceInfo>& devices) {
  return absl::StrJoin(devices, ", ", [](std::string* out, const DeviceInfo& device) {
    absl::StrAppend(out, device.name, " (", UuidText(device.uuid), ")");
  });
}

}  // namespace

Result<uint32_t> Dispatcher::FindDevice(const TrainerSession& session, const DeviceUuid& uuid,
                                        DeviceEngine** engine) {
  Result<DeviceEngine*> devices = executor_->device_engine();
  if (!devices) {
    return Unexpected(devices.error().code(),
                      absl::StrCat(session.Describe(),
                                   ": gradsyncd cannot use GPUs: ", devices.error().message()));
  }
  *engine = *devices;
  const std::vector<DeviceInfo>& all = (*devices)->devices();
  for (uint32_t index = 0; index < all.size(); ++index) {
    if (all[index].uuid == uuid) return index;
  }
  return Unexpected(Code::kUnsupported,
                    absl::StrCat(session.Describe(), " uses ", UuidText(uuid),
                                 ", which gradsyncd does not see; it sees ", ListOf(all),
                                 ". Start gradsyncd with access to every GPU that its trainers use "
                                 "(CUDA_VISIBLE_DEVICES, the container's devices)"));
}

void Dispatcher::AnswerSegment(TrainerSession* session, uint32_t request_id,
                               const Result<SegmentTable::NewSegment>& segment) {
  if (!segment) {
    ReplyError(session, request_id,
               {segment.error().code(),
                absl::StrCat(session->Describe(), ": ", segment.error().message())});
    return;
  }
  auto reply = MakeMessage<SegmentAllocated>(request_id);
  reply.bytes = segment->bytes;
  reply.segment = segment->number;
  const std::array<int, 1> fds = {segment->fd.get()};
  LoseUnlessSent(session, session->Send(reply, std::span(fds).first(segment->fd.valid() ? 1 : 0)));
}

Status Dispatcher::HandleAllocateOnDevice(TrainerSession* session,
                                          std::span<const std::byte> frame) {
  const Result<AllocateDeviceSegment> request = CheckMessage<AllocateDeviceSegment>(frame);
  if (!request) return request.error();
  const uint32_t id = request->header.request_id;
  DeviceEngine* engine = nullptr;
  const Result<uint32_t> device = FindDevice(*session, request->device, &engine);
  if (!device) {
    ReplyError(session, id, device.error());
    return OkStatus();
  }
  AnswerSegment(session, id, session->segments().AllocateOn(engine, *device, request->bytes));
  return OkStatus();
}

Status Dispatcher::HandleImportFromDevice(TrainerSession* session, Frame frame) {
  const Result<ImportDeviceSegment> request = CheckMessage<ImportDeviceSegment>(frame.bytes);
  if (!request) return request.error();
  const Result<HandOver> hand_over = CheckImportDeviceSegment(*request, frame.fds);
  if (!hand_over) return hand_over.error();
  const uint32_t id = request->header.request_id;
  const bool allowed = options_.import_memory == ServerOptions::ImportMemory::kAlways ||
                       (options_.import_memory == ServerOptions::ImportMemory::kOwnUser &&
                        session->uid() == geteuid());
  if (!allowed) {
    ReplyError(session, id,
               {Code::kPermissionDenied,
                absl::StrCat(session->Describe(),
                             ": gradsyncd uses no GPU memory of this user's trainers where it "
                             "lies (its --import-gpu-memory)")});
    return OkStatus();
  }
  DeviceEngine* engine = nullptr;
  const Result<uint32_t> device = FindDevice(*session, request->device, &engine);
  if (!device) {
    ReplyError(session, id, device.error());
    return OkStatus();
  }
  Result<std::shared_ptr<const DeviceMemory>> memory =
      *hand_over == HandOver::kLegacyHandle
          ? engine->ImportLegacy(*device, request->handle, request->bytes)
          : engine->ImportExported(*device, std::move(frame.fds.front()), request->bytes);
  AnswerSegment(session, id,
                memory ? session->segments().Adopt(*std::move(memory))
                       : Result<SegmentTable::NewSegment>(Unexpected(memory.error())));
  return OkStatus();
}

Status Dispatcher::HandleUseDevice(TrainerSession* session, std::span<const std::byte> frame) {
  const Result<UseDevice> request = CheckMessage<UseDevice>(frame);
  if (!request) return request.error();
  const std::shared_ptr<const Mapping>* page = session->segments().Find(request->flags_segment);
  if (!executor_->jobs().FindGroup(session->id(), request->group)) {
    return {Code::kProtocol,
            absl::StrCat("USE_DEVICE for group ", request->group, ", which it is not in")};
  }
  if (session->device_use(request->group) != nullptr) {
    return {Code::kProtocol, absl::StrCat("a second USE_DEVICE for group ", request->group)};
  }
  if (page == nullptr || (*page)->size() < kFlagPageBytes) {
    return {Code::kProtocol, absl::StrCat("USE_DEVICE with segment ", request->flags_segment,
                                          ", which is no flag page")};
  }
  DeviceEngine* engine = nullptr;
  const Result<uint32_t> device = FindDevice(*session, request->device, &engine);
  if (!device) {
    ReplyError(session, request->header.request_id, device.error());
    return OkStatus();
  }
  Result<std::shared_ptr<DeviceFlags>> flags = engine->PinFlags(*page);
  if (!flags) {
    ReplyError(
        session, request->header.request_id,
        {flags.error().code(), absl::StrCat(session->Describe(), ": ", flags.error().message())});
    return OkStatus();
  }
  session->UseDevice(request->group, {*device, *std::move(flags)});
  Acknowledge(session, request->header.request_id);
  return OkStatus();
}

}  // namespace gradsync

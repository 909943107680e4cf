// From the bytes that a trainer sent to values that can be trusted: every field is checked here,
// and an error says which one was wrong. Pure.
#ifndef GRADSYNC_SERVER_LOCAL_FRAMES_H_
#define GRADSYNC_SERVER_LOCAL_FRAMES_H_

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/job/job_table.h"
#include "server/job/operation.h"
#include "shm/protocol.h"
#include "shm/status.h"
#include "shm/unique_fd.h"

namespace gradsync {

// "HELLO", and so on; "frame type 77" for what is none.
std::string FrameTypeName(uint16_t type);

// The header of a frame of this version of the protocol. kProtocol if it is of another version (the
// text names both), of another size than it says, or not one of our frames at all.
Result<FrameHeader> CheckHeader(std::span<const std::byte> frame);

// The whole message; kProtocol if the frame is not exactly a Message.
template <typename Message>
Result<Message> CheckMessage(std::span<const std::byte> frame) {
  if (std::optional<Message> message = ReadMessage<Message>(frame)) return *message;
  return Unexpected(Code::kProtocol,
                    absl::StrCat("a ", FrameTypeName(static_cast<uint16_t>(Message::kType)),
                                 " frame has ", frame.size(), " bytes, not ", sizeof(Message)));
}

Result<JoinRequest> CheckHello(const Hello& hello, uid_t uid);
Result<GroupRequest> CheckCreateGroup(const CreateGroup& request);
Result<BucketDescription> CheckDescribeBucket(const DescribeBucket& request);
// `fds` are those of the frame: the message's memory is taken from there if it is not in the frame.
// `membership` is the session's place in the group, if it is in it.
Result<std::shared_ptr<Message>> CheckSendMessage(
    const SendMessage& request, std::vector<UniqueFd>* fds,
    const std::optional<JobTable::Membership>& membership);
Status CheckReceiveMessage(const ReceiveMessage& request,
                           const std::optional<JobTable::Membership>& membership);
Result<AsideRequest> CheckStandAside(const StandAside& request,
                                     const std::optional<JobTable::Membership>& membership);
// `fds` are those of the frame: one for exported memory.
Result<HandOver> CheckImportDeviceSegment(const ImportDeviceSegment& request,
                                          std::span<const UniqueFd> fds);
// The reason that an AbortGroup gives.
Result<Status> CheckAbortGroup(const AbortGroup& request);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_LOCAL_FRAMES_H_

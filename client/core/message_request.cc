#include "client/core/message_request.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <vector>

#include "shm/segment.h"

namespace gradsync {
namespace {

// Memory of exactly `bytes`, which begins with `data`. Its pages are charged to this process.
Result<UniqueFd> MemoryWith(const std::byte* data, uint64_t bytes) {
  auto fd = CreateSealedMemfd("gradsync:message", bytes);
  if (!fd) return fd;
  const auto mapping = Mapping::Map(fd->get(), bytes);
  if (!mapping) return Unexpected(mapping.error());
  GRADSYNC_RETURN_IF_ERROR(mapping->Prefault());
  std::memcpy(mapping->data(), data, bytes);
  return fd;
}

}  // namespace

Result<MessageRequest> MessageRequest::Send(std::shared_ptr<Session> session, SendMessage request,
                                            const std::byte* data, uint64_t bytes,
                                            Deadline deadline) {
  request.bytes = bytes;
  UniqueFd memory;
  if (bytes > kInlineMessageBytes) {
    auto made = MemoryWith(data, bytes);
    if (!made) return Unexpected(made.error());
    memory = *std::move(made);
  } else if (bytes > 0) {
    std::memcpy(request.data.data(), data, bytes);
  }
  const std::array<int, 1> fds = {memory.get()};
  const auto id =
      session->connection().Post(request, std::span(fds).first(memory.valid() ? 1 : 0), deadline);
  if (!id) return Unexpected(id.error());
  return MessageRequest(std::move(session), *id, request.group, /*receives=*/false, deadline);
}

Result<MessageRequest> MessageRequest::Receive(std::shared_ptr<Session> session,
                                               const ReceiveMessage& request, Deadline deadline) {
  const auto id = session->connection().Post(request, {}, deadline);
  if (!id) return Unexpected(id.error());
  return MessageRequest(std::move(session), *id, request.group, /*receives=*/true, deadline);
}

MessageRequest::~MessageRequest() {
  if (session_ == nullptr || id_ == 0) return;
  Cancel();
  session_->connection().Forget(id_);
}

void MessageRequest::Cancel() const {
  auto request = MakeMessage<CancelMessage>();
  request.group = group_;
  request.request = id_;
  Connection& connection = session_->connection();
  const auto id = connection.Post(request, {}, std::chrono::steady_clock::now() + kDaemonGrace);
  // Without a daemon there is nothing to cancel.
  if (id) connection.Forget(*id);
}

Result<size_t> MessageRequest::WaitAny(std::span<const MessageRequest* const> requests) {
  std::vector<uint32_t> ids;
  Deadline deadline = Deadline::max();
  for (const MessageRequest* request : requests) {
    ids.push_back(request->id_);
    deadline = std::min(deadline, request->deadline_);
  }
  return requests.front()->session_->connection().AwaitAny(ids, deadline);
}

Result<uint32_t> MessageRequest::End(std::byte* data, uint64_t bytes) {
  if (id_ == 0) return Unexpected(Code::kFailedPrecondition, "the request has ended already");
  const auto answer = session_->connection().Await(std::exchange(id_, 0), deadline_);
  if (!answer) return Unexpected(answer.error());
  return Take(*answer, data, bytes);
}

Result<uint32_t> MessageRequest::Take(const Frame& answer, std::byte* data, uint64_t bytes) const {
  Connection& connection = session_->connection();
  const FrameType expected = receives_ ? MessageReceived::kType : Done::kType;
  GRADSYNC_RETURN_IF_ERROR(CheckReply(answer, connection.path(), expected));
  if (!receives_) return 0;
  const auto message = ReadMessage<MessageReceived>(answer.bytes);
  const bool is_inline = message && message->bytes <= kInlineMessageBytes;
  if (!message || answer.fds.size() != (is_inline ? 0 : 1)) {
    return Unexpected(connection.GiveUp(Code::kProtocol, "gradsyncd sent a malformed message"));
  }
  if (message->bytes != bytes) {
    return Unexpected(Code::kMismatch, "a message from member " + std::to_string(message->from) +
                                           " has " + std::to_string(message->bytes) +
                                           " bytes, but " + std::to_string(bytes) +
                                           " were to be received");
  }
  if (is_inline) {
    if (bytes > 0) std::memcpy(data, message->data.data(), bytes);
    return message->from;
  }
  // It is the sender's: what it maps as must be there to the end.
  GRADSYNC_RETURN_IF_ERROR(CheckSealedMemfd(answer.fds[0].get(), bytes));
  const auto mapping = Mapping::Map(answer.fds[0].get(), bytes);
  if (!mapping) return Unexpected(mapping.error());
  std::memcpy(data, mapping->data(), bytes);
  return message->from;
}

}  // namespace gradsync

#include "server/local/frames.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <string>
#include <utility>

#include "server/local/text.h"
#include "shm/segment.h"
#include "shm/types.h"

namespace gradsync {
namespace {

// A text that names something: ranks meet by it, so that it is refused rather than repaired.
template <size_t N>
Result<std::string> CheckName(const Text<N>& text, const char* field) {
  if (text.bytes.back() != '\0') {
    return Unexpected(Code::kProtocol, absl::StrCat("the ", field, " is longer than ", N - 1,
                                                    " bytes, or not terminated"));
  }
  std::string name = text.Get();
  if (name.empty()) {
    return Unexpected(Code::kInvalidArgument, absl::StrCat("the ", field, " is empty"));
  }
  if (!IsPrintable(name)) {
    return Unexpected(Code::kInvalidArgument,
                      absl::StrCat("the ", field, " '", MakePrintable(name),
                                   "' is not UTF-8, or has control characters"));
  }
  return name;
}

Result<std::vector<uint32_t>> CheckRanks(const CreateGroup& request) {
  if (request.rank_count == 0 || request.rank_count > kMaxLocalRanks) {
    return Unexpected(Code::kInvalidArgument,
                      absl::StrCat("a group has ", request.rank_count, " ranks; it must have 1 to ",
                                   kMaxLocalRanks));
  }
  const std::span<const uint32_t> ranks(request.ranks.data(), request.rank_count);
  std::vector<uint32_t> sorted(ranks.begin(), ranks.end());
  std::sort(sorted.begin(), sorted.end());
  if (const auto repeated = std::adjacent_find(sorted.begin(), sorted.end());
      repeated != sorted.end()) {
    return Unexpected(Code::kInvalidArgument,
                      absl::StrCat("rank ", *repeated, " is named twice in one group"));
  }
  return std::vector<uint32_t>(ranks.begin(), ranks.end());
}

}  // namespace

std::string FrameTypeName(uint16_t type) {
  static constexpr std::array<const char*, 23> kNames = {nullptr,
                                                         "HELLO",
                                                         "WELCOME",
                                                         "ALLOCATE_SEGMENT",
                                                         "SEGMENT_ALLOCATED",
                                                         "FREE_SEGMENT",
                                                         "CREATE_GROUP",
                                                         "GROUP_CREATED",
                                                         "DESTROY_GROUP",
                                                         "DESCRIBE_BUCKET",
                                                         "GOODBYE",
                                                         "DONE",
                                                         "ERROR",
                                                         "ABORT_GROUP",
                                                         "SEND_MESSAGE",
                                                         "RECEIVE_MESSAGE",
                                                         "MESSAGE_RECEIVED",
                                                         "CANCEL_MESSAGE",
                                                         "STAND_ASIDE",
                                                         "REJOINED",
                                                         "ALLOCATE_DEVICE_SEGMENT",
                                                         "IMPORT_DEVICE_SEGMENT",
                                                         "USE_DEVICE"};
  if (type > 0 && type < kNames.size()) return kNames[type];
  return absl::StrCat("frame type ", type);
}

Result<FrameHeader> CheckHeader(std::span<const std::byte> frame) {
  const std::optional<FrameHeader> header = ReadHeader(frame);
  if (!header) {
    return Unexpected(
        Code::kProtocol,
        absl::StrCat("the ", frame.size(), " bytes received are no frame of gradsync's protocol"));
  }
  if (header->version != kProtocolVersion) {
    return Unexpected(Code::kProtocol,
                      absl::StrCat("the client speaks protocol ", header->version, ", this daemon ",
                                   kProtocolVersion,
                                   "; install the same version of gradsync on both sides, or start "
                                   "a daemon of the client's version on another socket"));
  }
  if (header->size != frame.size()) {
    return Unexpected(Code::kProtocol,
                      absl::StrCat("a ", FrameTypeName(header->type), " frame of ", frame.size(),
                                   " bytes says that it has ", header->size));
  }
  return *header;
}

Result<JoinRequest> CheckHello(const Hello& hello, uid_t uid) {
  Result<std::string> job = CheckName(hello.job, "job's name");
  if (!job) return Unexpected(job.error());
  if (hello.world_size == 0 || hello.rank >= hello.world_size) {
    return Unexpected(Code::kInvalidArgument,
                      absl::StrCat("rank ", hello.rank, " of job '", *job,
                                   "' is not below its world size, ", hello.world_size));
  }
  if (hello.local_world_size == 0 || hello.local_rank >= hello.local_world_size ||
      hello.local_world_size > hello.world_size) {
    return Unexpected(
        Code::kInvalidArgument,
        absl::StrCat("rank ", hello.rank, " of job '", *job, "': local rank ", hello.local_rank,
                     " and local world size ", hello.local_world_size,
                     " do not fit a world size of ", hello.world_size));
  }
  if (hello.local_world_size > kMaxLocalRanks) {
    return Unexpected(Code::kUnsupported,
                      absl::StrCat("job '", *job, "' has ", hello.local_world_size,
                                   " ranks on this node; gradsyncd serves at most ", kMaxLocalRanks,
                                   " of a job"));
  }
  JoinRequest request;
  request.uid = uid;
  request.job = *std::move(job);
  request.generation = hello.generation;
  request.world_size = hello.world_size;
  request.rank = hello.rank;
  request.local_rank = hello.local_rank;
  request.local_world_size = hello.local_world_size;
  request.pid = hello.pid;
  request.program = MakePrintable(hello.program.Get());
  return request;
}

Result<GroupRequest> CheckCreateGroup(const CreateGroup& request) {
  GroupRequest result;
  Result<std::string> tag = CheckName(request.tag, "group's tag");
  if (!tag) return Unexpected(tag.error());
  Result<std::vector<uint32_t>> ranks = CheckRanks(request);
  if (!ranks) {
    return Unexpected(ranks.error().code(),
                      absl::StrCat("group '", *tag, "': ", ranks.error().message()));
  }
  if (request.timeout_ms == 0) {
    return Unexpected(Code::kInvalidArgument, absl::StrCat("group '", *tag, "': timeout is zero"));
  }
  result.request_id = request.header.request_id;
  result.tag = *std::move(tag);
  result.ranks = *std::move(ranks);
  result.timeout = std::chrono::milliseconds(std::min(request.timeout_ms, kMaxTimeoutMs));
  return result;
}

Result<BucketDescription> CheckDescribeBucket(const DescribeBucket& request) {
  if (request.bucket >= request.bucket_count) {
    return Unexpected(Code::kInvalidArgument,
                      absl::StrCat("bucket ", request.bucket, " is not below the plan's ",
                                   request.bucket_count, " buckets"));
  }
  if (request.dtype >= kDTypeCount) {
    return Unexpected(Code::kInvalidArgument, absl::StrCat("bucket ", request.bucket, " has dtype ",
                                                           request.dtype, ", which is none"));
  }
  BucketDescription description;
  description.bucket = request.bucket;
  description.bucket_count = request.bucket_count;
  description.parameter_count = request.parameter_count;
  description.count = request.count;
  description.dtype = static_cast<DType>(request.dtype);
  description.parameters = MakePrintable(request.parameters.Get());
  return description;
}

Result<std::shared_ptr<Message>> CheckSendMessage(
    const SendMessage& request, std::vector<UniqueFd>* fds,
    const std::optional<JobTable::Membership>& membership) {
  const auto bad = [&request](const std::string& what) {
    return Unexpected(Code::kProtocol,
                      absl::StrCat("SEND_MESSAGE of ", request.bytes, " bytes to member ",
                                   request.to, " of group ", request.group, ": ", what));
  };
  if (!membership) return bad("it is not in the group");
  if (request.to >= membership->size) return bad("the group has no such member");
  if (request.timeout_ms == 0) return bad("the timeout is zero");
  const bool is_inline = request.bytes <= kInlineMessageBytes;
  if (fds->size() != (is_inline ? 0 : 1)) {
    return bad(absl::StrCat("it carries ", fds->size(), " descriptors"));
  }
  auto message = std::make_shared<Message>();
  message->from = membership->member;
  message->tag = request.tag;
  message->bytes = request.bytes;
  if (is_inline) {
    message->data.assign(request.data.begin(),
                         request.data.begin() + static_cast<std::ptrdiff_t>(request.bytes));
  } else {
    // The receiver checks it as well; here it keeps what is no memory out of the daemon's hands.
    const Status memory = CheckSealedMemfd(fds->front().get(), request.bytes);
    if (!memory.ok()) return bad(memory.message());
    message->memory = std::move(fds->front());
  }
  return message;
}

Status CheckReceiveMessage(const ReceiveMessage& request,
                           const std::optional<JobTable::Membership>& membership) {
  const auto bad = [&request](const char* what) -> Status {
    return {Code::kProtocol, absl::StrCat("RECEIVE_MESSAGE from member ", request.from,
                                          " of group ", request.group, ": ", what)};
  };
  if (!membership) return bad("it is not in the group");
  if (request.from >= membership->size && request.from != kAnyMember) {
    return bad("the group has no such member");
  }
  if (request.timeout_ms == 0) return bad("the timeout is zero");
  return OkStatus();
}

Result<AsideRequest> CheckStandAside(const StandAside& request,
                                     const std::optional<JobTable::Membership>& membership) {
  const auto bad = [&request](const char* what) {
    return Unexpected(Code::kProtocol,
                      absl::StrCat("STAND_ASIDE in group ", request.group, ": ", what));
  };
  if (!membership) return bad("it is not in the group");
  if (request.timeout_ms == 0) return bad("the timeout is zero");
  if (request.policy >= kAsidePolicyCount) return bad("there is no such policy");
  return AsideRequest{
      .request_id = request.header.request_id,
      .next_sequence = request.next_sequence,
      .policy = AsidePolicy{request.policy},
      .timeout = std::chrono::milliseconds(std::min(request.timeout_ms, kMaxTimeoutMs))};
}

Result<HandOver> CheckImportDeviceSegment(const ImportDeviceSegment& request,
                                          std::span<const UniqueFd> fds) {
  const auto bad = [&request](const std::string& what) {
    return Unexpected(Code::kProtocol,
                      absl::StrCat("IMPORT_DEVICE_SEGMENT of ", request.bytes, " bytes: ", what));
  };
  const auto hand_over = HandOver{request.hand_over};
  if (hand_over != HandOver::kExportedMemory && hand_over != HandOver::kLegacyHandle) {
    return bad(absl::StrCat("hand-over ", request.hand_over, " is none of a trainer's memory"));
  }
  const size_t expected = hand_over == HandOver::kExportedMemory ? 1 : 0;
  if (fds.size() != expected) return bad(absl::StrCat("it carries ", fds.size(), " descriptors"));
  if (request.bytes == 0) return bad("there is nothing");
  return hand_over;
}

Result<Status> CheckAbortGroup(const AbortGroup& request) {
  const std::optional<Code> code = ErrorCodeFrom(request.code);
  if (!code) {
    return Unexpected(Code::kProtocol,
                      absl::StrCat("ABORT_GROUP with code ", request.code, ", which is no error"));
  }
  return Status(*code, MakePrintableLines(request.text.Get()));
}

}  // namespace gradsync

#include "tests/integration/raw_client.h"

#include <unistd.h>

#include <algorithm>

namespace gradsync::testing {
namespace {

constexpr uint32_t kTimeoutMs =
    std::chrono::duration_cast<std::chrono::milliseconds>(kPatience).count();

// Small integers, so that sums are exact.
float Value(uint64_t sequence, uint64_t rank, uint64_t i) {
  return static_cast<float>((sequence * 31 + rank * 7 + i) % 1000);
}

}  // namespace

Hello MakeHello(const std::string& job, uint32_t rank, uint32_t world_size) {
  auto hello = MakeMessage<Hello>(1);
  hello.job.Set(job);
  hello.world_size = world_size;
  hello.rank = rank;
  hello.local_rank = rank;
  hello.local_world_size = world_size;
  hello.pid = static_cast<uint32_t>(getpid());
  hello.program.Set("raw_client");
  return hello;
}

CreateGroup MakeCreateGroup(const std::string& tag, const std::vector<uint32_t>& ranks,
                            std::chrono::milliseconds timeout) {
  auto request = MakeMessage<CreateGroup>(2);
  request.tag.Set(tag);
  request.timeout_ms = static_cast<uint32_t>(timeout.count());
  request.rank_count = static_cast<uint32_t>(ranks.size());
  std::copy_n(ranks.begin(), std::min(ranks.size(), request.ranks.size()), request.ranks.begin());
  return request;
}

Result<RawClient> RawClient::Connect(const std::string& socket) {
  Result<UniqueFd> fd = ConnectTo(socket);
  if (!fd) return Unexpected(fd.error());
  return RawClient(*std::move(fd));
}

Result<RawClient> RawClient::Join(const std::string& socket, const std::string& job, uint32_t rank,
                                  uint32_t world_size) {
  Result<RawClient> client = Connect(socket);
  if (!client) return client;
  GRADSYNC_RETURN_IF_ERROR(client->SayHello(MakeHello(job, rank, world_size)));
  return client;
}

Status RawClient::SayHello(Hello hello) {
  // A daemon that refuses the connection may have hung up by now; its reason can still be read.
  const Status sent = SendRaw(AsBytes(hello));
  if (sent.code() != Code::kDaemonLost) GRADSYNC_RETURN_IF_ERROR(sent);
  std::vector<UniqueFd> fds;
  const Result<Welcome> welcome = Receive<Welcome>(&fds);
  if (!welcome) return welcome.error();
  if (fds.size() != 2) return {Code::kProtocol, "WELCOME without its two descriptors"};
  GRADSYNC_RETURN_IF_ERROR(CheckSealedMemfd(fds[0].get(), welcome->control_bytes));
  Result<Mapping> mapping = Mapping::Map(fds[0].get(), welcome->control_bytes);
  if (!mapping) return mapping.error();
  welcome_ = *welcome;
  control_ = *std::move(mapping);
  doorbell_ = std::move(fds[1]);
  ring_.emplace(&layout()->ring);
  return OkStatus();
}

Result<RawSegment> RawClient::Allocate(uint64_t bytes) {
  auto request = MakeMessage<AllocateSegment>(3);
  request.bytes = bytes;
  request.label.Set("test");
  GRADSYNC_RETURN_IF_ERROR(SendRaw(AsBytes(request)));
  std::vector<UniqueFd> fds;
  const Result<SegmentAllocated> reply = Receive<SegmentAllocated>(&fds);
  if (!reply) return Unexpected(reply.error());
  if (fds.size() != 1) return Unexpected(Code::kProtocol, "a segment without its descriptor");
  GRADSYNC_RETURN_IF_ERROR(CheckSealedMemfd(fds[0].get(), reply->bytes));
  Result<Mapping> mapping = Mapping::Map(fds[0].get(), reply->bytes);
  if (!mapping) return Unexpected(mapping.error());
  return RawSegment{reply->segment, *std::move(mapping)};
}

Status RawClient::Free(uint32_t segment) {
  auto request = MakeMessage<FreeSegment>(4);
  request.segment = segment;
  return Ask(request);
}

Result<uint32_t> RawClient::MakeGroup(CreateGroup request) {
  GRADSYNC_RETURN_IF_ERROR(SendCreateGroup(request));
  return ReceiveGroupCreated();
}

Status RawClient::SendCreateGroup(CreateGroup request) { return SendRaw(AsBytes(request)); }

Result<uint32_t> RawClient::ReceiveGroupCreated() {
  const Result<GroupCreated> reply = Receive<GroupCreated>();
  if (!reply) return Unexpected(reply.error());
  return reply->group;
}

Status RawClient::Request(std::span<const std::byte> message) {
  GRADSYNC_RETURN_IF_ERROR(SendRaw(message));
  const Result<Done> done = Receive<Done>();
  return done ? OkStatus() : done.error();
}

Status RawClient::SendRaw(std::span<const std::byte> bytes, std::span<const int> fds) {
  return SendFrame(socket_.get(), bytes, fds, SoonEnough());
}

Result<Frame> RawClient::ReceiveAny() {
  Result<Frame> frame = ReceiveFrame(socket_.get(), SoonEnough());
  if (!frame) return frame;
  if (const auto error = ReadMessage<ErrorReply>(frame->bytes)) {
    return Unexpected(static_cast<Code>(error->code), error->text.Get());
  }
  return frame;
}

Status RawClient::ReceiveLastError() {
  const Result<ErrorReply> error = Receive<ErrorReply>();
  if (error) return {Code::kInternal, "an error reply was not taken for one"};
  const Result<Frame> more = ReceiveFrame(socket_.get(), SoonEnough());
  if (more || more.error().code() != Code::kDaemonLost) {
    return {Code::kInternal, "the daemon goes on after: " + error.error().ToString()};
  }
  return error.error();
}

bool RawClient::Push(const Submission& submission) {
  if (!ring_->TryPush(submission)) return false;
  if (ring_->MustWakeDaemon()) RingDoorbell();
  return true;
}

void RawClient::RingDoorbell() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(doorbell_.get(), &one, sizeof(one));
}

Status RawClient::Wait(uint32_t group, uint64_t sequence) {
  const CompletionReader reader(&layout()->groups[group]);
  return reader.Wait(sequence, SoonEnough(), std::chrono::nanoseconds::zero(), [this] {
    return HasHungUp(socket_.get()) ? Status(Code::kDaemonLost, "the daemon hung up") : OkStatus();
  });
}

Status RawClient::GroupFailure(uint32_t group) const {
  return CompletionReader(&layout()->groups[group]).Failure();
}

Submission MakeAllReduce(uint32_t group, uint64_t sequence, uint64_t count,
                         const RawSegment& segment, DType dtype, ReduceOp op) {
  Submission submission{};
  submission.sequence = sequence;
  submission.count = count;
  submission.group = group;
  submission.timeout_ms = kTimeoutMs;
  submission.kind = static_cast<uint8_t>(OpKind::kAllReduce);
  submission.dtype = static_cast<uint8_t>(dtype);
  submission.reduce_op = static_cast<uint8_t>(op);
  submission.input = segment.At(0);
  submission.output = segment.At(0);
  return submission;
}

Submission MakeBarrier(uint32_t group, uint64_t sequence) {
  Submission submission{};
  submission.sequence = sequence;
  submission.group = group;
  submission.timeout_ms = kTimeoutMs;
  submission.kind = static_cast<uint8_t>(OpKind::kBarrier);
  submission.input.segment = kNoSegment;
  submission.output.segment = kNoSegment;
  return submission;
}

Result<RawJob> RawJob::Start(const std::string& socket, const std::string& job, uint32_t world_size,
                             uint64_t segment_bytes) {
  RawJob result;
  std::vector<uint32_t> everybody;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    Result<RawClient> client = RawClient::Join(socket, job, rank, world_size);
    if (!client) return Unexpected(client.error());
    result.ranks.push_back(*std::move(client));
    everybody.push_back(rank);
  }
  for (RawClient& rank : result.ranks) {
    GRADSYNC_RETURN_IF_ERROR(rank.SendCreateGroup(MakeCreateGroup("world", everybody)));
  }
  for (RawClient& rank : result.ranks) {
    const Result<uint32_t> group = rank.ReceiveGroupCreated();
    if (!group) return Unexpected(group.error());
    result.groups.push_back(*group);
    Result<RawSegment> segment = rank.Allocate(segment_bytes);
    if (!segment) return Unexpected(segment.error());
    result.segments.push_back(*std::move(segment));
  }
  return result;
}

Status RawJob::AllReduceAndCheck(uint64_t sequence, uint64_t count) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const std::span<float> values = segments[rank].As<float>();
    for (uint64_t i = 0; i < count; ++i) values[i] = Value(sequence, rank, i);
    if (!ranks[rank].Push(MakeAllReduce(groups[rank], sequence, count, segments[rank]))) {
      return {Code::kInternal, "the ring is full"};
    }
  }
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    GRADSYNC_RETURN_IF_ERROR(ranks[rank].Wait(groups[rank], sequence));
    const std::span<const float> values = segments[rank].As<float>();
    for (uint64_t i = 0; i < count; ++i) {
      float sum = 0;
      for (size_t other = 0; other < ranks.size(); ++other) sum += Value(sequence, other, i);
      if (values[i] != sum) {
        return {Code::kInternal, "rank " + std::to_string(rank) + ", element " + std::to_string(i) +
                                     ": " + std::to_string(values[i]) + ", not " +
                                     std::to_string(sum)};
      }
    }
  }
  return OkStatus();
}

}  // namespace gradsync::testing

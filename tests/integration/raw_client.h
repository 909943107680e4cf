// A trainer reduced to the bytes: speaks the local protocol over shm/ alone, so that a test can
// also send what no proper client would.
#ifndef GRADSYNC_TESTS_INTEGRATION_RAW_CLIENT_H_
#define GRADSYNC_TESTS_INTEGRATION_RAW_CLIENT_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "shm/completion.h"
#include "shm/frame_socket.h"
#include "shm/protocol.h"
#include "shm/ring_writer.h"
#include "shm/segment.h"
#include "shm/session_layout.h"
#include "shm/status.h"
#include "shm/types.h"
#include "shm/unique_fd.h"

namespace gradsync::testing {

// Long enough for anything that works, however slow the machine.
inline constexpr std::chrono::seconds kPatience{30};
inline Deadline SoonEnough() { return std::chrono::steady_clock::now() + kPatience; }

Hello MakeHello(const std::string& job, uint32_t rank, uint32_t world_size);
CreateGroup MakeCreateGroup(const std::string& tag, const std::vector<uint32_t>& ranks,
                            std::chrono::milliseconds timeout = kPatience);

// A segment, mapped.
struct RawSegment {
  uint32_t number = 0;
  Mapping mapping;

  template <typename T>
  std::span<T> As() const {
    return {reinterpret_cast<T*>(mapping.data()), mapping.size() / sizeof(T)};
  }
  Region At(uint64_t offset) const { return {number, 0, offset}; }
};

// One connection. One thread. Errors that the daemon sends come back as the Status it sent.
class RawClient {
 public:
  static Result<RawClient> Connect(const std::string& socket);
  // Connects and says Hello.
  static Result<RawClient> Join(const std::string& socket, const std::string& job, uint32_t rank,
                                uint32_t world_size);

  int socket() const { return socket_.get(); }
  const Welcome& welcome() const { return welcome_; }
  SessionLayout* layout() const { return reinterpret_cast<SessionLayout*>(control_.data()); }

  // A request and its reply. Each Send counts the request's number up.
  Status SayHello(Hello hello);
  Result<RawSegment> Allocate(uint64_t bytes);
  Status Free(uint32_t segment);
  Result<uint32_t> MakeGroup(CreateGroup request);
  Status Request(std::span<const std::byte> message);  // one that is answered by Done
  template <typename Message>
  Status Ask(const Message& message) {
    return Request(AsBytes(message));
  }

  // Half a request: for groups, whose ranks must all ask before one is answered.
  Status SendCreateGroup(CreateGroup request);
  Result<uint32_t> ReceiveGroupCreated();

  Status SendRaw(std::span<const std::byte> bytes, std::span<const int> fds = {});
  // The next reply of this type; the error that the daemon sent in its stead.
  template <typename Message>
  Result<Message> Receive(std::vector<UniqueFd>* fds = nullptr) {
    Result<Frame> frame = ReceiveAny();
    if (!frame) return Unexpected(frame.error());
    if (fds != nullptr) *fds = std::move(frame->fds);
    if (std::optional<Message> message = ReadMessage<Message>(frame->bytes)) return *message;
    return Unexpected(Code::kProtocol, "the reply is of another type");
  }
  // The last word of a daemon that ends this session: an ErrorReply, and then nothing more.
  Status ReceiveLastError();

  // Writes the entry, however wrong, and wakes the daemon. False if the ring is full.
  bool Push(const Submission& submission);
  void RingDoorbell();

  // Waits for an operation of a group; kDaemonLost when the daemon hangs up.
  Status Wait(uint32_t group, uint64_t sequence);
  Status GroupFailure(uint32_t group) const;

  void Disconnect() { socket_.Reset(); }

 private:
  explicit RawClient(UniqueFd socket) : socket_(std::move(socket)) {}

  Result<Frame> ReceiveAny();

  UniqueFd socket_;
  UniqueFd doorbell_;
  Mapping control_;
  std::optional<RingWriter> ring_;
  Welcome welcome_{};
};

// An all-reduce, in place at the segment's start.
Submission MakeAllReduce(uint32_t group, uint64_t sequence, uint64_t count,
                         const RawSegment& segment, DType dtype = DType::kFloat32,
                         ReduceOp op = ReduceOp::kSum);
Submission MakeBarrier(uint32_t group, uint64_t sequence);

// A whole job of raw clients: every rank joined, one group of all, a segment each.
struct RawJob {
  std::vector<RawClient> ranks;
  std::vector<uint32_t> groups;  // each rank's number of the group
  std::vector<RawSegment> segments;

  static Result<RawJob> Start(const std::string& socket, const std::string& job,
                              uint32_t world_size, uint64_t segment_bytes);

  // Fills the segments with values that follow from `sequence`, sums `count` of them over all
  // ranks, and checks every sum.
  Status AllReduceAndCheck(uint64_t sequence, uint64_t count);
};

}  // namespace gradsync::testing

#endif  // GRADSYNC_TESTS_INTEGRATION_RAW_CLIENT_H_

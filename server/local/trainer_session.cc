#include "server/local/trainer_session.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"

namespace gradsync {
namespace {

uint64_t ControlBytes() {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return (sizeof(SessionLayout) + page - 1) / page * page;
}

ErrorReply MakeError(uint32_t request_id, const Status& why) {
  auto reply = MakeMessage<ErrorReply>(request_id);
  reply.code = static_cast<int32_t>(why.code());
  reply.text.Set(why.message());
  return reply;
}

// A socket that is closed with frames unread makes the peer's next read fail (ECONNRESET) instead
// of returning what we sent last. So: no more frames, discard those that are there, then close.
void CloseReadably(UniqueFd socket) {
  shutdown(socket.get(), SHUT_RD);
  std::byte discarded{};
  while (recv(socket.get(), &discarded, sizeof(discarded), MSG_DONTWAIT | MSG_TRUNC) > 0) {
  }
}

}  // namespace

void CloseWithError(UniqueFd socket, const Status& why) {
  // Nobody to tell if this fails.
  const ErrorReply reply = MakeError(/*request_id=*/0, why);
  static_cast<void>(SendFrame(socket.get(), AsBytes(reply), {}, Deadline{}));
  CloseReadably(std::move(socket));
}

TrainerSession::TrainerSession(SessionId id, UniqueFd socket, uid_t uid, Charge place,
                               SegmentTable segments)
    : id_(id),
      uid_(uid),
      place_(std::move(place)),
      socket_(std::move(socket)),
      segments_(std::move(segments)) {}

Status TrainerSession::SendOrKeep(std::span<const std::byte> bytes, std::span<const int> fds) {
  if (unsent_.empty()) {
    Status sent = SendFrame(socket_.get(), bytes, fds, Deadline{});
    if (sent.code() != Code::kDeadlineExceeded || poller_ == nullptr) return sent;
    GRADSYNC_RETURN_IF_ERROR(
        poller_->WatchWrites(socket_.get(), {EventSource::kSocket, id_}, true));
  }
  if (unsent_.size() == kMaxUnsent) {
    return {Code::kDaemonLost, "the trainer does not read its socket"};
  }
  Frame frame;
  frame.bytes.assign(bytes.begin(), bytes.end());
  for (const int fd : fds) {
    frame.fds.emplace_back(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!frame.fds.back().valid()) return ErrnoStatus(Code::kOutOfMemory, errno, "no descriptors");
  }
  unsent_.push_back(std::move(frame));
  return OkStatus();
}

void TrainerSession::Flush() {
  if (unsent_.empty()) return;
  while (!unsent_.empty()) {
    const Frame& frame = unsent_.front();
    std::vector<int> fds;
    for (const UniqueFd& fd : frame.fds) fds.push_back(fd.get());
    const Status sent = SendFrame(socket_.get(), frame.bytes, fds, Deadline{});
    if (sent.code() == Code::kDeadlineExceeded) return;
    if (!sent.ok()) {
      unsent_.clear();
      break;
    }
    unsent_.pop_front();
  }
  // It can only fail where watching the socket has never worked.
  static_cast<void>(poller_->WatchWrites(socket_.get(), {EventSource::kSocket, id_}, false));
}

Status TrainerSession::Watch(Poller* poller) {
  poller_ = poller;
  GRADSYNC_RETURN_IF_ERROR(poller->Add(socket_.get(), {EventSource::kSocket, id_}));
  process_ = PeerPidFd(socket_.get());
  if (!process_.valid()) return OkStatus();
  return poller->Add(process_.get(), {EventSource::kProcess, id_}, /*edge=*/true);
}

Status TrainerSession::OpenControl(Poller* poller) {
  const uint64_t bytes = ControlBytes();
  Result<UniqueFd> fd = CreateSealedMemfd("gradsync:control", bytes);
  if (!fd) return fd.error();
  Result<Mapping> mapping = Mapping::Map(fd->get(), bytes);
  if (!mapping) return mapping.error();
  doorbell_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!doorbell_.valid()) {
    return ErrnoStatus(Code::kOutOfMemory, errno, "cannot create a session's eventfd");
  }
  GRADSYNC_RETURN_IF_ERROR(
      poller->Add(doorbell_.get(), {EventSource::kDoorbell, id_}, /*edge=*/true));
  control_fd_ = *std::move(fd);
  control_ = *std::move(mapping);
  layout()->magic = kControlMagic;
  layout()->version = kProtocolVersion;
  layout()->ring_entries = kRingEntries;
  ring_.emplace(&layout()->ring);
  return OkStatus();
}

std::string TrainerSession::Describe() const {
  if (!who_) return "a client that has not said HELLO";
  return absl::StrCat("rank ", who_->rank, " of job '", who_->job, "'");
}

Status TrainerSession::SendWelcome(Welcome welcome) {
  welcome.control_bytes = control_.size();
  const std::array<int, 2> fds = {control_fd_.get(), doorbell_.get()};
  Status sent = Send(welcome, fds);
  control_fd_.Reset();
  return sent;
}

Status TrainerSession::SendError(uint32_t request_id, const Status& why) {
  return Send(MakeError(request_id, why));
}

CompletionWriter* TrainerSession::group_words(uint32_t number) {
  if (number >= kMaxGroupsPerSession) return nullptr;
  while (group_words_.size() <= number) {
    group_words_.emplace_back(&layout()->groups[group_words_.size()]);
  }
  return &group_words_[number];
}

void TrainerSession::UseDevice(uint32_t number, DeviceUse use) {
  if (number >= device_uses_.size()) device_uses_.resize(number + 1);
  device_uses_[number] = std::move(use);
}

void TrainerSession::EndDeviceUse(uint32_t number) {
  const DeviceUse* use = device_use(number);
  if (use == nullptr) return;
  ReleaseDone(use->flags->page());
  device_uses_[number] = {};
}

void TrainerSession::Close(Poller* poller, const Status& why) {
  for (uint32_t number = 0; number < device_uses_.size(); ++number) EndDeviceUse(number);
  for (UniqueFd* fd : {&doorbell_, &process_}) {
    if (fd->valid()) poller->Remove(fd->get());
    fd->Reset();
  }
  poller->Remove(socket_.get());
  if (why.ok()) {
    CloseReadably(std::move(socket_));
  } else {
    CloseWithError(std::move(socket_), why);
  }
}

}  // namespace gradsync

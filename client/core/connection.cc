#include "client/core/connection.h"

#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <thread>
#include <utility>

namespace gradsync {
namespace {

constexpr std::chrono::milliseconds kGoodbyeWait{500};
constexpr std::chrono::microseconds kRingFullPause{100};
constexpr std::chrono::milliseconds kLookAgain{100};
// A daemon may ask us to spin, but not to burn a core.
constexpr uint32_t kMaxSpinUs = 1000;

uint32_t RequestIdOf(const Frame& frame) {
  const std::optional<FrameHeader> header = ReadHeader(frame.bytes);
  return header ? header->request_id : 0;
}

Status OtherVersion(const std::string& path, uint16_t version) {
  return {Code::kProtocol, "gradsyncd at '" + path + "' speaks version " + std::to_string(version) +
                               " of the protocol, this client version " +
                               std::to_string(kProtocolVersion) +
                               "; install the same release of both"};
}

}  // namespace

Status CheckReply(const Frame& frame, const std::string& path, FrameType expected) {
  const std::optional<FrameHeader> header = ReadHeader(frame.bytes);
  if (!header) return {Code::kProtocol, "what listens at '" + path + "' is not a gradsyncd"};
  if (header->version != kProtocolVersion) return OtherVersion(path, header->version);
  if (const auto error = ReadMessage<ErrorReply>(frame.bytes)) {
    return {ErrorCodeFrom(error->code).value_or(Code::kProtocol), error->text.Get()};
  }
  if (header->type != static_cast<uint16_t>(expected)) {
    return {Code::kProtocol, "gradsyncd at '" + path + "' answered with a frame of type " +
                                 std::to_string(header->type) + ", not " +
                                 std::to_string(static_cast<int>(expected))};
  }
  return OkStatus();
}

Connection::Connection(UniqueFd socket, std::string path, const Identity& identity)
    : path_(std::move(path)), identity_(identity), guard_(std::move(socket)) {}

Connection::~Connection() { Close(); }

Result<std::shared_ptr<Connection>> Connection::Open(UniqueFd socket, std::string path,
                                                     const Identity& identity, Deadline deadline) {
  std::shared_ptr<Connection> connection(
      new Connection(std::move(socket), std::move(path), identity));
  const Status greeted = connection->Greet(deadline);
  if (greeted.ok()) return connection;
  const std::lock_guard lock(connection->mutex_);
  connection->Lose(greeted);  // there is no session to say goodbye to
  return Unexpected(greeted);
}

Status Connection::Greet(Deadline deadline) {
  auto hello = MakeMessage<Hello>();
  hello.job.Set(identity_.job);
  hello.generation = identity_.generation;
  hello.world_size = identity_.world_size;
  hello.rank = identity_.rank;
  hello.local_rank = identity_.local_rank;
  hello.local_world_size = identity_.local_world_size;
  hello.pid = static_cast<uint32_t>(getpid());
  hello.program.Set(program_invocation_short_name);
  std::vector<UniqueFd> fds;
  const auto welcome = Call<Welcome>(hello, deadline, &fds);
  if (!welcome) return welcome.error();
  return AdoptControlSegment(*welcome, std::move(fds));
}

Status Connection::AdoptControlSegment(const Welcome& welcome, std::vector<UniqueFd> fds) {
  if (fds.size() != 2 || welcome.control_bytes < sizeof(SessionLayout)) {
    return {Code::kProtocol, "gradsyncd at '" + path_ + "' sent a malformed welcome"};
  }
  GRADSYNC_RETURN_IF_ERROR(CheckSealedMemfd(fds[0].get(), welcome.control_bytes));
  auto control = Mapping::Map(fds[0].get(), welcome.control_bytes);
  if (!control) return control.error();
  control_ = *std::move(control);
  GRADSYNC_RETURN_IF_ERROR(control_.Prefault());
  if (layout()->magic != kControlMagic || layout()->version != kProtocolVersion ||
      layout()->ring_entries != kRingEntries) {
    return {Code::kProtocol, "gradsyncd at '" + path_ + "' sent a control segment of another kind"};
  }
  guard_.SetDoorbell(std::move(fds[1]));
  writer_.emplace(&layout()->ring);
  spin_ = std::chrono::microseconds(std::min(welcome.spin_us, kMaxSpinUs));
  return OkStatus();
}

uint32_t Connection::NextRequestId() {
  const std::lock_guard lock(mutex_);
  // 0 marks what the daemon sends unasked.
  if (++last_request_id_ == 0) ++last_request_id_;
  return last_request_id_;
}

// A daemon that refuses us may have said so and hung up already; then the reason waits to be read.
Status Connection::SendRequest(std::span<const std::byte> bytes, std::span<const int> fds,
                               Deadline deadline) {
  {
    const std::lock_guard lock(mutex_);
    if (!lost_.ok()) return lost_;
  }
  Status sent = SendFrame(guard_.socket(), bytes, fds, deadline);
  if (sent.ok()) return sent;
  std::unique_lock lock(mutex_);
  while (lost_.ok()) {
    if (reading_) {
      // The thread that reads will come to the hang-up.
      if (!replied_.wait_for(lock, kDaemonGrace, [this] { return !lost_.ok() || !reading_; })) {
        Lose(sent);
      }
    } else {
      Result<Frame> frame = ReceiveFrame(guard_.socket(), Deadline());
      const bool nothing = !frame && frame.error().code() == Code::kDeadlineExceeded;
      Dispatch(nothing ? Unexpected(sent) : std::move(frame));
    }
  }
  replied_.notify_all();
  return lost_;
}

Result<Frame> Connection::Exchange(uint32_t request_id, std::span<const std::byte> bytes,
                                   Deadline deadline) {
  GRADSYNC_RETURN_IF_ERROR(SendRequest(bytes, {}, deadline));
  return Await(request_id, deadline);
}

Result<Frame> Connection::Await(uint32_t id, Deadline deadline) {
  if (in_child()) return Unexpected(ForkedStatus());
  std::unique_lock lock(mutex_);
  for (;;) {
    if (auto reply = TakeReply(id)) return *std::move(reply);
    GRADSYNC_RETURN_IF_ERROR(NextFrame(&lock, deadline, deadline));
  }
}

Result<size_t> Connection::AwaitAny(std::span<const uint32_t> ids, Deadline deadline) {
  if (in_child()) return Unexpected(ForkedStatus());
  std::unique_lock lock(mutex_);
  for (bool waited = false;; waited = true) {
    const auto found =
        std::find_if(ids.begin(), ids.end(), [&](uint32_t id) { return HasReply(id); });
    if (found != ids.end() || waited) return static_cast<size_t>(found - ids.begin());
    // Not for long: a reply to a request that is newer than `ids` may be there already.
    const Deadline look_again = std::chrono::steady_clock::now() + kLookAgain;
    GRADSYNC_RETURN_IF_ERROR(NextFrame(&lock, deadline, std::min(deadline, look_again)));
  }
}

void Connection::Forget(uint32_t id) {
  if (in_child()) return;
  const std::lock_guard lock(mutex_);
  if (!TakeReply(id)) forgotten_.push_back(id);
}

Status Connection::NextFrame(std::unique_lock<std::mutex>* lock, Deadline deadline,
                             Deadline until) {
  if (!lost_.ok()) return lost_;
  if (std::chrono::steady_clock::now() >= deadline) {
    lock->unlock();
    Status silent = GiveUpSilentDaemon();
    lock->lock();
    return silent;
  }
  if (reading_) {
    replied_.wait_until(*lock, until);
    return OkStatus();
  }
  reading_ = true;
  lock->unlock();
  Result<Frame> frame = ReceiveFrame(guard_.socket(), until);
  lock->lock();
  reading_ = false;
  Dispatch(std::move(frame));
  replied_.notify_all();
  return OkStatus();
}

bool Connection::HasReply(uint32_t request_id) const {
  return std::any_of(replies_.begin(), replies_.end(),
                     [&](const Frame& frame) { return RequestIdOf(frame) == request_id; });
}

std::optional<Frame> Connection::TakeReply(uint32_t request_id) {
  const auto found = std::find_if(replies_.begin(), replies_.end(), [&](const Frame& frame) {
    return RequestIdOf(frame) == request_id;
  });
  if (found == replies_.end()) return std::nullopt;
  Frame frame = std::move(*found);
  replies_.erase(found);
  return frame;
}

// With mutex_ held.
void Connection::Dispatch(Result<Frame> frame) {
  if (!frame) {
    // The waiters look at their clocks.
    if (frame.error().code() == Code::kDeadlineExceeded) return;
    Lose(frame.error().code() == Code::kDaemonLost ? HungUpStatus() : frame.error());
    return;
  }
  if (const uint32_t id = RequestIdOf(*frame); id != 0) {
    if (std::erase(forgotten_, id) == 0) replies_.push_back(*std::move(frame));
    return;
  }
  // The last thing that a daemon says before it closes a session.
  const Status reason = CheckReply(*frame, path_, FrameType::kError);
  Lose(reason.ok() ? HungUpStatus() : reason);
}

// With mutex_ held. The first reason is kept.
void Connection::Lose(const Status& why) {
  if (!lost_.ok()) return;
  lost_ = why;
  is_lost_.store(true, std::memory_order_relaxed);
  // Not close(): another thread may be about to use the descriptor.
  shutdown(guard_.socket(), SHUT_RDWR);
}

Status Connection::Submit(const Submission& submission, Deadline deadline) {
  if (in_child()) return ForkedStatus();
  for (;;) {
    {
      const std::lock_guard lock(ring_mutex_);
      if (writer_->TryPush(submission)) {
        if (!writer_->MustWakeDaemon()) return OkStatus();
        break;
      }
    }
    GRADSYNC_RETURN_IF_ERROR(CheckAlive());
    if (std::chrono::steady_clock::now() >= deadline) return GiveUpSilentDaemon();
    std::this_thread::sleep_for(kRingFullPause);
  }
  const uint64_t one = 1;
  // It can only fail if the daemon made the counter overflow, and then the daemon is awake.
  [[maybe_unused]] const ssize_t written = write(guard_.doorbell(), &one, sizeof(one));
  return OkStatus();
}

Status Connection::CheckAlive() {
  if (in_child()) return ForkedStatus();
  {
    const std::lock_guard lock(mutex_);
    if (!lost_.ok()) return lost_;
  }
  if (!HasHungUp(guard_.socket())) return OkStatus();
  std::unique_lock lock(mutex_);
  // A thread that waits for a reply reads the hang-up itself.
  while (lost_.ok() && !reading_) {
    // Before the hang-up lie the replies that nobody has read, and the daemon's reason.
    Dispatch(ReceiveFrame(guard_.socket(), Deadline()));
  }
  replied_.wait_for(lock, kDaemonGrace, [this] { return !lost_.ok(); });
  return lost_.ok() ? HungUpStatus() : lost_;
}

void Connection::Close() {
  if (in_child()) return;
  {
    const std::lock_guard lock(mutex_);
    if (!lost_.ok() || closing_) return;
    closing_ = true;
  }
  // A daemon that does not answer will see the hang-up.
  static_cast<void>(
      Call<Done>(MakeMessage<Goodbye>(), std::chrono::steady_clock::now() + kGoodbyeWait));
  const std::lock_guard lock(mutex_);
  Lose(HungUpStatus());
  replied_.notify_all();
}

Status Connection::GiveUp(Code code, const std::string& what) {
  if (in_child()) return ForkedStatus();
  const std::lock_guard lock(mutex_);
  replied_.notify_all();
  Lose({code, Who() + ": " + what});
  return lost_;
}

Status Connection::GiveUpSilentDaemon() {
  return GiveUp(Code::kDaemonLost, "gradsyncd at '" + path_ +
                                       "' did not answer in time; is it stopped, or the machine "
                                       "overloaded?");
}

// With mutex_ held.
Status Connection::HungUpStatus() const {
  if (closing_) return {Code::kFailedPrecondition, Who() + " has closed its session"};
  return {Code::kDaemonLost, Who() + " lost gradsyncd at '" + path_ +
                                 "': it has hung up without a word, so it was killed or has "
                                 "crashed; see its log, then start the job again"};
}

Status Connection::ForkedStatus() const {
  return {Code::kFailedPrecondition,
          "this session belongs to the process that opened it, and this is a forked child; open a "
          "session of its own here, or use none"};
}

std::string Connection::Who() const {
  return "rank " + std::to_string(identity_.rank) + " of job '" + identity_.job + "'";
}

}  // namespace gradsync

#include "client/core/session.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "client/core/memory_limit.h"
#include "shm/protocol.h"
#include "shm/segment.h"

namespace gradsync {
namespace {

constexpr Timeout kDefaultTimeout{600000};
// For replies that wait for nobody else.
constexpr std::chrono::seconds kReplyWait{10};
// To find a daemon, to start one if need be, and to be greeted.
constexpr std::chrono::seconds kOpenWait{30};
constexpr std::chrono::milliseconds kFirstPause{5};

Deadline After(std::chrono::nanoseconds wait) { return std::chrono::steady_clock::now() + wait; }

// A daemon that was just ending by idleness when we came, or draining.
bool IsWorthAnotherTry(const Status& status) {
  return status.code() == Code::kDaemonLost || status.code() == Code::kShuttingDown;
}

Result<std::shared_ptr<Connection>> OpenConnection(const Identity& identity,
                                                   const Discovery& discovery) {
  const Deadline deadline = After(kOpenWait);
  for (auto pause = kFirstPause;; pause *= 2) {
    auto found = FindDaemon(discovery, deadline);
    if (!found) return Unexpected(found.error());
    auto connection = Connection::Open(std::move(found->socket), found->path, identity, deadline);
    const bool retry = !connection && IsWorthAnotherTry(connection.error()) &&
                       After(pause) < deadline && !discovery.is_fixed();
    if (!retry) return connection;
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace

class Session::SegmentBuffer : public SharedBuffer {
 public:
  SegmentBuffer(std::weak_ptr<Session> session, Mapping mapping, uint32_t segment)
      : session_(std::move(session)), mapping_(std::move(mapping)), segment_(segment) {}
  SegmentBuffer(const SegmentBuffer&) = delete;
  SegmentBuffer& operator=(const SegmentBuffer&) = delete;
  ~SegmentBuffer() override {
    if (const auto session = session_.lock()) session->Forget(mapping_.data(), segment_);
  }

  std::byte* data() const override { return mapping_.data(); }
  uint64_t size() const override { return mapping_.size(); }

 private:
  const std::weak_ptr<Session> session_;
  const Mapping mapping_;
  const uint32_t segment_;
};

Session::Session(std::shared_ptr<Connection> connection, Timeout timeout)
    : connection_(std::move(connection)), timeout_(timeout) {}

Session::~Session() { Close(); }

Result<std::shared_ptr<Session>> Session::Open(const SessionRequest& request,
                                               const Environment& environment) {
  return Open(request, environment, DiscoveryFrom(request.socket, environment));
}

Result<std::shared_ptr<Session>> Session::Open(const SessionRequest& request,
                                               const Environment& environment,
                                               const Discovery& discovery) {
  const auto identity = ResolveIdentity(request, environment);
  if (!identity) return Unexpected(identity.error());
  auto connection = OpenConnection(*identity, discovery);
  if (!connection) return Unexpected(connection.error());
  const Timeout timeout(request.timeout_ms);
  return std::shared_ptr<Session>(
      new Session(*std::move(connection), timeout == Timeout::zero() ? kDefaultTimeout : timeout));
}

Timeout Session::Resolve(Timeout timeout) const {
  return std::min(timeout == Timeout::zero() ? timeout_ : timeout, Timeout(kMaxTimeoutMs));
}

Result<std::shared_ptr<SharedBuffer>> Session::Allocate(uint64_t bytes, const std::string& label) {
  if (bytes == 0) {
    return Unexpected(Code::kInvalidArgument, "buffer '" + label + "' must not be empty");
  }
  if (!connection_->in_child()) {
    if (const Status memory = CheckMemoryAvailable(bytes); !memory.ok()) {
      return Unexpected(memory.code(), "buffer '" + label + "': " + memory.message());
    }
  }
  auto request = MakeMessage<AllocateSegment>();
  request.bytes = bytes;
  request.label.Set(label);
  std::vector<UniqueFd> fds;
  const auto reply = connection_->Call<SegmentAllocated>(request, After(kReplyWait), &fds);
  if (!reply) return Unexpected(reply.error());
  if (fds.size() != 1 || reply->bytes < bytes) {
    return Unexpected(connection_->GiveUp(Code::kProtocol, "gradsyncd sent a malformed segment"));
  }
  auto buffer = Adopt(*reply, std::move(fds.front()), label);
  if (!buffer) FreeSegmentOfDaemon(reply->segment);
  return buffer;
}

Result<std::shared_ptr<SharedBuffer>> Session::Adopt(const SegmentAllocated& reply, UniqueFd fd,
                                                     const std::string& label) {
  GRADSYNC_RETURN_IF_ERROR(CheckSealedMemfd(fd.get(), reply.bytes));
  auto mapping = Mapping::Map(fd.get(), reply.bytes);
  Status status = mapping ? mapping->Prefault() : mapping.error();
  if (!status.ok()) {
    return Unexpected(status.code(), "buffer '" + label + "': " + status.message());
  }
  const Range range{mapping->data(), mapping->size(), reply.segment};
  auto buffer =
      std::make_shared<SegmentBuffer>(weak_from_this(), *std::move(mapping), reply.segment);
  const std::lock_guard lock(ranges_mutex_);
  const auto after =
      std::upper_bound(ranges_.begin(), ranges_.end(), range.begin,
                       [](const std::byte* begin, const Range& r) { return begin < r.begin; });
  ranges_.insert(after, range);
  return std::static_pointer_cast<SharedBuffer>(buffer);
}

std::optional<Region> Session::Find(const void* data, uint64_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(data);
  const std::shared_lock lock(ranges_mutex_);
  auto after = std::upper_bound(ranges_.begin(), ranges_.end(), begin,
                                [](const std::byte* b, const Range& r) { return b < r.begin; });
  if (after == ranges_.begin()) return std::nullopt;
  const Range& range = *--after;
  const auto offset = static_cast<uint64_t>(begin - range.begin);
  if (offset > range.size || bytes > range.size - offset) return std::nullopt;
  return Region{range.segment, 0, offset};
}

void Session::Forget(const std::byte* begin, uint32_t segment) {
  if (connection_->in_child()) return;
  {
    const std::lock_guard lock(ranges_mutex_);
    std::erase_if(ranges_, [begin](const Range& range) { return range.begin == begin; });
  }
  FreeSegmentOfDaemon(segment);
}

// Failure does not matter: then the session is lost, and the daemon frees what it had.
void Session::FreeSegmentOfDaemon(uint32_t segment) {
  auto request = MakeMessage<FreeSegment>();
  request.segment = segment;
  static_cast<void>(connection_->Call<Done>(request, After(kReplyWait)));
}

Result<std::shared_ptr<SharedBuffer>> Session::BorrowStaging(uint64_t bytes) {
  {
    const std::lock_guard lock(staging_mutex_);
    const auto idle = std::find_if(idle_staging_.rbegin(), idle_staging_.rend(),
                                   [bytes](const auto& one) { return one->size() == bytes; });
    if (idle != idle_staging_.rend()) {
      std::shared_ptr<SharedBuffer> staging = std::move(*idle);
      idle_staging_.erase(std::next(idle).base());
      return staging;
    }
  }
  return Allocate(bytes, "staging");
}

void Session::ReturnStaging(std::shared_ptr<SharedBuffer> staging) {
  const std::lock_guard lock(staging_mutex_);
  idle_staging_.push_back(std::move(staging));
}

}  // namespace gradsync

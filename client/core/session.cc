#include "client/core/session.h"

#include <algorithm>
#include <array>
#include <span>
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
// The first use of a GPU takes the daemon a driver to load, and a context to make.
constexpr std::chrono::seconds kFirstUseWait{60};
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

class Session::DeviceBuffer : public SharedBuffer {
 public:
  DeviceBuffer(std::weak_ptr<Session> session, std::shared_ptr<Device> device,
               std::unique_ptr<DeviceMapping> mapping, uint32_t segment)
      : session_(std::move(session)),
        device_(std::move(device)),
        mapping_(std::move(mapping)),
        segment_(segment) {}
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  // Any stream of the process may still be at it.
  ~DeviceBuffer() override {
    device_->SynchronizeAll();
    if (const auto session = session_.lock()) session->Forget(mapping_->address(), segment_);
  }

  std::byte* data() const override { return mapping_->address(); }
  uint64_t size() const override { return mapping_->size(); }
  uint32_t device() const override { return device_->device(); }

 private:
  const std::weak_ptr<Session> session_;
  const std::shared_ptr<Device> device_;
  const std::unique_ptr<DeviceMapping> mapping_;
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

Result<std::shared_ptr<SharedBuffer>> Session::Allocate(uint64_t bytes, const std::string& label,
                                                        uint32_t device) {
  if (bytes == 0) {
    return Unexpected(Code::kInvalidArgument, "buffer '" + label + "' must not be empty");
  }
  if (device != kCpu) return AllocateOn(device, bytes, label);
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
  Remember(range);
  return std::static_pointer_cast<SharedBuffer>(buffer);
}

void Session::Remember(const Range& range) {
  const std::lock_guard lock(ranges_mutex_);
  const auto after =
      std::upper_bound(ranges_.begin(), ranges_.end(), range.begin,
                       [](const std::byte* begin, const Range& r) { return begin < r.begin; });
  ranges_.insert(after, range);
}

Result<std::shared_ptr<Device>> Session::GetDevice(uint32_t device) {
  if (connection_->in_child()) return Unexpected(connection_->CheckAlive());
  const std::lock_guard lock(devices_mutex_);
  const auto found = std::find_if(devices_.begin(), devices_.end(),
                                  [device](const auto& one) { return one->device() == device; });
  if (found != devices_.end()) return *found;
  Result<std::shared_ptr<Device>> opened = OpenDevice(device);
  if (!opened) return opened;
  return devices_.emplace_back(*std::move(opened));
}

Result<std::shared_ptr<SharedBuffer>> Session::AllocateOn(uint32_t device, uint64_t bytes,
                                                          const std::string& label) {
  Result<std::shared_ptr<Device>> opened = GetDevice(device);
  if (!opened) return Unexpected(opened.error());
  auto request = MakeMessage<AllocateDeviceSegment>();
  request.bytes = bytes;
  request.device = (*opened)->uuid();
  request.label.Set(label);
  std::vector<UniqueFd> fds;
  const auto reply = connection_->Call<SegmentAllocated>(request, After(kFirstUseWait), &fds);
  if (!reply) return Unexpected(reply.error());
  if (fds.size() != 1 || reply->bytes < bytes) {
    return Unexpected(connection_->GiveUp(Code::kProtocol, "gradsyncd sent a malformed segment"));
  }
  auto mapping = (*opened)->Map(std::move(fds.front()), reply->bytes);
  if (!mapping) {
    FreeSegmentOfDaemon(reply->segment);
    return Unexpected(mapping.error().code(),
                      "buffer '" + label + "': " + mapping.error().message());
  }
  Remember({(*mapping)->address(), (*mapping)->size(), reply->segment});
  return std::static_pointer_cast<SharedBuffer>(std::make_shared<DeviceBuffer>(
      weak_from_this(), *std::move(opened), *std::move(mapping), reply->segment));
}

Status Session::Register(uint32_t device, const std::byte* address, uint64_t bytes) {
  Result<std::shared_ptr<Device>> opened = GetDevice(device);
  if (!opened) return opened.error();
  Result<DeviceAllocation> shared = (*opened)->Share(address);
  if (!shared) return shared.error();
  const auto offset = static_cast<uint64_t>(address - shared->base);
  if (bytes > shared->bytes - offset) {
    return {Code::kUnsupported, "the memory spans several allocations"};
  }
  const std::lock_guard lock(devices_mutex_);
  for (const Registered& one : registered_) {
    if (one.base == shared->base) return OkStatus();
  }
  auto request = MakeMessage<ImportDeviceSegment>();
  request.bytes = shared->bytes;
  request.device = (*opened)->uuid();
  request.hand_over = static_cast<uint8_t>(shared->hand_over);
  request.handle = shared->legacy;
  const std::array<int, 1> fds = {shared->exported.get()};
  const auto id = connection_->Post(request, std::span(fds).first(shared->exported.valid() ? 1 : 0),
                                    After(kFirstUseWait));
  if (!id) return id.error();
  const Result<Frame> frame = connection_->Await(*id, After(kFirstUseWait));
  if (!frame) return frame.error();
  GRADSYNC_RETURN_IF_ERROR(CheckReply(*frame, connection_->path(), SegmentAllocated::kType));
  const auto reply = ReadMessage<SegmentAllocated>(frame->bytes);
  if (!reply || reply->bytes < shared->bytes) {
    return connection_->GiveUp(Code::kProtocol, "gradsyncd sent a malformed segment");
  }
  registered_.push_back({shared->base, reply->segment, *std::move(opened)});
  Remember({shared->base, shared->bytes, reply->segment});
  return OkStatus();
}

Status Session::Unregister(const std::byte* address) {
  const std::optional<Region> region = Find(address, 1);
  Registered gone;
  {
    const std::lock_guard lock(devices_mutex_);
    const auto found = std::find_if(registered_.begin(), registered_.end(), [&](const auto& one) {
      return region && one.segment == region->segment;
    });
    if (found == registered_.end()) {
      return {Code::kInvalidArgument, "the memory is not registered"};
    }
    gone = std::move(*found);
    registered_.erase(found);
  }
  gone.device->SynchronizeAll();
  Forget(gone.base, gone.segment);
  return OkStatus();
}

Status Session::Watch(FlagPage* page) {
  const std::lock_guard lock(devices_mutex_);
  if (watch_ == nullptr) {
    Result<std::unique_ptr<DeviceWatch>> started = DeviceWatch::Start(
        connection_->socket(),
        [connection = connection_.get()] { static_cast<void>(connection->CheckAlive()); });
    if (!started) return started.error();
    watch_ = *std::move(started);
  }
  watch_->Add(page);
  return OkStatus();
}

void Session::Unwatch(FlagPage* page) {
  const std::lock_guard lock(devices_mutex_);
  if (watch_ != nullptr) watch_->Remove(page);
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

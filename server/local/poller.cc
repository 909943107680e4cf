#include "server/local/poller.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <utility>

namespace gradsync {
namespace {

// Session numbers count from 1 and never come near 2^56.
constexpr int kSourceBits = 8;

uint64_t Pack(PollEvent event) {
  return event.session << kSourceBits | static_cast<uint64_t>(event.source);
}

PollEvent Unpack(uint64_t data) {
  return {static_cast<EventSource>(data & ((1u << kSourceBits) - 1)), data >> kSourceBits};
}

}  // namespace

Result<Poller> Poller::Create() {
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) {
    return Unexpected(ErrnoStatus(Code::kInternal, errno, "cannot create an epoll descriptor"));
  }
  return Poller(std::move(epoll));
}

Status Poller::Add(int fd, PollEvent event, bool edge) {
  epoll_event entry{};
  entry.events = EPOLLIN | EPOLLRDHUP | (edge ? EPOLLET : 0u);
  entry.data.u64 = Pack(event);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &entry) == 0) return OkStatus();
  return ErrnoStatus(Code::kInternal, errno, "cannot watch a descriptor");
}

Status Poller::WatchWrites(int fd, PollEvent event, bool on) {
  epoll_event entry{};
  entry.events = EPOLLIN | EPOLLRDHUP | (on ? EPOLLOUT : 0u);
  entry.data.u64 = Pack(event);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &entry) == 0) return OkStatus();
  return ErrnoStatus(Code::kInternal, errno, "cannot watch a descriptor");
}

void Poller::Remove(int fd) { epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

std::span<const PollEvent> Poller::Wait(std::chrono::nanoseconds timeout) {
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(timeout).count();
  std::array<epoll_event, kMaxEvents> ready{};
  const int count = epoll_wait(epoll_.get(), ready.data(), kMaxEvents,
                               static_cast<int>(std::clamp<int64_t>(ms, 0, INT_MAX)));
  // An interruption by a signal is as good as a timeout: the caller looks at everything again.
  const size_t found = count > 0 ? static_cast<size_t>(count) : 0;
  for (size_t i = 0; i < found; ++i) events_[i] = Unpack(ready[i].data.u64);
  return {events_.data(), found};
}

}  // namespace gradsync

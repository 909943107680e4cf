#include "client/core/device_watch.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <system_error>
#include <utility>

namespace gradsync {

Result<std::unique_ptr<DeviceWatch>> DeviceWatch::Start(int socket, std::function<void()> on_lost) {
  UniqueFd stop(eventfd(0, EFD_CLOEXEC));
  if (!stop.valid()) return Unexpected(ErrnoStatus(Code::kOutOfMemory, errno, "cannot watch"));
  std::unique_ptr<DeviceWatch> watch(new DeviceWatch(socket, std::move(on_lost), std::move(stop)));
  // The trainer's signals are for the trainer's threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Status started;
  try {
    watch->thread_ = std::thread([raw = watch.get()] { raw->Run(); });
  } catch (const std::system_error& error) {
    started = {Code::kOutOfMemory, std::string("cannot start a thread: ") + error.what()};
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  GRADSYNC_RETURN_IF_ERROR(started);
  return watch;
}

DeviceWatch::DeviceWatch(int socket, std::function<void()> on_lost, UniqueFd stop)
    : socket_(socket), on_lost_(std::move(on_lost)), stop_(std::move(stop)), owner_(getpid()) {}

DeviceWatch::~DeviceWatch() {
  if (!thread_.joinable()) return;
  if (getpid() != owner_) {
    thread_.detach();
    return;
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(stop_.get(), &one, sizeof(one));
  thread_.join();
}

void DeviceWatch::Add(FlagPage* page) {
  const std::lock_guard lock(mutex_);
  pages_.push_back(page);
  if (lost_) ReleaseDone(page);
}

void DeviceWatch::Remove(FlagPage* page) {
  const std::lock_guard lock(mutex_);
  std::erase(pages_, page);
}

void DeviceWatch::Run() {
  std::array<pollfd, 2> watched = {pollfd{socket_, POLLRDHUP, 0}, pollfd{stop_.get(), POLLIN, 0}};
  int ready = 0;
  do {
    ready = poll(watched.data(), watched.size(), -1);
  } while (ready < 0 && errno == EINTR);
  if (watched[1].revents != 0) return;
  on_lost_();
  const std::lock_guard lock(mutex_);
  lost_ = true;
  for (FlagPage* page : pages_) ReleaseDone(page);
}

}  // namespace gradsync

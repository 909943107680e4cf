#include "server/local/server.h"

#include <unistd.h>

#include <limits>
#include <utility>

#include "server/engine/cpu/cores.h"
#include "server/local/log.h"
#include "server/local/reactor.h"

namespace gradsync {
namespace {

uint64_t PhysicalMemory() {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

ServerOptions WithDefaults(ServerOptions options) {
  if (options.logger == nullptr) options.logger = MakeSilentLogger();
  if (options.max_total_bytes == 0) options.max_total_bytes = PhysicalMemory();
  if (options.max_user_bytes == 0) options.max_user_bytes = options.max_total_bytes;
  if (options.max_session_bytes == 0) options.max_session_bytes = options.max_user_bytes;
  if (options.max_session_device_bytes == 0) {
    options.max_session_device_bytes = std::numeric_limits<uint64_t>::max();
  }
  if (options.max_user_sessions == 0) options.max_user_sessions = options.max_sessions;
  if (options.cores == 0) options.cores = AvailableCores();
  return options;
}

}  // namespace

Result<std::unique_ptr<Server>> Server::Create(ServerOptions options,
                                               std::unique_ptr<Engine> engine,
                                               DeviceEngineFactory devices) {
  Result<std::unique_ptr<Reactor>> reactor =
      Reactor::Create(WithDefaults(std::move(options)), std::move(engine), std::move(devices));
  if (!reactor) return Unexpected(reactor.error());
  return std::unique_ptr<Server>(new Server(*std::move(reactor)));
}

Server::Server(std::unique_ptr<Reactor> reactor) : reactor_(std::move(reactor)) {}
Server::~Server() = default;

Status Server::Run() { return reactor_->Run(); }

void Server::Stop() { reactor_->Stop(); }

Status Server::Call(std::function<void(const JobTable&, Time)> function, Time deadline) {
  return reactor_->Call(std::move(function), deadline);
}

}  // namespace gradsync

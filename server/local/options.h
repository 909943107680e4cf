// What a Server can be told.
#ifndef GRADSYNC_SERVER_LOCAL_OPTIONS_H_
#define GRADSYNC_SERVER_LOCAL_OPTIONS_H_

#include <spdlog/logger.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "server/job/operation.h"

namespace gradsync {

struct ServerOptions {
  // Where trainers connect, and who may: the socket file's mode is the only gate. 0666 lets every
  // user of the machine in (jobs of different users never meet), 0600 only the daemon's own.
  std::string socket;
  mode_t socket_mode = 0600;

  // Null: nothing is logged.
  std::shared_ptr<spdlog::logger> logger;

  // Limits. A client that asks for more gets kOutOfMemory with the name of the flag; it may go on.
  uint32_t max_sessions = 1024;
  uint32_t max_user_sessions = 0;  // of one user; 0: max_sessions
  uint32_t max_segments_per_session = 4096;
  uint64_t max_session_bytes = 0;  // of segments; 0: max_user_bytes
  uint64_t max_user_bytes = 0;     // of all sessions of one user; 0: max_total_bytes
  uint64_t max_total_bytes = 0;    // 0: this machine's memory

  uint64_t max_session_device_bytes = 0;  // of segments on GPUs; 0: what the GPUs have

  // Whether a trainer's own GPU memory may be used where it lies. One that frees such memory while
  // it is in use can harm every job of that GPU, so only the daemon's own user by default.
  enum class ImportMemory : uint8_t { kNever, kOwnUser, kAlways };
  ImportMemory import_memory = ImportMemory::kOwnUser;

  // How long a connection may be silent before it says Hello.
  Duration hello_timeout = std::chrono::seconds(5);

  // How long Stop() waits for running operations.
  Duration drain_timeout = std::chrono::seconds(30);

  // Run() ends by itself after this long without a session; zero: never. No trainer falls between
  // a daemon that goes and one that comes: it ends under SocketLock::Right::kStarting, which a
  // trainer that looks for a daemon holds until it has its Welcome. One that connects without the
  // lock in the very last moment reads end-of-file before any Welcome, and tries again.
  Duration idle_exit = Duration::zero();

  // The longest that the daemon, and a waiting trainer, spins before it sleeps. Used only while
  // there are more cores than sessions: elsewhere a spinning thread keeps a working one waiting.
  Duration spin = std::chrono::microseconds(40);

  // Cores that this process may use; 0: AvailableCores().
  int cores = 0;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_LOCAL_OPTIONS_H_

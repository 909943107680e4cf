// Everything that the client takes from the process's environment, read and checked in this one
// place.
#ifndef GRADSYNC_CLIENT_CORE_ENVIRONMENT_H_
#define GRADSYNC_CLIENT_CORE_ENVIRONMENT_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "shm/status.h"

namespace gradsync {

// The variables as they are set; an empty value counts as unset.
struct Environment {
  std::optional<std::string> socket;     // GRADSYNC_SOCKET
  std::optional<std::string> job;        // GRADSYNC_JOB
  std::optional<std::string> daemon;     // GRADSYNC_DAEMON
  std::optional<std::string> idle_exit;  // GRADSYNC_IDLE_EXIT
  std::optional<std::string> rank;
  std::optional<std::string> world_size;
  std::optional<std::string> local_rank;
  std::optional<std::string> local_world_size;
  std::optional<std::string> run_id;         // TORCHELASTIC_RUN_ID
  std::optional<std::string> restart_count;  // TORCHELASTIC_RESTART_COUNT
  std::optional<std::string> master_addr;
  std::optional<std::string> master_port;
  std::optional<std::string> runtime_dir;  // XDG_RUNTIME_DIR
  std::optional<std::string> path;
  // "NAME=value" of what a private daemon is started with. Nothing else of a trainer's environment
  // (OMP_NUM_THREADS, CUDA_VISIBLE_DEVICES, LD_PRELOAD, ...) is meant for a daemon that serves all
  // ranks and outlives this one.
  std::vector<std::string> for_daemon;
};

// `environ` is a null-terminated array of "NAME=value", as in environ(7).
Environment ReadEnvironment(const char* const* environ);

// What the caller of gradsync_session_open said; zero and empty fields were left open.
struct SessionRequest {
  std::string socket;
  std::string job;
  uint32_t generation = 0;
  uint32_t world_size = 0;
  uint32_t rank = 0;
  uint32_t local_rank = 0;
  uint32_t local_world_size = 0;
  uint32_t timeout_ms = 0;
};

// Which rank of which job this process is.
struct Identity {
  std::string job;
  uint32_t generation = 0;
  uint32_t world_size = 0;
  uint32_t rank = 0;
  uint32_t local_rank = 0;
  uint32_t local_world_size = 0;
};

// Completes the request from the environment, as gradsync/gradsync.h says. kInvalidArgument names
// the variable that is missing or makes no sense, and what to do about it.
Result<Identity> ResolveIdentity(const SessionRequest& request, const Environment& environment);

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_CORE_ENVIRONMENT_H_

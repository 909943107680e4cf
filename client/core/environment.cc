#include "client/core/environment.h"

#include <array>
#include <charconv>
#include <string_view>
#include <utility>

#include "shm/protocol.h"

namespace gradsync {
namespace {

constexpr size_t kMaxJobBytes = sizeof(Hello::job) - 1;

// Values that must not change what the daemon is: its own settings, and what it needs to find
// files.
bool IsForDaemon(std::string_view name) {
  static constexpr std::array<std::string_view, 6> kNames = {"PATH",   "HOME", "XDG_RUNTIME_DIR",
                                                             "TMPDIR", "LANG", "TZ"};
  for (const std::string_view known : kNames) {
    if (name == known) return true;
  }
  return name.starts_with("GRADSYNC_");
}

std::optional<std::string>* FieldOf(Environment* environment, std::string_view name) {
  const std::array<std::pair<std::string_view, std::optional<std::string>*>, 14> fields = {{
      {"GRADSYNC_SOCKET", &environment->socket},
      {"GRADSYNC_JOB", &environment->job},
      {"GRADSYNC_DAEMON", &environment->daemon},
      {"GRADSYNC_IDLE_EXIT", &environment->idle_exit},
      {"RANK", &environment->rank},
      {"WORLD_SIZE", &environment->world_size},
      {"LOCAL_RANK", &environment->local_rank},
      {"LOCAL_WORLD_SIZE", &environment->local_world_size},
      {"TORCHELASTIC_RUN_ID", &environment->run_id},
      {"TORCHELASTIC_RESTART_COUNT", &environment->restart_count},
      {"MASTER_ADDR", &environment->master_addr},
      {"MASTER_PORT", &environment->master_port},
      {"XDG_RUNTIME_DIR", &environment->runtime_dir},
      {"PATH", &environment->path},
  }};
  for (const auto& [known, field] : fields) {
    if (name == known) return field;
  }
  return nullptr;
}

Result<uint32_t> ParseNumber(const char* name, const std::string& text) {
  uint32_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) {
    return Unexpected(Code::kInvalidArgument, std::string("the environment variable ") + name +
                                                  "='" + text + "' is not a number");
  }
  return value;
}

Result<uint32_t> RequiredNumber(const char* name, const std::optional<std::string>& text) {
  if (!text) {
    return Unexpected(Code::kInvalidArgument,
                      std::string("the environment variable ") + name +
                          " is not set: start the program by torchrun, or set RANK and WORLD_SIZE, "
                          "or give rank and world_size in the session's options");
  }
  return ParseNumber(name, *text);
}

Result<uint32_t> NumberOr(uint32_t otherwise, const char* name,
                          const std::optional<std::string>& text) {
  if (!text) return otherwise;
  return ParseNumber(name, *text);
}

Status TakeRanksFromEnvironment(const Environment& environment, Identity* identity) {
  const auto take = [](Result<uint32_t> number, uint32_t* out) -> Status {
    if (!number) return number.error();
    *out = *number;
    return OkStatus();
  };
  GRADSYNC_RETURN_IF_ERROR(take(RequiredNumber("RANK", environment.rank), &identity->rank));
  GRADSYNC_RETURN_IF_ERROR(
      take(RequiredNumber("WORLD_SIZE", environment.world_size), &identity->world_size));
  GRADSYNC_RETURN_IF_ERROR(
      take(NumberOr(identity->world_size, "LOCAL_WORLD_SIZE", environment.local_world_size),
           &identity->local_world_size));
  // Without LOCAL_RANK the rank will do where all ranks are on this node; elsewhere it would lie.
  if (!environment.local_rank && identity->local_world_size != identity->world_size) {
    return RequiredNumber("LOCAL_RANK", environment.local_rank).error();
  }
  GRADSYNC_RETURN_IF_ERROR(
      take(NumberOr(identity->rank, "LOCAL_RANK", environment.local_rank), &identity->local_rank));
  return take(NumberOr(0, "TORCHELASTIC_RESTART_COUNT", environment.restart_count),
              &identity->generation);
}

// torchrun names each run, except that a run without a rendezvous id is called "none", which two
// runs on one node may both be; the rendezvous address tells those apart.
Result<std::string> JobFromEnvironment(const Environment& environment) {
  if (environment.job) return *environment.job;
  if (environment.run_id && *environment.run_id != "none") return *environment.run_id;
  if (environment.master_addr && environment.master_port) {
    return environment.run_id.value_or("job") + "@" + *environment.master_addr + ":" +
           *environment.master_port;
  }
  return Unexpected(
      Code::kInvalidArgument,
      "the job has no name: neither GRADSYNC_JOB nor TORCHELASTIC_RUN_ID is set, and " +
          std::string(environment.master_addr ? "MASTER_PORT" : "MASTER_ADDR") +
          " is not either; start the program by torchrun, or set GRADSYNC_JOB to the "
          "same text for every rank");
}

Status CheckIdentity(const Identity& identity) {
  if (identity.job.empty() || identity.job.size() > kMaxJobBytes) {
    return {Code::kInvalidArgument, "the job's name '" + identity.job + "' must have 1 to " +
                                        std::to_string(kMaxJobBytes) + " bytes"};
  }
  if (identity.rank >= identity.world_size) {
    return {Code::kInvalidArgument, "rank " + std::to_string(identity.rank) + " of job '" +
                                        identity.job + "' is not below its world size, " +
                                        std::to_string(identity.world_size)};
  }
  if (identity.local_rank >= identity.local_world_size ||
      identity.local_world_size > identity.world_size) {
    return {Code::kInvalidArgument,
            "local rank " + std::to_string(identity.local_rank) + " of " +
                std::to_string(identity.local_world_size) + " on this node does not fit rank " +
                std::to_string(identity.rank) + " of " + std::to_string(identity.world_size) +
                " in job '" + identity.job + "'"};
  }
  return OkStatus();
}

}  // namespace

Environment ReadEnvironment(const char* const* environ) {
  Environment environment;
  for (; *environ != nullptr; ++environ) {
    const std::string_view entry(*environ);
    const size_t equals = entry.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string_view name = entry.substr(0, equals);
    const std::string_view value = entry.substr(equals + 1);
    if (IsForDaemon(name)) environment.for_daemon.emplace_back(entry);
    std::optional<std::string>* field = FieldOf(&environment, name);
    if (field != nullptr && !value.empty()) *field = value;
  }
  return environment;
}

Result<Identity> ResolveIdentity(const SessionRequest& request, const Environment& environment) {
  Identity identity;
  if (request.world_size == 0) {
    GRADSYNC_RETURN_IF_ERROR(TakeRanksFromEnvironment(environment, &identity));
  } else {
    identity.generation = request.generation;
    identity.world_size = request.world_size;
    identity.rank = request.rank;
    const bool one_node = request.local_world_size == 0;
    identity.local_world_size = one_node ? request.world_size : request.local_world_size;
    identity.local_rank = one_node ? request.rank : request.local_rank;
  }
  if (!request.job.empty()) {
    identity.job = request.job;
  } else {
    auto job = JobFromEnvironment(environment);
    if (!job) return Unexpected(job.error());
    identity.job = *std::move(job);
  }
  GRADSYNC_RETURN_IF_ERROR(CheckIdentity(identity));
  return identity;
}

}  // namespace gradsync

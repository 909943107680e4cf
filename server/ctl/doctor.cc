#include "server/ctl/doctor.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "server/ctl/format.h"
#include "shm/protocol.h"

namespace gradsync {
namespace {

using Level = Finding::Level;

// A rank shares as much memory as its gradients take; a model of any use has more.
constexpr uint64_t kScarceMemory = uint64_t{1} << 30;

bool IsOlder(const std::string& release, std::pair<int, int> than) {
  std::pair<int, int> version;
  if (std::sscanf(release.c_str(), "%d.%d", &version.first, &version.second) != 2) return false;
  return version < than;
}

Finding JudgeKernel(const std::string& release) {
  Finding finding{Level::kOk, "kernel", absl::StrCat("Linux ", release), ""};
  // SO_PEERPIDFD (shm/frame_socket.h), MADV_POPULATE_WRITE (shm/segment.h).
  if (IsOlder(release, {5, 14})) {
    finding.level = Level::kNote;
    finding.advice =
        "before 5.14 a shortage of memory can end a trainer where later ones get an error: update "
        "if you can";
  } else if (IsOlder(release, {6, 5})) {
    finding.level = Level::kNote;
    finding.advice =
        "before 6.5 the death of a trainer is noticed only when its children no longer hold its "
        "socket; Python's data loaders do not";
  }
  return finding;
}

Finding JudgeMemfd(const Status& memfd) {
  if (memfd.ok()) return {Level::kOk, "shared memory", "memfd, sealed and mapped", ""};
  return {Level::kProblem, "shared memory", memfd.message(),
          "gradsync needs memfd_create(2) with seals: allow it in the sandbox (seccomp), or update "
          "the kernel"};
}

Finding JudgeFutex(const Status& futex) {
  if (futex.ok()) return {Level::kOk, "futex", "works between processes", ""};
  return {Level::kProblem, "futex", futex.message(),
          "gradsync needs futex(2): allow it in the sandbox (seccomp)"};
}

Finding JudgeCores(int cores, int machine_cores) {
  Finding finding{Level::kOk, "cores", absl::StrCat(cores, " of ", machine_cores, " may be used"),
                  ""};
  if (cores < 2) {
    finding.level = Level::kNote;
    finding.advice =
        "gradsyncd and the trainers take turns on it: allow more (the cgroup's cpu.max, taskset)";
  }
  return finding;
}

Finding JudgeMemory(const MemoryRoom& memory) {
  if (!memory.available && !memory.left) {
    return {Level::kNote, "memory", "what is available cannot be read",
            "is /proc mounted? A shortage will be a signal instead of an error"};
  }
  // The first version of cgroups has a limit where there is none: a very large one.
  const bool is_limited = memory.left && (!memory.available || *memory.left < *memory.available);
  const uint64_t room = is_limited ? *memory.left : *memory.available;
  Finding finding{Level::kOk, "memory", absl::StrCat(FormatBytes(room), " available"), ""};
  if (is_limited) {
    absl::StrAppend(&finding.found, ", left of the ", FormatBytes(memory.limit), " that ",
                    memory.cgroup, " allows");
  }
  if (room < kScarceMemory) {
    finding.level = Level::kNote;
    finding.advice =
        absl::StrCat("each rank shares as much memory as its gradients take: ",
                     is_limited ? "raise the limit" : "free some", " if the model needs more");
  }
  return finding;
}

std::string Access(uid_t owner, mode_t mode) {
  return absl::StrFormat("uid %u's, mode %04o", owner, mode);
}

// Whether a trainer would look further if this is all that it finds there.
bool IsNobody(const SocketFacts& socket) { return socket.connected.code() == Code::kDaemonLost; }

std::string DaemonText(const SocketFacts& socket) {
  std::string text = absl::StrCat(socket.path, " (", Access(socket.owner, socket.mode),
                                  "), daemon of uid ", socket.daemon_user);
  if (socket.daemon_pid != 0) absl::StrAppend(&text, ", pid ", socket.daemon_pid);
  return text;
}

Finding JudgeAnswer(const SocketFacts& socket) {
  if (socket.protocol == 0) {
    return {Level::kProblem, "daemon",
            absl::StrCat(DaemonText(socket), ": ", socket.answered.message()),
            "is its process stopped, or its node overloaded? Else restart it"};
  }
  const std::string found =
      absl::StrCat(DaemonText(socket), ", answers with protocol ", socket.protocol);
  if (socket.protocol == kProtocolVersion) return {Level::kOk, "daemon", found, ""};
  return {Level::kProblem, "daemon", found,
          absl::StrCat("this release speaks ", kProtocolVersion,
                       ": install the same release of both, and restart the daemon")};
}

Finding JudgeNoAccess(const SocketFacts& socket) {
  if (socket.connected.code() == Code::kPermissionDenied) {
    return {Level::kProblem, "daemon",
            absl::StrCat(socket.path, " (", Access(socket.owner, socket.mode),
                         "): this user may not connect"),
            "ask to be made a member of the socket's group, or set GRADSYNC_SOCKET to a daemon of "
            "your own"};
  }
  if (socket.connected.code() == Code::kDeadlineExceeded) {
    return {Level::kProblem, "daemon", absl::StrCat(socket.path, ": ", socket.connected.message()),
            "is its process stopped, or its node overloaded? Else restart it"};
  }
  return {Level::kProblem, "daemon", absl::StrCat(socket.path, ": ", socket.connected.message()),
          "this is not a gradsyncd's socket for trainers: name that with --socket or "
          "GRADSYNC_SOCKET"};
}

std::string NobodyText(const SocketFacts& socket) {
  return absl::StrCat(socket.path, socket.exists ? " (left behind: nobody listens)" : "");
}

Finding JudgeNobody(const DaemonFacts& facts) {
  const std::string found = absl::StrCat(
      "none runs at ",
      absl::StrJoin(facts.sockets, " or ", [](std::string* text, const SocketFacts& socket) {
        absl::StrAppend(text, NobodyText(socket));
      }));
  if (facts.is_fixed) {
    return {Level::kProblem, "daemon", found,
            absl::StrCat(facts.fixed_by,
                         " names this socket, so trainers start none: start gradsyncd there, or "
                         "name none")};
  }
  if (facts.program) {
    return {Level::kOk, "daemon",
            absl::StrCat(found, "; the first trainer starts ", *facts.program), ""};
  }
  return {Level::kProblem, "daemon", found, facts.program.error().message()};
}

bool WantsPrivateDaemon(const DaemonFacts& daemon) {
  return !daemon.is_fixed && daemon.sockets.size() > 1;
}

std::string DirectoryFault(const DirectoryFacts& facts, uid_t user) {
  if (!facts.exists) return facts.may_be_made ? "" : "is not there and cannot be made";
  if (!facts.is_directory) return "is not a directory";
  if (facts.owner != user) return absl::StrCat("belongs to uid ", facts.owner, ", not ", user);
  return (facts.mode & 0077U) != 0 ? absl::StrFormat("is open to others (mode %04o)", facts.mode)
                                   : "";
}

}  // namespace

std::vector<Finding> JudgeHost(const HostFacts& facts) {
  return {JudgeKernel(facts.kernel), JudgeMemfd(facts.memfd), JudgeFutex(facts.futex),
          JudgeCores(facts.cores, facts.machine_cores), JudgeMemory(facts.memory)};
}

Finding JudgeDaemon(const DaemonFacts& facts) {
  const auto used = std::find_if_not(facts.sockets.begin(), facts.sockets.end(), IsNobody);
  if (used == facts.sockets.end()) return JudgeNobody(facts);
  return used->connected.ok() ? JudgeAnswer(*used) : JudgeNoAccess(*used);
}

Finding JudgeDirectory(const DirectoryFacts& facts, const DaemonFacts& daemon) {
  const std::string fault = DirectoryFault(facts, daemon.user);
  if (fault.empty()) {
    return {Level::kOk, "private directory",
            absl::StrCat(facts.path, facts.exists ? "" : " (not there yet)"), ""};
  }
  return {WantsPrivateDaemon(daemon) ? Level::kProblem : Level::kNote, "private directory",
          absl::StrCat(facts.path, " ", fault),
          "trainers start no private gradsyncd there: remove it, or set XDG_RUNTIME_DIR to a "
          "directory of your own"};
}

std::vector<Finding> Judge(const DoctorFacts& facts) {
  std::vector<Finding> findings = JudgeHost(facts.host);
  findings.push_back(JudgeDaemon(facts.daemon));
  findings.push_back(JudgeDirectory(facts.directory, facts.daemon));
  std::vector<Finding> gpu = JudgeGpu(facts.gpu);
  std::move(gpu.begin(), gpu.end(), std::back_inserter(findings));
  return findings;
}

}  // namespace gradsync

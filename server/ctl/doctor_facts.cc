#include "server/ctl/doctor_facts.h"

#include <linux/futex.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/ctl/doctor_gpu_facts.h"
#include "server/engine/cpu/cores.h"
#include "shm/frame_socket.h"
#include "shm/protocol.h"
#include "shm/segment.h"

namespace gradsync {
namespace {

// A daemon that works answers at once; one on a busy node within this.
constexpr std::chrono::seconds kPatience{5};

constexpr size_t kPage = 4096;

Result<Mapping> MapPage() {
  Result<UniqueFd> fd = CreateSealedMemfd("gradsync:doctor", kPage);
  if (!fd) return Unexpected(fd.error());
  GRADSYNC_RETURN_IF_ERROR(CheckSealedMemfd(fd->get(), kPage));
  return Mapping::Map(fd->get(), kPage);
}

// Waits for a word that already has another value: the kernel looks and comes back.
Status TryFutex(std::byte* page) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  auto* word = reinterpret_cast<std::atomic<uint32_t>*>(page);
  constexpr uint32_t kOther = 1;
  if (syscall(SYS_futex, word, FUTEX_WAIT, kOther, nullptr) == 0 || errno == EAGAIN) {
    return OkStatus();
  }
  return ErrnoStatus(Code::kUnsupported, errno, "cannot wait on a word of shared memory");
}

// The kernel's word on who listens; in another pid namespace it has no number.
void TakeCredentials(int socket, SocketFacts* facts) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) return;
  facts->daemon_user = credentials.uid;
  facts->daemon_pid = credentials.pid;
}

// A daemon of any version answers a first frame that is no HELLO by an error, whose header says
// which version it speaks; no job hears of it.
Status AskForProtocol(int socket, uint16_t* protocol) {
  const Deadline deadline = std::chrono::steady_clock::now() + kPatience;
  const auto message = MakeMessage<Goodbye>();
  GRADSYNC_RETURN_IF_ERROR(SendFrame(socket, AsBytes(message), {}, deadline));
  const Result<Frame> frame = ReceiveFrame(socket, deadline);
  if (!frame && frame.error().code() == Code::kDeadlineExceeded) {
    return {Code::kDeadlineExceeded,
            absl::StrCat("listens but did not answer within ", kPatience.count(), " s")};
  }
  if (!frame) return frame.error();
  const std::optional<FrameHeader> header = ReadHeader(frame->bytes);
  if (!header) return {Code::kProtocol, "what listens there is not a gradsyncd"};
  *protocol = header->version;
  return OkStatus();
}

std::vector<std::string> TrainerSockets(const Discovery& discovery) {
  if (discovery.is_fixed()) return {discovery.fixed_socket};
  return {discovery.system_socket, discovery.private_socket()};
}

DaemonFacts CollectDaemon(const CommandLine& command, const Discovery& discovery) {
  DaemonFacts facts{.user = geteuid(),
                    .is_fixed = discovery.is_fixed(),
                    .fixed_by = command.socket.empty() ? discovery.fixed_by : "--socket",
                    .sockets = {},
                    .program = FindDaemonBinary(discovery)};
  for (const std::string& path : TrainerSockets(discovery)) {
    facts.sockets.push_back(LookAtSocket(path));
    if (facts.sockets.back().connected.code() != Code::kDaemonLost) break;
  }
  return facts;
}

// Of the daemon that runs, or else of the one that a trainer would start; empty: not to be known.
std::filesystem::path DaemonProgram(const DaemonFacts& daemon) {
  std::error_code error;
  const pid_t pid = daemon.sockets.back().daemon_pid;
  if (pid != 0) {
    auto running = std::filesystem::read_symlink(absl::StrCat("/proc/", pid, "/exe"), error);
    if (!error) return running;
  }
  if (!daemon.program) return {};
  auto program = std::filesystem::canonical(*daemon.program, error);
  return error ? std::filesystem::path() : program;
}

std::string VariableOr(const char* name, const std::string& otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? otherwise : value;
}

// What a daemon takes from the environment if its command line has none of it (flags.h).
CudaOptions OptionsOfDaemon(const CommandLine& command) {
  CudaOptions options;
  options.module = VariableOr("GRADSYNC_CUDA_MODULE", options.module);
  options.nccl = VariableOr("GRADSYNC_NCCL", options.nccl);
  if (!command.nccl.empty()) options.nccl = command.nccl;
  return options;
}

bool MayMakeIn(const std::string& folder) { return access(folder.c_str(), W_OK | X_OK) == 0; }

}  // namespace

HostFacts CollectHost() {
  HostFacts facts;
  utsname name{};
  facts.kernel = uname(&name) == 0 ? name.release : "of an unknown version";
  const Result<Mapping> page = MapPage();
  if (page) {
    facts.futex = TryFutex(page->data());
  } else {
    facts.memfd = page.error();
  }
  facts.cores = AvailableCores();
  facts.machine_cores = std::max(facts.cores, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
  facts.memory = FindMemoryRoom();
  return facts;
}

SocketFacts LookAtSocket(const std::string& path) {
  SocketFacts facts;
  facts.path = path;
  struct stat info {};
  if (stat(path.c_str(), &info) == 0) {
    facts.exists = true;
    facts.owner = info.st_uid;
    facts.mode = info.st_mode & 07777U;
  }
  const Result<UniqueFd> connection = ConnectTo(path);
  if (!connection) {
    facts.connected = connection.error();
    return facts;
  }
  TakeCredentials(connection->get(), &facts);
  facts.answered = AskForProtocol(connection->get(), &facts.protocol);
  return facts;
}

DirectoryFacts LookAtDirectory(const std::string& path) {
  DirectoryFacts facts;
  facts.path = path;
  struct stat info {};
  if (lstat(path.c_str(), &info) == 0) {
    facts.exists = true;
    facts.is_directory = S_ISDIR(info.st_mode);
    facts.owner = info.st_uid;
    facts.mode = info.st_mode & 07777U;
  } else {
    facts.may_be_made = MayMakeIn(std::filesystem::path(path).parent_path());
  }
  return facts;
}

DoctorFacts CollectFacts(const CommandLine& command, const Discovery& discovery) {
  DoctorFacts facts{.host = CollectHost(),
                    .daemon = CollectDaemon(command, discovery),
                    .directory = LookAtDirectory(discovery.private_directory),
                    .gpu = {}};
  facts.gpu = CollectGpu(OptionsOfDaemon(command), DaemonProgram(facts.daemon));
  return facts;
}

}  // namespace gradsync

// What gradsyncctl doctor says of the machine: from facts to one line for each check. Pure
// functions; the facts are collected by doctor_facts.h.
#ifndef GRADSYNC_SERVER_CTL_DOCTOR_H_
#define GRADSYNC_SERVER_CTL_DOCTOR_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "client/core/memory_limit.h"
#include "server/ctl/doctor_gpu.h"
#include "server/ctl/finding.h"
#include "shm/status.h"

namespace gradsync {

struct HostFacts {
  std::string kernel;  // its release: "6.1.0-18-amd64"
  Status memfd;        // of making a sealed one and mapping it
  Status futex;        // of waiting on a word that processes share
  int cores = 1;       // that this process may use
  int machine_cores = 1;
  MemoryRoom memory;
};

// A place where a trainer would look for a daemon.
struct SocketFacts {
  std::string path;
  bool exists = false;
  uid_t owner = 0;  // of the file
  mode_t mode = 0;  // its permissions
  Status connected;
  // If it could be connected to:
  uid_t daemon_user = 0;
  pid_t daemon_pid = 0;  // 0: in another pid namespace
  Status answered;
  uint16_t protocol = 0;  // what the answer speaks; 0: none came
};

struct DaemonFacts {
  uid_t user = 0;  // who asks
  bool is_fixed = false;
  std::string fixed_by;              // who named the only socket, if it is_fixed
  std::vector<SocketFacts> sockets;  // up to the one that a trainer would use
  Result<std::string> program;       // of a private daemon, or why there is none
};

// Where a private daemon of this user lives.
struct DirectoryFacts {
  std::string path;
  bool exists = false;
  bool is_directory = false;  // and no symbolic link
  uid_t owner = 0;
  mode_t mode = 0;
  bool may_be_made = false;  // if it does not exist
};

struct DoctorFacts {
  HostFacts host;
  DaemonFacts daemon;
  DirectoryFacts directory;
  GpuFacts gpu;
};

std::vector<Finding> Judge(const DoctorFacts& facts);

// The parts of that.
std::vector<Finding> JudgeHost(const HostFacts& facts);
Finding JudgeDaemon(const DaemonFacts& facts);
// `daemon`: a private one may not be wanted.
Finding JudgeDirectory(const DirectoryFacts& facts, const DaemonFacts& daemon);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_CTL_DOCTOR_H_

// All that the stand-in knows: communicators, what they were asked, and what runs. One mutex guards
// it, held neither while a kernel computes nor while a call waits.
#ifndef GRADSYNC_TESTS_FAKES_NCCL_WORLD_H_
#define GRADSYNC_TESTS_FAKES_NCCL_WORLD_H_

#include <cuda.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/fakes/nccl/cuda_link.h"
#include "tests/fakes/nccl/nccl_api.h"

namespace gradsync::fake_nccl {

using Lock = std::unique_lock<std::mutex>;

enum class Function { kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter, kSend, kRecv };

// An operator that a user made: sum of inputs, each first multiplied by a scalar of its rank.
struct PreMulSum {
  ncclDataType_t type = ncclFloat32;
  bool on_device = false;
  std::array<std::byte, 8> scalar{};  // if not on the device
  CUdeviceptr address = 0;            // if there
};

// What is injected at one collective (inject.h).
struct Injected {
  bool stalls = false;
  ncclResult_t error = ncclSuccess;
};

// One operation, as one rank asked for it.
struct Request {
  Function function = Function::kAllReduce;
  const char* name = "";
  CUdeviceptr send = 0;
  CUdeviceptr receive = 0;
  size_t count = 0;
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t op = ncclSum;
  std::optional<PreMulSum> pre_mul_sum;
  int root = 0;  // of a send or receive, the peer
  CUstream stream = nullptr;
  ncclComm* comm = nullptr;
  Injected injected;
  uint64_t number = 0;  // among the collectives of its rank, once launched
};

// A request whose kernel has started: where it reads and writes.
struct Arrival {
  const Request* request = nullptr;
  const std::byte* send = nullptr;
  std::byte* receive = nullptr;
  std::array<std::byte, 8> scalar{};  // of a PreMulSum
};

// Who issued a rank's part of a collective: a thread, and which of its calls outside a group, or
// its groups.
struct Issuer {
  uint64_t thread = 0;
  uint64_t call = 0;
};

// One collective of a clique, from its first launch on any rank until all of them have left it.
struct Collective {
  std::vector<std::optional<Issuer>> issuers;        // by rank
  std::vector<std::map<uint64_t, uint64_t>> before;  // by rank: launch_order.cc
  std::string asked;                                 // what the first rank asked, for a message
  int asked_by = -1;
  std::vector<Arrival> arrivals;  // by rank
  int arrived = 0;
  int left = 0;
  bool computing = false;
  bool done = false;
  bool never = false;  // cannot complete any more
};

// One side of a send and its receive.
struct Transfer {
  const Request* request = nullptr;
  std::byte* memory = nullptr;
  bool done = false;
};

struct Channel {
  std::deque<std::shared_ptr<Transfer>> sends;
  std::deque<std::shared_ptr<Transfer>> receives;
};

// The communicators of one unique id.
struct Clique {
  uint64_t id = 0;
  std::vector<ncclComm*> comms;         // by rank; none before it has called
  std::map<uint64_t, uint64_t> joined;  // by thread: which of its calls
  int ranks = 0;                        // 0 before the first has called
  int present = 0;
  bool started = false;
  bool aborted = false;  // at least one of them
  int finalizing = 0;
  std::map<uint64_t, Collective> collectives;       // by number
  std::map<std::pair<int, int>, Channel> channels;  // by sender and receiver
};

enum class Life { kLive, kFailed, kDestroyed, kAborted };

}  // namespace gradsync::fake_nccl

// NCCL's opaque type. Never freed: a handle that is used too long is recognised.
struct ncclComm {
  uint64_t id = 0;
  std::shared_ptr<gradsync::fake_nccl::Clique> clique;
  int rank = 0;
  int device = 0;
  bool blocking = true;
  pid_t process = getpid();
  gradsync::fake_nccl::Life life = gradsync::fake_nccl::Life::kLive;

  // What ncclCommGetAsyncError says: the error if there is one, else ncclInProgress or success.
  ncclResult_t error = ncclSuccess;
  bool in_progress = true;
  // ncclInProgress was returned, and its end not yet seen by polling; of init, or of a launch.
  bool unseen = false;
  bool launch_unseen = false;
  bool aborted = false;
  bool finalized = false;

  uint64_t launched = 0;  // collectives
  uint64_t issues = 0;    // calls or groups that launched something
  int unfinished = 0;     // launches whose kernel has not ended
  int running = 0;        // kernels
  uint64_t user = 0;      // the thread that is inside a call on it
  int user_depth = 0;
  int pollers = 0;           // threads inside a call that only asks
  bool ending = false;       // a thread is inside the call that ends it
  uint64_t group_owner = 0;  // the thread whose open group has operations on it

  std::map<int, gradsync::fake_nccl::PreMulSum> ops;
  std::set<uint64_t> registrations;
};

namespace gradsync::fake_nccl {

// One kernel: the operations of one communicator that were issued together.
struct Launch {
  ncclComm* comm = nullptr;
  std::vector<Request> requests;
  int streams = 1;  // that it was issued to; all wait for it
  int gates_reached = 0;
  int users = 0;
  bool done = false;
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;  // anything
  std::map<const ncclComm*, std::unique_ptr<ncclComm>> comms;
  std::map<std::string, std::shared_ptr<Clique>> cliques;  // by unique id
  std::map<uint64_t, std::shared_ptr<Launch>> launches;
  std::map<int, uint64_t> issuing;  // by device: the thread that is issuing to it
  std::set<std::string> texts;      // of errors; kept, as ncclGetLastError gave them away
  const std::string* last_error = nullptr;
  uint64_t next_id = 1;
};

// The only one; never destroyed, as kernels may outlive main.
World& TheWorld();

template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// A communicator, for a message: "communicator 3 (rank 1 of 4, device 2)".
std::string Name(const ncclComm& comm);
const char* TypeName(ncclDataType_t type);

// Keeps `text` for ncclGetLastError and returns `result`.
ncclResult_t Fail(ncclResult_t result, const std::string& text);
ncclResult_t FailLocked(ncclResult_t result, const std::string& text);

// This thread's number: never that of another, also not of one that has ended.
uint64_t ThisThread();

// Waits until `done`, on `World::changed`. What would hang real NCCL for ever is a breach here,
// after GRADSYNC_FAKE_NCCL_PATIENCE_MS (60000).
void WaitPatiently(Lock* lock, const std::function<bool()>& done, const std::string& rule,
                   const char* source);

// Runs `action`, the world locked, a few milliseconds from now and after those before it.
void RunSoon(std::function<void()> action);

}  // namespace gradsync::fake_nccl

#endif  // GRADSYNC_TESTS_FAKES_NCCL_WORLD_H_

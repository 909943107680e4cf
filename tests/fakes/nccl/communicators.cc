#include "tests/fakes/nccl/communicators.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "tests/fakes/nccl/call.h"

namespace gradsync::fake_nccl {
namespace {

constexpr unsigned kConfigMagic = 0xcafebeef;  // of NCCL_CONFIG_INITIALIZER
constexpr char kIdMagic[] = "gradsync stand-in for NCCL";

// What the stand-in puts into a unique id.
struct IdContent {
  char magic[sizeof(kIdMagic)];
  pid_t process;
  uint64_t number;
};
static_assert(sizeof(IdContent) <= NCCL_UNIQUE_ID_BYTES);

std::string KeyOf(const ncclUniqueId& id) { return {id.internal, sizeof(id.internal)}; }

// `blocking` from a configuration; its other attributes only tune. NULL: the defaults.
ncclResult_t ReadConfig(const char* call, const ncclConfig_t* config, bool* blocking) {
  *blocking = true;
  if (config == nullptr) return ncclSuccess;
  if (config->size != sizeof(ncclConfig_t) || config->magic != kConfigMagic) {
    return Fail(ncclInvalidArgument,
                Text(call, " : ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER"));
  }
  const auto valid = [](int value, int least, int most) {
    return value == NCCL_CONFIG_UNDEF_INT || (value >= least && value <= most);
  };
  const bool ctas = config->minCTAs == NCCL_CONFIG_UNDEF_INT ||
                    config->maxCTAs == NCCL_CONFIG_UNDEF_INT || config->minCTAs <= config->maxCTAs;
  // User guide, ncclConfig_t: blocking is 0 or 1, cgaClusterSize between 0 and 8, minCTAs and
  // maxCTAs positive.
  if (!valid(config->blocking, 0, 1) || !valid(config->cgaClusterSize, 0, 8) ||
      !valid(config->minCTAs, 1, INT_MAX) || !valid(config->maxCTAs, 1, INT_MAX) || !ctas) {
    return Fail(ncclInvalidArgument, Text(call, " : invalid config"));
  }
  *blocking = config->blocking != 0;
  return ncclSuccess;
}

// Which clique an id stands for.
ncclResult_t FindClique(const char* call, const ncclUniqueId& id, std::shared_ptr<Clique>* clique) {
  IdContent content{};
  std::memcpy(&content, id.internal, sizeof(content));
  if (std::memcmp(content.magic, kIdMagic, sizeof(kIdMagic)) != 0) {
    return Fail(ncclInvalidArgument, Text(call, " : commId is not from ncclGetUniqueId"));
  }
  if (content.process != getpid()) {
    return Fail(ncclSystemError, Text(call, " : commId is from process ", content.process,
                                      ": the stand-in for NCCL has all ranks in one process"));
  }
  const Lock lock(TheWorld().mutex);
  *clique = TheWorld().cliques.at(KeyOf(id));
  return ncclSuccess;
}

ncclResult_t CurrentDevice(const char* call, int* device) {
  const CUresult result = Cuda().cuCtxGetDevice(device);
  if (result == CUDA_SUCCESS) return ncclSuccess;
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    Breach(
        Text(call, " on a thread without a current context"),
        "nccl.h, ncclCommInitRank: each rank is associated to a CUDA device, which has to be set "
        "before calling ncclCommInitRank");
  }
  return Fail(ncclUnhandledCudaError, Text(call, " : Cuda failure ", result));
}

ncclComm* Create(std::shared_ptr<Clique> clique, int ranks, int rank, int device, bool blocking) {
  World& world = TheWorld();
  const Lock lock(world.mutex);
  if (clique->ranks == 0) {
    clique->ranks = ranks;
    clique->comms.resize(ranks);
  }
  if (clique->ranks != ranks) {
    Breach(Text("ncclCommInitRank with ", ranks, " ranks, after ", clique->ranks,
                " for the same unique id"),
           "nccl.h, ncclCommInitRank: rank must be between 0 and nranks-1 and unique within a "
           "communicator clique");
  }
  auto comm = std::make_unique<ncclComm>();
  ncclComm* handle = comm.get();
  comm->id = world.next_id++;
  comm->clique = std::move(clique);
  comm->rank = rank;
  comm->device = device;
  comm->blocking = blocking;
  world.comms[handle] = std::move(comm);
  return handle;
}

// NCCL's check once all ranks are there.
ncclResult_t Outcome(const Clique& clique) {
  for (const ncclComm* comm : clique.comms) {
    for (const ncclComm* other : clique.comms) {
      if (other->rank <= comm->rank || other->device != comm->device) continue;
      return FailLocked(ncclInvalidUsage,
                        Text("Duplicate GPU detected : rank ", comm->rank, " and rank ",
                             other->rank, " both on CUDA device ", comm->device));
    }
  }
  return ncclSuccess;
}

void Start(const std::shared_ptr<Clique>& clique) {
  if (clique->aborted) return;  // the rest wait, until they are aborted as well
  const ncclResult_t outcome = Outcome(*clique);
  clique->started = true;
  for (ncclComm* comm : clique->comms) {
    comm->in_progress = false;
    comm->error = outcome;
  }
  TheWorld().changed.notify_all();
}

// `call` numbers what this thread did outside a group, or its group. Locked.
void Join(ncclComm* comm, uint64_t call) {
  Clique& clique = *comm->clique;
  ncclComm*& place = clique.comms[comm->rank];
  if (place != nullptr) {
    Breach(Text("a second ncclCommInitRank for rank ", comm->rank, " of one unique id"),
           "nccl.h, ncclCommInitRank: rank must be unique within a communicator clique");
  }
  const auto [joined, first] = clique.joined.try_emplace(ThisThread(), call);
  if (!first && joined->second != call) {
    Breach(Text("one thread initialises ", Name(*comm), " and, outside that group, another rank"),
           "NCCL user guide, Management Of Multiple GPUs From One Thread: group calls must also be "
           "used to create a communicator when one thread manages more than one device");
  }
  place = comm;
  if (++clique.present == clique.ranks) RunSoon([shared = comm->clique] { Start(shared); });
}

// What a blocking call waits for.
ncclResult_t WaitForStart(Lock* lock, ncclComm* comm) {
  WaitPatiently(
      lock, [comm] { return comm->clique->started; },
      Text("a blocking initialisation of ", Name(*comm), " hangs: ", comm->clique->present,
           " ranks have called"),
      "nccl.h, ncclCommInitRank: implicitly synchronizes with other ranks, so it must be called by "
      "different threads/processes or use ncclGroupStart/ncclGroupEnd");
  return comm->error;
}

ncclResult_t Init(const char* call, ncclComm_t* out, int ranks, const ncclUniqueId& id, int rank,
                  const ncclConfig_t* config) {
  const ncclResult_t pointer = CheckPointer(call, out, "newcomm");
  if (pointer != ncclSuccess) return pointer;
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    return Fail(ncclInvalidArgument, Text(call, " : Invalid rank requested : ", rank, "/", ranks));
  }
  bool blocking = true;
  const ncclResult_t read = ReadConfig(call, config, &blocking);
  if (read != ncclSuccess) return read;
  std::shared_ptr<Clique> clique;
  const ncclResult_t found = FindClique(call, id, &clique);
  if (found != ncclSuccess) return found;
  Group& group = ThisGroup();
  if (!group.requests.empty() || !group.ends.empty()) {
    return Fail(ncclInvalidUsage,
                Text(call, " : calls to ncclCommInitRank() cannot be merged with others"));
  }
  int device = 0;
  const ncclResult_t current = CurrentDevice(call, &device);
  if (current != ncclSuccess) return current;
  ncclComm* comm = Create(std::move(clique), ranks, rank, device, blocking);
  const ncclResult_t mode = CheckGroupMode(call, *comm);
  if (mode != ncclSuccess) {
    Discard(comm, out);
    return mode;
  }
  *out = comm;
  if (group.depth == 0) return EndInits({{comm, out}});
  group.inits.emplace_back(comm, out);
  return ncclSuccess;
}

ncclResult_t NewUniqueId(ncclUniqueId* id) {
  World& world = TheWorld();
  const Lock lock(world.mutex);
  IdContent content{};
  std::memcpy(content.magic, kIdMagic, sizeof(kIdMagic));
  content.process = getpid();
  content.number = world.next_id++;
  *id = {};
  std::memcpy(id->internal, &content, sizeof(content));
  auto clique = std::make_shared<Clique>();
  clique->id = content.number;
  world.cliques[KeyOf(*id)] = std::move(clique);
  return ncclSuccess;
}

ncclResult_t CheckDevices(int count, const int* devices) {
  int present = 0;
  if (Cuda().cuDeviceGetCount(&present) != CUDA_SUCCESS) {
    return Fail(ncclUnhandledCudaError, "ncclCommInitAll : cuDeviceGetCount");
  }
  for (int i = 0; i < count; ++i) {
    const int device = devices == nullptr ? i : devices[i];
    if (device < 0 || device >= present) {
      return Fail(ncclInvalidArgument, Text("ncclCommInitAll : Invalid device ", device));
    }
    if (devices != nullptr && std::count(devices, devices + count, device) > 1) {
      return Fail(ncclInvalidUsage, Text("ncclCommInitAll : Duplicate GPU detected : ", device));
    }
  }
  return ncclSuccess;
}

}  // namespace

ncclResult_t EndInits(const std::vector<std::pair<ncclComm*, ncclComm_t*>>& inits) {
  static std::atomic<uint64_t> calls{0};
  const uint64_t call = ++calls;
  Lock lock(TheWorld().mutex);
  for (const auto& [comm, out] : inits) {
    comm->unseen = !comm->blocking;
    Join(comm, call);
  }
  ncclResult_t result = ncclSuccess;
  for (const auto& [comm, out] : inits) {
    const ncclResult_t one = comm->blocking ? WaitForStart(&lock, comm) : ncclInProgress;
    if (one == ncclSuccess) continue;
    if (result == ncclSuccess || result == ncclInProgress) result = one;
  }
  if (result == ncclSuccess || result == ncclInProgress) return result;
  lock.unlock();
  for (const auto& [comm, out] : inits) Discard(comm, out);
  return result;
}

void Discard(ncclComm* comm, ncclComm_t* out) {
  const Lock lock(TheWorld().mutex);
  comm->life = Life::kFailed;
  *out = nullptr;
}

}  // namespace gradsync::fake_nccl

using namespace gradsync::fake_nccl;

ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId) {
  const Call call("ncclGetUniqueId");
  if (call.result() != ncclSuccess) return call.result();
  const ncclResult_t pointer = CheckPointer("ncclGetUniqueId", uniqueId, "out");
  return pointer != ncclSuccess ? pointer : NewUniqueId(uniqueId);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t* config) {
  const Call call("ncclCommInitRankConfig");
  if (call.result() != ncclSuccess) return ForGroup(call.result());
  return ForGroup(Init("ncclCommInitRankConfig", comm, nranks, commId, rank, config));
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank) {
  const Call call("ncclCommInitRank");
  if (call.result() != ncclSuccess) return ForGroup(call.result());
  return ForGroup(Init("ncclCommInitRank", comm, nranks, commId, rank, nullptr));
}

ncclResult_t ncclCommInitAll(ncclComm_t* comm, int ndev, const int* devlist) {
  const Call call("ncclCommInitAll");
  if (call.result() != ncclSuccess) return ForGroup(call.result());
  const ncclResult_t pointer = CheckPointer("ncclCommInitAll", comm, "comms");
  if (pointer != ncclSuccess) return ForGroup(pointer);
  if (ndev < 1) {
    return ForGroup(Fail(ncclInvalidArgument, Text("ncclCommInitAll : Invalid count ", ndev)));
  }
  if (ThisGroup().depth > 0) {
    return ForGroup(Fail(ncclInvalidUsage, "ncclCommInitAll : not in a group"));
  }
  const ncclResult_t devices = CheckDevices(ndev, devlist);
  if (devices != ncclSuccess) return devices;
  ncclUniqueId id;
  NewUniqueId(&id);
  std::shared_ptr<Clique> clique;
  FindClique("ncclCommInitAll", id, &clique);
  std::vector<std::pair<ncclComm*, ncclComm_t*>> inits;
  for (int i = 0; i < ndev; ++i) {
    comm[i] = Create(clique, ndev, i, devlist == nullptr ? i : devlist[i], true);
    inits.emplace_back(comm[i], comm + i);
  }
  return EndInits(inits);
}

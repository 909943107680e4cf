#include "tests/fakes/nccl/launch.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "tests/fakes/nccl/inject.h"
#include "tests/fakes/nccl/kernel.h"
#include "tests/fakes/nccl/launch_order.h"

namespace gradsync::fake_nccl {
namespace {

struct Batch {
  ncclComm* comm = nullptr;
  std::vector<Request> requests;
};

std::vector<Batch> ByCommunicator(std::vector<Request> requests) {
  std::vector<Batch> batches;
  for (Request& request : requests) {
    auto batch = std::find_if(batches.begin(), batches.end(), [&request](const Batch& other) {
      return other.comm == request.comm;
    });
    if (batch == batches.end()) batch = batches.insert(batch, {request.comm, {}});
    batch->requests.push_back(std::move(request));
  }
  return batches;
}

bool IsCollective(const Request& request) {
  return request.function != Function::kSend && request.function != Function::kRecv;
}

std::string OpName(const Request& request) {
  static constexpr std::array<const char*, ncclNumOps> kNames = {"ncclSum", "ncclProd", "ncclMax",
                                                                 "ncclMin", "ncclAvg"};
  return request.pre_mul_sum ? "PreMulSum" : kNames[request.op];
}

bool Reduces(const Request& request) {
  return request.function == Function::kAllReduce || request.function == Function::kReduce ||
         request.function == Function::kReduceScatter;
}

bool HasRoot(const Request& request) {
  return request.function == Function::kReduce || request.function == Function::kBroadcast;
}

// What all ranks must agree upon. `place` and `size`: in what is launched together.
std::string Asked(const Request& request, size_t place, size_t size) {
  std::string asked = Text(request.name, " of ", request.count, " ", TypeName(request.type));
  if (Reduces(request)) asked += " " + OpName(request);
  if (HasRoot(request)) asked += Text(" root ", request.root);
  if (size > 1) asked += Text(" (", place + 1, " of ", size, " in a group)");
  return asked;
}

void CheckSameAsked(const ncclComm& comm, uint64_t number, const std::string& asked,
                    Collective* collective) {
  if (collective->asked_by < 0) {
    collective->asked = asked;
    collective->asked_by = comm.rank;
    return;
  }
  if (asked == collective->asked) return;
  if (MismatchHangs()) {
    collective->never = true;
    return;
  }
  Breach(Text("collective ", number, " is ", collective->asked, " on rank ", collective->asked_by,
              ", but ", asked, " on ", Name(comm)),
         "NCCL user guide, Collective Operations: collective operations have to be called for each "
         "rank with the same count and the same datatype; Group Operation Ordering Semantics: "
         "users still need to guarantee the same issuing order among different GPUs");
}

void CheckGrouped(const ncclComm& comm, const Issuer& issuer, const Collective& collective) {
  for (const auto& other : collective.issuers) {
    if (!other || other->thread != issuer.thread || other->call == issuer.call) continue;
    Breach(Text("one thread issues ", collective.asked, " to ", Name(comm),
                " and, outside that group, to another rank"),
           "NCCL user guide, Management Of Multiple GPUs From One Thread: when a single thread is "
           "managing multiple devices, group semantics must be used");
  }
}

// Gives a collective its number among those of its rank. Locked.
void Enlist(Request* request, const Issuer& issuer, const std::string& asked) {
  ncclComm& comm = *request->comm;
  request->number = comm.launched;
  Collective& collective = comm.clique->collectives[request->number];
  collective.issuers.resize(comm.clique->ranks);
  collective.before.resize(comm.clique->ranks);
  collective.arrivals.resize(comm.clique->ranks);
  CheckSameAsked(comm, request->number, asked, &collective);
  CheckGrouped(comm, issuer, collective);
  collective.issuers[comm.rank] = issuer;
  NoteLaunch(comm, request->number);
  ++comm.launched;
}

std::vector<CUstream> Streams(const Batch& batch) {
  std::vector<CUstream> streams;
  for (const Request& request : batch.requests) {
    if (std::find(streams.begin(), streams.end(), request.stream) == streams.end()) {
      streams.push_back(request.stream);
    }
  }
  return streams;
}

ncclResult_t LaunchFailed(ncclComm* comm, CUresult result) {
  comm->error = FailLocked(ncclUnhandledCudaError,
                           Text("the kernel of ", Name(*comm), " : Cuda failure ", result));
  return comm->error;
}

// Locked, so that devices see launches in the order that launch_order.cc was told.
ncclResult_t LaunchBatch(Batch batch, const Issuer& issuer) {
  ncclComm* comm = batch.comm;
  if (comm->aborted) return ncclSuccess;
  const auto collectives = static_cast<size_t>(
      std::count_if(batch.requests.begin(), batch.requests.end(), IsCollective));
  size_t place = 0;
  for (Request& request : batch.requests) {
    if (!IsCollective(request)) continue;
    Enlist(&request, issuer, Asked(request, place++, collectives));
  }
  const std::vector<CUstream> streams = Streams(batch);
  World& world = TheWorld();
  const uint64_t number = world.next_id++;
  auto launch = std::make_shared<Launch>();
  launch->comm = comm;
  launch->requests = std::move(batch.requests);
  launch->streams = launch->users = static_cast<int>(streams.size());
  world.launches[number] = launch;
  ++comm->unfinished;
  void* argument = reinterpret_cast<void*>(number);
  for (size_t i = 1; i < streams.size(); ++i) {
    const CUresult result = Cuda().launch(streams[i], RunGate, argument);
    if (result != CUDA_SUCCESS) return LaunchFailed(comm, result);
  }
  const CUresult result = Cuda().launch(streams.front(), RunKernel, argument);
  return result == CUDA_SUCCESS ? ncclSuccess : LaunchFailed(comm, result);
}

ncclResult_t LaunchAll(std::vector<Batch> batches, const Issuer& issuer) {
  ncclResult_t first = ncclSuccess;
  for (Batch& batch : batches) {
    const ncclResult_t result = LaunchBatch(std::move(batch), issuer);
    if (first == ncclSuccess) first = result;
  }
  return first;
}

// Whether this issue is one of those that real NCCL would do in the background: of a non-blocking
// communicator the third, the sixth... Locked.
bool InBackground(const std::vector<Batch>& batches) {
  bool turn = false;
  for (const Batch& batch : batches) {
    if (++batch.comm->issues % 3 == 0 && !batch.comm->blocking) turn = true;
  }
  return turn;
}

void LaunchLater(std::vector<Batch> batches, const Issuer& issuer) {
  for (const Batch& batch : batches) {
    batch.comm->in_progress = batch.comm->unseen = batch.comm->launch_unseen = true;
  }
  RunSoon([batches = std::move(batches), issuer]() mutable {
    std::vector<ncclComm*> comms;
    for (const Batch& batch : batches) comms.push_back(batch.comm);
    LaunchAll(std::move(batches), issuer);
    for (ncclComm* comm : comms) comm->in_progress = false;
    TheWorld().changed.notify_all();
  });
}

// A thread at a time issues to a device, and not while a launch may still be in the background:
// nobody could say then which order the device gets. Locked.
void CheckDevice(const ncclComm& comm) {
  const auto issuing = TheWorld().issuing.find(comm.device);
  if (issuing != TheWorld().issuing.end() && issuing->second != ThisThread()) {
    Breach(Text("two threads issue to device ", comm.device, " at the same time, one of them to ",
                Name(comm)),
           "NCCL user guide, Thread Safety: it is not safe to issue NCCL operations in parallel to "
           "independent communicators located on the same device with multiple threads");
  }
  for (const auto& [handle, other] : TheWorld().comms) {
    if (handle == &comm || other->device != comm.device || !other->launch_unseen) continue;
    if (other->life != Life::kLive || other->aborted || other->error != ncclSuccess) continue;
    Breach(Text("an operation of ", Name(comm), " while one of ", Name(*other),
                " has returned ncclInProgress, and its end was not yet seen"),
           "NCCL user guide, ncclCommGetAsyncError: users must query the states of the "
           "communicators until all the states become ncclSuccess before calling another NCCL "
           "function; Using multiple NCCL communicators concurrently: the order of host-side "
           "launches");
  }
}

// Marks this thread as the one that issues to the devices of some batches.
class Issuing {
 public:
  explicit Issuing(const std::vector<Batch>& batches) {
    const Lock lock(TheWorld().mutex);
    for (const Batch& batch : batches) {
      CheckDevice(*batch.comm);
      TheWorld().issuing[batch.comm->device] = ThisThread();
      devices_.push_back(batch.comm->device);
    }
  }
  Issuing(const Issuing&) = delete;
  Issuing& operator=(const Issuing&) = delete;
  ~Issuing() {
    const Lock lock(TheWorld().mutex);
    for (const int device : devices_) TheWorld().issuing.erase(device);
  }

 private:
  std::vector<int> devices_;
};

}  // namespace

ncclResult_t Issue(std::vector<Request> requests) {
  static std::atomic<uint64_t> calls{0};
  const Issuer issuer{ThisThread(), ++calls};
  std::vector<Batch> batches = ByCommunicator(std::move(requests));
  const Issuing issuing(batches);
  const Lock lock(TheWorld().mutex);
  if (InBackground(batches)) {
    LaunchLater(std::move(batches), issuer);
    return ncclInProgress;
  }
  return LaunchAll(std::move(batches), issuer);
}

}  // namespace gradsync::fake_nccl

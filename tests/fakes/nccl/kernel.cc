#include "tests/fakes/nccl/kernel.h"

#include <algorithm>
#include <cstring>

#include "tests/fakes/nccl/reduce.h"

namespace gradsync::fake_nccl {
namespace {

// How often a kernel that waits looks at `abandoned`, whose change nobody signals.
constexpr std::chrono::milliseconds kLook{2};

bool IsAbandoned(const volatile int* abandoned) {
  return __atomic_load_n(abandoned, __ATOMIC_ACQUIRE) != 0;
}

// Until `done`, or until there is no use in waiting: the communicator is aborted, its device lost.
template <typename Done>
bool WaitInKernel(Lock* lock, const ncclComm& comm, const volatile int* abandoned, Done done) {
  while (!done()) {
    if (comm.aborted || IsAbandoned(abandoned)) return false;
    TheWorld().changed.wait_for(*lock, kLook);
  }
  return true;
}

// The memory of a request, as the kernel sees it. False if it sees some of it not at all.
bool Resolve(const Request& request, Arrival* arrival) {
  const int device = request.comm->device;
  const auto find = [device](CUdeviceptr address, size_t bytes) {
    return static_cast<std::byte*>(Cuda().kernel_address(address, bytes, device));
  };
  arrival->request = &request;
  const size_t send = SendBytes(request);
  const size_t receive = ReceiveBytes(request);
  if (send > 0) arrival->send = find(request.send, send);
  if (receive > 0) arrival->receive = find(request.receive, receive);
  if ((send > 0 && arrival->send == nullptr) || (receive > 0 && arrival->receive == nullptr)) {
    return false;
  }
  if (!request.pre_mul_sum) return true;
  arrival->scalar = request.pre_mul_sum->scalar;
  if (!request.pre_mul_sum->on_device) return true;
  const size_t bytes = TypeBytes(request.type);
  const std::byte* scalar = find(request.pre_mul_sum->address, bytes);
  if (scalar == nullptr) return false;
  std::memcpy(arrival->scalar.data(), scalar, bytes);
  return true;
}

// Real NCCL's kernel would fault here, and its context with it. Locked.
void SayUnreadable(const Request& request) {
  request.comm->error =
      FailLocked(ncclUnhandledCudaError,
                 Text(request.name, " : ", Name(*request.comm), " cannot access its buffers (send ",
                      reinterpret_cast<void*>(request.send), ", receive ",
                      reinterpret_cast<void*>(request.receive), "): an illegal address"));
}

std::vector<Input> Inputs(const Collective& collective, size_t offset) {
  std::vector<Input> inputs;
  for (const Arrival& arrival : collective.arrivals) {
    inputs.push_back(
        {arrival.send + offset, arrival.request->pre_mul_sum ? arrival.scalar.data() : nullptr});
  }
  return inputs;
}

// Reduces `count` elements as a ring would: in chunks, each of which starts at another rank.
void ReduceInChunks(const Collective& collective, const std::vector<std::byte*>& outputs) {
  const Request& request = *collective.arrivals.front().request;
  const ncclRedOp_t op = request.pre_mul_sum ? ncclSum : request.op;
  const std::vector<Input> inputs = Inputs(collective, 0);
  const size_t chunk = (request.count + inputs.size() - 1) / inputs.size();
  for (size_t start = 0; start * chunk < request.count; ++start) {
    const size_t first = start * chunk;
    Reduce(request.type, op, inputs, start, first, std::min(chunk, request.count - first), outputs);
  }
}

void ReduceScatter(const Collective& collective) {
  const Request& request = *collective.arrivals.front().request;
  const ncclRedOp_t op = request.pre_mul_sum ? ncclSum : request.op;
  const size_t block = request.count * TypeBytes(request.type);
  for (size_t rank = 0; rank < collective.arrivals.size(); ++rank) {
    const size_t start = (rank + 1) % collective.arrivals.size();
    Reduce(request.type, op, Inputs(collective, rank * block), start, 0, request.count,
           {collective.arrivals[rank].receive});
  }
}

void AllGather(const Collective& collective) {
  const size_t block = SendBytes(*collective.arrivals.front().request);
  for (size_t from = 0; from < collective.arrivals.size(); ++from) {
    for (const Arrival& to : collective.arrivals) {
      std::memmove(to.receive + from * block, collective.arrivals[from].send, block);
    }
  }
}

void Broadcast(const Collective& collective) {
  const Arrival& root = collective.arrivals[collective.arrivals.front().request->root];
  for (const Arrival& to : collective.arrivals) {
    std::memmove(to.receive, root.send, ReceiveBytes(*to.request));
  }
}

void Compute(const Collective& collective) {
  const Request& request = *collective.arrivals.front().request;
  std::vector<std::byte*> outputs;
  for (const Arrival& arrival : collective.arrivals) outputs.push_back(arrival.receive);
  switch (request.function) {
    case Function::kAllReduce:
      return ReduceInChunks(collective, outputs);
    case Function::kReduce:
      return ReduceInChunks(collective, {outputs[request.root]});
    case Function::kReduceScatter:
      return ReduceScatter(collective);
    case Function::kAllGather:
      return AllGather(collective);
    case Function::kBroadcast:
      return Broadcast(collective);
    default:
      return;
  }
}

// This rank's part. The last to arrive computes for all, while the others wait.
void RunCollective(Lock* lock, const Request& request, const volatile int* abandoned) {
  ncclComm& comm = *request.comm;
  Clique& clique = *comm.clique;
  Collective& collective = clique.collectives.at(request.number);
  Arrival arrival;
  lock->unlock();
  const bool readable = Resolve(request, &arrival);
  lock->lock();
  if (!readable) SayUnreadable(request);
  if (request.injected.error != ncclSuccess) {
    comm.error = FailLocked(request.injected.error,
                            Text(request.name, " : ", Name(comm), " has an injected error"));
  }
  if (!readable || request.injected.stalls) collective.never = true;
  collective.arrivals[comm.rank] = arrival;
  if (++collective.arrived == clique.ranks && !collective.never) {
    collective.computing = true;
    lock->unlock();
    Compute(collective);
    lock->lock();
    collective.done = true;
    TheWorld().changed.notify_all();
  }
  WaitInKernel(lock, comm, abandoned, [&collective] { return collective.done; });
  // While another computes it reads and writes what is only kept for as long as this kernel runs.
  while (collective.computing && !collective.done) TheWorld().changed.wait(*lock);
  if (!collective.done) collective.never = true;
  if (++collective.left == clique.ranks) clique.collectives.erase(request.number);
}

std::pair<int, int> ChannelOf(const Request& request) {
  return request.function == Function::kSend ? std::pair(request.comm->rank, request.root)
                                             : std::pair(request.root, request.comm->rank);
}

// Copies what the heads of a channel have to send and receive, for as long as there are both.
void Match(Channel* channel) {
  while (!channel->sends.empty() && !channel->receives.empty()) {
    Transfer& send = *channel->sends.front();
    Transfer& receive = *channel->receives.front();
    const Request& sent = *send.request;
    const Request& received = *receive.request;
    if (sent.count != received.count || sent.type != received.type) {
      Breach(Text("ncclSend of ", sent.count, " ", TypeName(sent.type), " on ", Name(*sent.comm),
                  " meets ncclRecv of ", received.count, " ", TypeName(received.type), " on ",
                  Name(*received.comm)),
             "nccl.h, ncclSend: rank peer needs to call ncclRecv with the same datatype and the "
             "same count from this rank");
    }
    if (sent.count > 0) std::memmove(receive.memory, send.memory, SendBytes(sent));
    send.done = receive.done = true;
    channel->sends.pop_front();
    channel->receives.pop_front();
  }
}

std::shared_ptr<Transfer> Post(Lock* lock, const Request& request) {
  Arrival arrival;
  lock->unlock();
  const bool readable = Resolve(request, &arrival);
  lock->lock();
  const bool sends = request.function == Function::kSend;
  auto transfer = std::make_shared<Transfer>();
  transfer->request = &request;
  transfer->memory = sends ? const_cast<std::byte*>(arrival.send) : arrival.receive;
  if (!readable) {
    SayUnreadable(request);
    return transfer;  // never done
  }
  Channel& channel = request.comm->clique->channels[ChannelOf(request)];
  (sends ? channel.sends : channel.receives).push_back(transfer);
  Match(&channel);
  TheWorld().changed.notify_all();
  return transfer;
}

// Takes a transfer that will not be waited for out of its channel: its memory may go.
void Withdraw(const std::shared_ptr<Transfer>& transfer) {
  Channel& channel = transfer->request->comm->clique->channels[ChannelOf(*transfer->request)];
  std::erase(channel.sends, transfer);
  std::erase(channel.receives, transfer);
}

bool IsPointToPoint(const Request& request) {
  return request.function == Function::kSend || request.function == Function::kRecv;
}

// Point-to-point operations of a group progress independently (nccl.h, ncclSend), so all are posted
// before any is waited for.
void RunRequests(Lock* lock, const Launch& launch, const volatile int* abandoned) {
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (const Request& request : launch.requests) {
    if (IsPointToPoint(request)) transfers.push_back(Post(lock, request));
  }
  for (const Request& request : launch.requests) {
    if (launch.comm->aborted || IsAbandoned(abandoned)) break;
    if (!IsPointToPoint(request)) RunCollective(lock, request, abandoned);
  }
  for (const auto& transfer : transfers) {
    WaitInKernel(lock, *launch.comm, abandoned, [&transfer] { return transfer->done; });
    if (!transfer->done) Withdraw(transfer);
  }
}

void Leave(uint64_t number, Launch* launch) {
  if (--launch->users == 0) TheWorld().launches.erase(number);
  TheWorld().changed.notify_all();
}

}  // namespace

size_t SendBytes(const Request& request) {
  const size_t bytes = request.count * TypeBytes(request.type);
  switch (request.function) {
    case Function::kBroadcast:
      return request.comm->rank == request.root ? bytes : 0;
    case Function::kReduceScatter:
      return bytes * request.comm->clique->ranks;
    case Function::kRecv:
      return 0;
    default:
      return bytes;
  }
}

size_t ReceiveBytes(const Request& request) {
  const size_t bytes = request.count * TypeBytes(request.type);
  switch (request.function) {
    case Function::kReduce:
      return request.comm->rank == request.root ? bytes : 0;
    case Function::kAllGather:
      return bytes * request.comm->clique->ranks;
    case Function::kSend:
      return 0;
    default:
      return bytes;
  }
}

void RunKernel(void* launch_number, const volatile int* abandoned) {
  const auto number = reinterpret_cast<uint64_t>(launch_number);
  Lock lock(TheWorld().mutex);
  const std::shared_ptr<Launch> launch = TheWorld().launches.at(number);
  ncclComm& comm = *launch->comm;
  ++comm.running;
  const bool started = WaitInKernel(
      &lock, comm, abandoned, [&launch] { return launch->gates_reached == launch->streams - 1; });
  if (started && !comm.aborted) RunRequests(&lock, *launch, abandoned);
  launch->done = true;
  --comm.running;
  --comm.unfinished;
  Leave(number, launch.get());
}

void RunGate(void* launch_number, const volatile int* abandoned) {
  const auto number = reinterpret_cast<uint64_t>(launch_number);
  Lock lock(TheWorld().mutex);
  const std::shared_ptr<Launch> launch = TheWorld().launches.at(number);
  ++launch->gates_reached;
  TheWorld().changed.notify_all();
  WaitInKernel(&lock, *launch->comm, abandoned, [&launch] { return launch->done; });
  Leave(number, launch.get());
}

}  // namespace gradsync::fake_nccl

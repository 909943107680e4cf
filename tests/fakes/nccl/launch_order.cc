#include "tests/fakes/nccl/launch_order.h"

namespace gradsync::fake_nccl {
namespace {

// The communicator of a clique on a device; NULL if there is none, or if the clique is no more.
const ncclComm* OnDevice(const Clique& clique, int device) {
  if (!clique.started || clique.aborted) return nullptr;
  for (const ncclComm* comm : clique.comms) {
    if (comm != nullptr && comm->device == device && comm->life == Life::kLive) return comm;
  }
  return nullptr;
}

// Compares the launch of `comm` with that of the same collective on `peer`, an earlier one.
//
// `before` counts what the other clique had launched on the device by then. Where it is fewer on
// the peer's, the first of the rest came after this collective there: unless it is still to come,
// and may yet turn out to be aborted.
void Compare(const ncclComm& comm, const ncclComm& peer, uint64_t before, uint64_t before_on_peer,
             const Clique& other) {
  const ncclComm* here = OnDevice(other, comm.device);
  const ncclComm* there = OnDevice(other, peer.device);
  if (here == nullptr || there == nullptr) return;
  if (before <= before_on_peer || there->launched <= before_on_peer) return;
  Breach(Text(Name(comm), " launches a collective after one of ", Name(*here), ", which device ",
              peer.device, " has launched in the other order (", Name(peer), " before ",
              Name(*there), ")"),
         "NCCL user guide, Using multiple NCCL communicators concurrently: users must ensure the "
         "order of host-side launches matches for all devices");
}

}  // namespace

void NoteLaunch(const ncclComm& comm, uint64_t number) {
  const Clique& clique = *comm.clique;
  auto& before = comm.clique->collectives.at(number).before;
  for (const auto& [unique_id, other] : TheWorld().cliques) {
    if (other->id == clique.id) continue;
    const ncclComm* here = OnDevice(*other, comm.device);
    if (here == nullptr) continue;
    before[comm.rank][other->id] = here->launched;
    for (const ncclComm* peer : clique.comms) {
      const auto& on_peer = before[peer->rank];
      const auto counted = on_peer.find(other->id);
      if (peer == &comm || counted == on_peer.end()) continue;
      Compare(comm, *peer, here->launched, counted->second, *other);
    }
  }
}

}  // namespace gradsync::fake_nccl

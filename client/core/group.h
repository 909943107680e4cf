// A group of ranks, as the rest of the client sees it: collectives, and the hand-over of buckets.
#ifndef GRADSYNC_CLIENT_CORE_GROUP_H_
#define GRADSYNC_CLIENT_CORE_GROUP_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "client/core/device.h"
#include "shm/status.h"
#include "shm/types.h"

namespace gradsync {

using Timeout = std::chrono::milliseconds;  // zero stands for the session's

// Shared memory of a session. Its memory stays mapped as long as the object lives, whatever becomes
// of the session.
class SharedBuffer {
 public:
  virtual ~SharedBuffer() = default;
  virtual std::byte* data() const = 0;  // of a GPU's memory: its address there
  virtual uint64_t size() const = 0;
  virtual uint32_t device() const { return kCpu; }
};

// Within memory of one GPU.
struct DeviceCopy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  uint64_t bytes = 0;
};

struct BucketInfo {
  uint32_t index = 0;
  uint32_t bucket_count = 0;
  uint32_t parameter_count = 0;
  uint64_t count = 0;
  DType dtype = DType::kFloat32;
  std::string parameters;  // "first.name ... last.name"
};

// Thread-safe. Calls that submit keep the order in which they are made, which must be the same on
// every rank. The implementation is client/core/daemon_group.h; tests of client/ddp bring their
// own.
class Group {
 public:
  virtual ~Group() = default;

  virtual uint32_t rank() const = 0;  // index in the group
  virtual uint32_t size() const = 0;
  virtual uint32_t job_rank(uint32_t member) const = 0;  // for texts
  virtual const std::string& tag() const = 0;

  // Why no call can succeed any more: the group has failed, the daemon is gone, or this is a forked
  // child. OK if none is known.
  virtual Status CheckUsable() const = 0;

  // Why the group has failed, on every rank. OK if none is known, or if this rank alone cannot use
  // the group any more.
  virtual Status Failure() const = 0;

  // As in gradsync/gradsync.h.
  virtual Status AllReduce(void* data, uint64_t count, DType dtype, ReduceOp op,
                           Timeout timeout) = 0;
  virtual Status Broadcast(void* data, uint64_t count, DType dtype, uint32_t root,
                           Timeout timeout) = 0;
  virtual Status AllGather(const void* input, void* output, uint64_t count, DType dtype,
                           Timeout timeout) = 0;
  virtual Status Barrier(Timeout timeout) = 0;
  virtual Status Share(void* data, uint64_t count, DType dtype, Timeout timeout) = 0;

  // This rank submits nothing more, and the others go on without it (AsidePolicy), until it has
  // waited in Rejoin for all of them to do the same. Rejoin returns the member that took part
  // longest. No other call may be made in between.
  virtual Status StandAside(AsidePolicy policy, Timeout timeout) = 0;
  virtual Result<uint32_t> Rejoin() = 0;

  virtual Result<std::shared_ptr<SharedBuffer>> Allocate(uint64_t bytes, const std::string& label,
                                                         uint32_t device) = 0;

  // For each bucket of a plan, in index order, before the first SubmitBucket of that plan.
  virtual Status DescribeBucket(const BucketInfo& info) = 0;

  // Takes the next `count` numbers of the group's order, for operations to be submitted in any
  // order. Every one of them must be submitted, or the group stands still until its deadline.
  virtual uint64_t ReserveSequences(uint32_t count) = 0;

  // Hands over `info.count` elements at `offset` bytes of `buffer` (made by Allocate of this
  // group), to be reduced in place as operation `sequence`. Does not wait for the result. On a GPU,
  // behind what `stream` has been given so far.
  virtual Status SubmitBucket(uint64_t sequence, const BucketInfo& info, const SharedBuffer& buffer,
                              uint64_t offset, ReduceOp op, Timeout timeout, Stream stream) = 0;

  // As SubmitBucket, for a range of `buffer` that is no bucket of the plan.
  virtual Status SubmitAllReduce(uint64_t sequence, uint64_t count, DType dtype,
                                 const SharedBuffer& buffer, uint64_t offset, ReduceOp op,
                                 Timeout timeout) = 0;

  // Waits until a submitted operation is complete.
  virtual Status Wait(uint64_t sequence, Timeout timeout) = 0;

  // Makes `stream` wait for a submitted operation on `device`, and returns at once. Streams are let
  // go when the group fails: what they then find is undefined, and Failure says why.
  virtual Status EnqueueWait(uint64_t sequence, uint32_t device, Stream stream) = 0;

  // Behind what `stream` has been given so far; waits for the copies.
  virtual Status CopyOnDevice(uint32_t device, std::span<const DeviceCopy> copies,
                              Stream stream) = 0;

  // Fails the group with `why`, on every rank and at once: for a rank that will not keep its side
  // of what the others wait for, and knows the reason. Does nothing if the group has failed already
  // or the daemon is gone; does not wait for the other ranks.
  virtual void Abort(const Status& why) = 0;
};

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_CORE_GROUP_H_

// A Group whose operations the daemon carries out.
#ifndef GRADSYNC_CLIENT_CORE_DAEMON_GROUP_H_
#define GRADSYNC_CLIENT_CORE_DAEMON_GROUP_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "client/core/device_lane.h"
#include "client/core/device_run.h"
#include "client/core/device_work.h"
#include "client/core/group.h"
#include "client/core/message_request.h"
#include "client/core/pieces.h"
#include "client/core/session.h"
#include "client/core/turns.h"
#include "shm/completion.h"

namespace gradsync {

class DaemonGroup : public Group, public std::enable_shared_from_this<DaemonGroup> {
 public:
  // Blocks until every rank in `ranks` (empty: all of the job) has asked for the same.
  static Result<std::shared_ptr<DaemonGroup>> Create(std::shared_ptr<Session> session,
                                                     const std::string& tag,
                                                     std::vector<uint32_t> ranks, Timeout timeout);
  DaemonGroup(const DaemonGroup&) = delete;
  DaemonGroup& operator=(const DaemonGroup&) = delete;
  ~DaemonGroup() override;

  uint32_t rank() const override { return rank_; }
  uint32_t size() const override { return static_cast<uint32_t>(ranks_.size()); }
  uint32_t job_rank(uint32_t member) const override { return ranks_[member]; }
  const std::string& tag() const override { return tag_; }

  Status CheckUsable() const override;
  Status Failure() const override;
  Status AllReduce(void* data, uint64_t count, DType dtype, ReduceOp op, Timeout timeout) override;
  Status Broadcast(void* data, uint64_t count, DType dtype, uint32_t root,
                   Timeout timeout) override;
  Status AllGather(const void* input, void* output, uint64_t count, DType dtype,
                   Timeout timeout) override;
  Status Barrier(Timeout timeout) override;
  Status Share(void* data, uint64_t count, DType dtype, Timeout timeout) override;
  Status StandAside(AsidePolicy policy, Timeout timeout) override;
  Result<uint32_t> Rejoin() override;

  // Not of Group: client/ddp has no use for them. As in gradsync/gradsync.h.
  Status Reduce(void* data, uint64_t count, DType dtype, ReduceOp op, uint32_t root,
                Timeout timeout);
  Status Gather(const void* input, void* output, uint64_t count, DType dtype, uint32_t root,
                Timeout timeout);
  Status Scatter(const void* input, void* output, uint64_t count, DType dtype, uint32_t root,
                 Timeout timeout);
  Status ReduceScatter(const void* input, void* output, uint64_t count, DType dtype, ReduceOp op,
                       Timeout timeout);
  Status AllToAll(const void* input, void* output, uint64_t count, DType dtype, Timeout timeout);

  // A collective over memory of one GPU, with the arguments of the calls above: enqueued, behind
  // what `stream` has been given so far. Waits for nothing but its turn among other threads'. The
  // first of a group fixes the GPU that this rank uses there.
  Result<std::unique_ptr<DeviceWork>> Enqueue(const Collective& collective, uint32_t device,
                                              Stream stream, Timeout timeout);
  // Of an operation on a GPU whose streams go on: whether that is because it is complete, or why
  // not.
  Status CheckCompleted(uint64_t sequence) const;
  // Waits until the event is over, as Wait does for an operation.
  Status AwaitEvent(const Device& device, DeviceEvent event, Timeout timeout) const;

  Result<std::shared_ptr<SharedBuffer>> Allocate(uint64_t bytes, const std::string& label,
                                                 uint32_t device) override;
  Status DescribeBucket(const BucketInfo& info) override;
  uint64_t ReserveSequences(uint32_t count) override;
  Status SubmitBucket(uint64_t sequence, const BucketInfo& info, const SharedBuffer& buffer,
                      uint64_t offset, ReduceOp op, Timeout timeout, Stream stream) override;
  Status SubmitAllReduce(uint64_t sequence, uint64_t count, DType dtype, const SharedBuffer& buffer,
                         uint64_t offset, ReduceOp op, Timeout timeout) override;
  Status Wait(uint64_t sequence, Timeout timeout) override;
  Status EnqueueWait(uint64_t sequence, uint32_t device, Stream stream) override;
  Status CopyOnDevice(uint32_t device, std::span<const DeviceCopy> copies, Stream stream) override;
  void Abort(const Status& why) override;

  // Messages between two members, of which `from` may be any; see client/core/message_request.h.
  Result<MessageRequest> BeginSend(const std::byte* data, uint64_t bytes, uint32_t to, uint64_t tag,
                                   Timeout timeout);
  Result<MessageRequest> BeginReceive(std::optional<uint32_t> from, uint64_t tag, Timeout timeout);

  const std::shared_ptr<Session>& session() const { return session_; }

 private:
  class Run;

  DaemonGroup(std::shared_ptr<Session> session, std::string tag, std::vector<uint32_t> ranks,
              uint32_t rank, uint32_t number);

  // `what`: "a message to".
  Status CheckMember(const std::string& what, uint32_t member) const;
  Status CheckRoot(OpKind kind, uint32_t root) const;
  Status CheckTakesPart() const;
  Status CheckNotFailing() const;
  Result<Frame> AwaitRejoined();
  // The way through the GPU that this rank uses for the group.
  Result<DeviceLane*> Lane(uint32_t device);
  Status CheckCollective(const Collective& collective) const;
  Status LateTurn();
  Status EnqueueRun(DeviceRun* run, DeviceLane* lane, Stream stream, DeviceEvent event,
                    uint64_t first_sequence, Deadline deadline);
  Status Perform(const Collective& collective, Timeout timeout);
  Status PerformEmpty(const Collective& collective, Deadline deadline);
  // Fills in where the operation's `count` elements lie, and how long it may take.
  Status SubmitInPlace(Submission submission, const SharedBuffer& buffer, uint64_t offset,
                       Timeout timeout, Stream stream);
  Status WaitUntil(uint64_t sequence, Deadline deadline);

  const std::shared_ptr<Session> session_;
  const std::string tag_;
  const std::vector<uint32_t> ranks_;
  const uint32_t rank_;
  const uint32_t number_;
  const CompletionReader completion_;
  std::atomic<uint64_t> next_sequence_{0};
  // One collective at a time: a second one would start after the first in any case.
  Turns collectives_;
  // While this rank stands aside: the request that is answered when all do, and its timeout.
  std::atomic<uint32_t> aside_request_{0};
  std::atomic<Timeout> aside_timeout_{Timeout(0)};
  std::mutex lane_mutex_;  // guards which lane it is
  std::unique_ptr<DeviceLane> lane_;
  std::atomic<DeviceLane*> published_lane_{nullptr};
};

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_CORE_DAEMON_GROUP_H_

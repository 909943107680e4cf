// gradsync as a backend of torch.distributed.
#ifndef GRADSYNC_CLIENT_TORCH_PROCESS_GROUP_H_
#define GRADSYNC_CLIENT_TORCH_PROCESS_GROUP_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "client/torch/group_collectives.h"
#include "client/torch/messenger.h"
#include "client/torch/monitored_barrier.h"
#include "client/torch/ordered_worker.h"
#include "client/torch/session.h"
#include "client/torch/torch_version.h"

namespace gradsync::torch {

// The collectives of one process group, in the order of their calls. A call that need not be
// asynchronous is carried out on the calling thread when no earlier one is under way; the others on
// a thread of the group. Works fail with Error; a timeout that is not given (-1) is the group's.
//
// Tensors on a GPU are served apart, by a group of their own that the first of them makes, so that
// each kind keeps the order of its calls whatever the other does. These collectives are enqueued
// from the calling thread, and refused there; their works are a GPU's (DeviceWork). Not offered are
// there what needs a root's memory alone, messages, all_to_all, sparse tensors and bitwise
// reductions.
//
// Where torch has two names for an operation, the older one is taken here: it is known to every
// version, and newer ones come to it by the other.
//
// Thread-safe, but as with any backend every rank must make the same calls in the same order.
class ProcessGroupGradsync : public c10d::Backend {
 public:
  // Blocks until every rank of the group has come. `owns_session`: shutting this group down, the
  // default one, closes the session.
  ProcessGroupGradsync(std::shared_ptr<Session> session, const std::string& group_name,
                       const std::vector<uint32_t>& ranks, int rank,
                       std::chrono::milliseconds timeout, bool owns_session);
  ~ProcessGroupGradsync() override;

  const std::shared_ptr<Session>& session() const { return session_; }

  const std::string getBackendName() const override { return "gradsync"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  // Waits for what is under way. Nothing may be asked for afterwards.
  void shutdown() override;
  // What waits fails at once; what is under way, when the daemon hears that the session has ended.
  void abort() override;

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                                     std::vector<at::Tensor>& inputs,
                                                     const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override;

  // Throws RuntimeError with torch's words if a rank has not come in time, but leaves the group
  // usable. Keeps no order with the collectives.
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  c10::intrusive_ptr<c10d::Work> allreduce_sparse(std::vector<at::Tensor>& tensors,
                                                  const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& opts) override;
#if GRADSYNC_TORCH_SINCE_2(15)  // before, torch has no such operation
  c10::intrusive_ptr<c10d::Work> gather_single(at::Tensor& output, at::Tensor& input,
                                               const c10d::GatherOptions& opts) override;
#endif
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs,
                                         std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& opts) override;
  // Splits are given by every rank or by none.
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& opts) override;

  // Messages keep no order with the collectives; what is sent is copied at once. Works of receives
  // know the source's rank.
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;

 private:
  // How one call is to be carried out.
  struct Call {
    c10d::OpType type;
    const char* title;
    std::chrono::milliseconds timeout;
    bool async;
  };
  // `operation(group, timeout)`.
  template <typename Operation>
  c10::intrusive_ptr<c10d::Work> Start(const Call& call, std::vector<at::Tensor> outputs,
                                       Operation operation);
  // `operation(collectives, timeout)`, of tensors on `device`.
  template <typename Operation>
  c10::intrusive_ptr<c10d::Work> StartOn(c10::Device device, const Call& call,
                                         std::vector<at::Tensor> outputs, Operation operation);
  c10::intrusive_ptr<c10d::Work> StartOnDevice(
      c10::Device device, const Call& call, std::vector<at::Tensor> outputs,
      const std::function<void(Collectives&, Timeout)>& operation);
  // What serves tensors on a GPU.
  struct DevicePart {
    // Blocks until every rank has come to its first such call.
    DevicePart(std::shared_ptr<Session> session, const std::string& tag,
               const std::vector<uint32_t>& ranks, Timeout timeout, c10::Device where);

    const Group group;
    const c10::Device device;
    const c10::Stream aside;               // where what is asynchronous is waited for
    std::shared_ptr<const Enqueued> last;  // null before the first
  };
  DevicePart& PartOn(c10::Device device);
  void FinishOnDevice();
  Timeout TimeoutOr(Timeout timeout) const;
  c10::intrusive_ptr<CollectiveWork> NewMessage(c10d::OpType type, const char* title,
                                                std::vector<at::Tensor> tensors);

  const std::shared_ptr<Session> session_;
  const std::string group_name_;
  const std::vector<uint32_t> ranks_;
  const std::shared_ptr<const Group> group_;
  const bool owns_session_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<uint64_t> sequence_{0};
  std::mutex device_mutex_;
  std::unique_ptr<DevicePart> device_;  // under device_mutex_; null before it is needed
  std::mutex monitored_barrier_mutex_;
  MonitoredBarrier monitored_barrier_;
  OrderedWorker worker_;
  Messenger messenger_;
};

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_PROCESS_GROUP_H_

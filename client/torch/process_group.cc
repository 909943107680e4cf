#include "client/torch/process_group.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "client/torch/collective_checks.h"
#include "client/torch/collectives.h"
#include "client/torch/device.h"
#include "client/torch/device_work.h"
#include "client/torch/errors.h"
#include "client/torch/group_collectives.h"
#include "client/torch/interpreter.h"
#include "client/torch/tensors.h"

namespace gradsync::torch {
namespace {

#if GRADSYNC_TORCH_SINCE_2(15)
constexpr auto kAllGatherCoalesced = c10d::OpType::ALLGATHER_INTO_TENSOR_COALESCED;
constexpr auto kReduceScatterCoalesced = c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED;
#else
constexpr auto kAllGatherCoalesced = c10d::OpType::COALESCED;
constexpr auto kReduceScatterCoalesced = c10d::OpType::COALESCED;
#endif

}  // namespace

ProcessGroupGradsync::ProcessGroupGradsync(std::shared_ptr<Session> session,
                                           const std::string& group_name,
                                           const std::vector<uint32_t>& ranks, int rank,
                                           std::chrono::milliseconds timeout, bool owns_session)
    : Backend(rank, static_cast<int>(ranks.size())),
      session_(std::move(session)),
      group_name_(group_name),
      ranks_(ranks),
      group_(std::make_shared<const Group>(session_, "c10d:" + group_name, ranks, timeout)),
      owns_session_(owns_session),
      timeout_(timeout),
      monitored_barrier_(*group_),
      messenger_(group_) {
  init();
}

ProcessGroupGradsync::~ProcessGroupGradsync() {
  const WithoutInterpreter released;
  messenger_.Finish();
  worker_.Finish();
}

c10::intrusive_ptr<c10d::Backend::Options> ProcessGroupGradsync::getBackendOptions() {
  return c10::make_intrusive<Options>("gradsync", timeout_.load());
}

void ProcessGroupGradsync::shutdown() {
  const WithoutInterpreter released;
  messenger_.Finish();
  worker_.Finish();
  FinishOnDevice();
  if (owns_session_) session_->Close();
}

// Collectives of a group end in order.
void ProcessGroupGradsync::FinishOnDevice() {
  std::shared_ptr<const Enqueued> last;
  {
    const std::lock_guard lock(device_mutex_);
    if (device_ != nullptr) last = device_->last;
  }
  if (last == nullptr) return;
  try {
    last->Synchronize();
  } catch (const Error&) {  // told to those who have waited for it
  }
}

void ProcessGroupGradsync::abort() {
  const WithoutInterpreter released;
  worker_.Abandon();
  if (owns_session_) session_->Close();  // first: then nothing waits for the daemon
  messenger_.Finish();
}

Timeout ProcessGroupGradsync::TimeoutOr(Timeout timeout) const {
  return timeout == c10d::kUnsetTimeout ? timeout_.load() : timeout;
}

template <typename Operation>
c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::Start(const Call& call,
                                                           std::vector<at::Tensor> outputs,
                                                           Operation operation) {
  const Timeout timeout = TimeoutOr(call.timeout);
  auto work = c10::make_intrusive<CollectiveWork>(rank_, call.type, call.title, std::move(outputs),
                                                  ++sequence_, timeout);
  worker_.Run(
      work,
      [group = group_, operation = std::move(operation), timeout, title = call.title] {
        // What is copied here is nobody's gradient, and the worker's thread inherits no mode.
        const at::NoGradGuard no_grad;
        try {
          operation(*group, timeout);
        } catch (const Error& error) {
          throw WithTorchsWords(error, title, timeout);
        }
      },
      !call.async);
  return work;
}

template <typename Operation>
c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::StartOn(c10::Device device, const Call& call,
                                                             std::vector<at::Tensor> outputs,
                                                             Operation operation) {
  if (device.is_cuda()) return StartOnDevice(device, call, std::move(outputs), operation);
  return Start(call, std::move(outputs),
               [operation = std::move(operation)](const Group& group, Timeout timeout) {
                 HostCollectives collectives(group);
                 operation(collectives, timeout);
               });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::StartOnDevice(
    c10::Device device, const Call& call, std::vector<at::Tensor> outputs,
    const std::function<void(Collectives&, Timeout)>& operation) {
  const WithoutInterpreter released;
  const Timeout timeout = TimeoutOr(call.timeout);
  // Held meanwhile, so that calls from several threads are enqueued one after the other.
  const std::lock_guard lock(device_mutex_);
  DevicePart& part = PartOn(device);
  auto work = c10::make_intrusive<DeviceWork>(rank_, call.type, call.title, std::move(outputs),
                                              ++sequence_, timeout);
  const at::NoGradGuard no_grad;
  try {
    DeviceCollectives collectives(
        part.group, device, call.async ? std::optional<c10::Stream>(part.aside) : std::nullopt);
    operation(collectives, timeout);
    work->Enqueue(collectives.last(), CurrentStream(device));
    if (collectives.last() != nullptr) part.last = collectives.last();
  } catch (const Error& error) {
    const Error told = WithTorchsWords(error, call.title, timeout);
    work->Fail(std::make_exception_ptr(told));
    throw told;
  } catch (...) {
    work->Fail(std::current_exception());
    throw;
  }
  return work;
}

ProcessGroupGradsync::DevicePart::DevicePart(std::shared_ptr<Session> session,
                                             const std::string& tag,
                                             const std::vector<uint32_t>& ranks, Timeout timeout,
                                             c10::Device where)
    : group(std::move(session), tag, ranks, timeout), device(where), aside(PoolStream(where)) {}

// With device_mutex_.
ProcessGroupGradsync::DevicePart& ProcessGroupGradsync::PartOn(c10::Device device) {
  if (device_ == nullptr) {
    device_ = std::make_unique<DevicePart>(session_, "c10d-cuda:" + group_name_, ranks_,
                                           timeout_.load(), device);
  }
  TORCH_CHECK_VALUE(device_->device == device,
                    "gradsync: a rank uses one GPU in a process group: ", "this one has used ",
                    device_->device, ", and was given a tensor on ", device,
                    "; make another group for that");
  return *device_;
}

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

WorkPtr ProcessGroupGradsync::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && tensors[0].is_sparse()) return allreduce_sparse(tensors, opts);
  const at::Tensor& tensor = OnlyOne(tensors, "all_reduce");
  CheckReduces(tensor, "all_reduce");
  return StartOn(
      tensor.device(), {c10d::OpType::ALLREDUCE, "gradsync:all_reduce", opts.timeout, opts.asyncOp},
      tensors,
      [tensor, op = ToReduceOp(opts.reduceOp, tensor.device())](
          Collectives& group, Timeout timeout) { AllReduceOne(group, tensor, op, timeout); });
}

WorkPtr ProcessGroupGradsync::allreduce_sparse(Tensors& tensors,
                                               const c10d::AllreduceOptions& opts) {
  TORCH_CHECK_VALUE(tensors.size() == 1 && tensors[0].layout() == at::kSparse,
                    "gradsync: all_reduce of sparse tensors takes one COO tensor");
  const at::Tensor tensor = tensors[0];
  CheckOnCpu(tensor, "all_reduce of sparse tensors");
  TORCH_CHECK_VALUE(opts.reduceOp == c10d::ReduceOp::SUM,
                    "gradsync: all_reduce of sparse tensors can only sum");
  return Start(
      {c10d::OpType::_ALLREDUCE_SPARSE, "gradsync:sparse_all_reduce", opts.timeout, opts.asyncOp},
      tensors,
      [tensor](const Group& group, Timeout timeout) { AllReduceSparse(group, tensor, timeout); });
}

WorkPtr ProcessGroupGradsync::allreduce_coalesced(Tensors& tensors,
                                                  const c10d::AllreduceCoalescedOptions& opts) {
  const c10::Device device = CheckOneDevice(tensors, "all_reduce_coalesced");
  for (const at::Tensor& tensor : tensors) CheckReduces(tensor, "all_reduce_coalesced");
  return StartOn(
      device,
      {c10d::OpType::ALLREDUCE_COALESCED, "gradsync:all_reduce_coalesced", opts.timeout,
       opts.asyncOp},
      tensors,
      [tensors, op = ToReduceOp(opts.reduceOp, device)](Collectives& group, Timeout timeout) {
        for (const at::Tensor& tensor : tensors) AllReduceOne(group, tensor, op, timeout);
      });
}

WorkPtr ProcessGroupGradsync::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const at::Tensor& tensor = OnlyOne(tensors, "broadcast");
  return StartOn(
      tensor.device(), {c10d::OpType::BROADCAST, "gradsync:broadcast", opts.timeout, opts.asyncOp},
      tensors,
      [tensor, root = CheckRoot(opts.rootRank, size_, "broadcast")](
          Collectives& group, Timeout timeout) { BroadcastOne(group, tensor, root, timeout); });
}

WorkPtr ProcessGroupGradsync::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = OnlyOne(tensors, "reduce");
  CheckOnCpu(tensor, "reduce");
  CheckReduces(tensor, "reduce");
  return Start(
      {c10d::OpType::REDUCE, "gradsync:reduce", opts.timeout, opts.asyncOp}, tensors,
      [tensor, op = ToReduceOp(opts.reduceOp, at::kCPU),
       root = CheckRoot(opts.rootRank, size_, "reduce")](const Group& group, Timeout timeout) {
        HostCollectives collectives(group);
        ReduceOne(collectives, tensor, op, root, timeout);
      });
}

WorkPtr ProcessGroupGradsync::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& opts) {
  const at::Tensor& input = OnlyOne(inputs, "all_gather");
  const Tensors& targets = OnlyList(outputs, "all_gather");
  CheckList(targets, input, {size_, rank_}, "all_gather");
  return StartOn(input.device(),
                 {c10d::OpType::ALLGATHER, "gradsync:all_gather", opts.timeout, opts.asyncOp},
                 targets, [targets, input](Collectives& group, Timeout timeout) {
                   AllGatherIntoList(group, targets, input, timeout);
                 });
}

WorkPtr ProcessGroupGradsync::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& opts) {
  // outputs[rank][i] is inputs[i] of that rank.
  std::vector<Tensors> by_input(inputs.size());
  Tensors all;
  for (const Tensors& of_rank : outputs) {
    TORCH_CHECK_VALUE(of_rank.size() == inputs.size(),
                      "gradsync: all_gather_coalesced needs as many outputs of each rank as there "
                      "are inputs (",
                      inputs.size(), "), but was given ", of_rank.size());
    for (size_t i = 0; i < inputs.size(); ++i) by_input[i].push_back(of_rank[i]);
    all.insert(all.end(), of_rank.begin(), of_rank.end());
  }
  const c10::Device device = CheckOneDevice(inputs, "all_gather_coalesced");
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckEqualList(by_input[i], inputs[i], {size_, rank_}, "all_gather_coalesced");
  }
  return StartOn(device,
                 {c10d::OpType::ALLGATHER_COALESCED, "gradsync:all_gather_coalesced", opts.timeout,
                  opts.asyncOp},
                 std::move(all),
                 [by_input = std::move(by_input), inputs](Collectives& group, Timeout timeout) {
                   for (size_t i = 0; i < inputs.size(); ++i) {
                     AllGatherIntoList(group, by_input[i], inputs[i], timeout);
                   }
                 });
}

WorkPtr ProcessGroupGradsync::_allgather_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::AllgatherOptions& opts) {
  CheckBlocks(output, input, size_, "all_gather_single");
  return StartOn(
      input.device(),
      {c10d::OpType::_ALLGATHER_BASE, "gradsync:all_gather_single", opts.timeout, opts.asyncOp},
      {output}, [output, input](Collectives& group, Timeout timeout) {
        GatherIntoOne(group, output, input, timeout);
      });
}

WorkPtr ProcessGroupGradsync::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                              const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(),
                    "gradsync: all_gather_single_coalesced was given ", outputs.size(),
                    " outputs for ", inputs.size(), " inputs");
  const c10::Device device = CheckOneDevice(inputs, "all_gather_single_coalesced");
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckBlocks(outputs[i], inputs[i], size_, "all_gather_single_coalesced");
  }
  return StartOn(
      device,
      {kAllGatherCoalesced, "gradsync:all_gather_single_coalesced", opts.timeout, opts.asyncOp},
      outputs, [outputs, inputs](Collectives& group, Timeout timeout) {
        for (size_t i = 0; i < inputs.size(); ++i) {
          GatherIntoOne(group, outputs[i], inputs[i], timeout);
        }
      });
}

WorkPtr ProcessGroupGradsync::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::GatherOptions& opts) {
  const at::Tensor& input = OnlyOne(inputs, "gather");
  CheckOnCpu(input, "gather");
  const uint32_t root = CheckRoot(opts.rootRank, size_, "gather");
  Tensors targets;
  if (rank_ == opts.rootRank) {
    targets = OnlyList(outputs, "gather");
    CheckEqualList(targets, input, {size_, rank_}, "gather");
  } else {
    TORCH_CHECK_VALUE(outputs.empty(), "gradsync: gather requires empty output on non-root");
  }
  return Start({c10d::OpType::GATHER, "gradsync:gather", opts.timeout, opts.asyncOp}, targets,
               [targets, input, root](const Group& group, Timeout timeout) {
                 GatherIntoListAt(group, targets, input, root, timeout);
               });
}

#if GRADSYNC_TORCH_SINCE_2(15)
WorkPtr ProcessGroupGradsync::gather_single(at::Tensor& output, at::Tensor& input,
                                            const c10d::GatherOptions& opts) {
  CheckDense(input, "gather_single");
  CheckOnCpu(input, "gather_single");
  const uint32_t root = CheckRoot(opts.rootRank, size_, "gather_single");
  if (rank_ == opts.rootRank) CheckBlocks(output, input, size_, "gather_single");
  return Start({c10d::OpType::GATHER, "gradsync:gather_single", opts.timeout, opts.asyncOp},
               {output}, [output, input, root](const Group& group, Timeout timeout) {
                 GatherIntoOneAt(group, output, input, root, timeout);
               });
}
#endif

WorkPtr ProcessGroupGradsync::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                      const c10d::ScatterOptions& opts) {
  const at::Tensor& output = OnlyOne(outputs, "scatter");
  CheckOnCpu(output, "scatter");
  const uint32_t root = CheckRoot(opts.rootRank, size_, "scatter");
  Tensors sources;
  if (rank_ == opts.rootRank) {
    sources = OnlyList(inputs, "scatter");
    CheckEqualList(sources, output, {size_, rank_}, "scatter");
  } else {
    TORCH_CHECK_VALUE(inputs.empty(), "gradsync: scatter requires empty input on non-root");
  }
  return Start({c10d::OpType::SCATTER, "gradsync:scatter", opts.timeout, opts.asyncOp}, outputs,
               [output, sources = std::move(sources), root](const Group& group, Timeout timeout) {
                 ScatterList(group, output, sources, root, timeout);
               });
}

WorkPtr ProcessGroupGradsync::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                             const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = OnlyOne(outputs, "reduce_scatter");
  CheckReduces(output, "reduce_scatter");
  const Tensors& sources = OnlyList(inputs, "reduce_scatter");
  CheckList(sources, output, {size_, rank_}, "reduce_scatter");
  return StartOn(
      output.device(),
      {c10d::OpType::REDUCE_SCATTER, "gradsync:reduce_scatter", opts.timeout, opts.asyncOp},
      outputs,
      [output, sources, op = ToReduceOp(opts.reduceOp, output.device())](Collectives& group,
                                                                         Timeout timeout) {
        ReduceScatterList(group, output, sources, op, timeout);
      });
}

WorkPtr ProcessGroupGradsync::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& opts) {
  CheckBlocks(input, output, size_, "reduce_scatter_single");
  CheckReduces(output, "reduce_scatter_single");
  return StartOn(output.device(),
                 {c10d::OpType::_REDUCE_SCATTER_BASE, "gradsync:reduce_scatter_single",
                  opts.timeout, opts.asyncOp},
                 {output},
                 [output, input, op = ToReduceOp(opts.reduceOp, output.device())](
                     Collectives& group, Timeout timeout) {
                   ReduceScatterOne(group, output, input, op, timeout);
                 });
}

WorkPtr ProcessGroupGradsync::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(),
                    "gradsync: reduce_scatter_single_coalesced was given ", outputs.size(),
                    " outputs for ", inputs.size(), " inputs");
  const c10::Device device = CheckOneDevice(outputs, "reduce_scatter_single_coalesced");
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckBlocks(inputs[i], outputs[i], size_, "reduce_scatter_single_coalesced");
    CheckReduces(outputs[i], "reduce_scatter_single_coalesced");
  }
  return StartOn(device,
                 {kReduceScatterCoalesced, "gradsync:reduce_scatter_single_coalesced", opts.timeout,
                  opts.asyncOp},
                 outputs,
                 [outputs, inputs, op = ToReduceOp(opts.reduceOp, device)](Collectives& group,
                                                                           Timeout timeout) {
                   for (size_t i = 0; i < inputs.size(); ++i) {
                     ReduceScatterOne(group, outputs[i], inputs[i], op, timeout);
                   }
                 });
}

namespace {

// Rows of the first dimension; all alike without splits.
Tensors Split(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size) {
  if (splits.empty()) {
    // Not split(): that makes one part of a tensor without rows.
    return tensor.split_with_sizes(
        std::vector<int64_t>(static_cast<size_t>(size), tensor.size(0) / size));
  }
  return tensor.split_with_sizes(splits);
}

}  // namespace

WorkPtr ProcessGroupGradsync::alltoall_base(at::Tensor& output, at::Tensor& input,
                                            std::vector<int64_t>& output_splits,
                                            std::vector<int64_t>& input_splits,
                                            const c10d::AllToAllOptions& opts) {
  CheckOnCpu(output, "all_to_all_single");
  CheckOnCpu(input, "all_to_all_single");
  CheckSplits(output, output_splits, size_, "all_to_all_single");
  CheckSplits(input, input_splits, size_, "all_to_all_single");
  TORCH_CHECK_TYPE(output.scalar_type() == input.scalar_type(),
                   "gradsync: all_to_all_single needs tensors of one type, but was given ",
                   input.scalar_type(), " and ", output.scalar_type());
  const Call call{c10d::OpType::ALLTOALL_BASE, "gradsync:all_to_all_single", opts.timeout,
                  opts.asyncOp};
  // Without splits on this rank there are none on any, and nothing to agree on.
  if (output_splits.empty() && input_splits.empty()) {
    TORCH_CHECK_VALUE(output.numel() == input.numel(), "gradsync: all_to_all_single was given ",
                      input.numel(), " elements for an output of ", output.numel());
    return Start(call, {output}, [output, input](const Group& group, Timeout timeout) {
      AllToAllOne(group, output, input, timeout);
    });
  }
  return Start(
      call, {output},
      [outputs = Split(output, output_splits, size_), inputs = Split(input, input_splits, size_)](
          const Group& group, Timeout timeout) { AllToAllList(group, outputs, inputs, timeout); });
}

WorkPtr ProcessGroupGradsync::alltoall(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllToAllOptions& opts) {
  CheckList(outputs, outputs.empty() ? at::Tensor() : outputs[0], {size_, 0}, "all_to_all");
  CheckList(inputs, inputs.empty() ? at::Tensor() : inputs[0], {size_, 0}, "all_to_all");
  CheckOnCpu(outputs[0], "all_to_all");
  CheckOnCpu(inputs[0], "all_to_all");
  TORCH_CHECK_TYPE(outputs[0].scalar_type() == inputs[0].scalar_type(),
                   "gradsync: all_to_all needs tensors of one type, but was given ",
                   inputs[0].scalar_type(), " and ", outputs[0].scalar_type());
  return Start({c10d::OpType::ALLTOALL, "gradsync:all_to_all", opts.timeout, opts.asyncOp}, outputs,
               [outputs, inputs](const Group& group, Timeout timeout) {
                 AllToAllList(group, outputs, inputs, timeout);
               });
}

WorkPtr ProcessGroupGradsync::barrier(const c10d::BarrierOptions& opts) {
  c10::Device device = opts.device.value_or(at::kCPU);
  if (device.is_cuda() && !device.has_index()) device = CurrentCudaDevice();
  return StartOn(device.is_cuda() ? device : c10::Device(at::kCPU),
                 {c10d::OpType::BARRIER, "gradsync:barrier", opts.timeout, opts.asyncOp}, {},
                 [](Collectives& group, Timeout timeout) { group.Barrier(timeout); });
}

void ProcessGroupGradsync::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const std::lock_guard lock(monitored_barrier_mutex_);
  monitored_barrier_.Run(TimeoutOr(opts.timeout), wait_all_ranks);
}

c10::intrusive_ptr<CollectiveWork> ProcessGroupGradsync::NewMessage(c10d::OpType type,
                                                                    const char* title,
                                                                    Tensors tensors) {
  return c10::make_intrusive<CollectiveWork>(rank_, type, title, std::move(tensors), sequence_,
                                             timeout_.load());
}

WorkPtr ProcessGroupGradsync::send(Tensors& tensors, int to, int tag) {
  const at::Tensor& tensor = OnlyOne(tensors, "send");
  CheckOnCpu(tensor, "send");
  const uint32_t receiver = CheckRoot(to, size_, "send");
  auto work = NewMessage(c10d::OpType::SEND, "gradsync:send", tensors);
  messenger_.Send(work, tensor, receiver, static_cast<uint32_t>(tag), timeout_.load());
  return work;
}

WorkPtr ProcessGroupGradsync::recv(Tensors& tensors, int from, int tag) {
  const at::Tensor& tensor = OnlyOne(tensors, "recv");
  CheckOnCpu(tensor, "recv");
  const uint32_t sender = CheckRoot(from, size_, "recv");
  auto work = NewMessage(c10d::OpType::RECV, "gradsync:recv", tensors);
  messenger_.Receive(work, tensor, sender, static_cast<uint32_t>(tag), timeout_.load());
  return work;
}

WorkPtr ProcessGroupGradsync::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor& tensor = OnlyOne(tensors, "recv");
  CheckOnCpu(tensor, "recv");
  auto work = NewMessage(c10d::OpType::RECVANYSOURCE, "gradsync:recv_any_source", tensors);
  messenger_.Receive(work, tensor, GRADSYNC_ANY_RANK, static_cast<uint32_t>(tag), timeout_.load());
  return work;
}

}  // namespace gradsync::torch

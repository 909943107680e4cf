#include "client/torch/process_group.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "client/torch/interpreter.h"
#include "client/torch/tensors.h"

namespace gradsync::torch {
namespace {

gradsync_reduce_op ToReduceOp(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return GRADSYNC_SUM;
    case c10d::ReduceOp::AVG:
      return GRADSYNC_AVG;
    case c10d::ReduceOp::MIN:
      return GRADSYNC_MIN;
    case c10d::ReduceOp::MAX:
      return GRADSYNC_MAX;
    case c10d::ReduceOp::PRODUCT:
      return GRADSYNC_PRODUCT;
    default:
      C10_THROW_ERROR(NotImplementedError,
                      "gradsync: of the reduce operations only SUM, AVG, MIN, MAX and PRODUCT are "
                      "implemented yet");
  }
}

gradsync_dtype DTypeToReduce(const at::Tensor& tensor) {
  const auto dtype = DTypeOf(tensor.scalar_type());
  TORCH_CHECK_TYPE(dtype.has_value(), "gradsync: all_reduce does not take tensors of type ",
                   tensor.scalar_type());
  return *dtype;
}

[[noreturn]] void NotOffered(const char* operation) {
  C10_THROW_ERROR(NotImplementedError,
                  std::string("gradsync: ") + operation +
                      " is not implemented yet; use a group of another backend for it, made by "
                      "torch.distributed.new_group(backend=\"gloo\")");
}

const at::Tensor& OnlyOne(const std::vector<at::Tensor>& tensors, const char* operation) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "gradsync: ", operation,
                    " takes one tensor, but was given ", tensors.size());
  CheckDenseCpu(tensors[0], operation);
  return tensors[0];
}

// Calls `operation` on `tensor`, or on a copy that lies in one piece and is copied back.
template <typename Operation>
void InPlace(const at::Tensor& tensor, Operation operation) {
  if (IsPlain(tensor)) {
    operation(tensor);
    return;
  }
  const at::Tensor plain = NewPlain(tensor).copy_(tensor);
  operation(plain);
  tensor.copy_(plain);
}

at::Tensor PlainInput(const at::Tensor& tensor) {
  return IsPlain(tensor) ? tensor : NewPlain(tensor).copy_(tensor);
}

void AllReduceOne(const Group& group, const at::Tensor& tensor, gradsync_dtype dtype,
                  gradsync_reduce_op op, Timeout timeout) {
  InPlace(tensor, [&](const at::Tensor& plain) {
    group.AllReduce(plain.data_ptr(), static_cast<uint64_t>(plain.numel()), dtype, op, timeout);
  });
}

void GatherOne(const Group& group, const at::Tensor& output, const at::Tensor& input,
               Timeout timeout) {
  const at::Tensor plain = PlainInput(input);
  const Elements elements = ElementsToMove(plain);
  InPlace(output, [&](const at::Tensor& target) {
    group.AllGather(plain.data_ptr(), target.data_ptr(), elements.count, elements.dtype, timeout);
  });
}

void CheckGather(const at::Tensor& output, const at::Tensor& input, int size,
                 const char* operation) {
  CheckDenseCpu(output, operation);
  CheckDenseCpu(input, operation);
  TORCH_CHECK_TYPE(output.scalar_type() == input.scalar_type(), "gradsync: ", operation,
                   " was given an output of type ", output.scalar_type(), " for an input of type ",
                   input.scalar_type());
  TORCH_CHECK_VALUE(output.numel() == input.numel() * size, "gradsync: ", operation,
                    " needs an output of ", input.numel() * size, " elements (", size,
                    " ranks times the input's ", input.numel(), "), but was given one of ",
                    output.numel());
}

// A list of outputs, one for each rank.
void GatherList(const Group& group, const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                Timeout timeout) {
  const at::Tensor all =
      at::empty({static_cast<int64_t>(outputs.size()), input.numel()}, input.options());
  GatherOne(group, all, input, timeout);
  for (size_t rank = 0; rank < outputs.size(); ++rank) {
    outputs[rank].copy_(all[static_cast<int64_t>(rank)].view(input.sizes()));
  }
}

void CheckGatherList(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int size) {
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size),
                    "gradsync: all_gather needs one output for each of the ", size,
                    " ranks, but was given ", outputs.size());
  CheckDenseCpu(input, "all_gather");
  for (const at::Tensor& output : outputs) {
    CheckDenseCpu(output, "all_gather");
    TORCH_CHECK_VALUE(
        output.sizes() == input.sizes() && output.scalar_type() == input.scalar_type(),
        "gradsync: all_gather needs outputs of the input's sizes and type (", input.sizes(), " ",
        input.scalar_type(), "), but was given one of ", output.sizes(), " ", output.scalar_type());
  }
}

}  // namespace

ProcessGroupGradsync::ProcessGroupGradsync(std::shared_ptr<Session> session,
                                           const std::string& group_name,
                                           const std::vector<uint32_t>& ranks, int rank,
                                           std::chrono::milliseconds timeout, bool owns_session)
    : Backend(rank, static_cast<int>(ranks.size())),
      session_(std::move(session)),
      group_(std::make_shared<const Group>(session_, "c10d:" + group_name, ranks, timeout)),
      owns_session_(owns_session),
      timeout_(timeout) {
  init();
}

ProcessGroupGradsync::~ProcessGroupGradsync() {
  const WithoutInterpreter released;
  worker_.Finish();
}

c10::intrusive_ptr<c10d::Backend::Options> ProcessGroupGradsync::getBackendOptions() {
  return c10::make_intrusive<Options>("gradsync", timeout_.load());
}

void ProcessGroupGradsync::shutdown() {
  const WithoutInterpreter released;
  worker_.Finish();
  if (owns_session_) session_->Close();
}

void ProcessGroupGradsync::abort() {
  const WithoutInterpreter released;
  worker_.Abandon();
  if (owns_session_) session_->Close();
}

template <typename Operation>
c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::Start(const Call& call,
                                                           std::vector<at::Tensor> outputs,
                                                           Operation operation) {
  const std::chrono::milliseconds timeout =
      call.timeout == c10d::kUnsetTimeout ? timeout_.load() : call.timeout;
  auto work = c10::make_intrusive<CollectiveWork>(rank_, call.type, call.title, std::move(outputs),
                                                  ++sequence_, timeout);
  worker_.Run(
      work,
      [group = group_, operation = std::move(operation), timeout] {
        // What is copied here is nobody's gradient, and the worker's thread inherits no mode.
        const at::NoGradGuard no_grad;
        operation(*group, timeout);
      },
      !call.async);
  return work;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::allreduce(std::vector<at::Tensor>& tensors,
                                                               const c10d::AllreduceOptions& opts) {
  const at::Tensor& tensor = OnlyOne(tensors, "all_reduce");
  return Start({c10d::OpType::ALLREDUCE, "gradsync:all_reduce", opts.timeout, opts.asyncOp},
               tensors,
               [tensor, dtype = DTypeToReduce(tensor), op = ToReduceOp(opts.reduceOp)](
                   const Group& group, Timeout timeout) {
                 AllReduceOne(group, tensor, dtype, op, timeout);
               });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::allreduce_coalesced(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  for (const at::Tensor& tensor : tensors) {
    CheckDenseCpu(tensor, "all_reduce_coalesced");
    DTypeToReduce(tensor);
  }
  return Start({c10d::OpType::ALLREDUCE_COALESCED, "gradsync:all_reduce_coalesced", opts.timeout,
                opts.asyncOp},
               tensors,
               [tensors, op = ToReduceOp(opts.reduceOp)](const Group& group, Timeout timeout) {
                 for (const at::Tensor& tensor : tensors) {
                   AllReduceOne(group, tensor, DTypeToReduce(tensor), op, timeout);
                 }
               });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::broadcast(std::vector<at::Tensor>& tensors,
                                                               const c10d::BroadcastOptions& opts) {
  const at::Tensor& tensor = OnlyOne(tensors, "broadcast");
  TORCH_CHECK_VALUE(opts.rootRank >= 0 && opts.rootRank < size_, "gradsync: broadcast from rank ",
                    opts.rootRank, " of a group of ", size_);
  return Start(
      {c10d::OpType::BROADCAST, "gradsync:broadcast", opts.timeout, opts.asyncOp}, tensors,
      [tensor, root = static_cast<uint32_t>(opts.rootRank)](const Group& group, Timeout timeout) {
        const Elements elements = ElementsToMove(tensor);
        InPlace(tensor, [&](const at::Tensor& plain) {
          group.Broadcast(plain.data_ptr(), elements.count, elements.dtype, root, timeout);
        });
      });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::allgather(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& opts) {
  const at::Tensor& input = OnlyOne(inputs, "all_gather");
  TORCH_CHECK_VALUE(outputs.size() == 1,
                    "gradsync: all_gather takes one list of outputs, but was given ",
                    outputs.size());
  CheckGatherList(outputs[0], input, size_);
  return Start({c10d::OpType::ALLGATHER, "gradsync:all_gather", opts.timeout, opts.asyncOp},
               outputs[0], [targets = outputs[0], input](const Group& group, Timeout timeout) {
                 GatherList(group, targets, input, timeout);
               });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::allgather_coalesced(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& opts) {
  // outputs[rank][i] is inputs[i] of that rank.
  std::vector<std::vector<at::Tensor>> by_input(inputs.size());
  std::vector<at::Tensor> all;
  for (const std::vector<at::Tensor>& of_rank : outputs) {
    TORCH_CHECK_VALUE(
        of_rank.size() == inputs.size(),
        "gradsync: all_gather_coalesced needs as many outputs of each rank as there are "
        "inputs (",
        inputs.size(), "), but was given ", of_rank.size());
    for (size_t i = 0; i < inputs.size(); ++i) by_input[i].push_back(of_rank[i]);
    all.insert(all.end(), of_rank.begin(), of_rank.end());
  }
  for (size_t i = 0; i < inputs.size(); ++i) CheckGatherList(by_input[i], inputs[i], size_);
  return Start({c10d::OpType::ALLGATHER_COALESCED, "gradsync:all_gather_coalesced", opts.timeout,
                opts.asyncOp},
               std::move(all),
               [by_input = std::move(by_input), inputs](const Group& group, Timeout timeout) {
                 for (size_t i = 0; i < inputs.size(); ++i) {
                   GatherList(group, by_input[i], inputs[i], timeout);
                 }
               });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::all_gather_single(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  CheckGather(output, input, size_, "all_gather_single");
  return Start(
      {c10d::OpType::_ALLGATHER_BASE, "gradsync:all_gather_single", opts.timeout, opts.asyncOp},
      {output}, [output, input](const Group& group, Timeout timeout) {
        GatherOne(group, output, input, timeout);
      });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::all_gather_single_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(),
                    "gradsync: all_gather_single_coalesced was given ", outputs.size(),
                    " outputs for ", inputs.size(), " inputs");
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckGather(outputs[i], inputs[i], size_, "all_gather_single_coalesced");
  }
  return Start({c10d::OpType::ALLGATHER_INTO_TENSOR_COALESCED,
                "gradsync:all_gather_single_coalesced", opts.timeout, opts.asyncOp},
               outputs, [outputs, inputs](const Group& group, Timeout timeout) {
                 for (size_t i = 0; i < inputs.size(); ++i) {
                   GatherOne(group, outputs[i], inputs[i], timeout);
                 }
               });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::barrier(const c10d::BarrierOptions& opts) {
  return Start({c10d::OpType::BARRIER, "gradsync:barrier", opts.timeout, opts.asyncOp}, {},
               [](const Group& group, Timeout timeout) { group.Barrier(timeout); });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::allreduce_sparse(
    std::vector<at::Tensor>&, const c10d::AllreduceOptions&) {
  NotOffered("all_reduce of sparse tensors");
}
c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::reduce(std::vector<at::Tensor>&,
                                                            const c10d::ReduceOptions&) {
  NotOffered("reduce");
}
c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::gather(std::vector<std::vector<at::Tensor>>&,
                                                            std::vector<at::Tensor>&,
                                                            const c10d::GatherOptions&) {
  NotOffered("gather");
}
c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::gather_single(at::Tensor&, at::Tensor&,
                                                                   const c10d::GatherOptions&) {
  NotOffered("gather_single");
}
c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::scatter(std::vector<at::Tensor>&,
                                                             std::vector<std::vector<at::Tensor>>&,
                                                             const c10d::ScatterOptions&) {
  NotOffered("scatter");
}
c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::reduce_scatter(
    std::vector<at::Tensor>&, std::vector<std::vector<at::Tensor>>&,
    const c10d::ReduceScatterOptions&) {
  NotOffered("reduce_scatter");
}
c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::reduce_scatter_single(
    at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) {
  NotOffered("reduce_scatter_single");
}
c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::reduce_scatter_single_coalesced(
    std::vector<at::Tensor>&, std::vector<at::Tensor>&, const c10d::ReduceScatterOptions&) {
  NotOffered("reduce_scatter_single_coalesced");
}
c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::all_to_all_single(
    at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
    const c10d::AllToAllOptions&) {
  NotOffered("all_to_all_single");
}
c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::alltoall(std::vector<at::Tensor>&,
                                                              std::vector<at::Tensor>&,
                                                              const c10d::AllToAllOptions&) {
  NotOffered("all_to_all");
}
c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::send(std::vector<at::Tensor>&, int, int) {
  NotOffered("send");
}
c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::recv(std::vector<at::Tensor>&, int, int) {
  NotOffered("recv");
}
c10::intrusive_ptr<c10d::Work> ProcessGroupGradsync::recvAnysource(std::vector<at::Tensor>&, int) {
  NotOffered("recv from any source");
}

}  // namespace gradsync::torch

#include "client/torch/group_collectives.h"

#include <utility>

#include "client/torch/device.h"
#include "client/torch/errors.h"
#include "client/torch/tensors.h"

namespace gradsync::torch {
namespace {

gradsync_dtype ReducedType(const at::Tensor& tensor) { return *DTypeOf(tensor.scalar_type()); }

uint64_t CountOf(const at::Tensor& tensor) { return static_cast<uint64_t>(tensor.numel()); }

gradsync_collective Moving(gradsync_collective_kind kind, const at::Tensor& moved) {
  const Elements elements = ElementsToMove(moved);
  gradsync_collective what{};
  what.kind = kind;
  what.dtype = elements.dtype;
  what.count = elements.count;
  return what;
}

gradsync_collective Reducing(gradsync_collective_kind kind, const at::Tensor& result,
                             gradsync_reduce_op op) {
  gradsync_collective what{};
  what.kind = kind;
  what.dtype = ReducedType(result);
  what.op = op;
  what.count = CountOf(result);
  return what;
}

}  // namespace

void HostCollectives::AllReduce(const at::Tensor& data, gradsync_reduce_op op, Timeout timeout) {
  group_.AllReduce(data.data_ptr(), CountOf(data), ReducedType(data), op, timeout);
}

void HostCollectives::Broadcast(const at::Tensor& data, uint32_t root, Timeout timeout) {
  const Elements elements = ElementsToMove(data);
  group_.Broadcast(data.data_ptr(), elements.count, elements.dtype, root, timeout);
}

void HostCollectives::AllGather(const at::Tensor& input, const at::Tensor& output,
                                Timeout timeout) {
  const Elements elements = ElementsToMove(input);
  group_.AllGather(input.data_ptr(), output.data_ptr(), elements.count, elements.dtype, timeout);
}

void HostCollectives::Reduce(const at::Tensor& data, gradsync_reduce_op op, uint32_t root,
                             Timeout timeout) {
  group_.Reduce(data.data_ptr(), CountOf(data), ReducedType(data), op, root, timeout);
}

void HostCollectives::ReduceScatter(const at::Tensor& input, const at::Tensor& output,
                                    gradsync_reduce_op op, Timeout timeout) {
  group_.ReduceScatter(input.data_ptr(), output.data_ptr(), CountOf(output), ReducedType(output),
                       op, timeout);
}

void HostCollectives::Share(const at::Tensor& data, Timeout timeout) {
  const Elements elements = ElementsToMove(data);
  group_.Share(data.data_ptr(), elements.count, elements.dtype, timeout);
}

void Enqueued::Wait(const c10::Stream& stream) const {
  gradsync_error error{};
  Check(gradsync_work_wait(work_.get(), stream.native_handle(), &error), error);
}

bool Enqueued::IsDone() const {
  gradsync_error error{};
  int done = 0;
  Check(gradsync_work_query(work_.get(), &done, &error), error);
  return done != 0;
}

void Enqueued::Synchronize() const {
  gradsync_error error{};
  Check(gradsync_work_synchronize(work_.get(), &error), error);
}

void DeviceCollectives::AllReduce(const at::Tensor& data, gradsync_reduce_op op, Timeout timeout) {
  Enqueue(Reducing(GRADSYNC_ALL_REDUCE, data, op), {}, data, timeout);
}

void DeviceCollectives::Broadcast(const at::Tensor& data, uint32_t root, Timeout timeout) {
  gradsync_collective what = Moving(GRADSYNC_BROADCAST, data);
  what.root = root;
  Enqueue(what, {}, data, timeout);
}

void DeviceCollectives::AllGather(const at::Tensor& input, const at::Tensor& output,
                                  Timeout timeout) {
  Enqueue(Moving(GRADSYNC_ALL_GATHER, input), input, output, timeout);
}

void DeviceCollectives::Reduce(const at::Tensor& data, gradsync_reduce_op /*op*/, uint32_t /*root*/,
                               Timeout /*timeout*/) {
  CheckOnCpu(data, "reduce, or reduce_scatter of tensors of different sizes,");
}

void DeviceCollectives::ReduceScatter(const at::Tensor& input, const at::Tensor& output,
                                      gradsync_reduce_op op, Timeout timeout) {
  Enqueue(Reducing(GRADSYNC_REDUCE_SCATTER, output, op), input, output, timeout);
}

void DeviceCollectives::Share(const at::Tensor& data, Timeout timeout) {
  Enqueue(Moving(GRADSYNC_SHARE, data), {}, data, timeout);
}

void DeviceCollectives::Barrier(Timeout timeout) {
  gradsync_collective what{};
  what.kind = GRADSYNC_BARRIER;
  Enqueue(what, {}, {}, timeout);
}

void DeviceCollectives::Enqueue(gradsync_collective what, const at::Tensor& input,
                                const at::Tensor& output, Timeout timeout) {
  what.struct_size = sizeof(what);
  what.timeout_ms = Milliseconds(timeout);
  what.input = input.defined() ? input.data_ptr() : nullptr;
  what.output = output.defined() ? output.data_ptr() : nullptr;
  gradsync_error error{};
  gradsync_work* work = nullptr;
  Check(gradsync_enqueue(group_.handle(), NumberOf(device_), &what,
                         CurrentStream(device_).native_handle(), &work, &error),
        error);
  last_ = std::make_shared<const Enqueued>(work);
  if (aside_) guard_.reset_stream(*aside_);
  last_->Wait(CurrentStream(device_));
  // Until the stream that waits has come to the result, nobody else may have the memory.
  for (const at::Tensor* tensor : {&input, &output}) {
    if (tensor->defined()) KeepForCurrentStream(*tensor);
  }
}

std::unique_ptr<Collectives> CollectivesOn(c10::Device device, const Group& group) {
  if (device.is_cpu()) return std::make_unique<HostCollectives>(group);
  return std::make_unique<DeviceCollectives>(group, device);
}

}  // namespace gradsync::torch

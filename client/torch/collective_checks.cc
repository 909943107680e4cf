#include "client/torch/collective_checks.h"

#include <numeric>

#include "client/torch/tensors.h"

namespace gradsync::torch {

namespace {

gradsync_reduce_op OpOf(const c10d::ReduceOp& op) {
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
    case c10d::ReduceOp::BAND:
      return GRADSYNC_BIT_AND;
    case c10d::ReduceOp::BOR:
      return GRADSYNC_BIT_OR;
    case c10d::ReduceOp::BXOR:
      return GRADSYNC_BIT_XOR;
    default:
      C10_THROW_ERROR(NotImplementedError,
                      "gradsync: of the reduce operations only SUM, AVG, MIN, MAX, PRODUCT, BAND, "
                      "BOR and BXOR are offered");
  }
}

}  // namespace

gradsync_reduce_op ToReduceOp(const c10d::ReduceOp& op, c10::Device device) {
  const gradsync_reduce_op result = OpOf(op);
  const bool is_bitwise =
      result == GRADSYNC_BIT_AND || result == GRADSYNC_BIT_OR || result == GRADSYNC_BIT_XOR;
  TORCH_CHECK_NOT_IMPLEMENTED(
      device.is_cpu() || !is_bitwise,
      "gradsync: BAND, BOR and BXOR are not offered for tensors on a GPU: move the tensor to the "
      "CPU first, or use a gloo group for it");
  return result;
}

void CheckReduces(const at::Tensor& tensor, const char* operation) {
  TORCH_CHECK_TYPE(DTypeOf(tensor.scalar_type()).has_value(), "gradsync: ", operation,
                   " does not take tensors of type ", tensor.scalar_type());
}

const at::Tensor& OnlyOne(const std::vector<at::Tensor>& tensors, const char* operation) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "gradsync: ", operation,
                    " takes one tensor, but was given ", tensors.size());
  CheckDense(tensors[0], operation);
  return tensors[0];
}

const std::vector<at::Tensor>& OnlyList(const std::vector<std::vector<at::Tensor>>& lists,
                                        const char* operation) {
  TORCH_CHECK_VALUE(lists.size() == 1, "gradsync: ", operation,
                    " takes one list of tensors, but was given ", lists.size());
  return lists[0];
}

namespace {

void CheckOneDevice(const at::Tensor& a, const at::Tensor& b, const char* operation) {
  TORCH_CHECK_VALUE(a.device() == b.device(), "gradsync: ", operation,
                    " needs tensors on one device, but was given some on ", a.device(), " and ",
                    b.device());
}

}  // namespace

c10::Device CheckOneDevice(const std::vector<at::Tensor>& tensors, const char* operation) {
  for (const at::Tensor& tensor : tensors) {
    CheckDense(tensor, operation);
    CheckOneDevice(tensors[0], tensor, operation);
  }
  return tensors.empty() ? at::kCPU : tensors[0].device();
}

uint32_t CheckRoot(int64_t root, int size, const char* operation) {
  TORCH_CHECK_VALUE(root >= 0 && root < size, "gradsync: ", operation, " with rank ", root,
                    " of a group of ", size);
  return static_cast<uint32_t>(root);
}

void CheckBlocks(const at::Tensor& large, const at::Tensor& small, int size,
                 const char* operation) {
  CheckDense(large, operation);
  CheckDense(small, operation);
  TORCH_CHECK_TYPE(large.scalar_type() == small.scalar_type(), "gradsync: ", operation,
                   " was given tensors of types ", large.scalar_type(), " and ",
                   small.scalar_type(), "; input and output must be of one type");
  CheckOneDevice(large, small, operation);
  TORCH_CHECK_VALUE(large.numel() == small.numel() * size, "gradsync: ", operation,
                    " needs a tensor of ", small.numel() * size, " elements (", size,
                    " ranks times ", small.numel(), "), but was given one of ", large.numel());
}

namespace {

void CheckListTypes(const std::vector<at::Tensor>& tensors, const at::Tensor& like, int size,
                    const char* operation) {
  TORCH_CHECK_VALUE(tensors.size() == static_cast<size_t>(size), "gradsync: ", operation,
                    " needs one tensor for each of the ", size, " ranks, but was given ",
                    tensors.size());
  CheckDense(like, operation);
  for (const at::Tensor& tensor : tensors) {
    CheckDense(tensor, operation);
    TORCH_CHECK_VALUE(tensor.scalar_type() == like.scalar_type(), "gradsync: ", operation,
                      " needs tensors of one type, but was given ", like.scalar_type(), " and ",
                      tensor.scalar_type());
    CheckOneDevice(like, tensor, operation);
  }
}

void CheckSizes(const at::Tensor& tensor, const at::Tensor& like, size_t rank,
                const char* operation) {
  TORCH_CHECK_VALUE(tensor.sizes() == like.sizes(), "gradsync: ", operation,
                    " was given tensors of sizes ", like.sizes(), " and, for rank ", rank, ", ",
                    tensor.sizes(), "; they must be the same");
}

}  // namespace

void CheckList(const std::vector<at::Tensor>& tensors, const at::Tensor& like, GroupSize group,
               const char* operation) {
  CheckListTypes(tensors, like, group.size, operation);
  const auto own = static_cast<size_t>(group.rank);
  CheckSizes(tensors[own], like, own, operation);
}

void CheckEqualList(const std::vector<at::Tensor>& tensors, const at::Tensor& like, GroupSize group,
                    const char* operation) {
  CheckListTypes(tensors, like, group.size, operation);
  for (size_t rank = 0; rank < tensors.size(); ++rank) {
    CheckSizes(tensors[rank], like, rank, operation);
  }
}

void CheckSplits(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size,
                 const char* operation) {
  CheckDense(tensor, operation);
  const int64_t rows = tensor.dim() == 0 ? 0 : tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(
        tensor.dim() > 0 && rows % size == 0,
        "Tensor's dim 0 does not divide equally across group size: gradsync: ", operation, " over ",
        size, " ranks was given a tensor of sizes ", tensor.sizes());
    return;
  }
  TORCH_CHECK_VALUE(splits.size() == static_cast<size_t>(size),
                    "Number of tensor splits not equal to group size: gradsync: ", operation,
                    " over ", size, " ranks was given ", splits.size(), " splits");
  for (const int64_t split : splits) {
    TORCH_CHECK_VALUE(split >= 0, "gradsync: ", operation, " was given a split of ", split);
  }
  const int64_t sum = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  TORCH_CHECK_VALUE(sum == rows,
                    "Split sizes doesn't match total dim 0 size: gradsync: ", operation,
                    " was given splits of ", sum, " rows in all for ", rows);
}

}  // namespace gradsync::torch

#include "client/torch/sparse_average.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "client/torch/group_collectives.h"

namespace gradsync::torch {
namespace {

// How a gradient is made up, the same on every rank but for the number of its rows.
struct Shape {
  int64_t rows = 0;         // of its values
  int64_t sparse_dims = 0;  // 0: this rank has none, and follows the others
};

// Every rank's `tensor`, its first dimension filled up to `rows`.
std::vector<at::Tensor> Gather(Collectives& group, const at::Tensor& tensor, int64_t rows,
                               Timeout timeout) {
  at::DimVector sizes(tensor.sizes());
  sizes[0] = rows;
  const at::Tensor padded = at::zeros(sizes, tensor.options());
  padded.narrow(0, 0, tensor.size(0)).copy_(tensor);
  sizes.insert(sizes.begin(), group.size());
  const at::Tensor all = at::empty(sizes, tensor.options());
  group.AllGather(padded, all, timeout);
  return all.unbind(0);
}

std::vector<Shape> GatherShapes(const Group& group, const Shape& own, Timeout timeout) {
  static_assert(sizeof(Shape) == 2 * sizeof(int64_t));
  std::vector<Shape> shapes(group.size());
  group.AllGather(&own, shapes.data(), 2, GRADSYNC_INT64, timeout);
  return shapes;
}

}  // namespace

at::Tensor AverageSparse(const Group& group, const at::Tensor& parameter,
                         const at::Tensor& gradient, Timeout timeout) {
  const at::NoGradGuard no_grad;
  const at::Tensor own = gradient.defined() ? gradient.coalesce() : at::Tensor();
  const std::vector<Shape> shapes =
      GatherShapes(group, own.defined() ? Shape{own._nnz(), own.sparse_dim()} : Shape{}, timeout);
  Shape longest;
  for (const Shape& shape : shapes) {
    longest.rows = std::max(longest.rows, shape.rows);
    longest.sparse_dims = std::max(longest.sparse_dims, shape.sparse_dims);
  }
  const auto options = at::TensorOptions(parameter.device()).dtype(parameter.scalar_type());
  if (longest.rows == 0) return at::empty(parameter.sizes(), options.layout(at::kSparse));

  at::DimVector value_sizes(parameter.sizes().slice(static_cast<size_t>(longest.sparse_dims)));
  value_sizes.insert(value_sizes.begin(), 0);
  // Row by row, so that a rank's come together.
  const at::Tensor indices = own.defined()
                                 ? own.indices().t()
                                 : at::empty({0, longest.sparse_dims}, options.dtype(at::kLong));
  const at::Tensor values = own.defined() ? own.values() : at::empty(value_sizes, options);
  const std::unique_ptr<Collectives> collectives = CollectivesOn(parameter.device(), group);
  std::vector<at::Tensor> all_indices = Gather(*collectives, indices, longest.rows, timeout);
  std::vector<at::Tensor> all_values = Gather(*collectives, values, longest.rows, timeout);
  for (size_t rank = 0; rank < shapes.size(); ++rank) {
    all_indices[rank] = all_indices[rank].narrow(0, 0, shapes[rank].rows);
    all_values[rank] = all_values[rank].narrow(0, 0, shapes[rank].rows);
  }
  const at::Tensor sum = at::sparse_coo_tensor(at::cat(all_indices).t(), at::cat(all_values),
                                               parameter.sizes(), options)
                             .coalesce();
  return sum.div_(static_cast<int64_t>(group.size()));
}

}  // namespace gradsync::torch

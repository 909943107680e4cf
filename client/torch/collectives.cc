#include "client/torch/collectives.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <string>

#include "client/torch/errors.h"
#include "client/torch/message_tags.h"
#include "client/torch/tensors.h"

namespace gradsync::torch {
namespace {

uint64_t CountOf(const at::Tensor& tensor) { return static_cast<uint64_t>(tensor.numel()); }

// All in one piece, one after the other.
at::Tensor Flatten(const Tensors& tensors) {
  at::Tensor flat =
      at::empty({static_cast<int64_t>(tensors.size()), tensors[0].numel()}, tensors[0].options());
  for (size_t i = 0; i < tensors.size(); ++i) {
    CopyOnCurrentStream(flat[static_cast<int64_t>(i)].view(tensors[i].sizes()), tensors[i]);
  }
  return flat;
}

void Unflatten(const at::Tensor& flat, const Tensors& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    CopyOnCurrentStream(tensors[i], flat[static_cast<int64_t>(i)].view(tensors[i].sizes()));
  }
}

at::Tensor NewFlat(const at::Tensor& like, size_t blocks) {
  return at::empty({static_cast<int64_t>(blocks), like.numel()}, like.options());
}

bool AllOfOneSize(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.numel() == tensors[0].numel();
  });
}

// What every rank has in the row `own` of `rows`.
void AllGatherRow(const Group& group, const at::Tensor& rows, const at::Tensor& own,
                  Timeout timeout) {
  group.AllGather(own.data_ptr(), rows.data_ptr(), CountOf(own), GRADSYNC_INT64, timeout);
}

at::Tensor Int64(const std::vector<int64_t>& values) { return at::tensor(values, at::kLong); }

struct Blocks {
  at::Tensor rows;      // row r: the bytes that rank r sends to each rank, then expects of each
  uint64_t number = 0;  // of this exchange, the same on every rank and never used again
};

Blocks AgreeOnBlocks(const Group& group, const Tensors& outputs, const Tensors& inputs,
                     Timeout timeout) {
  static std::atomic<uint32_t> exchanges{0};
  std::vector<int64_t> own;
  for (const Tensors* side : {&inputs, &outputs}) {
    for (const at::Tensor& block : *side) own.push_back(static_cast<int64_t>(block.nbytes()));
  }
  const auto blocks = static_cast<int64_t>(own.size());
  own.push_back(exchanges++);
  const at::Tensor all =
      at::empty({static_cast<int64_t>(group.size()), static_cast<int64_t>(own.size())}, at::kLong);
  AllGatherRow(group, all, Int64(own), timeout);
  return {all.narrow(1, 0, blocks), static_cast<uint64_t>(all[0][blocks].item<int64_t>())};
}

void CheckBlocks(const at::Tensor& rows) {
  const auto sizes = rows.accessor<int64_t, 2>();
  const int64_t ranks = rows.size(0);
  for (int64_t from = 0; from < ranks; ++from) {
    for (int64_t to = 0; to < ranks; ++to) {
      if (sizes[from][to] == sizes[to][ranks + from]) continue;
      throw Error(GRADSYNC_MISMATCH,
                  "gradsync: all_to_all: rank " + std::to_string(from) + " of the group sends " +
                      std::to_string(sizes[from][to]) + " bytes to rank " + std::to_string(to) +
                      ", which expects " + std::to_string(sizes[to][ranks + from]) +
                      " of it. Split sizes of both must agree.");
    }
  }
}

bool AllBlocksEqual(const at::Tensor& rows) {
  return rows.numel() == 0 || rows.eq(rows[0][0]).all().item<bool>();
}

// In as many rounds as there are ranks: in round k with the ranks k places before and behind. At no
// time has a rank more than one message that is not received. A block of an exchange that ended in
// the middle bears another number, and is never taken for one of this.
void ExchangeInPairs(const Group& group, const Tensors& outputs, const Tensors& inputs,
                     uint64_t number, Timeout timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const uint32_t size = group.size();
  const uint32_t own = group.rank();
  InPlace(outputs[own], [&](const at::Tensor& to) {
    const at::Tensor from = PlainInput(inputs[own]);
    CopyBytes(to.data_ptr(), from.data_ptr(), from.nbytes());
  });
  for (uint32_t round = 1; round < size; ++round) {
    const uint32_t to = (own + round) % size;
    const uint32_t from = (own + size - round) % size;
    const at::Tensor sent = PlainInput(inputs[to]);
    const auto left = std::max(
        Timeout(1), std::chrono::ceil<Timeout>(deadline - std::chrono::steady_clock::now()));
    const uint64_t tag = kTagOfAllToAll + number;
    const Request send = group.BeginSend(sent.data_ptr(), sent.nbytes(), to, tag, left);
    const Request receive = group.BeginReceive(from, tag, left);
    InPlace(outputs[from],
            [&](const at::Tensor& plain) { receive.End(plain.data_ptr(), plain.nbytes()); });
    send.End(nullptr, 0);
  }
}

// Rank `root`'s indices and values of `counts[root]` elements.
at::Tensor BroadcastSparse(const Group& group, const at::Tensor& own, const at::Tensor& like,
                           int64_t count, uint32_t root, Timeout timeout) {
  at::Tensor indices = own._indices().contiguous();
  at::Tensor values = own._values().contiguous();
  if (root != group.rank()) {
    std::vector<int64_t> sizes = values.sizes().vec();
    sizes[0] = count;
    indices = at::empty({own.sparse_dim(), count}, indices.options());
    values = at::empty(sizes, values.options());
  }
  HostCollectives collectives(group);
  BroadcastOne(collectives, indices, root, timeout);
  BroadcastOne(collectives, values, root, timeout);
  return at::sparse_coo_tensor(indices, values, like.sizes(), like.options());
}

}  // namespace

void AllReduceOne(Collectives& group, const at::Tensor& tensor, gradsync_reduce_op op,
                  Timeout timeout) {
  InPlace(tensor, [&](const at::Tensor& plain) { group.AllReduce(plain, op, timeout); });
}

void AllReduceSparse(const Group& group, const at::Tensor& tensor, Timeout timeout) {
  const at::Tensor own = tensor.coalesce();
  std::vector<int64_t> shape = {own._nnz(), own.sparse_dim(), own.dense_dim()};
  for (const int64_t extent : own.sizes()) shape.push_back(extent);
  const auto length = static_cast<int64_t>(shape.size());
  const at::Tensor shapes = at::empty({static_cast<int64_t>(group.size()), length}, at::kLong);
  AllGatherRow(group, shapes, Int64(shape), timeout);
  const auto row = shapes.accessor<int64_t, 2>();
  for (uint32_t rank = 0; rank < group.size(); ++rank) {
    for (int64_t i = 1; i < length; ++i) {
      if (row[rank][i] == row[0][i]) continue;
      throw Error(GRADSYNC_MISMATCH,
                  "gradsync: all_reduce of sparse tensors: sizes or dimensions "
                  "of rank " +
                      std::to_string(rank) + " of the group differ from those of rank 0");
    }
  }
  at::Tensor sum;
  for (uint32_t rank = 0; rank < group.size(); ++rank) {
    const at::Tensor one = BroadcastSparse(group, own, tensor, row[rank][0], rank, timeout);
    sum = sum.defined() ? sum + one : one;
  }
  tensor.copy_(sum.coalesce());
}

void BroadcastOne(Collectives& group, const at::Tensor& tensor, uint32_t root, Timeout timeout) {
  InPlace(tensor, [&](const at::Tensor& plain) { group.Broadcast(plain, root, timeout); });
}

void ReduceOne(Collectives& group, const at::Tensor& tensor, gradsync_reduce_op op, uint32_t root,
               Timeout timeout) {
  const auto reduce = [&](const at::Tensor& plain) { group.Reduce(plain, op, root, timeout); };
  if (group.rank() == root) {
    InPlace(tensor, reduce);
  } else {
    reduce(PlainInput(tensor));
  }
}

void GatherIntoOne(Collectives& group, const at::Tensor& output, const at::Tensor& input,
                   Timeout timeout) {
  const at::Tensor plain = PlainInput(input);
  InPlace(output, [&](const at::Tensor& target) { group.AllGather(plain, target, timeout); });
}

void AllGatherIntoList(Collectives& group, const Tensors& outputs, const at::Tensor& input,
                       Timeout timeout) {
  if (AllOfOneSize(outputs)) {
    const at::Tensor all = NewFlat(input, outputs.size());
    GatherIntoOne(group, all, input, timeout);
    Unflatten(all, outputs);
    return;
  }
  CopyOnCurrentStream(outputs[group.rank()], input);
  for (uint32_t rank = 0; rank < group.size(); ++rank) {
    BroadcastOne(group, outputs[rank], rank, timeout);
  }
}

void GatherIntoOneAt(const Group& group, const at::Tensor& output, const at::Tensor& input,
                     uint32_t root, Timeout timeout) {
  const at::Tensor plain = PlainInput(input);
  const Elements elements = ElementsToMove(plain);
  if (group.rank() != root) {
    group.Gather(plain.data_ptr(), nullptr, elements.count, elements.dtype, root, timeout);
    return;
  }
  InPlace(output, [&](const at::Tensor& target) {
    group.Gather(plain.data_ptr(), target.data_ptr(), elements.count, elements.dtype, root,
                 timeout);
  });
}

void GatherIntoListAt(const Group& group, const Tensors& outputs, const at::Tensor& input,
                      uint32_t root, Timeout timeout) {
  if (group.rank() != root) {
    GatherIntoOneAt(group, {}, input, root, timeout);
    return;
  }
  const at::Tensor all = NewFlat(input, outputs.size());
  GatherIntoOneAt(group, all, input, root, timeout);
  Unflatten(all, outputs);
}

void ScatterList(const Group& group, const at::Tensor& output, const Tensors& inputs, uint32_t root,
                 Timeout timeout) {
  const at::Tensor all = group.rank() == root ? Flatten(inputs) : at::Tensor();
  InPlace(output, [&](const at::Tensor& plain) {
    const Elements elements = ElementsToMove(plain);
    group.Scatter(all.defined() ? all.data_ptr() : nullptr, plain.data_ptr(), elements.count,
                  elements.dtype, root, timeout);
  });
}

void ReduceScatterOne(Collectives& group, const at::Tensor& output, const at::Tensor& input,
                      gradsync_reduce_op op, Timeout timeout) {
  const at::Tensor plain = PlainInput(input);
  InPlace(output,
          [&](const at::Tensor& target) { group.ReduceScatter(plain, target, op, timeout); });
}

void ReduceScatterList(Collectives& group, const at::Tensor& output, const Tensors& inputs,
                       gradsync_reduce_op op, Timeout timeout) {
  if (AllOfOneSize(inputs)) {
    ReduceScatterOne(group, output, Flatten(inputs), op, timeout);
    return;
  }
  for (uint32_t rank = 0; rank < group.size(); ++rank) {
    // The others' inputs stay as they are.
    if (rank != group.rank()) {
      ReduceOne(group, inputs[rank], op, rank, timeout);
      continue;
    }
    const at::Tensor own = NewPlain(inputs[rank]).copy_(inputs[rank]);
    ReduceOne(group, own, op, rank, timeout);
    output.copy_(own.view(output.sizes()));
  }
}

void AllToAllOne(const Group& group, const at::Tensor& output, const at::Tensor& input,
                 Timeout timeout) {
  const at::Tensor plain = PlainInput(input);
  const Elements elements = ElementsToMove(plain);
  InPlace(output, [&](const at::Tensor& target) {
    group.AllToAll(plain.data_ptr(), target.data_ptr(), elements.count / group.size(),
                   elements.dtype, timeout);
  });
}

void AllToAllList(const Group& group, const Tensors& outputs, const Tensors& inputs,
                  Timeout timeout) {
  const Blocks blocks = AgreeOnBlocks(group, outputs, inputs, timeout);
  CheckBlocks(blocks.rows);
  if (!AllBlocksEqual(blocks.rows)) {
    ExchangeInPairs(group, outputs, inputs, blocks.number, timeout);
    return;
  }
  const at::Tensor to = NewFlat(outputs[0], outputs.size());
  AllToAllOne(group, to, Flatten(inputs), timeout);
  Unflatten(to, outputs);
}

}  // namespace gradsync::torch

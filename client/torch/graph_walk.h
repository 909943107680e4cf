// Which parameters a backward pass can reach.
#ifndef GRADSYNC_CLIENT_TORCH_GRAPH_WALK_H_
#define GRADSYNC_CLIENT_TORCH_GRAPH_WALK_H_

#include <ATen/ATen.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <vector>

namespace gradsync::torch {

// Keeps its memory from one walk to the next, as it walks in every iteration. One thread at a time.
class GraphWalk {
 public:
  // The node at which the graph ends in the next parameter: they are numbered as they are added.
  void AddParameter(const ::torch::autograd::Node* accumulator);
  void ForgetParameters();

  // The parameters that no path from any of `outputs` leads to, in ascending order. Ends early when
  // it has found them all.
  const std::vector<uint32_t>& FindUnused(const std::vector<at::Tensor>& outputs);

 private:
  void Visit(const ::torch::autograd::Node* node);

  ska::flat_hash_map<const ::torch::autograd::Node*, uint32_t> parameters_;
  ska::flat_hash_set<const ::torch::autograd::Node*> seen_;
  std::vector<const ::torch::autograd::Node*> open_;  // seen, but not walked on from
  std::vector<uint8_t> reached_;                      // by parameter
  size_t reached_count_ = 0;
  std::vector<uint32_t> unused_;
};

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_GRAPH_WALK_H_

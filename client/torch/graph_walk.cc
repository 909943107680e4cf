#include "client/torch/graph_walk.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace gradsync::torch {

namespace autograd = ::torch::autograd;

void GraphWalk::AddParameter(const autograd::Node* accumulator) {
  parameters_.emplace(accumulator, static_cast<uint32_t>(reached_.size()));
  reached_.push_back(0);
}

void GraphWalk::ForgetParameters() {
  parameters_.clear();
  reached_.clear();
}

const std::vector<uint32_t>& GraphWalk::FindUnused(const std::vector<at::Tensor>& outputs) {
  seen_.clear();
  open_.clear();
  std::fill(reached_.begin(), reached_.end(), uint8_t{0});
  reached_count_ = 0;
  for (const at::Tensor& output : outputs) {
    // A parameter that is returned as it is has an edge, but no function.
    if (output.requires_grad()) Visit(autograd::impl::gradient_edge(output).function.get());
  }
  while (!open_.empty() && reached_count_ < reached_.size()) {
    const autograd::Node* node = open_.back();
    open_.pop_back();
    for (const autograd::Edge& edge : node->next_edges()) Visit(edge.function.get());
  }
  unused_.clear();
  for (uint32_t i = 0; i < reached_.size(); ++i) {
    if (reached_[i] == 0) unused_.push_back(i);
  }
  return unused_;
}

void GraphWalk::Visit(const autograd::Node* node) {
  if (node == nullptr || !seen_.insert(node).second) return;
  if (node->num_outputs() > 0) {
    open_.push_back(node);
    return;
  }
  // Only where the graph ends can it be a parameter.
  const auto parameter = parameters_.find(node);
  if (parameter == parameters_.end()) return;
  reached_[parameter->second] = 1;
  ++reached_count_;
}

}  // namespace gradsync::torch

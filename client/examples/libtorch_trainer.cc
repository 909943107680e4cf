// Data-parallel training with LibTorch, PyTorch's C++ interface, and no Python.
//
//   libtorch_trainer [--ranks N]     N = 1, 2 (the default) or 4
//
// Each rank, a process of its own, trains the same small network on its share of the samples.
// Gradients are made in the memory that the daemon reads, and a hook on each parameter says when
// one is complete, so that averaging goes on beside backward. Equal shares make that training on
// all samples: every step must have the loss that one process has alone, and every rank must end
// with the same network. The exit status says whether they did.
#include <sys/wait.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gradsync/gradsync.hpp"

namespace {

namespace gs = gradsync::client;
namespace autograd = torch::autograd;

constexpr int64_t kSamples = 64;
constexpr int64_t kFeatures = 8;
constexpr size_t kSteps = 20;
constexpr double kTolerance = 1e-5;  // shares are summed in another order than the whole

using Losses = std::array<double, kSteps>;

// LibTorch reports by exceptions; so does the rest of this program.
void Require(const gs::Status& status) {
  if (!status) throw std::runtime_error(status.error().ToString());
}
template <typename T>
T Require(gs::Result<T> result) {
  if (!result) throw std::runtime_error(result.error().ToString());
  return *std::move(result);
}

// Averages the gradients of a network over the ranks of a group, during each backward. The network
// must outlive it, and its gradients must be zeroed in place.
class GradientAverager {
 public:
  GradientAverager(const gs::Group& group, const torch::nn::Module& network)
      : ddp_(Require(gs::Ddp::Create(group, Describe(network)))) {
    for (const torch::Tensor& parameter : network.parameters()) AddHook(parameter);
  }
  ~GradientAverager() {
    for (const Hook& hook : hooks_) hook.accumulator->del_post_hook(hook.key);
  }
  GradientAverager(const GradientAverager&) = delete;
  GradientAverager& operator=(const GradientAverager&) = delete;

  // Before backward.
  void Begin() const { Require(ddp_.Begin()); }

  // After it: then every gradient is the average.
  void Finish() const {
    for (uint32_t bucket = 0; bucket < ddp_.bucket_count(); ++bucket) Require(ddp_.Wait(bucket));
    Require(ddp_.End());
  }

 private:
  struct Hook {
    // A parameter does not keep its own, and without it there is no hook.
    decltype(autograd::impl::grad_accumulator({})) accumulator;
    uintptr_t key = 0;
  };

  static std::vector<gs::Parameter> Describe(const torch::nn::Module& network) {
    std::vector<gs::Parameter> parameters;
    for (const auto& parameter : network.named_parameters()) {
      parameters.push_back({parameter.key(), GRADSYNC_FLOAT32, parameter->sizes().vec(), 0});
    }
    return parameters;
  }

  // Gives the parameter a gradient that lies in its slot: autograd adds to it in place.
  void AddHook(const torch::Tensor& parameter) {
    const auto index = static_cast<uint32_t>(hooks_.size());
    const gradsync_slot slot = Require(ddp_.Slot(index));
    gradsync_buffer_retain(slot.buffer);
    parameter.mutable_grad() = torch::from_blob(
        slot.data, parameter.sizes(),
        [buffer = slot.buffer](void* /*data*/) { gradsync_buffer_release(buffer); });
    auto accumulator = autograd::impl::grad_accumulator(parameter);
    const uintptr_t key =
        accumulator->add_post_hook(std::make_unique<autograd::utils::LambdaPostHook>(
            [this, index](const autograd::variable_list& outputs,
                          const autograd::variable_list& /*inputs*/) {
              Require(ddp_.Ready(index));
              return outputs;
            }));
    hooks_.push_back({std::move(accumulator), key});
  }

  gs::Ddp ddp_;
  std::vector<Hook> hooks_;
};

torch::nn::Sequential MakeNetwork(uint64_t seed) {
  torch::manual_seed(seed);
  return torch::nn::Sequential(torch::nn::Linear(kFeatures, 32), torch::nn::Tanh(),
                               torch::nn::Linear(32, 1));
}

// The samples [begin, end) and what the network is to say of them.
std::pair<torch::Tensor, torch::Tensor> Samples(int64_t begin, int64_t end) {
  torch::manual_seed(7);
  const torch::Tensor all = torch::randn({kSamples, kFeatures});
  const torch::Tensor inputs = all.slice(0, begin, end);
  return {inputs, torch::sin(inputs.sum(1, /*keepdim=*/true))};
}

// Trains on the samples [begin, end). `averager` may be null, for one process alone.
Losses Train(torch::nn::Sequential network, int64_t begin, int64_t end,
             const GradientAverager* averager) {
  const auto [inputs, targets] = Samples(begin, end);
  torch::optim::SGD optimizer(network->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  Losses losses{};
  for (double& loss_value : losses) {
    optimizer.zero_grad(/*set_to_none=*/false);
    const torch::Tensor loss = torch::mse_loss(network->forward(inputs), targets);
    if (averager != nullptr) averager->Begin();
    loss.backward();
    if (averager != nullptr) averager->Finish();
    optimizer.step();
    loss_value = loss.item<double>();
  }
  return losses;
}

// Whether every rank has the network of rank 0, to the last bit.
bool IsSameEverywhere(const gs::Group& group, const torch::nn::Module& network) {
  bool same = true;
  for (const torch::Tensor& parameter : network.parameters()) {
    const torch::Tensor first = parameter.detach().clone();
    Require(group.Broadcast(first.data_ptr<float>(), first.numel(), 0));
    same = same && torch::equal(first, parameter);
  }
  return same;
}

// One rank's training; the losses are those over all samples.
Losses TrainRank(const std::string& job, uint32_t rank, uint32_t ranks) {
  gs::SessionOptions options;
  options.job = job;
  options.world_size = ranks;
  options.rank = rank;
  options.timeout = std::chrono::seconds(60);
  const gs::Session session = Require(gs::Session::Open(options));
  // A group that averages buckets does nothing else.
  const gs::Group buckets = Require(session.CreateGroup("buckets"));
  const gs::Group group = Require(session.CreateGroup("training"));

  // Each rank would begin with a network of its own: all take rank 0's.
  torch::nn::Sequential network = MakeNetwork(rank);
  for (const torch::Tensor& parameter : network->parameters()) {
    Require(group.Broadcast(parameter.data_ptr<float>(), parameter.numel(), 0));
  }
  const GradientAverager averager(buckets, *network);
  const int64_t share = kSamples / ranks;
  Losses losses = Train(network, rank * share, (rank + 1) * share, &averager);
  Require(group.AllReduce(losses.data(), losses.size(), gs::Op::kAvg));
  if (!IsSameEverywhere(group, *network)) {
    throw std::runtime_error("the networks of rank 0 and this rank differ");
  }
  return losses;
}

struct Rank {
  pid_t process = 0;
  int losses = -1;  // the end of a pipe
};

// Starts a rank as a process of its own.
Rank Start(const std::string& job, uint32_t rank, uint32_t ranks) {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) throw std::runtime_error("cannot make a pipe");
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("cannot fork");
  if (child > 0) {
    close(ends[1]);
    return {child, ends[0]};
  }
  torch::set_num_threads(1);
  int status = EXIT_FAILURE;
  try {
    const Losses losses = TrainRank(job, rank, ranks);
    if (write(ends[1], losses.data(), sizeof(losses)) == sizeof(losses)) status = EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %u: %s\n", rank, error.what());
  }
  std::exit(status);
}

// Waits for a rank. Of one that failed, no number is right.
Losses Finish(const Rank& rank) {
  Losses losses{};
  const ssize_t bytes = read(rank.losses, losses.data(), sizeof(losses));
  close(rank.losses);
  int status = 0;
  waitpid(rank.process, &status, 0);
  const bool ended_well = WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS;
  if (bytes != sizeof(losses) || !ended_well) losses.fill(std::nan(""));
  return losses;
}

int Launch(uint32_t ranks) {
  const std::string job = "libtorch_trainer-" + std::to_string(getpid());
  // Before LibTorch has started a thread: a forked process would not have it.
  std::vector<Rank> started;
  for (uint32_t rank = 0; rank < ranks; ++rank) started.push_back(Start(job, rank, ranks));
  std::vector<Losses> everyones;
  for (const Rank& rank : started) everyones.push_back(Finish(rank));

  torch::set_num_threads(1);
  const Losses alone = Train(MakeNetwork(0), 0, kSamples, nullptr);
  bool all_same = true;
  std::printf("step   one process, all samples   %u ranks, a share each\n", ranks);
  for (size_t step = 0; step < kSteps; ++step) {
    for (const Losses& losses : everyones) {
      const double difference = std::abs(losses[step] - alone[step]);
      all_same = all_same && difference <= kTolerance * std::abs(alone[step]);
    }
    std::printf("%4zu   %24.8f   %21.8f\n", step, alone[step], everyones[0][step]);
  }
  const bool learned = alone.back() < alone.front();
  std::printf("%s\n", all_same && learned ? "Every rank trained as one process on all samples."
                                          : "FAILED: see above.");
  return all_same && learned ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  int ranks = 2;
  const bool chosen = argc == 3 && std::strcmp(argv[1], "--ranks") == 0;
  if (chosen) ranks = std::atoi(argv[2]);
  if ((argc != 1 && !chosen) || (ranks != 1 && ranks != 2 && ranks != 4)) {
    std::fprintf(stderr, "usage: %s [--ranks 1|2|4]\n", argv[0]);
    return 2;
  }
  try {
    return Launch(static_cast<uint32_t>(ranks));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return EXIT_FAILURE;
  }
}

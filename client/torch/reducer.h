// What DistributedDataParallel does during backward: it takes each gradient as autograd makes it,
// hands buckets of them to the daemon, and puts the averages in the gradients' place.
#ifndef GRADSYNC_CLIENT_TORCH_REDUCER_H_
#define GRADSYNC_CLIENT_TORCH_REDUCER_H_

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "client/torch/session.h"

namespace gradsync::torch {

// One for each wrapped module. The methods are for the thread that runs forward; the hooks that the
// constructor leaves on the parameters run on autograd's threads, without the interpreter's lock.
// The destructor removes them.
class Reducer {
 public:
  struct Options {
    uint64_t bucket_bytes = 0;  // as in gradsync_ddp_options
    uint64_t first_bucket_bytes = 0;
    std::vector<uint64_t> bucket_bytes_list;
    Timeout timeout{0};
    bool gradient_as_bucket_view = false;
    bool find_unused = false;
    bool skip_unused = false;     // buckets of which nothing is used, on any rank, are not reduced
    std::vector<uint8_t> sparse;  // by parameter: whether its gradient is
    // If forward runs on copies of another type, and gives the reducer its gradients by OnGradient.
    std::optional<at::ScalarType> gradient_type;
    std::string backend;  // the process group's, for profilers
  };

  // When what happened, in the last synchronised iteration; nanoseconds of a steady clock.
  struct Times {
    int64_t forward_begin = 0;
    int64_t backward_begin = 0;  // and the end of forward
    int64_t first_bucket = 0;    // was handed over
    int64_t last_gradient = 0;
    int64_t end = 0;
  };

  // Agrees on the parameters with every rank of `ranks` under `tag`, and allocates their buckets.
  // `names` are for messages. Throws Error.
  Reducer(std::shared_ptr<Session> session, const std::string& tag,
          const std::vector<uint32_t>& ranks, const std::vector<at::Tensor>& parameters,
          const std::vector<std::string>& names, const Options& options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // ---- Before the first iteration, on every rank alike ----

  // Which parameters are used, and how often their hooks fire, is the same in every iteration as in
  // the first.
  void SetStaticGraph();

  // Buckets go to `hook` instead of the daemon, in index order.
  void SetHook(std::unique_ptr<c10d::CommHookInterface> hook);

  // The hook also does what is to be done with the gradients: they are not put back.
  void SetOptimizerInBackward();

  // The end of backward is left to FinishBackward.
  void SetManualFinish(bool manual);

  // ---- In every iteration ----

  // Before a forward whose backward will be synchronised. Throws if the last one left gradients
  // out, or if a parameter was converted since construction, which removes its hook.
  void PrepareForForward();

  // Once, in the second synchronised forward: orders the buckets as gradients were seen to become
  // ready. `together`: every rank calls it now, whether its forward will be synchronised or not.
  // True if the order was looked at.
  bool RebuildBuckets(bool together);

  // After such a forward: the next backward is synchronised. Without it gradients are only
  // accumulated. Where parameters may be unused, those that no path leads to from `outputs` are.
  // The first backward of a static graph is reduced at its end.
  void PrepareForBackward(const std::vector<at::Tensor>& outputs);

  // The gradient of the parameter is there: for forwards on copies, which have hooks of their own.
  void OnGradient(uint32_t index);

  void FinishBackward();

  // This rank has run out of input, and the daemon averages the others' gradients without it, until
  // it has waited in Rejoin for all of them to have none. Rejoin returns the rank (index in the
  // group) that went on longest. Not with a hook, sparse gradients or a static graph.
  void StandAside(gradsync_aside_policy policy);
  uint32_t Rejoin();

  // A whole iteration of a rank that has no gradients, beside one of the others.
  void RunEmptyIteration();

  // `living` is the sum over the ranks of who still has input, and is there when it is complete:
  // the averages of the next synchronised backward are over those ranks only.
  void AverageOverLiving(c10::intrusive_ptr<c10d::Work> living);

  // At the end of the next synchronised backward, after the averages: for what must be there, too.
  void CallAtEnd(std::function<void()> call);

  // Throws unless the last synchronised backward was completed.
  void CheckFinalized() const;

  // Gradients are never synchronised again.
  void RemoveHooks();

  // ---- What is known ----

  bool recorded_static_graph() const;
  bool needs_manual_finish() const;     // and could not be finished before backward has returned
  bool found_same_unused() const;       // in every iteration so far
  std::vector<int32_t> UsedBy() const;  // by parameter: ranks, in the last iteration
  std::vector<uint64_t> BucketBytes() const;
  std::vector<std::vector<uint32_t>> BucketParameters() const;
  std::vector<uint32_t> ReadyOrder() const;  // of the last iteration
  uint32_t ReducedBuckets() const;           // in the last iteration
  Times times() const;
  uint64_t iterations() const;  // that were completed
  std::string error() const;    // the last one; empty if there was none

 private:
  class State;
  std::shared_ptr<State> state_;  // shared with the hooks
};

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_REDUCER_H_

// What DistributedDataParallel does during backward: it takes each gradient as autograd makes it,
// hands buckets of them to the daemon, and puts the averages in the gradients' place.
#ifndef GRADSYNC_CLIENT_TORCH_REDUCER_H_
#define GRADSYNC_CLIENT_TORCH_REDUCER_H_

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <string>
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
    Timeout timeout{0};
    bool gradient_as_bucket_view = false;
  };

  // Agrees on the parameters with every rank of `ranks` under `tag`, and allocates their buckets.
  // `names` are for messages. Throws Error.
  Reducer(std::shared_ptr<Session> session, const std::string& tag,
          const std::vector<uint32_t>& ranks, const std::vector<at::Tensor>& parameters,
          const std::vector<std::string>& names, const Options& options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Before a forward whose backward will be synchronised. Throws if the last one left gradients
  // out, or if a parameter was converted since construction, which removes its hook.
  void PrepareForForward();

  // Once, in the second synchronised forward: orders the buckets as gradients were seen to become
  // ready. True if that happened now.
  bool RebuildBuckets();

  // After such a forward: the next backward is synchronised. Without it gradients are only
  // accumulated.
  void PrepareForBackward();

  // Throws unless the last synchronised backward was completed.
  void CheckFinalized() const;

  // Gradients are never synchronised again.
  void RemoveHooks();

  std::vector<uint64_t> BucketBytes() const;
  uint64_t iterations() const;  // that were completed
  std::string error() const;    // the last one; empty if there was none

 private:
  class State;
  std::shared_ptr<State> state_;  // shared with the hooks
};

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_REDUCER_H_

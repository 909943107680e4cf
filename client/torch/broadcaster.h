// Makes tensors the same on every rank, many at a time.
#ifndef GRADSYNC_CLIENT_TORCH_BROADCASTER_H_
#define GRADSYNC_CLIENT_TORCH_BROADCASTER_H_

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/torch/session.h"

namespace gradsync::torch {

// A group of ranks that is used for nothing else. One thread at a time.
class Broadcaster {
 public:
  // `backend`: the process group's, for profilers.
  Broadcaster(std::shared_ptr<Session> session, const std::string& tag,
              const std::vector<uint32_t>& ranks, Timeout timeout, const std::string& backend)
      : group_(std::move(session), tag, ranks, timeout),
        timeout_(timeout),
        title_(backend + ":broadcast") {}

  // Overwrites `tensors`, wherever they are, with rank `root`'s (an index in the group; without
  // one, with those of the last rank that does not stand aside), in chunks of at most `chunk_bytes`
  // but at least one tensor. Every rank must pass the same sizes, types and kinds of device, in the
  // same order. Neither autograd nor version counters notice. Tensors on a GPU (on one) are there
  // in the order of the current stream.
  void Broadcast(const std::vector<at::Tensor>& tensors, int64_t chunk_bytes,
                 std::optional<uint32_t> root);

  // What every rank passed, in the group's order.
  std::vector<std::string> AllGather(const std::string& text);

  // As gradsync_stand_aside and gradsync_rejoin.
  void StandAside(gradsync_aside_policy policy) { group_.StandAside(policy, timeout_); }
  uint32_t Rejoin() { return group_.Rejoin(); }

 private:
  // Of tensors that are all on one kind of device.
  void BroadcastInChunks(const std::vector<at::Tensor>& tensors, int64_t chunk_bytes,
                         std::optional<uint32_t> root);
  void BroadcastChunk(const at::Tensor* begin, const at::Tensor* end, int64_t bytes,
                      std::optional<uint32_t> root);
  // True if this rank's tensors are to be sent, and if they are to be overwritten.
  bool Sends(std::optional<uint32_t> root) const { return !root || *root == group_.rank(); }
  bool Receives(std::optional<uint32_t> root) const { return root != group_.rank(); }

  Group group_;
  Timeout timeout_;
  const std::string title_;
};

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_BROADCASTER_H_

// A barrier in which rank 0 finds out who has not come.
#ifndef GRADSYNC_CLIENT_TORCH_MONITORED_BARRIER_H_
#define GRADSYNC_CLIENT_TORCH_MONITORED_BARRIER_H_

#include <cstdint>

#include "client/torch/session.h"

namespace gradsync::torch {

// Of one group; one thread at a time. It is made of messages, so that a rank that is stuck in a
// collective, or a barrier that has failed, does not disturb the group.
//
// Rank 0 asks every other rank, each answers when it comes, and when all have, rank 0 lets them
// go. Questions are numbered: a rank that missed a barrier answers the old question too, and
// rank 0 passes over answers to old ones.
class MonitoredBarrier {
 public:
  explicit MonitoredBarrier(const Group& group) : group_(group) {}

  // Throws Error (GRADSYNC_DEADLINE_EXCEEDED) with torch's words. `all`: rank 0 waits for everyone
  // and names all who failed, not only the first.
  void Run(Timeout timeout, bool all);

 private:
  void Lead(Timeout timeout, bool all);
  void Follow(Timeout timeout);

  const Group& group_;
  int64_t number_ = 0;  // of rank 0's last question
};

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_MONITORED_BARRIER_H_

// The messages of a process group, from rank to rank, apart from its collectives and their order.
#ifndef GRADSYNC_CLIENT_TORCH_MESSENGER_H_
#define GRADSYNC_CLIENT_TORCH_MESSENGER_H_

#include <ATen/ATen.h>
#include <c10/util/intrusive_ptr.h>
#include <unistd.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "client/torch/session.h"
#include "client/torch/work.h"

namespace gradsync::torch {

// Thread-safe. Each call begins on the calling thread, so that messages keep the order of the
// calls; one thread, started by the first call, waits for all that are under way and completes
// their works.
class Messenger {
 public:
  explicit Messenger(std::shared_ptr<const Group> group);
  // Finish().
  ~Messenger();
  Messenger(const Messenger&) = delete;
  Messenger& operator=(const Messenger&) = delete;

  // `tensor`, dense and in CPU memory, is copied at once.
  void Send(c10::intrusive_ptr<CollectiveWork> work, const at::Tensor& tensor, uint32_t to,
            uint32_t tag, Timeout timeout);
  // `from`: GRADSYNC_ANY_RANK is any.
  void Receive(c10::intrusive_ptr<CollectiveWork> work, const at::Tensor& tensor, uint32_t from,
               uint32_t tag, Timeout timeout);

  // What is under way fails; nothing more is taken. Returns when the callbacks have ended,
  // or after some seconds.
  void Finish();

 private:
  struct Pending {
    Request request;
    c10::intrusive_ptr<CollectiveWork> work;
    at::Tensor target;  // of a receive
  };
  // Shared with the thread, which may outlive the messenger: as OrderedWorker's.
  struct State {
    explicit State(std::shared_ptr<const Group> of) : group(std::move(of)) {}
    const std::shared_ptr<const Group> group;
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::unique_ptr<Pending>> pending;
    bool closed = false;
    size_t settling = 0;  // threads that run callbacks
    std::thread thread;
  };

  // `begin` makes the request.
  template <typename Begin>
  void Add(c10::intrusive_ptr<CollectiveWork> work, at::Tensor target, Begin begin);
  static void Loop(const std::shared_ptr<State>& state);
  static void End(const std::shared_ptr<State>& state, const Pending& pending);
  static void Settle(const std::shared_ptr<State>& state,
                     const c10::intrusive_ptr<CollectiveWork>& work);

  const pid_t owner_ = getpid();
  std::shared_ptr<State> state_;
};

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_MESSENGER_H_

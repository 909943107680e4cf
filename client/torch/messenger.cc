#include "client/torch/messenger.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <system_error>
#include <utility>

#include "client/torch/errors.h"
#include "client/torch/tensors.h"

namespace gradsync::torch {
namespace {

// Whether this thread runs the callbacks of a message's future.
thread_local bool is_settling = false;

constexpr std::chrono::seconds kPatience{5};

}  // namespace

Messenger::Messenger(std::shared_ptr<const Group> group)
    : state_(std::make_shared<State>(std::move(group))) {}

Messenger::~Messenger() {
  if (getpid() != owner_) {
    // Left behind: its lock and its thread are the parent's.
    new std::shared_ptr<State>(std::move(state_));
    return;
  }
  Finish();
}

void Messenger::Send(c10::intrusive_ptr<CollectiveWork> work, const at::Tensor& tensor, uint32_t to,
                     uint32_t tag, Timeout timeout) {
  const at::Tensor plain = PlainInput(tensor);
  Add(std::move(work), {}, [&](const Group& group) {
    return group.BeginSend(plain.data_ptr(), plain.nbytes(), to, tag, timeout);
  });
}

void Messenger::Receive(c10::intrusive_ptr<CollectiveWork> work, const at::Tensor& tensor,
                        uint32_t from, uint32_t tag, Timeout timeout) {
  Add(std::move(work), tensor,
      [&](const Group& group) { return group.BeginReceive(from, tag, timeout); });
}

template <typename Begin>
void Messenger::Add(c10::intrusive_ptr<CollectiveWork> work, at::Tensor target, Begin begin) {
  if (getpid() != owner_) {
    work->Complete(std::make_exception_ptr(Error(
        GRADSYNC_FAILED_PRECONDITION,
        "the process group belongs to the process that made it, and this is a forked child")));
    return;
  }
  std::exception_ptr failure;
  {
    // Held while the request is sent: the thread must find it in the list when its answer comes.
    const std::lock_guard lock(state_->mutex);
    try {
      if (state_->closed) {
        throw Error(GRADSYNC_FAILED_PRECONDITION, "the process group was shut down");
      }
      if (!state_->thread.joinable()) state_->thread = std::thread(&Messenger::Loop, state_);
      state_->pending.push_back(
          std::make_unique<Pending>(begin(*state_->group), std::move(work), std::move(target)));
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (failure == nullptr) {
    state_->changed.notify_all();
  } else {
    work->Complete(failure);
  }
}

void Messenger::Loop(const std::shared_ptr<State>& state) {
  pthread_setname_np(pthread_self(), "gradsync-p2p");
  std::vector<gradsync_request*> requests;
  while (true) {
    requests.clear();
    {
      std::unique_lock lock(state->mutex);
      state->changed.wait(lock, [&] { return !state->pending.empty() || state->closed; });
      if (state->pending.empty()) return;
      for (const auto& pending : state->pending) requests.push_back(pending->request.get());
    }
    uint32_t index = 0;
    // An error is the session's: the first request ends with it, and then the others.
    gradsync_request_wait_any(requests.data(), static_cast<uint32_t>(requests.size()), &index,
                              nullptr);
    if (index == requests.size()) continue;
    std::unique_ptr<Pending> done;
    {
      const std::lock_guard lock(state->mutex);
      const auto found =
          std::find_if(state->pending.begin(), state->pending.end(),
                       [&](const auto& one) { return one->request.get() == requests[index]; });
      done = std::move(*found);
      state->pending.erase(found);
    }
    End(state, *done);
  }
}

void Messenger::End(const std::shared_ptr<State>& state, const Pending& pending) {
  std::exception_ptr failure;
  try {
    if (pending.target.defined()) {
      const at::NoGradGuard no_grad;
      InPlace(pending.target, [&](const at::Tensor& plain) {
        const uint32_t from = pending.request.End(plain.data_ptr(), plain.nbytes());
        pending.work->SetSource(static_cast<int>(from));
      });
    } else {
      pending.request.End(nullptr, 0);
    }
  } catch (...) {
    failure = std::current_exception();
  }
  if (!pending.work->Finish(failure)) return;
  // Callbacks may wait for further messages, which this thread has to receive.
  try {
    const std::lock_guard lock(state->mutex);
    std::thread(&Messenger::Settle, state, pending.work).detach();
    ++state->settling;
  } catch (const std::system_error&) {  // no more threads for this process
    pending.work->Settle();
  }
}

void Messenger::Settle(const std::shared_ptr<State>& state,
                       const c10::intrusive_ptr<CollectiveWork>& work) {
  is_settling = true;
  // Whatever becomes of this thread: an interpreter that ends, ends those that want its lock.
  struct Leave {
    const std::shared_ptr<State>& state;
    ~Leave() {
      const std::lock_guard lock(state->mutex);
      --state->settling;
      state->changed.notify_all();
    }
  } const leave{state};
  work->Settle();
}

void Messenger::Finish() {
  if (getpid() != owner_) return;
  std::thread thread;
  {
    const std::lock_guard lock(state_->mutex);
    state_->closed = true;
    for (const auto& pending : state_->pending) gradsync_request_cancel(pending->request.get());
    state_->changed.notify_all();
    thread = std::move(state_->thread);
  }
  if (thread.joinable() && thread.get_id() == std::this_thread::get_id()) {
    thread.detach();
  } else if (thread.joinable()) {
    thread.join();
  }
  // One that drops the last reference to the messenger does not wait for itself; and a callback may
  // wait for what only the caller of this would do.
  std::unique_lock lock(state_->mutex);
  state_->changed.wait_for(lock, kPatience, [&] { return state_->settling == 0 || is_settling; });
}

}  // namespace gradsync::torch

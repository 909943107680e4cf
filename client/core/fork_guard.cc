#include "client/core/fork_guard.h"

#include <pthread.h>

#include <mutex>
#include <utility>

namespace gradsync {

// The list of guards. A list threaded through them and a plain pthread mutex, both constant-
// initialised and never destroyed: the handlers may run before and after every other static.
struct ForkHandlers {
  static pthread_mutex_t mutex;
  static ForkGuard* first;

  static void Prepare() { pthread_mutex_lock(&mutex); }
  static void InParent() { pthread_mutex_unlock(&mutex); }
  static void InChild() {
    for (ForkGuard* guard = first; guard != nullptr; guard = guard->next_) guard->EnterChild();
    pthread_mutex_unlock(&mutex);
  }
};

pthread_mutex_t ForkHandlers::mutex = PTHREAD_MUTEX_INITIALIZER;
ForkGuard* ForkHandlers::first = nullptr;

ForkGuard::ForkGuard(UniqueFd socket) : socket_(std::move(socket)) {
  static std::once_flag registered;
  std::call_once(registered, [] {
    pthread_atfork(&ForkHandlers::Prepare, &ForkHandlers::InParent, &ForkHandlers::InChild);
  });
  pthread_mutex_lock(&ForkHandlers::mutex);
  next_ = std::exchange(ForkHandlers::first, this);
  if (next_ != nullptr) next_->previous_ = this;
  pthread_mutex_unlock(&ForkHandlers::mutex);
}

ForkGuard::~ForkGuard() {
  pthread_mutex_lock(&ForkHandlers::mutex);
  if (next_ != nullptr) next_->previous_ = previous_;
  (previous_ != nullptr ? previous_->next_ : ForkHandlers::first) = next_;
  pthread_mutex_unlock(&ForkHandlers::mutex);
}

void ForkGuard::SetDoorbell(UniqueFd doorbell) {
  pthread_mutex_lock(&ForkHandlers::mutex);  // a fork in another thread sees all of it or nothing
  doorbell_ = std::move(doorbell);
  pthread_mutex_unlock(&ForkHandlers::mutex);
}

void ForkGuard::EnterChild() {
  in_child_.store(true, std::memory_order_relaxed);
  socket_.Reset();
  doorbell_.Reset();
}

}  // namespace gradsync

// What an operation costs apart from its data: the ring, and waking the other side.
#include <benchmark/benchmark.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#include "shm/completion.h"
#include "shm/ring_reader.h"
#include "shm/ring_writer.h"
#include "shm/session_layout.h"
#include "shm/unique_fd.h"

namespace gradsync {
namespace {

template <typename Layout>
std::unique_ptr<Layout> NewZeroed() {
  auto layout = std::make_unique<Layout>();
  std::memset(static_cast<void*>(layout.get()), 0, sizeof(Layout));
  return layout;
}

// Writes and takes `entries` in turn: with 1 the other side keeps up, with more they pile up.
void BM_Ring(benchmark::State& state) {
  const auto layout = NewZeroed<RingLayout>();
  RingWriter writer(layout.get());
  RingReader reader(layout.get());
  const int64_t entries = state.range(0);
  Submission entry{};
  for ([[maybe_unused]] auto _ : state) {
    for (int64_t i = 0; i < entries; ++i) benchmark::DoNotOptimize(writer.TryPush(entry));
    for (int64_t i = 0; i < entries; ++i) benchmark::DoNotOptimize(reader.TryPop(&entry));
  }
  state.SetItemsProcessed(state.iterations() * entries);
}
BENCHMARK(BM_Ring)->Arg(1)->Arg(64);

// A trainer and a daemon of two threads: an entry goes in, the sleeping daemon is woken by the
// doorbell, completes it, and wakes the trainer by the futex. The argument is for how many
// microseconds each side spins before it sleeps; there must be a core for each of them.
class WakeUp {
 public:
  explicit WakeUp(std::chrono::microseconds spin) : spin_(spin), daemon_([this] { Serve(); }) {}
  ~WakeUp() {
    stop_ = true;
    RingDoorbell();
    daemon_.join();
  }

  void Operate() {
    Submission entry{};
    entry.sequence = sequence_;
    writer_.TryPush(entry);
    if (writer_.MustWakeDaemon()) RingDoorbell();
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    const Status done = reader_.Wait(sequence_, deadline, spin_, [] { return OkStatus(); });
    if (done.ok()) ++sequence_;
  }

 private:
  void RingDoorbell() const {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(doorbell_.get(), &one, sizeof(one));
  }

  void Serve() {
    RingReader ring(ring_.get());
    CompletionWriter words(words_.get());
    Submission entry{};
    auto spin_until = std::chrono::steady_clock::now() + spin_;
    while (!stop_) {
      if (ring.TryPop(&entry) == RingReader::Pop::kEntry) {
        words.Complete(entry.sequence + 1);
        spin_until = std::chrono::steady_clock::now() + spin_;
      } else if (std::chrono::steady_clock::now() >= spin_until) {
        if (ring.PrepareToSleep()) Sleep();
        ring.WakeUp();
      }
    }
  }

  void Sleep() const {
    pollfd entry{doorbell_.get(), POLLIN, 0};
    poll(&entry, 1, -1);
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t taken = read(doorbell_.get(), &count, sizeof(count));
  }

  const std::unique_ptr<RingLayout> ring_ = NewZeroed<RingLayout>();
  const std::unique_ptr<GroupWords> words_ = NewZeroed<GroupWords>();
  const UniqueFd doorbell_{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  const std::chrono::microseconds spin_;
  RingWriter writer_{ring_.get()};
  CompletionReader reader_{words_.get()};
  uint64_t sequence_ = 0;
  std::atomic<bool> stop_{false};
  std::thread daemon_;  // last: it uses all of the above
};

void BM_WakeUp(benchmark::State& state) {
  WakeUp pair(std::chrono::microseconds(state.range(0)));
  for ([[maybe_unused]] auto _ : state) pair.Operate();
}
BENCHMARK(BM_WakeUp)->Arg(0)->Arg(40)->UseRealTime();

}  // namespace
}  // namespace gradsync

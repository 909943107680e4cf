#include "tests/fakes/nccl/world.h"

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <thread>

namespace gradsync::fake_nccl {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// As long as real NCCL may need in the background; long enough to be seen.
constexpr milliseconds kSoon{3};

milliseconds Patience() {
  const char* text = std::getenv("GRADSYNC_FAKE_NCCL_PATIENCE_MS");
  return milliseconds(text == nullptr ? 60000 : std::strtol(text, nullptr, 10));
}

// What NCCL does in the background for non-blocking communicators: one thread for all, started
// with the first action.
class Background {
 public:
  void Run(std::function<void()> action) {
    const std::lock_guard<std::mutex> lock(mutex_);
    actions_.push_back({steady_clock::now() + kSoon, std::move(action)});
    if (process_ != getpid()) {
      process_ = getpid();
      std::thread(&Background::Main, this).detach();
    }
    changed_.notify_all();
  }

 private:
  struct Action {
    steady_clock::time_point due;
    std::function<void()> run;
  };

  [[noreturn]] void Main() {
    while (true) {
      std::function<void()> run = Next();
      const Lock lock(TheWorld().mutex);
      run();
    }
  }

  std::function<void()> Next() {
    Lock lock(mutex_);
    changed_.wait(lock, [this] { return !actions_.empty(); });
    const Action action = std::move(actions_.front());
    actions_.pop_front();
    lock.unlock();
    std::this_thread::sleep_until(action.due);
    return action.run;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Action> actions_;
  pid_t process_ = 0;
};

// A communicator that its process never destroyed nor aborted is a leak.
class LeakReport {
 public:
  LeakReport() = default;
  LeakReport(const LeakReport&) = delete;
  LeakReport& operator=(const LeakReport&) = delete;
  ~LeakReport() {
    const char* directory = std::getenv("GRADSYNC_FAKE_CUDA_DIR");
    if (directory == nullptr) return;
    World& world = TheWorld();
    const Lock lock(world.mutex);
    std::ofstream file;
    for (const auto& [handle, comm] : world.comms) {
      if (comm->life != Life::kLive || comm->process != getpid()) continue;
      if (!file.is_open()) file.open(Text(directory, "/leaks.", getpid()), std::ios::app);
      file << "ncclComm: " << Name(*comm) << "\n";
    }
  }
};

const LeakReport leak_report;

}  // namespace

World& TheWorld() {
  static World* const world = new World;
  return *world;
}

std::string Name(const ncclComm& comm) {
  return Text("communicator ", comm.id, " (rank ", comm.rank, " of ", comm.clique->ranks,
              ", device ", comm.device, ")");
}

const char* TypeName(ncclDataType_t type) {
  static constexpr std::array<const char*, ncclNumTypes> kNames = {
      "ncclInt8",    "ncclUint8",    "ncclInt32",      "ncclUint32",
      "ncclInt64",   "ncclUint64",   "ncclFloat16",    "ncclFloat32",
      "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3", "ncclFloat8e5m2"};
  return type >= 0 && type < ncclNumTypes ? kNames[type] : "no type";
}

ncclResult_t FailLocked(ncclResult_t result, const std::string& text) {
  World& world = TheWorld();
  world.last_error = &*world.texts.insert(text).first;
  return result;
}

ncclResult_t Fail(ncclResult_t result, const std::string& text) {
  const Lock lock(TheWorld().mutex);
  return FailLocked(result, text);
}

uint64_t ThisThread() {
  static std::atomic<uint64_t> next{1};
  thread_local const uint64_t number = next++;
  return number;
}

void WaitPatiently(Lock* lock, const std::function<bool()>& done, const std::string& rule,
                   const char* source) {
  if (!TheWorld().changed.wait_for(*lock, Patience(), done)) Breach(rule, source);
}

void RunSoon(std::function<void()> action) {
  static Background* const background = new Background;
  background->Run(std::move(action));
}

}  // namespace gradsync::fake_nccl

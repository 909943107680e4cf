// GRADSYNC_FAKE_CUDA_INJECT and GRADSYNC_FAKE_CUDA_TRACE: what happens at the N-th call.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "tests/fakes/cuda/process.h"

namespace gradsync::fake_cuda {
namespace {

struct Injection {
  uint64_t at = 0;
  std::string action;
  long argument = 0;
};

// "N:ACTION", or several of them with commas between.
std::vector<Injection> ReadInjections() {
  std::vector<Injection> injections;
  const char* text = std::getenv("GRADSYNC_FAKE_CUDA_INJECT");
  std::string rest = text == nullptr ? "" : text;
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    const std::string item = rest.substr(0, comma);
    const size_t colon = item.find(':');
    const size_t equals = item.find('=');
    Injection injection;
    injection.at = std::strtoull(item.c_str(), nullptr, 10);
    if (colon != std::string::npos) {
      injection.action =
          item.substr(colon + 1, equals == std::string::npos ? equals : equals - colon - 1);
    }
    if (equals != std::string::npos) {
      injection.argument = std::strtol(item.c_str() + equals + 1, nullptr, 10);
    }
    const std::string& action = injection.action;
    const bool known = action == "error" || action == "delay" || action == "lose";
    if (injection.at == 0 || (action != "kill" && !known) ||
        (known && equals == std::string::npos) ||
        (action == "lose" && (injection.argument < 0 || injection.argument >= kMaxDevices))) {
      std::fprintf(stderr, "fake CUDA: no such injection: %s\n", item.c_str());
      std::abort();
    }
    injections.push_back(injection);
    rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
  }
  return injections;
}

int OpenTrace() {
  const char* name = std::getenv("GRADSYNC_FAKE_CUDA_TRACE");
  if (name == nullptr || *name == '\0') return -1;
  std::string path = name;
  if (const size_t at = path.find("%p"); at != std::string::npos) {
    path.replace(at, 2, std::to_string(getpid()));
  }
  return open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

CUresult Act(const Injection& injection) {
  if (injection.action == "error") return static_cast<CUresult>(injection.argument);
  if (injection.action == "delay") {
    std::this_thread::sleep_for(std::chrono::milliseconds(injection.argument));
  } else if (injection.action == "kill") {
    raise(SIGKILL);
  } else {
    Process& process = Process::Get();
    Machine::Get().Lose(static_cast<int>(injection.argument));
    const Lock lock(process.mutex);
    for (const auto& context : process.contexts) {
      if (context->device == injection.argument) Poison(lock, context.get(), kLost);
    }
  }
  return CUDA_SUCCESS;
}

}  // namespace

CUresult Inject(const char* call) {
  static const int owner = getpid();
  if (getpid() != owner) return CUDA_SUCCESS;  // a fork, all of whose calls are refused
  static std::atomic<uint64_t> calls{0};
  static const std::vector<Injection>& injections = *new std::vector<Injection>(ReadInjections());
  static const int trace = OpenTrace();
  const uint64_t number = ++calls;
  if (trace >= 0) {
    const std::string line = std::to_string(number) + " " + call + "\n";
    if (write(trace, line.data(), line.size()) < 0) std::perror("fake CUDA: writing the trace");
  }
  for (const Injection& injection : injections) {
    if (injection.at == number) FAKE_CUDA_CHECK(Act(injection));
  }
  return CUDA_SUCCESS;
}

extern "C" FAKE_CUDA_API CUresult fakeCudaEnter(const char* call) { return Inject(call); }

}  // namespace gradsync::fake_cuda

// What this process still holds of the driver: asked for by tests, and written down at its end.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tests/fakes/cuda/address_space.h"
#include "tests/fakes/cuda/events.h"
#include "tests/fakes/cuda/modules.h"
#include "tests/fakes/cuda/streams.h"

namespace gradsync::fake_cuda {
namespace {

std::string Of(uint64_t value, size_t bytes) {
  char text[64];
  std::snprintf(text, sizeof(text), "%#llx, %zu bytes", static_cast<unsigned long long>(value),
                bytes);
  return text;
}

// What belongs to a context that failed, or to a device that is lost, cannot be given back, and so
// is nobody's fault.
bool Lives(const Lock& lock, Context* context) {
  return context == nullptr || Usable(lock, context) == CUDA_SUCCESS;
}

void DescribeSpace(const Space& space, std::vector<std::string>* lines) {
  switch (space.kind) {
    case Space::Kind::kReservation:
      for (const auto& [base, range] : space.mapped) {
        if (Machine::Get().Lost(range.backing->device)) return;
        lines->push_back("mapping " + Of(base, range.size));
      }
      lines->push_back("reservation " + Of(space.base, space.size));
      break;
    case Space::Kind::kBlock:
      for (const auto& [base, allocation] : space.allocation) {
        lines->push_back("allocation " + Of(base, allocation.size));
      }
      break;
    case Space::Kind::kImport:
      lines->push_back("import " + Of(space.address, space.bytes));
      break;
    case Space::Kind::kHost:
      lines->push_back("registration " + Of(space.address, space.bytes));
      break;
  }
}

std::vector<std::string> Live(const Lock& lock) {
  const Process& process = Process::Get();
  std::vector<std::string> lines;
  for (const auto& [base, space] : process.spaces) {
    if (Lives(lock, space->context)) DescribeSpace(*space, &lines);
  }
  for (const auto& [handle, memory] : process.handles) {
    if (Machine::Get().Lost(memory.backing->device)) continue;
    lines.push_back("handle " + Of(handle, memory.backing->size));
  }
  for (const auto& [handle, stream] : process.streams) {
    if (Lives(lock, stream->context)) lines.emplace_back("stream");
  }
  for (const auto& [handle, event] : process.events) {
    if (Lives(lock, event->context)) lines.emplace_back("event");
  }
  for (const auto& [handle, module] : process.modules) {
    if (Lives(lock, module->context)) lines.emplace_back("module");
  }
  return lines;
}

// Runs after the program's own destructors. Not in a fork, whose copy of the state means nothing.
__attribute__((destructor)) void AtExit() {
  Process& process = Process::Get();
  if (process.initialised_by != getpid()) return;
  process.ended = true;
  const Lock lock(process.mutex);
  for (const std::string& line : Live(lock)) {
    Machine::Get().Append("leaks." + std::to_string(getpid()), line);
  }
}

}  // namespace
extern "C" {

FAKE_CUDA_API size_t fakeCudaLiveObjects(void) {
  const Lock lock(Process::Get().mutex);
  return Live(lock).size();
}

FAKE_CUDA_API size_t fakeCudaDescribeLive(char* text, size_t size) {
  const Lock lock(Process::Get().mutex);
  std::string all;
  for (const std::string& line : Live(lock)) all += line + "\n";
  if (text != nullptr && size != 0) {
    const size_t copied = std::min(all.size(), size - 1);
    std::memcpy(text, all.data(), copied);
    text[copied] = '\0';
  }
  return all.size();
}

}  // extern "C"

}  // namespace gradsync::fake_cuda

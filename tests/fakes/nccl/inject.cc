#include "tests/fakes/nccl/inject.h"

#include <atomic>
#include <cstdlib>
#include <string_view>

namespace gradsync::fake_nccl {
namespace {

using Injections = std::map<uint64_t, Injected>;

Injected ParseWhat(const std::string& what) {
  constexpr std::string_view kAsync = "async=";
  if (what == "stall") return {true, ncclSuccess};
  if (what.starts_with(kAsync)) {
    const long number = std::strtol(what.c_str() + kAsync.size(), nullptr, 10);
    if (number > ncclSuccess && number < ncclNumResults) {
      return {true, static_cast<ncclResult_t>(number)};
    }
  }
  Breach("'" + what + "' is neither stall nor async=RESULT", "GRADSYNC_FAKE_NCCL_INJECT");
}

Injections Parse(const char* text) {
  Injections injections;
  std::istringstream all(text == nullptr ? "" : text);
  std::string one;
  while (std::getline(all, one, ',')) {
    const size_t colon = one.find(':');
    const uint64_t number = std::strtoull(one.c_str(), nullptr, 10);
    if (colon == std::string::npos || number == 0) {
      Breach("'" + one + "' does not begin with a collective's number",
             "GRADSYNC_FAKE_NCCL_INJECT");
    }
    injections[number] = ParseWhat(one.substr(colon + 1));
  }
  return injections;
}

}  // namespace

Injected NextCollective() {
  static const Injections injections = Parse(std::getenv("GRADSYNC_FAKE_NCCL_INJECT"));
  static std::atomic<uint64_t> called{0};
  const auto found = injections.find(++called);
  return found == injections.end() ? Injected{} : found->second;
}

bool MismatchHangs() {
  static const char* const text = std::getenv("GRADSYNC_FAKE_NCCL_MISMATCH");
  return text != nullptr && std::string_view(text) == "hang";
}

}  // namespace gradsync::fake_nccl

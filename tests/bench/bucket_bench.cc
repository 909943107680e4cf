// gradsync as a bucket goes through it: RANKS processes hand over a bucket of one parameter, and
// wait until it holds the averages.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "gradsync/gradsync.hpp"
#include "tests/bench/measurement.h"

namespace gradsync::bench {
namespace {

namespace gs = gradsync::client;

[[noreturn]] void Die(const gs::Error& error) {
  std::fprintf(stderr, "bucket_bench: %s\n", error.message.c_str());
  std::exit(1);
}

void Check(const gs::Status& status) {
  if (!status) Die(status.error());
}

template <typename T>
T Take(gs::Result<T> result) {
  if (!result) Die(result.error());
  return *std::move(result);
}

double MedianIteration(const gs::Session& session, const Size& size) {
  const gs::Group group = Take(session.CreateGroup("bench of " + std::to_string(size.bytes)));
  gs::DdpOptions options;
  options.fixed_plan = true;
  const auto elements = static_cast<int64_t>(size.count());
  const gs::Ddp ddp =
      Take(gs::Ddp::Create(group, {{"bench", GRADSYNC_FLOAT32, {elements}}}, options));
  std::fill_n(static_cast<float*>(Take(ddp.Slot(0)).data), size.count(), 1.0F);
  return MedianSeconds(size, [&] {
    Check(ddp.Begin());
    Take(ddp.Ready(0));
    Check(ddp.Wait(0));
    Check(ddp.End());
  });
}

void RunRank(const CommandLine& line, const std::string& job, int rank) {
  gs::SessionOptions options;
  options.job = job;
  options.world_size = static_cast<uint32_t>(line.ranks);
  options.rank = static_cast<uint32_t>(rank);
  options.local_rank = options.rank;
  options.timeout = std::chrono::minutes(1);
  const gs::Session session = Take(gs::Session::Open(options));
  for (const Size& size : line.sizes) {
    const double seconds = MedianIteration(session, size);
    if (rank == 0) Report(size, seconds);
  }
}

int Main(int argc, char** argv) {
  const CommandLine line = ParseCommandLine(argc, argv);
  const std::string job = "bucket-bench-" + std::to_string(getpid());
  for (int rank = 0; rank < line.ranks; ++rank) {
    const pid_t child = fork();
    if (child < 0) {
      std::perror("bucket_bench: fork");
      return 1;
    }
    if (child == 0) {
      RunRank(line, job, rank);
      return 0;
    }
  }
  int failed = 0;
  for (int status = 0; wait(&status) > 0;) failed |= status;
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace gradsync::bench

int main(int argc, char** argv) { return gradsync::bench::Main(argc, argv); }

// gradsync as a bucket goes through it: RANKS processes average a buffer in shared memory, in
// place.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "gradsync/gradsync.hpp"
#include "tests/bench/measurement.h"

namespace gradsync::bench {
namespace {

namespace gs = gradsync::client;

[[noreturn]] void Die(const gs::Error& error) {
  std::fprintf(stderr, "bucket_bench: %s\n", error.message.c_str());
  std::exit(1);
}

void RunRank(const CommandLine& line, const std::string& job, int rank) {
  gs::SessionOptions options;
  options.job = job;
  options.world_size = static_cast<uint32_t>(line.ranks);
  options.rank = static_cast<uint32_t>(rank);
  options.local_rank = options.rank;
  options.timeout = std::chrono::minutes(1);
  const auto session = gs::Session::Open(options);
  if (!session) Die(session.error());
  const auto buffer = session->CreateBuffer(line.largest(), "bench");
  if (!buffer) Die(buffer.error());
  const auto group = session->CreateGroup("bench");
  if (!group) Die(group.error());

  float* data = buffer->as<float>();
  std::fill_n(data, line.largest() / sizeof(float), static_cast<float>(rank + 1));
  for (const Size& size : line.sizes) {
    const double seconds = MedianSeconds(size, [&] {
      if (const auto done = group->AllReduce(data, size.count(), gs::Op::kAvg); !done) {
        Die(done.error());
      }
    });
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

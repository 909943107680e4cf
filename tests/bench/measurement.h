// What the bench's programs share: `PROGRAM RANKS BYTES:ITERATIONS...` averages float32 buffers of
// RANKS ranks, and prints `BYTES SECONDS` for each size, the median of its iterations.
#ifndef GRADSYNC_TESTS_BENCH_MEASUREMENT_H_
#define GRADSYNC_TESTS_BENCH_MEASUREMENT_H_

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

namespace gradsync::bench {

struct Size {
  size_t bytes = 0;
  int iterations = 0;

  size_t count() const { return bytes / sizeof(float); }
};

struct CommandLine {
  int ranks = 0;
  std::vector<Size> sizes;

  size_t largest() const {
    size_t bytes = 0;
    for (const Size& size : sizes) bytes = std::max(bytes, size.bytes);
    return bytes;
  }
};

// Ends the process if the command line is not what the file's opening says.
inline CommandLine ParseCommandLine(int argc, char** argv) {
  CommandLine result;
  if (argc > 1) result.ranks = std::atoi(argv[1]);
  for (int i = 2; i < argc; ++i) {
    char* end = nullptr;
    Size size;
    size.bytes = std::strtoull(argv[i], &end, 10);
    if (*end == ':') size.iterations = std::atoi(end + 1);
    if (size.count() == 0 || size.iterations <= 0) result.ranks = 0;
    result.sizes.push_back(size);
  }
  if (result.ranks <= 0 || result.sizes.empty()) {
    std::fprintf(stderr, "usage: %s RANKS BYTES:ITERATIONS...\n", argv[0]);
    std::exit(2);
  }
  return result;
}

// The median time of one call, in seconds, after a few that are not counted.
inline double MedianSeconds(const Size& size, const std::function<void()>& call) {
  using Clock = std::chrono::steady_clock;
  for (int i = 0; i < 3; ++i) call();
  std::vector<double> samples;
  samples.reserve(static_cast<size_t>(size.iterations));
  for (int i = 0; i < size.iterations; ++i) {
    const Clock::time_point start = Clock::now();
    call();
    samples.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  const auto middle = samples.begin() + static_cast<std::ptrdiff_t>(samples.size() / 2);
  std::nth_element(samples.begin(), middle, samples.end());
  return *middle;
}

inline void Report(const Size& size, double seconds) {
  std::printf("%zu %.9f\n", size.bytes, seconds);
  std::fflush(stdout);
}

}  // namespace gradsync::bench

#endif  // GRADSYNC_TESTS_BENCH_MEASUREMENT_H_

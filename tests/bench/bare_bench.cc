// What memory allows: one process averages the buffers of RANKS ranks in place, with as many of the
// machine's cores as make it fastest.
#include <sys/mman.h>

#include <algorithm>
#include <barrier>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "server/engine/cpu/bare_kernel.h"
#include "tests/bench/measurement.h"

namespace gradsync::bench {
namespace {

// Threads that each average an equal part, this one included.
class Crew {
 public:
  Crew(unsigned threads, float* const* buffers, size_t ranks)
      : barrier_(threads), buffers_(buffers), ranks_(ranks), threads_count_(threads) {
    for (unsigned i = 1; i < threads; ++i) threads_.emplace_back([this, i] { Work(i); });
  }
  ~Crew() {
    count_ = 0;
    barrier_.arrive_and_wait();
  }
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  void Average(size_t count) {
    count_ = count;
    barrier_.arrive_and_wait();
    AveragePart(0);
    barrier_.arrive_and_wait();
  }

 private:
  void Work(unsigned part) {
    for (;;) {
      barrier_.arrive_and_wait();
      if (count_ == 0) return;
      AveragePart(part);
      barrier_.arrive_and_wait();
    }
  }

  void AveragePart(size_t part) const {
    BareAverage(buffers_, ranks_, count_ * part / threads_count_,
                count_ * (part + 1) / threads_count_);
  }

  std::barrier<> barrier_;
  float* const* buffers_;
  size_t ranks_;
  size_t threads_count_;
  size_t count_ = 0;
  std::vector<std::jthread> threads_;
};

// Memory of the kind that a bucket lies in.
std::vector<float*> MakeBuffers(const CommandLine& line) {
  std::vector<float*> buffers;
  for (int rank = 0; rank < line.ranks; ++rank) {
    void* memory = mmap(nullptr, line.largest(), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) {
      std::perror("bare_bench: mmap");
      std::exit(1);
    }
    buffers.push_back(static_cast<float*>(memory));
    std::fill_n(buffers.back(), line.largest() / sizeof(float), static_cast<float>(rank + 1));
  }
  return buffers;
}

int Main(int argc, char** argv) {
  const CommandLine line = ParseCommandLine(argc, argv);
  if (line.ranks != 2 && line.ranks != 4) {
    std::fprintf(stderr, "bare_bench: RANKS must be 2 or 4\n");
    return 2;
  }
  const std::vector<float*> buffers = MakeBuffers(line);
  const auto ranks = static_cast<size_t>(line.ranks);
  Crew crew(std::max(1U, std::thread::hardware_concurrency()), buffers.data(), ranks);
  for (const Size& size : line.sizes) {
    const double alone =
        MedianSeconds(size, [&] { BareAverage(buffers.data(), ranks, 0, size.count()); });
    const double together = MedianSeconds(size, [&] { crew.Average(size.count()); });
    Report(size, std::min(alone, together));
  }
  return 0;
}

}  // namespace
}  // namespace gradsync::bench

int main(int argc, char** argv) { return gradsync::bench::Main(argc, argv); }

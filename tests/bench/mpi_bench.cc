// Open MPI doing the same: MPI_Allreduce in place, then the division that makes it an average.
// Started by mpirun with RANKS processes.
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tests/bench/measurement.h"

namespace gradsync::bench {
namespace {

void Average(float* data, size_t count, float scale) {
  if (MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(count), MPI_FLOAT, MPI_SUM,
                    MPI_COMM_WORLD) != MPI_SUCCESS) {
    std::fprintf(stderr, "mpi_bench: MPI_Allreduce failed\n");
    std::exit(1);
  }
  for (size_t i = 0; i < count; ++i) data[i] *= scale;
}

void Run(const CommandLine& line) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::vector<float> data(line.largest() / sizeof(float), static_cast<float>(rank + 1));
  const float scale = 1.0F / static_cast<float>(line.ranks);
  for (const Size& size : line.sizes) {
    const double seconds = MedianSeconds(size, [&] { Average(data.data(), size.count(), scale); });
    if (rank == 0) Report(size, seconds);
  }
}

}  // namespace
}  // namespace gradsync::bench

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  gradsync::bench::Run(gradsync::bench::ParseCommandLine(argc, argv));
  MPI_Finalize();
  return 0;
}

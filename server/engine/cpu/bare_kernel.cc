#include "server/engine/cpu/bare_kernel.h"

namespace gradsync {
namespace {

void Average2(float* __restrict a, float* __restrict b, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) {
    const float average = (a[i] + b[i]) * 0.5F;
    a[i] = average;
    b[i] = average;
  }
}

void Average4(float* __restrict a, float* __restrict b, float* __restrict c, float* __restrict d,
              size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) {
    const float average = (a[i] + b[i] + c[i] + d[i]) * 0.25F;
    a[i] = average;
    b[i] = average;
    c[i] = average;
    d[i] = average;
  }
}

}  // namespace

void BareAverage(float* const* buffers, size_t ranks, size_t begin, size_t end) {
  if (ranks == 2) {
    Average2(buffers[0], buffers[1], begin, end);
  } else {
    Average4(buffers[0], buffers[1], buffers[2], buffers[3], begin, end);
  }
}

}  // namespace gradsync

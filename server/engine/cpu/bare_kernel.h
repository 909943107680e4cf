// What the engine is measured against: one process that averages the ranks' float32 buffers in
// place by plain loops, which the compiler vectorises for this very machine. No journal, no
// dispatch.
#ifndef GRADSYNC_SERVER_ENGINE_CPU_BARE_KERNEL_H_
#define GRADSYNC_SERVER_ENGINE_CPU_BARE_KERNEL_H_

#include <cstddef>

namespace gradsync {

// Averages elements [begin, end) of `ranks` (2 or 4) buffers.
void BareAverage(float* const* buffers, size_t ranks, size_t begin, size_t end);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_ENGINE_CPU_BARE_KERNEL_H_

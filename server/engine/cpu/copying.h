// Broadcast and all-gather: the operations that only copy, cut into parts that any thread may do.
#ifndef GRADSYNC_SERVER_ENGINE_CPU_COPYING_H_
#define GRADSYNC_SERVER_ENGINE_CPU_COPYING_H_

#include <cstdint>

#include "server/engine/engine.h"

namespace gradsync {

// Copies bytes [begin, end) of the root's input to every output.
void BroadcastRange(const Task& task, uint64_t begin, uint64_t end);

// Copies bytes [begin, end) of every rank's input to its place in every output. Ranges may be done
// in any order and at once, also in place (outputs[i] == inputs[i]); that leaves no input behind.
void AllGatherRange(const Task& task, uint64_t begin, uint64_t end);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_ENGINE_CPU_COPYING_H_

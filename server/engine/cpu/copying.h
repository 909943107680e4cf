// Broadcast, gather, scatter and their like: the operations that only copy, cut into parts that any
// thread may do.
#ifndef GRADSYNC_SERVER_ENGINE_CPU_COPYING_H_
#define GRADSYNC_SERVER_ENGINE_CPU_COPYING_H_

#include <cstdint>

#include "server/engine/engine.h"

namespace gradsync {

// Copies bytes [begin, end) of every block that `task`, which reduces nothing and is no barrier,
// moves. Ranges may be done in any order and at once, also in place (outputs[i] == inputs[i]); that
// leaves no input of an all-gather behind.
void CopyRange(const Task& task, uint64_t begin, uint64_t end);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_ENGINE_CPU_COPYING_H_

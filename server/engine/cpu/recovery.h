// Finishing what a process did not live to finish.
#ifndef GRADSYNC_SERVER_ENGINE_CPU_RECOVERY_H_
#define GRADSYNC_SERVER_ENGINE_CPU_RECOVERY_H_

#include <cstdint>
#include <vector>

#include "server/engine/cpu/journal.h"
#include "server/engine/cpu/reduction.h"
#include "server/engine/engine.h"
#include "shm/status.h"

namespace gradsync {

// Ids of the reductions that had begun and not ended when the process died, in no order.
std::vector<uint64_t> InterruptedTasks(const Journal& journal);

enum class Recovered : uint8_t {
  kNotBegun,         // the journal does not know it: its inputs are intact (or it ended long ago)
  kAlreadyFinished,  // every output had been written
  kFinishedNow,      // every output is written now, with the bits that it would have had
};

// Finishes the in-place reduction `task`, which has the id, the shape and the contents of memory
// that it had in the process that died; no engine uses `journal`. May itself die and be done again.
// `observer` is for tests.
//
// kMismatch: the journal's reduction of that id has another shape. kProtocol: the journal
// contradicts itself. kFailedPrecondition: no slot is free; recover the other interrupted tasks
// first.
Result<Recovered> Recover(const Journal& journal, const Task& task,
                          StepObserver* observer = nullptr);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_ENGINE_CPU_RECOVERY_H_

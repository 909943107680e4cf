// A short training on a GPU in which any call of the driver may fail: what came of it, in a word.
#ifndef GRADSYNC_TESTS_GPU_INJECTED_TRAINER_H_
#define GRADSYNC_TESTS_GPU_INJECTED_TRAINER_H_

#include <cstdint>
#include <string>

namespace gradsync::testing {

// Two iterations of a Ddp, and collectives over memory that is staged, registered and the daemon's.
// "right"; "error: " and the sentence; or "wrong: " and what. Whatever it is, everything is given
// back that can be.
std::string TrainBriefly(const std::string& socket, const std::string& job, uint32_t rank,
                         uint32_t world_size);

// What the stand-in for the driver says is still there in this process; empty without it.
std::string LiveObjects();

}  // namespace gradsync::testing

#endif  // GRADSYNC_TESTS_GPU_INJECTED_TRAINER_H_

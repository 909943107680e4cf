// What becomes of parameters that get no gradient in an iteration.
#ifndef GRADSYNC_CLIENT_DDP_UNUSED_POLICY_H_
#define GRADSYNC_CLIENT_DDP_UNUSED_POLICY_H_

#include <cstdint>

namespace gradsync {

// The values are those of gradsync/gradsync.h.
enum class UnusedPolicy : uint8_t {
  kError = 0,   // the iteration can never finish
  kFind = 1,    // they are told apart, in each iteration anew
  kStatic = 2,  // they are told apart in the first iteration, and are the same ever after
};
inline constexpr uint32_t kUnusedPolicyCount = 3;

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_DDP_UNUSED_POLICY_H_

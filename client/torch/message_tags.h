// What messages are sent under that users do not send: theirs have tags of 32 bits.
#ifndef GRADSYNC_CLIENT_TORCH_MESSAGE_TAGS_H_
#define GRADSYNC_CLIENT_TORCH_MESSAGE_TAGS_H_

#include <cstdint>

namespace gradsync::torch {

inline constexpr uint64_t kTagOfAllToAll = uint64_t{1} << 32;  // plus the exchange's number
inline constexpr uint64_t kTagOfMonitoredBarrier = uint64_t{2} << 32;

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_MESSAGE_TAGS_H_

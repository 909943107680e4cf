// Where two ranks' models differ, and how to say it. Pure.
#ifndef GRADSYNC_CLIENT_DDP_MODEL_DIFFERENCE_H_
#define GRADSYNC_CLIENT_DDP_MODEL_DIFFERENCE_H_

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "client/ddp/digest.h"
#include "client/ddp/parameter.h"
#include "shm/protocol.h"

namespace gradsync {

// Equal on two ranks if their parameters agree in dtype, shape and order. Names do not count.
Digest ModelDigest(std::span<const ParameterSpec> parameters);

// A parameter as ranks show it to each other: plain data, any bytes of which are safe to read.
struct ParameterRecord {
  uint64_t present;  // 0 beyond the end of a rank's list, and then all is 0
  uint32_t dtype;
  uint32_t ndim;
  std::array<int64_t, kMaxDims> shape;
  Text<176> name;
};

ParameterRecord MakeRecord(const ParameterSpec& parameter);

// A parameter whose record on one rank differs from the first rank's.
struct ModelDifference {
  uint64_t parameter = 0;
  uint32_t member = 0;
  ParameterRecord first{};
  ParameterRecord other{};
};

enum class NamesCount : bool { kNo, kYes };

// Compares the same piece of each member's list, whose first parameter is number `begin`, on the
// members from `from` to `to` (exclusive) with member 0's. The first parameter that differs, on the
// first of those members. kYes takes a different name for a difference too, which finds the place
// where one list has something more.
std::optional<ModelDifference> FindDifference(
    std::span<const std::span<const ParameterRecord>> pieces, uint64_t begin, uint32_t from,
    uint32_t to, NamesCount names);

// How many parameters two ranks have, in PyTorch's words.
std::string CountSentence(uint32_t first_rank, uint64_t first_count, uint32_t other_rank,
                          uint64_t other_count);
// That sizes (or dtypes) differ, likewise.
std::string TypeSentence(const ModelDifference& difference, uint32_t first_rank,
                         uint32_t other_rank);
// What the parameter is on both ranks, and what to do.
std::string BothSidesSentence(const ModelDifference& difference, uint32_t first_rank,
                              uint32_t other_rank);

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_DDP_MODEL_DIFFERENCE_H_

// What a Ddp says when it is used out of order. PyTorch's wording where it has one: its users
// search for it, and programs match it.
#ifndef GRADSYNC_CLIENT_DDP_SENTENCES_H_
#define GRADSYNC_CLIENT_DDP_SENTENCES_H_

#include <cstdint>
#include <span>
#include <string>

#include "client/ddp/parameter.h"
#include "client/ddp/unused_policy.h"

namespace gradsync {

// "a.weight, a.bias and 37 more": as many names as fit into about `limit` bytes, at least one.
std::string ListNames(std::span<const ParameterSpec> parameters, std::span<const uint32_t> indices,
                      size_t limit);

// A new iteration while the last is unfinished; `unready` may be empty, if only the averages have
// not been collected. With as many names as fit into about `names_limit` bytes.
std::string UnfinishedSentence(std::span<const ParameterSpec> parameters,
                               std::span<const uint32_t> unready, uint32_t rank,
                               UnusedPolicy policy, size_t names_limit);

// Limits of names: what leaves the whole short enough for the text of a failed group, and what
// leaves it short enough for an error of the C interface.
inline constexpr size_t kGroupNamesLimit = 200;
inline constexpr size_t kErrorNamesLimit = 800;

std::string ReadyTwiceSentence(const ParameterSpec& parameter, uint32_t index);

// Waiting for a bucket of which `unready` have no gradient yet.
std::string BucketNotReadySentence(std::span<const ParameterSpec> parameters, uint32_t bucket,
                                   std::span<const uint32_t> unready);

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_DDP_SENTENCES_H_

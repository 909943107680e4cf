// What a Ddp says when it is used out of order. PyTorch's wording where it has one: its users
// search for it, and programs match it.
#ifndef GRADSYNC_CLIENT_DDP_SENTENCES_H_
#define GRADSYNC_CLIENT_DDP_SENTENCES_H_

#include <cstdint>
#include <span>
#include <string>

#include "client/ddp/parameter.h"

namespace gradsync {

// "a.weight, a.bias and 37 more": as many names as fit into about `limit` bytes, at least one.
std::string ListNames(std::span<const ParameterSpec> parameters, std::span<const uint32_t> indices,
                      size_t limit);

// A new iteration while the last is unfinished; `unready` may be empty, if only the averages have
// not been collected. Short enough for the text of a failed group.
std::string UnfinishedSentence(std::span<const ParameterSpec> parameters,
                               std::span<const uint32_t> unready, uint32_t rank);

std::string ReadyTwiceSentence(const ParameterSpec& parameter, uint32_t index);

// Waiting for a bucket of which `unready` have no gradient yet.
std::string BucketNotReadySentence(std::span<const ParameterSpec> parameters, uint32_t bucket,
                                   std::span<const uint32_t> unready);

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_DDP_SENTENCES_H_

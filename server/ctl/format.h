// What gradsyncctl prints for people. Pure functions.
#ifndef GRADSYNC_SERVER_CTL_FORMAT_H_
#define GRADSYNC_SERVER_CTL_FORMAT_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gradsync/v1/inspect.pb.h"

namespace gradsync {

std::string FormatJobs(const v1::ListJobsResponse& jobs);
std::string FormatJob(const v1::Job& job);

// The parts of those.
std::string FormatBytes(uint64_t bytes);                      // "25.0 MiB"
std::string FormatTime(std::chrono::nanoseconds time);        // "412 ms", "3m12s"
std::string FormatRanks(const std::vector<uint32_t>& ranks);  // "rank 1", "ranks 0-3, 7"

// `text` with what a terminal might take for a command replaced by '?': names come from trainers.
std::string Printable(std::string_view text);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_CTL_FORMAT_H_

// The words in which server/job speaks of operations, ranks and times.
#ifndef GRADSYNC_SERVER_JOB_DESCRIBE_H_
#define GRADSYNC_SERVER_JOB_DESCRIBE_H_

#include <cstdint>
#include <span>
#include <string>

#include "server/job/operation.h"

namespace gradsync {

// "all_reduce of 100 float32 (sum)", "broadcast of 8 int64 from root 2", "barrier".
std::string DescribeOperation(const Operation& operation);

// The fields in which two operations differ, of those that mean something to both: "dtype, count".
// Empty if they are the same operation.
std::string DifferingFields(const Operation& a, const Operation& b);

// Whether DifferingFields is empty.
bool SameOperation(const Operation& a, const Operation& b);

// "rank 3", "ranks 0-2, 5"; the order is kept: "ranks 1, 0".
std::string DescribeRanks(std::span<const uint32_t> ranks);

// "250 ms", "1.5 s", "600 s".
std::string DescribeDuration(Duration duration);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_JOB_DESCRIBE_H_

// What the tests of server/job share: a clock that is only a number, and ready-made operations.
#ifndef GRADSYNC_SERVER_JOB_JOB_TESTING_H_
#define GRADSYNC_SERVER_JOB_JOB_TESTING_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>

#include "server/job/operation.h"

namespace gradsync {

inline Time At(std::chrono::milliseconds since_start) { return Time() + since_start; }

inline Operation AllReduce(uint64_t sequence, uint64_t count = 100) {
  return {.sequence = sequence,
          .kind = OpKind::kAllReduce,
          .dtype = DType::kFloat32,
          .reduce_op = ReduceOp::kSum,
          .count = count};
}

inline Operation BucketReduce(uint64_t sequence, uint32_t bucket, uint64_t count = 1000) {
  return {.sequence = sequence,
          .kind = OpKind::kBucketReduce,
          .dtype = DType::kFloat32,
          .reduce_op = ReduceOp::kAvg,
          .bucket = bucket,
          .count = count};
}

inline Operation Barrier(uint64_t sequence) {
  return {.sequence = sequence, .kind = OpKind::kBarrier};
}

inline MemberBuffers WithTimeout(Duration timeout) {
  MemberBuffers buffers;
  buffers.timeout = timeout;
  return buffers;
}

inline MemberBuffers HalfMinute() { return WithTimeout(std::chrono::seconds(30)); }

inline BucketDescription Describe(uint32_t bucket, uint32_t bucket_count, uint64_t count = 1000) {
  return {.bucket = bucket,
          .bucket_count = bucket_count,
          .parameter_count = 2,
          .count = count,
          .dtype = DType::kFloat32,
          .parameters = "encoder.5.weight ... encoder.3.bias"};
}

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_JOB_JOB_TESTING_H_

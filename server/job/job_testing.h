// What the tests of server/job share: a clock that is only a number, ready-made requests, and
// actions as text.
#ifndef GRADSYNC_SERVER_JOB_JOB_TESTING_H_
#define GRADSYNC_SERVER_JOB_JOB_TESTING_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/job/actions.h"
#include "server/job/job_table.h"
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

// An action as a line, so that tests can say what they expect: "complete s1 #0 below 3".
inline std::string Line(const Action& action) {
  return std::visit(
      [](const auto& what) -> std::string {
        using T = std::decay_t<decltype(what)>;
        if constexpr (std::is_same_v<T, AbandonTasks>) {
          return absl::StrCat("abandon ", what.group);
        } else if constexpr (std::is_same_v<T, ForgetGroup>) {
          return absl::StrCat("forget ", what.group);
        } else if constexpr (std::is_same_v<T, StartTask>) {
          return absl::StrCat("start ", what.sequence);
        } else if constexpr (std::is_same_v<T, CompleteOperations>) {
          return absl::StrCat("complete s", what.session, " #", what.number, " below ",
                              what.completed);
        } else if constexpr (std::is_same_v<T, FailGroup>) {
          return absl::StrCat("fail s", what.session, " #", what.number, " ",
                              CodeName(what.status.code()));
        } else if constexpr (std::is_same_v<T, ReplyCreateGroup>) {
          return absl::StrCat(
              "reply s", what.session, " r", what.request_id, " ",
              what.status.ok() ? absl::StrCat("#", what.number) : CodeName(what.status.code()));
        } else if constexpr (std::is_same_v<T, AnswerMessage>) {
          return absl::StrCat("answer s", what.session, " r", what.request_id, " ",
                              what.message != nullptr
                                  ? absl::StrCat("message of ", what.message->from)
                                  : std::string(CodeName(what.status.code())));
        } else if constexpr (std::is_same_v<T, AnswerAside>) {
          const AsideAnswer& answer = what.answer;
          return absl::StrCat("rejoin s", what.session, " r", answer.request_id, " ",
                              answer.status.ok() ? absl::StrCat("at ", answer.next_sequence, " of ",
                                                                answer.last_member)
                                                 : std::string(CodeName(answer.status.code())));
        } else {
          return absl::StrCat("close s", what.session, " ", CodeName(what.status.code()));
        }
      },
      action);
}

inline std::vector<std::string> Lines(const Actions& actions) {
  std::vector<std::string> lines;
  for (const Action& action : actions) lines.push_back(Line(action));
  return lines;
}

inline JoinRequest Rank(uint32_t rank, uint32_t world_size, const std::string& job = "bert-7") {
  JoinRequest request;
  request.uid = 1000;
  request.job = job;
  request.world_size = world_size;
  request.rank = rank;
  request.local_rank = rank;
  request.local_world_size = world_size;
  request.pid = 100 + rank;
  request.program = "train.py";
  return request;
}

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_JOB_JOB_TESTING_H_

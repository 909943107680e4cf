#include "client/torch/session.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "client/torch/errors.h"
#include "client/torch/interpreter.h"

namespace gradsync::torch {

uint32_t Milliseconds(Timeout timeout) {
  return static_cast<uint32_t>(
      std::clamp<int64_t>(timeout.count(), 0, std::numeric_limits<uint32_t>::max()));
}

Session::Session(const Options& options)
    : job_(options.job), rank_(options.rank), world_size_(options.world_size) {
  gradsync_session_options raw{};
  raw.struct_size = sizeof(raw);
  raw.job = job_.c_str();
  raw.generation = options.generation;
  raw.world_size = options.world_size;
  raw.rank = options.rank;
  raw.local_rank = options.local_rank;
  raw.local_world_size = options.local_world_size;
  raw.timeout_ms = Milliseconds(options.timeout);
  gradsync_error error{};
  Check(gradsync_session_open(&raw, &handle_, &error), error);
}

Session::~Session() {
  const WithoutInterpreter released;
  Close();
}

void Session::Close() {
  const std::lock_guard lock(mutex_);
  gradsync_session_close(std::exchange(handle_, nullptr));
}

bool Session::closed() const {
  const std::lock_guard lock(mutex_);
  return handle_ == nullptr;
}

std::string Session::socket() const {
  const std::lock_guard lock(mutex_);
  return handle_ == nullptr ? "" : gradsync_session_socket(handle_);
}

Group::Group(std::shared_ptr<Session> session, const std::string& tag,
             const std::vector<uint32_t>& ranks, Timeout timeout)
    : session_(std::move(session)) {
  const std::lock_guard lock(session_->mutex_);
  if (session_->handle_ == nullptr) {
    throw Error(GRADSYNC_FAILED_PRECONDITION,
                "group \"" + tag + "\" cannot be formed: the session of job \"" + session_->job() +
                    "\" is closed (its process group was destroyed)");
  }
  gradsync_error error{};
  Check(gradsync_group_create(session_->handle_, tag.c_str(), ranks.data(),
                              static_cast<uint32_t>(ranks.size()), Milliseconds(timeout), &handle_,
                              &error),
        error);
}

Group::~Group() {
  const WithoutInterpreter released;
  gradsync_group_destroy(handle_);
}

void Group::AllReduce(void* data, uint64_t count, gradsync_dtype dtype, gradsync_reduce_op op,
                      Timeout timeout) const {
  gradsync_error error{};
  Check(gradsync_all_reduce(handle_, data, count, dtype, op, Milliseconds(timeout), &error), error);
}

void Group::Broadcast(void* data, uint64_t count, gradsync_dtype dtype, uint32_t root,
                      Timeout timeout) const {
  gradsync_error error{};
  Check(gradsync_broadcast(handle_, data, count, dtype, root, Milliseconds(timeout), &error),
        error);
}

void Group::AllGather(const void* input, void* output, uint64_t count, gradsync_dtype dtype,
                      Timeout timeout) const {
  gradsync_error error{};
  Check(gradsync_all_gather(handle_, input, output, count, dtype, Milliseconds(timeout), &error),
        error);
}

void Group::Barrier(Timeout timeout) const {
  gradsync_error error{};
  Check(gradsync_barrier(handle_, Milliseconds(timeout), &error), error);
}

void Group::Share(void* data, uint64_t count, gradsync_dtype dtype, Timeout timeout) const {
  gradsync_error error{};
  Check(gradsync_share(handle_, data, count, dtype, Milliseconds(timeout), &error), error);
}

void Group::StandAside(gradsync_aside_policy policy, Timeout timeout) const {
  gradsync_error error{};
  Check(gradsync_stand_aside(handle_, policy, Milliseconds(timeout), &error), error);
}

uint32_t Group::Rejoin() const {
  gradsync_error error{};
  uint32_t last = 0;
  Check(gradsync_rejoin(handle_, &last, &error), error);
  return last;
}

void Group::Reduce(void* data, uint64_t count, gradsync_dtype dtype, gradsync_reduce_op op,
                   uint32_t root, Timeout timeout) const {
  gradsync_error error{};
  Check(gradsync_reduce(handle_, data, count, dtype, op, root, Milliseconds(timeout), &error),
        error);
}

void Group::Gather(const void* input, void* output, uint64_t count, gradsync_dtype dtype,
                   uint32_t root, Timeout timeout) const {
  gradsync_error error{};
  Check(gradsync_gather(handle_, input, output, count, dtype, root, Milliseconds(timeout), &error),
        error);
}

void Group::Scatter(const void* input, void* output, uint64_t count, gradsync_dtype dtype,
                    uint32_t root, Timeout timeout) const {
  gradsync_error error{};
  Check(gradsync_scatter(handle_, input, output, count, dtype, root, Milliseconds(timeout), &error),
        error);
}

void Group::ReduceScatter(const void* input, void* output, uint64_t count, gradsync_dtype dtype,
                          gradsync_reduce_op op, Timeout timeout) const {
  gradsync_error error{};
  Check(gradsync_reduce_scatter(handle_, input, output, count, dtype, op, Milliseconds(timeout),
                                &error),
        error);
}

void Group::AllToAll(const void* input, void* output, uint64_t count, gradsync_dtype dtype,
                     Timeout timeout) const {
  gradsync_error error{};
  Check(gradsync_all_to_all(handle_, input, output, count, dtype, Milliseconds(timeout), &error),
        error);
}

Request Group::BeginSend(const void* data, uint64_t bytes, uint32_t to, uint64_t tag,
                         Timeout timeout) const {
  gradsync_error error{};
  gradsync_request* request = nullptr;
  Check(gradsync_send_begin(handle_, data, bytes, to, tag, Milliseconds(timeout), &request, &error),
        error);
  return Request(request);
}

Request Group::BeginReceive(uint32_t from, uint64_t tag, Timeout timeout) const {
  gradsync_error error{};
  gradsync_request* request = nullptr;
  Check(gradsync_receive_begin(handle_, from, tag, Milliseconds(timeout), &request, &error), error);
  return Request(request);
}

uint32_t Request::End(void* data, uint64_t bytes) const {
  gradsync_error error{};
  uint32_t from = 0;
  Check(gradsync_request_end(get(), data, bytes, &from, &error), error);
  return from;
}

}  // namespace gradsync::torch

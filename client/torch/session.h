// RAII over the C interface's session and group; failures are thrown (errors.h).
#ifndef GRADSYNC_CLIENT_TORCH_SESSION_H_
#define GRADSYNC_CLIENT_TORCH_SESSION_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gradsync/gradsync.h"

namespace gradsync::torch {

using Timeout = std::chrono::milliseconds;  // zero stands for the session's

// This process's connection to the daemon as one rank of a job. Thread-safe.
class Session {
 public:
  struct Options {
    std::string job;
    uint32_t generation = 0;
    uint32_t world_size = 1;
    uint32_t rank = 0;
    uint32_t local_rank = 0;
    uint32_t local_world_size = 1;
    Timeout timeout{0};
  };

  explicit Session(const Options& options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Says goodbye to the daemon. Groups of the session then answer with an error.
  void Close();

  bool closed() const;
  const std::string& job() const { return job_; }
  uint32_t rank() const { return rank_; }
  uint32_t world_size() const { return world_size_; }
  std::string socket() const;

 private:
  friend class Group;

  std::string job_;
  uint32_t rank_;
  uint32_t world_size_;
  mutable std::mutex mutex_;            // makes Close() wait for a group that is being formed
  gradsync_session* handle_ = nullptr;  // null once closed
};

// A message that is being sent or received. Must not outlive its group.
class Request {
 public:
  explicit Request(gradsync_request* handle) : handle_(handle) {}
  gradsync_request* get() const { return handle_.get(); }

  // Waits. Of a receive: what was received, of exactly that size, and the sender.
  uint32_t End(void* data, uint64_t bytes) const;

 private:
  struct Free {
    void operator()(gradsync_request* handle) const { gradsync_request_free(handle); }
  };
  std::unique_ptr<gradsync_request, Free> handle_;
};

// An ordered set of the job's ranks with one stream of operations. As thread-safe as the C
// interface: callers keep the order in which they call.
class Group {
 public:
  // Blocks until every rank of it has asked.
  Group(std::shared_ptr<Session> session, const std::string& tag,
        const std::vector<uint32_t>& ranks, Timeout timeout);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  gradsync_group* handle() const { return handle_; }
  uint32_t rank() const { return gradsync_group_rank(handle_); }
  uint32_t size() const { return gradsync_group_size(handle_); }

  void AllReduce(void* data, uint64_t count, gradsync_dtype dtype, gradsync_reduce_op op,
                 Timeout timeout) const;
  void Broadcast(void* data, uint64_t count, gradsync_dtype dtype, uint32_t root,
                 Timeout timeout) const;
  void AllGather(const void* input, void* output, uint64_t count, gradsync_dtype dtype,
                 Timeout timeout) const;
  void Barrier(Timeout timeout) const;
  void Share(void* data, uint64_t count, gradsync_dtype dtype, Timeout timeout) const;
  void StandAside(gradsync_aside_policy policy, Timeout timeout) const;
  uint32_t Rejoin() const;
  void Reduce(void* data, uint64_t count, gradsync_dtype dtype, gradsync_reduce_op op,
              uint32_t root, Timeout timeout) const;
  void Gather(const void* input, void* output, uint64_t count, gradsync_dtype dtype, uint32_t root,
              Timeout timeout) const;
  void Scatter(const void* input, void* output, uint64_t count, gradsync_dtype dtype, uint32_t root,
               Timeout timeout) const;
  void ReduceScatter(const void* input, void* output, uint64_t count, gradsync_dtype dtype,
                     gradsync_reduce_op op, Timeout timeout) const;
  void AllToAll(const void* input, void* output, uint64_t count, gradsync_dtype dtype,
                Timeout timeout) const;

  Request BeginSend(const void* data, uint64_t bytes, uint32_t to, uint64_t tag,
                    Timeout timeout) const;
  // `from`: GRADSYNC_ANY_RANK is any.
  Request BeginReceive(uint32_t from, uint64_t tag, Timeout timeout) const;

 private:
  std::shared_ptr<Session> session_;
  gradsync_group* handle_ = nullptr;
};

// For the C interface, which counts in 32 bits. A negative one stands for the session's.
uint32_t Milliseconds(Timeout timeout);

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_SESSION_H_

// gradsync: the client's C++ interface. C++17, header only: thin, move-only owners of the handles
// of gradsync/gradsync.h, whose conventions (threads, deadlines, forked children) hold here too.
//
//   namespace gs = gradsync::client;
//   auto session = gs::Session::Open();                       // who am I: torchrun's environment
//   if (!session) return Report(session.error());
//   auto group = session->CreateGroup("training");
//   ...
//   if (auto done = group->AllReduce(data, count, gs::Op::kAvg); !done) return
//   Report(done.error());
//
// Nothing throws but std::bad_alloc. What fails returns a Result (gradsync/result.hpp). An object
// that was moved from may only be destroyed or assigned to. Timeouts are in milliseconds; zero, the
// default, stands for the session's.
#ifndef GRADSYNC_GRADSYNC_HPP_
#define GRADSYNC_GRADSYNC_HPP_

#include <chrono>
#include <complex>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "gradsync/gradsync.h"
#include "gradsync/result.hpp"

namespace gradsync::client {

using Timeout = std::chrono::milliseconds;

enum class Op {
  kSum = GRADSYNC_SUM,
  kAvg = GRADSYNC_AVG,
  kMin = GRADSYNC_MIN,
  kMax = GRADSYNC_MAX,
  kProduct = GRADSYNC_PRODUCT,
  kBitAnd = GRADSYNC_BIT_AND,
  kBitOr = GRADSYNC_BIT_OR,
  kBitXor = GRADSYNC_BIT_XOR,
};

// The element type of C++ types that have one; float16 and bfloat16 have to be named.
template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> : std::integral_constant<gradsync_dtype, GRADSYNC_FLOAT32> {};
template <>
struct DTypeOf<double> : std::integral_constant<gradsync_dtype, GRADSYNC_FLOAT64> {};
template <>
struct DTypeOf<int8_t> : std::integral_constant<gradsync_dtype, GRADSYNC_INT8> {};
template <>
struct DTypeOf<uint8_t> : std::integral_constant<gradsync_dtype, GRADSYNC_UINT8> {};
template <>
struct DTypeOf<int16_t> : std::integral_constant<gradsync_dtype, GRADSYNC_INT16> {};
template <>
struct DTypeOf<int32_t> : std::integral_constant<gradsync_dtype, GRADSYNC_INT32> {};
template <>
struct DTypeOf<int64_t> : std::integral_constant<gradsync_dtype, GRADSYNC_INT64> {};
template <>
struct DTypeOf<bool> : std::integral_constant<gradsync_dtype, GRADSYNC_BOOL> {};
template <>
struct DTypeOf<std::complex<float>> : std::integral_constant<gradsync_dtype, GRADSYNC_COMPLEX64> {};
template <>
struct DTypeOf<std::complex<double>> : std::integral_constant<gradsync_dtype, GRADSYNC_COMPLEX128> {
};

namespace internal {

// Calls `function(arguments..., &error)` of the C interface.
template <typename Function, typename... Arguments>
std::optional<Error> Call(Function function, Arguments... arguments) {
  gradsync_error error;  // NOLINT: large, and written by whatever fails
  if (function(arguments..., &error) == GRADSYNC_OK) return std::nullopt;
  return Error{static_cast<gradsync_code>(error.code), error.message};
}

template <typename Function, typename... Arguments>
Status CallStatus(Function function, Arguments... arguments) {
  if (auto error = Call(function, arguments...)) return *std::move(error);
  return {};
}

inline uint32_t Milliseconds(Timeout timeout) {
  if (timeout.count() <= 0) return 0;
  return timeout.count() < UINT32_MAX ? static_cast<uint32_t>(timeout.count()) : UINT32_MAX;
}

// A unique_ptr's deleter out of a function.
template <auto Free>
struct Deleter {
  template <typename T>
  void operator()(T* handle) const {
    Free(handle);
  }
};

}  // namespace internal

// A reference to shared memory that the daemon reads and writes where it lies. Copying is another
// reference (Share), the last one frees the memory.
class Buffer {
 public:
  void* data() const { return gradsync_buffer_data(handle_.get()); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data());
  }
  uint64_t size() const { return gradsync_buffer_size(handle_.get()); }  // bytes

  Buffer Share() const { return Retain(handle_.get()); }
  static Buffer Retain(gradsync_buffer* handle) {
    gradsync_buffer_retain(handle);
    return Buffer(handle);
  }

  explicit Buffer(gradsync_buffer* owned) : handle_(owned) {}
  gradsync_buffer* handle() const { return handle_.get(); }

 private:
  std::unique_ptr<gradsync_buffer, internal::Deleter<gradsync_buffer_release>> handle_;
};

// A message on its way. One that is dropped before its end is cancelled. Must not outlive its
// group.
class Request {
 public:
  // Blocks until it is done. Of a receive: copies the message, of exactly `bytes`, to `data`, and
  // returns its sender.
  Result<uint32_t> End(void* data = nullptr, uint64_t bytes = 0) const {
    uint32_t from = 0;
    if (auto error = internal::Call(gradsync_request_end, handle_.get(), data, bytes, &from)) {
      return *std::move(error);
    }
    return from;
  }
  void Cancel() const { gradsync_request_cancel(handle_.get()); }

  explicit Request(gradsync_request* owned) : handle_(owned) {}
  gradsync_request* handle() const { return handle_.get(); }

 private:
  std::unique_ptr<gradsync_request, internal::Deleter<gradsync_request_free>> handle_;
};

// An ordered set of ranks with one stream of operations.
class Group {
 public:
  uint32_t rank() const { return gradsync_group_rank(handle_.get()); }  // index in the group
  uint32_t size() const { return gradsync_group_size(handle_.get()); }

  // data[count], in place.
  Status AllReduce(void* data, uint64_t count, gradsync_dtype dtype, Op op,
                   Timeout timeout = {}) const {
    return internal::CallStatus(gradsync_all_reduce, handle_.get(), data, count, dtype,
                                static_cast<gradsync_reduce_op>(op),
                                internal::Milliseconds(timeout));
  }
  template <typename T>
  Status AllReduce(T* data, uint64_t count, Op op, Timeout timeout = {}) const {
    return AllReduce(data, count, DTypeOf<T>::value, op, timeout);
  }

  // data[count]: the last rank's, of those that do not stand aside, on every one of them.
  template <typename T>
  Status Share(T* data, uint64_t count, Timeout timeout = {}) const {
    return internal::CallStatus(gradsync_share, handle_.get(), data, count, DTypeOf<T>::value,
                                internal::Milliseconds(timeout));
  }

  // The others go on without this rank, until it has waited in Rejoin for all to do the same.
  // Rejoin returns the rank (index in the group) that took part longest.
  Status StandAside(gradsync_aside_policy policy, Timeout timeout = {}) const {
    return internal::CallStatus(gradsync_stand_aside, handle_.get(), policy,
                                internal::Milliseconds(timeout));
  }
  Result<uint32_t> Rejoin() const {
    uint32_t last = 0;
    if (auto error = internal::Call(gradsync_rejoin, handle_.get(), &last)) {
      return *std::move(error);
    }
    return last;
  }

  // data[count]: the root's (an index in the group), on every rank.
  Status Broadcast(void* data, uint64_t count, gradsync_dtype dtype, uint32_t root,
                   Timeout timeout = {}) const {
    return internal::CallStatus(gradsync_broadcast, handle_.get(), data, count, dtype, root,
                                internal::Milliseconds(timeout));
  }
  template <typename T>
  Status Broadcast(T* data, uint64_t count, uint32_t root, Timeout timeout = {}) const {
    return Broadcast(data, count, DTypeOf<T>::value, root, timeout);
  }

  // output[size()][count]: every rank's input[count].
  Status AllGather(const void* input, void* output, uint64_t count, gradsync_dtype dtype,
                   Timeout timeout = {}) const {
    return internal::CallStatus(gradsync_all_gather, handle_.get(), input, output, count, dtype,
                                internal::Milliseconds(timeout));
  }
  template <typename T>
  Status AllGather(const T* input, T* output, uint64_t count, Timeout timeout = {}) const {
    return AllGather(input, output, count, DTypeOf<T>::value, timeout);
  }

  Status Barrier(Timeout timeout = {}) const {
    return internal::CallStatus(gradsync_barrier, handle_.get(), internal::Milliseconds(timeout));
  }

  // The root's data[count], in place; the others' stays as it is.
  template <typename T>
  Status Reduce(T* data, uint64_t count, Op op, uint32_t root, Timeout timeout = {}) const {
    return internal::CallStatus(gradsync_reduce, handle_.get(), data, count, DTypeOf<T>::value,
                                static_cast<gradsync_reduce_op>(op), root,
                                internal::Milliseconds(timeout));
  }
  // The root's output[size()][count]: every rank's input[count].
  template <typename T>
  Status Gather(const T* input, T* output, uint64_t count, uint32_t root,
                Timeout timeout = {}) const {
    return internal::CallStatus(gradsync_gather, handle_.get(), input, output, count,
                                DTypeOf<T>::value, root, internal::Milliseconds(timeout));
  }
  // output[count]: this rank's block of the root's input[size()][count].
  template <typename T>
  Status Scatter(const T* input, T* output, uint64_t count, uint32_t root,
                 Timeout timeout = {}) const {
    return internal::CallStatus(gradsync_scatter, handle_.get(), input, output, count,
                                DTypeOf<T>::value, root, internal::Milliseconds(timeout));
  }
  // output[count]: this rank's block of every rank's input[size()][count], combined.
  template <typename T>
  Status ReduceScatter(const T* input, T* output, uint64_t count, Op op,
                       Timeout timeout = {}) const {
    return internal::CallStatus(gradsync_reduce_scatter, handle_.get(), input, output, count,
                                DTypeOf<T>::value, static_cast<gradsync_reduce_op>(op),
                                internal::Milliseconds(timeout));
  }
  // output[size()][count]: this rank's block of every rank's input[size()][count].
  template <typename T>
  Status AllToAll(const T* input, T* output, uint64_t count, Timeout timeout = {}) const {
    return internal::CallStatus(gradsync_all_to_all, handle_.get(), input, output, count,
                                DTypeOf<T>::value, internal::Milliseconds(timeout));
  }

  // `data` may be used again at once.
  Result<Request> BeginSend(const void* data, uint64_t bytes, uint32_t to, uint64_t tag = 0,
                            Timeout timeout = {}) const {
    gradsync_request* request = nullptr;
    if (auto error = internal::Call(gradsync_send_begin, handle_.get(), data, bytes, to, tag,
                                    internal::Milliseconds(timeout), &request)) {
      return *std::move(error);
    }
    return Request(request);
  }
  // `from`: a rank of the group, or GRADSYNC_ANY_RANK.
  Result<Request> BeginReceive(uint32_t from, uint64_t tag = 0, Timeout timeout = {}) const {
    gradsync_request* request = nullptr;
    if (auto error = internal::Call(gradsync_receive_begin, handle_.get(), from, tag,
                                    internal::Milliseconds(timeout), &request)) {
      return *std::move(error);
    }
    return Request(request);
  }

  explicit Group(gradsync_group* owned) : handle_(owned) {}
  gradsync_group* handle() const { return handle_.get(); }

 private:
  std::unique_ptr<gradsync_group, internal::Deleter<gradsync_group_destroy>> handle_;
};

struct SessionOptions {
  std::string socket;  // empty: see gradsync_session_options, as for all that follows
  std::string job;     // empty: from the environment
  uint32_t generation = 0;
  uint32_t world_size = 0;  // 0: who this rank is comes from torchrun's environment
  uint32_t rank = 0;
  uint32_t local_rank = 0;
  uint32_t local_world_size = 0;
  Timeout timeout{0};  // for every wait that names none; 0: ten minutes
};

// This process as one rank of a job. Groups, buffers and ddps may outlive it; what they are asked
// then fails.
class Session {
 public:
  static Result<Session> Open(const SessionOptions& options = {}) {
    gradsync_session_options raw{};
    raw.struct_size = sizeof(raw);
    raw.socket = options.socket.empty() ? nullptr : options.socket.c_str();
    raw.job = options.job.empty() ? nullptr : options.job.c_str();
    raw.generation = options.generation;
    raw.world_size = options.world_size;
    raw.rank = options.rank;
    raw.local_rank = options.local_rank;
    raw.local_world_size = options.local_world_size;
    raw.timeout_ms = internal::Milliseconds(options.timeout);
    gradsync_session* handle = nullptr;
    if (auto error = internal::Call(gradsync_session_open, &raw, &handle)) {
      return *std::move(error);
    }
    return Session(handle);
  }

  uint32_t rank() const { return gradsync_session_rank(handle_.get()); }
  uint32_t world_size() const { return gradsync_session_world_size(handle_.get()); }
  std::string socket() const { return gradsync_session_socket(handle_.get()); }

  Result<Buffer> CreateBuffer(uint64_t bytes, const std::string& label = "buffer") const {
    gradsync_buffer* buffer = nullptr;
    if (auto error =
            internal::Call(gradsync_buffer_create, handle_.get(), bytes, label.c_str(), &buffer)) {
      return *std::move(error);
    }
    return Buffer(buffer);
  }

  // A group of `ranks`; empty: of all ranks of the job. Blocks until each has asked for the same.
  Result<Group> CreateGroup(const std::string& tag, const std::vector<uint32_t>& ranks = {},
                            Timeout timeout = {}) const {
    gradsync_group* group = nullptr;
    if (auto error = internal::Call(gradsync_group_create, handle_.get(), tag.c_str(),
                                    ranks.empty() ? nullptr : ranks.data(),
                                    static_cast<uint32_t>(ranks.size()),
                                    internal::Milliseconds(timeout), &group)) {
      return *std::move(error);
    }
    return Group(group);
  }

  explicit Session(gradsync_session* owned) : handle_(owned) {}
  gradsync_session* handle() const { return handle_.get(); }

 private:
  std::unique_ptr<gradsync_session, internal::Deleter<gradsync_session_close>> handle_;
};

struct Parameter {
  std::string name;
  gradsync_dtype dtype = GRADSYNC_FLOAT32;
  std::vector<int64_t> shape;  // empty: a scalar
  uint32_t device = 0;
};

struct DdpOptions {
  uint64_t bucket_bytes = 0;        // 0: 25 MiB
  uint64_t first_bucket_bytes = 0;  // 0: 1 MiB, or bucket_bytes if given
  Timeout timeout{0};
  bool fixed_plan = false;
  std::vector<uint64_t> bucket_bytes_list{};  // instead of the two sizes above
  bool fill_from_front = false;
};

enum class UnusedPolicy {
  kError = GRADSYNC_UNUSED_ERROR,
  kFind = GRADSYNC_UNUSED_FIND,
  kStatic = GRADSYNC_UNUSED_STATIC,
};

// The core of a DDP wrapper. See gradsync_ddp_* for what each call does and when it may be made.
class Ddp {
 public:
  // `group` must outlive it.
  static Result<Ddp> Create(const Group& group, const std::vector<Parameter>& parameters,
                            const DdpOptions& options = {}) {
    std::vector<gradsync_parameter> raw_parameters;
    raw_parameters.reserve(parameters.size());
    for (const Parameter& parameter : parameters) raw_parameters.push_back(ToRaw(parameter));
    gradsync_ddp_options raw{};
    raw.struct_size = sizeof(raw);
    raw.bucket_bytes = options.bucket_bytes;
    raw.first_bucket_bytes = options.first_bucket_bytes;
    raw.timeout_ms = internal::Milliseconds(options.timeout);
    raw.fixed_plan = options.fixed_plan ? 1 : 0;
    raw.bucket_bytes_list =
        options.bucket_bytes_list.empty() ? nullptr : options.bucket_bytes_list.data();
    raw.bucket_bytes_count = static_cast<uint32_t>(options.bucket_bytes_list.size());
    raw.fill_from_front = options.fill_from_front ? 1 : 0;
    gradsync_ddp* handle = nullptr;
    if (auto error = internal::Call(gradsync_ddp_create, group.handle(), raw_parameters.data(),
                                    static_cast<uint32_t>(raw_parameters.size()), &raw, &handle)) {
      return *std::move(error);
    }
    return Ddp(handle);
  }

  // Where the gradient of a parameter lies. `buffer` is borrowed; Buffer::Retain keeps it beyond a
  // replan.
  Result<gradsync_slot> Slot(uint32_t parameter) const {
    gradsync_slot slot{};
    if (auto error = internal::Call(gradsync_ddp_slot, handle_.get(), parameter, &slot)) {
      return *std::move(error);
    }
    return slot;
  }

  uint32_t bucket_count() const { return gradsync_ddp_bucket_count(handle_.get()); }
  Result<gradsync_bucket> Bucket(uint32_t index) const {
    gradsync_bucket bucket{};
    if (auto error = internal::Call(gradsync_ddp_bucket, handle_.get(), index, &bucket)) {
      return *std::move(error);
    }
    return bucket;
  }

  Status Begin() const { return internal::CallStatus(gradsync_ddp_begin, handle_.get()); }

  // True with the iteration's last parameter.
  Result<bool> Ready(uint32_t parameter) const {
    int all_ready = 0;
    if (auto error = internal::Call(gradsync_ddp_ready, handle_.get(), parameter, &all_ready)) {
      return *std::move(error);
    }
    return all_ready != 0;
  }

  Status SetUnusedPolicy(UnusedPolicy policy) const {
    return internal::CallStatus(gradsync_ddp_set_unused_policy, handle_.get(),
                                static_cast<gradsync_unused_policy>(policy));
  }
  Result<bool> ReadyUnused(uint32_t parameter) const {
    int all_ready = 0;
    if (auto error =
            internal::Call(gradsync_ddp_ready_unused, handle_.get(), parameter, &all_ready)) {
      return *std::move(error);
    }
    return all_ready != 0;
  }
  uint32_t UsedBy(uint32_t parameter) const {
    return gradsync_ddp_used_by(handle_.get(), parameter);
  }
  Status Skip(uint32_t bucket) const {
    return internal::CallStatus(gradsync_ddp_skip, handle_.get(), bucket);
  }
  Status ReduceElsewhere() const {
    return internal::CallStatus(gradsync_ddp_reduce_elsewhere, handle_.get());
  }
  bool IsBucketReady(uint32_t bucket) const {
    return gradsync_ddp_bucket_ready(handle_.get(), bucket) != 0;
  }

  Status Wait(uint32_t bucket) const {
    return internal::CallStatus(gradsync_ddp_wait, handle_.get(), bucket);
  }
  Status End() const { return internal::CallStatus(gradsync_ddp_end, handle_.get()); }

  // True if slots moved.
  Result<bool> Replan() const {
    int replanned = 0;
    if (auto error = internal::Call(gradsync_ddp_replan, handle_.get(), &replanned)) {
      return *std::move(error);
    }
    return replanned != 0;
  }

  // As Group::StandAside, between iterations; go on with Rejoin of the group.
  Status StandAside(gradsync_aside_policy policy) const {
    return internal::CallStatus(gradsync_ddp_stand_aside, handle_.get(), policy);
  }

  // Other memory for the slots, zeroed.
  Status Renew() const { return internal::CallStatus(gradsync_ddp_renew, handle_.get()); }

  // The parameters of the current iteration that have not become ready.
  std::vector<uint32_t> Unready() const {
    std::vector<uint32_t> parameters(gradsync_ddp_unready(handle_.get(), nullptr, 0));
    gradsync_ddp_unready(handle_.get(), parameters.data(),
                         static_cast<uint32_t>(parameters.size()));
    return parameters;
  }

  explicit Ddp(gradsync_ddp* owned) : handle_(owned) {}
  gradsync_ddp* handle() const { return handle_.get(); }

 private:
  static gradsync_parameter ToRaw(const Parameter& parameter) {
    gradsync_parameter raw{};
    raw.name = parameter.name.c_str();
    raw.dtype = parameter.dtype;
    raw.ndim = static_cast<uint32_t>(parameter.shape.size());
    raw.device = parameter.device;
    for (size_t i = 0; i < parameter.shape.size(); ++i) {
      // More dimensions than there is room for: the last one is the product of the rest.
      if (i < GRADSYNC_MAX_DIMS) {
        raw.shape[i] = parameter.shape[i];
      } else {
        raw.shape[GRADSYNC_MAX_DIMS - 1] *= parameter.shape[i];
      }
    }
    return raw;
  }

  std::unique_ptr<gradsync_ddp, internal::Deleter<gradsync_ddp_destroy>> handle_;
};

}  // namespace gradsync::client

#endif  // GRADSYNC_GRADSYNC_HPP_

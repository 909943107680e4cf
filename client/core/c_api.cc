// The C ABI of sessions, buffers, groups and collectives. gradsync/gradsync.h is its manual.
#include <unistd.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/core/c_api_support.h"

namespace gradsync {
namespace {

std::string TextOr(const char* text, const char* otherwise) {
  return text != nullptr ? text : otherwise;
}

SessionRequest ToRequest(const gradsync_session_options& options) {
  SessionRequest request;
  request.socket = TextOr(options.socket, "");
  request.job = TextOr(options.job, "");
  request.generation = options.generation;
  request.world_size = options.world_size;
  request.rank = options.rank;
  request.local_rank = options.local_rank;
  request.local_world_size = options.local_world_size;
  request.timeout_ms = options.timeout_ms;
  return request;
}

}  // namespace
}  // namespace gradsync

using gradsync::Guarded;
using gradsync::OkStatus;
using gradsync::Status;

const char* gradsync_version(void) { return GRADSYNC_VERSION_TEXT; }

const char* gradsync_code_name(int code) {
  return gradsync::CodeName(static_cast<gradsync::Code>(code));
}

int gradsync_session_open(const gradsync_session_options* options, gradsync_session** session,
                          gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (session == nullptr) return gradsync::MustNotBeNull(function, "session");
    *session = nullptr;
    gradsync_session_options taken{};
    GRADSYNC_RETURN_IF_ERROR(gradsync::TakeOptions(function, options, &taken));
    auto opened =
        gradsync::Session::Open(gradsync::ToRequest(taken), gradsync::ReadEnvironment(environ));
    if (!opened) return opened.error();
    *session = new gradsync_session{*std::move(opened)};
    return OkStatus();
  });
}

void gradsync_session_close(gradsync_session* session) {
  if (session == nullptr) return;
  Guarded(nullptr, [&] {
    session->session->Close();
    return OkStatus();
  });
  delete session;
}

uint32_t gradsync_session_rank(const gradsync_session* session) {
  return session->session->identity().rank;
}

uint32_t gradsync_session_world_size(const gradsync_session* session) {
  return session->session->identity().world_size;
}

const char* gradsync_session_socket(const gradsync_session* session) {
  return session->session->socket().c_str();
}

int gradsync_buffer_create(gradsync_session* session, uint64_t bytes, const char* label,
                           gradsync_buffer** buffer, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (session == nullptr) return gradsync::MustNotBeNull(function, "session");
    if (buffer == nullptr) return gradsync::MustNotBeNull(function, "buffer");
    *buffer = nullptr;
    auto allocated = session->session->Allocate(bytes, gradsync::TextOr(label, "buffer"));
    if (!allocated) return allocated.error();
    *buffer = new gradsync_buffer(*std::move(allocated));
    return OkStatus();
  });
}

void* gradsync_buffer_data(const gradsync_buffer* buffer) { return buffer->buffer->data(); }

uint64_t gradsync_buffer_size(const gradsync_buffer* buffer) { return buffer->buffer->size(); }

void gradsync_buffer_retain(gradsync_buffer* buffer) {
  buffer->references.fetch_add(1, std::memory_order_relaxed);
}

void gradsync_buffer_release(gradsync_buffer* buffer) {
  if (buffer == nullptr) return;
  if (buffer->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  Guarded(nullptr, [&] {
    delete buffer;
    return OkStatus();
  });
}

int gradsync_group_create(gradsync_session* session, const char* tag, const uint32_t* ranks,
                          uint32_t rank_count, uint32_t timeout_ms, gradsync_group** group,
                          gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (session == nullptr) return gradsync::MustNotBeNull(function, "session");
    if (tag == nullptr) return gradsync::MustNotBeNull(function, "tag");
    if (group == nullptr) return gradsync::MustNotBeNull(function, "group");
    *group = nullptr;
    std::vector<uint32_t> members;
    if (ranks != nullptr) {
      if (rank_count == 0) return {gradsync::Code::kInvalidArgument, "a group of no ranks"};
      members.assign(ranks, ranks + rank_count);
    }
    auto created = gradsync::DaemonGroup::Create(session->session, tag, std::move(members),
                                                 gradsync::Timeout(timeout_ms));
    if (!created) return created.error();
    *group = new gradsync_group{*std::move(created)};
    return OkStatus();
  });
}

void gradsync_group_destroy(gradsync_group* group) {
  if (group == nullptr) return;
  Guarded(nullptr, [&] {
    delete group;
    return OkStatus();
  });
}

uint32_t gradsync_group_rank(const gradsync_group* group) { return group->group->rank(); }

uint32_t gradsync_group_size(const gradsync_group* group) { return group->group->size(); }

int gradsync_all_reduce(gradsync_group* group, void* data, uint64_t count, gradsync_dtype dtype,
                        gradsync_reduce_op op, uint32_t timeout_ms, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (group == nullptr) return gradsync::MustNotBeNull(function, "group");
    if (data == nullptr && count != 0) return gradsync::MustNotBeNull(function, "data");
    return group->group->AllReduce(data, count, gradsync::ToEnum<gradsync::DType>(dtype),
                                   gradsync::ToEnum<gradsync::ReduceOp>(op),
                                   gradsync::Timeout(timeout_ms));
  });
}

int gradsync_broadcast(gradsync_group* group, void* data, uint64_t count, gradsync_dtype dtype,
                       uint32_t root, uint32_t timeout_ms, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (group == nullptr) return gradsync::MustNotBeNull(function, "group");
    if (data == nullptr && count != 0) return gradsync::MustNotBeNull(function, "data");
    return group->group->Broadcast(data, count, gradsync::ToEnum<gradsync::DType>(dtype), root,
                                   gradsync::Timeout(timeout_ms));
  });
}

int gradsync_all_gather(gradsync_group* group, const void* input, void* output, uint64_t count,
                        gradsync_dtype dtype, uint32_t timeout_ms, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (group == nullptr) return gradsync::MustNotBeNull(function, "group");
    if (input == nullptr && count != 0) return gradsync::MustNotBeNull(function, "input");
    if (output == nullptr && count != 0) return gradsync::MustNotBeNull(function, "output");
    return group->group->AllGather(input, output, count, gradsync::ToEnum<gradsync::DType>(dtype),
                                   gradsync::Timeout(timeout_ms));
  });
}

int gradsync_barrier(gradsync_group* group, uint32_t timeout_ms, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (group == nullptr) return gradsync::MustNotBeNull(function, "group");
    return group->group->Barrier(gradsync::Timeout(timeout_ms));
  });
}

int gradsync_share(gradsync_group* group, void* data, uint64_t count, gradsync_dtype dtype,
                   uint32_t timeout_ms, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (group == nullptr) return gradsync::MustNotBeNull(function, "group");
    if (data == nullptr && count != 0) return gradsync::MustNotBeNull(function, "data");
    return group->group->Share(data, count, gradsync::ToEnum<gradsync::DType>(dtype),
                               gradsync::Timeout(timeout_ms));
  });
}

int gradsync_stand_aside(gradsync_group* group, gradsync_aside_policy policy, uint32_t timeout_ms,
                         gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (group == nullptr) return gradsync::MustNotBeNull(function, "group");
    return group->group->StandAside(gradsync::ToEnum<gradsync::AsidePolicy>(policy),
                                    gradsync::Timeout(timeout_ms));
  });
}

int gradsync_rejoin(gradsync_group* group, uint32_t* last, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (group == nullptr) return gradsync::MustNotBeNull(function, "group");
    const gradsync::Result<uint32_t> found = group->group->Rejoin();
    if (!found) return found.error();
    if (last != nullptr) *last = *found;
    return gradsync::OkStatus();
  });
}

int gradsync_reduce(gradsync_group* group, void* data, uint64_t count, gradsync_dtype dtype,
                    gradsync_reduce_op op, uint32_t root, uint32_t timeout_ms,
                    gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (group == nullptr) return gradsync::MustNotBeNull(function, "group");
    if (data == nullptr && count != 0) return gradsync::MustNotBeNull(function, "data");
    return group->group->Reduce(data, count, gradsync::ToEnum<gradsync::DType>(dtype),
                                gradsync::ToEnum<gradsync::ReduceOp>(op), root,
                                gradsync::Timeout(timeout_ms));
  });
}

int gradsync_gather(gradsync_group* group, const void* input, void* output, uint64_t count,
                    gradsync_dtype dtype, uint32_t root, uint32_t timeout_ms,
                    gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (group == nullptr) return gradsync::MustNotBeNull(function, "group");
    if (input == nullptr && count != 0) return gradsync::MustNotBeNull(function, "input");
    if (output == nullptr && count != 0 && root == group->group->rank()) {
      return gradsync::MustNotBeNull(function, "output");
    }
    return group->group->Gather(input, output, count, gradsync::ToEnum<gradsync::DType>(dtype),
                                root, gradsync::Timeout(timeout_ms));
  });
}

int gradsync_scatter(gradsync_group* group, const void* input, void* output, uint64_t count,
                     gradsync_dtype dtype, uint32_t root, uint32_t timeout_ms,
                     gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (group == nullptr) return gradsync::MustNotBeNull(function, "group");
    if (output == nullptr && count != 0) return gradsync::MustNotBeNull(function, "output");
    if (input == nullptr && count != 0 && root == group->group->rank()) {
      return gradsync::MustNotBeNull(function, "input");
    }
    return group->group->Scatter(input, output, count, gradsync::ToEnum<gradsync::DType>(dtype),
                                 root, gradsync::Timeout(timeout_ms));
  });
}

int gradsync_reduce_scatter(gradsync_group* group, const void* input, void* output, uint64_t count,
                            gradsync_dtype dtype, gradsync_reduce_op op, uint32_t timeout_ms,
                            gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (group == nullptr) return gradsync::MustNotBeNull(function, "group");
    if (input == nullptr && count != 0) return gradsync::MustNotBeNull(function, "input");
    if (output == nullptr && count != 0) return gradsync::MustNotBeNull(function, "output");
    return group->group->ReduceScatter(
        input, output, count, gradsync::ToEnum<gradsync::DType>(dtype),
        gradsync::ToEnum<gradsync::ReduceOp>(op), gradsync::Timeout(timeout_ms));
  });
}

int gradsync_all_to_all(gradsync_group* group, const void* input, void* output, uint64_t count,
                        gradsync_dtype dtype, uint32_t timeout_ms, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (group == nullptr) return gradsync::MustNotBeNull(function, "group");
    if (input == nullptr && count != 0) return gradsync::MustNotBeNull(function, "input");
    if (output == nullptr && count != 0) return gradsync::MustNotBeNull(function, "output");
    return group->group->AllToAll(input, output, count, gradsync::ToEnum<gradsync::DType>(dtype),
                                  gradsync::Timeout(timeout_ms));
  });
}

int gradsync_send_begin(gradsync_group* group, const void* data, uint64_t bytes, uint32_t to,
                        uint64_t tag, uint32_t timeout_ms, gradsync_request** request,
                        gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (group == nullptr) return gradsync::MustNotBeNull(function, "group");
    if (request == nullptr) return gradsync::MustNotBeNull(function, "request");
    *request = nullptr;
    if (data == nullptr && bytes != 0) return gradsync::MustNotBeNull(function, "data");
    auto begun = group->group->BeginSend(static_cast<const std::byte*>(data), bytes, to, tag,
                                         gradsync::Timeout(timeout_ms));
    if (!begun) return begun.error();
    *request = new gradsync_request{*std::move(begun)};
    return OkStatus();
  });
}

int gradsync_receive_begin(gradsync_group* group, uint32_t from, uint64_t tag, uint32_t timeout_ms,
                           gradsync_request** request, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (group == nullptr) return gradsync::MustNotBeNull(function, "group");
    if (request == nullptr) return gradsync::MustNotBeNull(function, "request");
    *request = nullptr;
    const std::optional<uint32_t> sender =
        from == GRADSYNC_ANY_RANK ? std::nullopt : std::optional(from);
    auto begun = group->group->BeginReceive(sender, tag, gradsync::Timeout(timeout_ms));
    if (!begun) return begun.error();
    *request = new gradsync_request{*std::move(begun)};
    return OkStatus();
  });
}

int gradsync_request_wait_any(gradsync_request* const* requests, uint32_t count, uint32_t* index,
                              gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (requests == nullptr || count == 0) return gradsync::MustNotBeNull(function, "requests");
    if (index == nullptr) return gradsync::MustNotBeNull(function, "index");
    std::vector<const gradsync::MessageRequest*> all;
    for (uint32_t i = 0; i < count; ++i) all.push_back(&requests[i]->request);
    const auto found = gradsync::MessageRequest::WaitAny(all);
    if (!found) return found.error();
    *index = static_cast<uint32_t>(*found);
    return OkStatus();
  });
}

int gradsync_request_end(gradsync_request* request, void* data, uint64_t bytes, uint32_t* from,
                         gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (request == nullptr) return gradsync::MustNotBeNull(function, "request");
    const auto sender = request->request.End(static_cast<std::byte*>(data), bytes);
    if (!sender) return sender.error();
    if (from != nullptr) *from = *sender;
    return OkStatus();
  });
}

void gradsync_request_cancel(gradsync_request* request) {
  Guarded(nullptr, [&] {
    request->request.Cancel();
    return OkStatus();
  });
}

void gradsync_request_free(gradsync_request* request) {
  if (request == nullptr) return;
  Guarded(nullptr, [&] {
    delete request;
    return OkStatus();
  });
}

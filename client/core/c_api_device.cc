// The C ABI of memory and collectives on GPUs. gradsync/gradsync.h is its manual.
#include <memory>
#include <utility>

#include "client/core/c_api_support.h"
#include "client/core/device_work.h"

struct gradsync_work {
  std::unique_ptr<gradsync::DeviceWork> work;
};

namespace gradsync {
namespace {

Status CheckDevice(const char* function, uint32_t device) {
  if (device != GRADSYNC_CPU) return OkStatus();
  return {Code::kInvalidArgument, std::string(function) + ": name a device, GRADSYNC_CUDA(n)"};
}

// As the group wants it: who has a side, and where a result takes the input's place.
Result<Collective> ToCollective(const char* function, const gradsync_collective& what,
                                uint32_t rank) {
  Collective collective;
  collective.kind = ToEnum<OpKind>(what.kind);
  if (static_cast<uint8_t>(collective.kind) >= kOpKindCount) {
    return Unexpected(Code::kInvalidArgument, std::string(function) + ": no such kind");
  }
  collective.dtype = ToEnum<DType>(what.dtype);
  collective.op = ToEnum<ReduceOp>(what.op);
  collective.root = what.root;
  collective.count = what.count;
  if (collective.kind == OpKind::kBarrier) {
    collective.count = 0;
    return collective;
  }
  const OpTraits& traits = TraitsOf(collective.kind);
  const bool in_place = !traits.input_per_rank && !traits.output_per_rank;
  if (what.count != 0 && what.output == nullptr) {
    return Unexpected(MustNotBeNull(function, "output"));
  }
  if (what.count != 0 && !in_place && what.input == nullptr) {
    return Unexpected(MustNotBeNull(function, "input"));
  }
  auto* const output = static_cast<std::byte*>(what.output);
  collective.output = output;
  collective.input = in_place ? output : static_cast<const std::byte*>(what.input);
  if (collective.kind == OpKind::kBroadcast) {
    if (what.root == rank) collective.output = nullptr;
    if (what.root != rank) collective.input = nullptr;
  }
  return collective;
}

}  // namespace
}  // namespace gradsync

using gradsync::Guarded;
using gradsync::OkStatus;
using gradsync::Status;

int gradsync_buffer_create_on(gradsync_session* session, uint32_t device, uint64_t bytes,
                              const char* label, gradsync_buffer** buffer, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (session == nullptr) return gradsync::MustNotBeNull(function, "session");
    if (buffer == nullptr) return gradsync::MustNotBeNull(function, "buffer");
    *buffer = nullptr;
    GRADSYNC_RETURN_IF_ERROR(gradsync::CheckDevice(function, device));
    auto allocated = session->session->Allocate(bytes, label != nullptr ? label : "buffer", device);
    if (!allocated) return allocated.error();
    *buffer = new gradsync_buffer(*std::move(allocated));
    return OkStatus();
  });
}

int gradsync_memory_register(gradsync_session* session, uint32_t device, const void* memory,
                             uint64_t bytes, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (session == nullptr) return gradsync::MustNotBeNull(function, "session");
    if (memory == nullptr) return gradsync::MustNotBeNull(function, "memory");
    GRADSYNC_RETURN_IF_ERROR(gradsync::CheckDevice(function, device));
    return session->session->Register(device, static_cast<const std::byte*>(memory), bytes);
  });
}

int gradsync_memory_unregister(gradsync_session* session, const void* memory,
                               gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (session == nullptr) return gradsync::MustNotBeNull(function, "session");
    return session->session->Unregister(static_cast<const std::byte*>(memory));
  });
}

int gradsync_enqueue(gradsync_group* group, uint32_t device, const gradsync_collective* collective,
                     gradsync_stream stream, gradsync_work** work, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (group == nullptr) return gradsync::MustNotBeNull(function, "group");
    if (collective == nullptr) return gradsync::MustNotBeNull(function, "collective");
    if (work == nullptr) return gradsync::MustNotBeNull(function, "work");
    *work = nullptr;
    GRADSYNC_RETURN_IF_ERROR(gradsync::CheckDevice(function, device));
    gradsync_collective taken{};
    GRADSYNC_RETURN_IF_ERROR(gradsync::TakeOptions(function, collective, &taken));
    const auto what = gradsync::ToCollective(function, taken, group->group->rank());
    if (!what) return what.error();
    auto enqueued =
        group->group->Enqueue(*what, device, stream, gradsync::Timeout(taken.timeout_ms));
    if (!enqueued) return enqueued.error();
    *work = new gradsync_work{*std::move(enqueued)};
    return OkStatus();
  });
}

int gradsync_work_wait(const gradsync_work* work, gradsync_stream stream, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (work == nullptr) return gradsync::MustNotBeNull(function, "work");
    return work->work->Wait(stream);
  });
}

int gradsync_work_query(const gradsync_work* work, int* done, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (work == nullptr) return gradsync::MustNotBeNull(function, "work");
    if (done == nullptr) return gradsync::MustNotBeNull(function, "done");
    *done = 0;
    const gradsync::Result<bool> is_done = work->work->IsDone();
    if (!is_done) return is_done.error();
    *done = *is_done ? 1 : 0;
    return OkStatus();
  });
}

int gradsync_work_synchronize(const gradsync_work* work, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (work == nullptr) return gradsync::MustNotBeNull(function, "work");
    return work->work->Synchronize();
  });
}

void gradsync_work_free(gradsync_work* work) {
  if (work == nullptr) return;
  Guarded(nullptr, [&] {
    delete work;
    return OkStatus();
  });
}

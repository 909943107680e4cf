// The C ABI of the DDP core. gradsync/gradsync.h is its manual.
#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "client/core/c_api_support.h"
#include "client/ddp/ddp.h"

struct gradsync_ddp {
  std::unique_ptr<gradsync::Ddp> ddp;
  // The buffer of the current plan as a handle, with one reference of ours.
  gradsync_buffer* buffer = nullptr;

  // To be called whenever a plan may have moved the slots.
  void FollowBuffer() {
    if (buffer != nullptr && buffer->buffer == ddp->buffer()) return;
    gradsync_buffer* const fresh = ddp->buffer() ? new gradsync_buffer(ddp->buffer()) : nullptr;
    gradsync_buffer_release(buffer);
    buffer = fresh;
  }
};

namespace gradsync {
namespace {

Result<std::vector<ParameterSpec>> ToSpecs(const gradsync_parameter* parameters, uint32_t count) {
  std::vector<ParameterSpec> specs;
  specs.reserve(count);
  for (const gradsync_parameter& parameter : std::span(parameters, count)) {
    if (parameter.name == nullptr) {
      return Unexpected(Code::kInvalidArgument,
                        "parameter " + std::to_string(specs.size()) + " has no name");
    }
    ParameterSpec spec;
    spec.name = parameter.name;
    unsigned dtype = 0;  // a C program may have put any number there
    std::memcpy(&dtype, &parameter.dtype, sizeof(dtype));
    if (dtype >= kDTypeCount) {
      return Unexpected(Code::kInvalidArgument, "parameter '" + spec.name + "' has element type " +
                                                    std::to_string(dtype) + ", which is none");
    }
    spec.dtype = static_cast<DType>(dtype);
    const uint32_t dims = std::min<uint32_t>(parameter.ndim, GRADSYNC_MAX_DIMS);
    spec.shape.assign(parameter.shape, parameter.shape + dims);
    spec.device = parameter.device;
    specs.push_back(std::move(spec));
  }
  return specs;
}

DdpOptions ToOptions(const gradsync_ddp_options& options) {
  DdpOptions result;
  result.bucket_bytes = options.bucket_bytes;
  result.first_bucket_bytes = options.first_bucket_bytes;
  result.timeout = Timeout(options.timeout_ms);
  result.fixed_plan = options.fixed_plan != 0;
  result.fill_from_front = options.fill_from_front != 0;
  if (options.bucket_bytes_list != nullptr) {
    result.bucket_bytes_list.assign(options.bucket_bytes_list,
                                    options.bucket_bytes_list + options.bucket_bytes_count);
  }
  return result;
}

static_assert(kMaxDims == GRADSYNC_MAX_DIMS);

}  // namespace
}  // namespace gradsync

using gradsync::Guarded;
using gradsync::OkStatus;
using gradsync::Status;

int gradsync_ddp_create(gradsync_group* group, const gradsync_parameter* parameters,
                        uint32_t parameter_count, const gradsync_ddp_options* options,
                        gradsync_ddp** ddp, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (group == nullptr) return gradsync::MustNotBeNull(function, "group");
    if (ddp == nullptr) return gradsync::MustNotBeNull(function, "ddp");
    if (parameters == nullptr && parameter_count != 0) {
      return gradsync::MustNotBeNull(function, "parameters");
    }
    *ddp = nullptr;
    gradsync_ddp_options taken{};
    GRADSYNC_RETURN_IF_ERROR(gradsync::TakeOptions(function, options, &taken));
    auto specs = gradsync::ToSpecs(parameters, parameter_count);
    if (!specs) {
      group->group->Abort(specs.error());  // the others are about to agree on their parameters
      return specs.error();
    }
    auto created =
        gradsync::Ddp::Create(group->group, *std::move(specs), gradsync::ToOptions(taken));
    if (!created) return created.error();
    auto handle = std::make_unique<gradsync_ddp>();
    handle->ddp = *std::move(created);
    handle->FollowBuffer();
    *ddp = handle.release();
    return OkStatus();
  });
}

void gradsync_ddp_destroy(gradsync_ddp* ddp) {
  if (ddp == nullptr) return;
  Guarded(nullptr, [&] {
    gradsync_buffer_release(ddp->buffer);
    delete ddp;
    return OkStatus();
  });
}

int gradsync_ddp_slot(const gradsync_ddp* ddp, uint32_t parameter, gradsync_slot* slot,
                      gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (ddp == nullptr) return gradsync::MustNotBeNull(function, "ddp");
    if (slot == nullptr) return gradsync::MustNotBeNull(function, "slot");
    const auto found = ddp->ddp->GetSlot(parameter);
    if (!found) return found.error();
    *slot = {found->data, found->count, found->bucket, ddp->buffer};
    return OkStatus();
  });
}

uint32_t gradsync_ddp_bucket_count(const gradsync_ddp* ddp) { return ddp->ddp->bucket_count(); }

int gradsync_ddp_bucket(const gradsync_ddp* ddp, uint32_t index, gradsync_bucket* bucket,
                        gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (ddp == nullptr) return gradsync::MustNotBeNull(function, "ddp");
    if (bucket == nullptr) return gradsync::MustNotBeNull(function, "bucket");
    const auto found = ddp->ddp->GetBucket(index);
    if (!found) return found.error();
    *bucket = {found->data, found->count, static_cast<gradsync_dtype>(found->dtype),
               found->parameters.data(), static_cast<uint32_t>(found->parameters.size())};
    return OkStatus();
  });
}

int gradsync_ddp_begin(gradsync_ddp* ddp, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (ddp == nullptr) return gradsync::MustNotBeNull(function, "ddp");
    return ddp->ddp->Begin();
  });
}

int gradsync_ddp_ready(gradsync_ddp* ddp, uint32_t parameter, int* all_ready,
                       gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (ddp == nullptr) return gradsync::MustNotBeNull(function, "ddp");
    const auto ready = ddp->ddp->Ready(parameter);
    if (!ready) return ready.error();
    if (all_ready != nullptr) *all_ready = *ready ? 1 : 0;
    return OkStatus();
  });
}

int gradsync_ddp_set_unused_policy(gradsync_ddp* ddp, gradsync_unused_policy policy,
                                   gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (ddp == nullptr) return gradsync::MustNotBeNull(function, "ddp");
    const auto value = gradsync::ToEnum<gradsync::UnusedPolicy>(policy);
    if (static_cast<uint8_t>(value) >= gradsync::kUnusedPolicyCount) {
      return {gradsync::Code::kInvalidArgument, std::string(function) + ": there is no policy " +
                                                    std::to_string(static_cast<int>(value))};
    }
    return ddp->ddp->SetUnusedPolicy(value);
  });
}

int gradsync_ddp_ready_unused(gradsync_ddp* ddp, uint32_t parameter, int* all_ready,
                              gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (ddp == nullptr) return gradsync::MustNotBeNull(function, "ddp");
    const auto ready = ddp->ddp->ReadyUnused(parameter);
    if (!ready) return ready.error();
    if (all_ready != nullptr) *all_ready = *ready ? 1 : 0;
    return OkStatus();
  });
}

uint32_t gradsync_ddp_used_by(const gradsync_ddp* ddp, uint32_t parameter) {
  return ddp->ddp->UsedBy(parameter);
}

int gradsync_ddp_skip(gradsync_ddp* ddp, uint32_t bucket, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (ddp == nullptr) return gradsync::MustNotBeNull(function, "ddp");
    return ddp->ddp->Skip(bucket);
  });
}

int gradsync_ddp_reduce_elsewhere(gradsync_ddp* ddp, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (ddp == nullptr) return gradsync::MustNotBeNull(function, "ddp");
    return ddp->ddp->ReduceElsewhere();
  });
}

int gradsync_ddp_bucket_ready(const gradsync_ddp* ddp, uint32_t bucket) {
  return ddp->ddp->IsBucketReady(bucket) ? 1 : 0;
}

int gradsync_ddp_set_stream(gradsync_ddp* ddp, gradsync_stream stream, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (ddp == nullptr) return gradsync::MustNotBeNull(function, "ddp");
    ddp->ddp->UseStream(stream);
    return OkStatus();
  });
}

int gradsync_ddp_wait(gradsync_ddp* ddp, uint32_t bucket, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (ddp == nullptr) return gradsync::MustNotBeNull(function, "ddp");
    return ddp->ddp->Wait(bucket);
  });
}

int gradsync_ddp_end(gradsync_ddp* ddp, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (ddp == nullptr) return gradsync::MustNotBeNull(function, "ddp");
    return ddp->ddp->End();
  });
}

int gradsync_ddp_replan(gradsync_ddp* ddp, int* replanned, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (ddp == nullptr) return gradsync::MustNotBeNull(function, "ddp");
    const auto moved = ddp->ddp->Replan();
    if (!moved) return moved.error();
    ddp->FollowBuffer();
    if (replanned != nullptr) *replanned = *moved ? 1 : 0;
    return OkStatus();
  });
}

int gradsync_ddp_renew(gradsync_ddp* ddp, gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (ddp == nullptr) return gradsync::MustNotBeNull(function, "ddp");
    GRADSYNC_RETURN_IF_ERROR(ddp->ddp->Renew());
    ddp->FollowBuffer();
    return OkStatus();
  });
}

int gradsync_ddp_stand_aside(gradsync_ddp* ddp, gradsync_aside_policy policy,
                             gradsync_error* error) {
  const char* const function = __func__;
  return Guarded(error, [&]() -> Status {
    if (ddp == nullptr) return gradsync::MustNotBeNull(function, "ddp");
    return ddp->ddp->StandAside(gradsync::ToEnum<gradsync::AsidePolicy>(policy));
  });
}

uint32_t gradsync_ddp_unready(const gradsync_ddp* ddp, uint32_t* parameters, uint32_t capacity) {
  uint32_t count = 0;
  Guarded(nullptr, [&] {
    const std::vector<uint32_t> unready = ddp->ddp->Unready();
    count = static_cast<uint32_t>(unready.size());
    if (parameters != nullptr) std::copy_n(unready.begin(), std::min(count, capacity), parameters);
    return OkStatus();
  });
  return count;
}

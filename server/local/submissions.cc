#include "server/local/submissions.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "shm/protocol.h"
#include "shm/types.h"

namespace gradsync {
namespace {

// A segment of either kind: the whole of it.
struct Whole {
  std::byte* address = nullptr;
  uint64_t bytes = 0;
  std::shared_ptr<const void> owner;
  HandOver hand_over = HandOver::kHostMemory;
};

// A range of one segment. Without an owner: no bytes.
struct Range {
  Whole segment;
  uint64_t offset = 0;
  uint64_t bytes = 0;

  std::byte* data() const { return segment.owner == nullptr ? nullptr : segment.address + offset; }
};

std::string Describe(const Submission& entry) {
  return absl::StrCat("operation ", entry.sequence, " (", OpKindName(OpKind{entry.kind}),
                      ") of group ", entry.group, ": ");
}

Status Bad(const Submission& entry, const std::string& why) {
  return {Code::kProtocol, absl::StrCat("ring entry for ", Describe(entry), why)};
}

bool ReducesValues(OpKind kind) { return TraitsOf(kind).reduces; }

Status CheckEnums(const Submission& entry) {
  if (entry.kind >= kOpKindCount) {
    return Bad(entry, absl::StrCat("kind ", entry.kind, " is no operation"));
  }
  if (entry.dtype >= kDTypeCount) {
    return Bad(entry, absl::StrCat("dtype ", entry.dtype, " is no element type"));
  }
  if (entry.reduce_op >= kReduceOpCount) {
    return Bad(entry, absl::StrCat("reduce op ", entry.reduce_op, " is no reduction"));
  }
  const auto dtype = DType{entry.dtype};
  const auto op = ReduceOp{entry.reduce_op};
  if (ReducesValues(OpKind{entry.kind}) && !IsSupported(dtype, op)) {
    return Bad(entry, absl::StrCat(DTypeName(dtype), " values have no ", ReduceOpName(op)));
  }
  return OkStatus();
}

Status CheckNumbers(const Submission& entry, const JobTable::Membership& membership) {
  const auto kind = OpKind{entry.kind};
  if (entry.timeout_ms == 0) return Bad(entry, "the timeout is zero");
  if (entry.root >= (TraitsOf(kind).has_root ? membership.size : 1)) {
    return Bad(entry, absl::StrCat("root ", entry.root, " is out of range"));
  }
  if (kind != OpKind::kBucketReduce && entry.bucket != 0) {
    return Bad(entry, absl::StrCat("bucket ", entry.bucket, " of an operation without buckets"));
  }
  if (kind == OpKind::kBarrier && entry.count != 0) {
    return Bad(entry, absl::StrCat("a barrier with ", entry.count, " elements"));
  }
  return OkStatus();
}

std::optional<Whole> FindSegment(const Submission& entry, uint32_t number,
                                 const SegmentTable& segments, const DeviceUse* device_use) {
  if (entry.on_device == 0) {
    const std::shared_ptr<const Mapping>* host = segments.Find(number);
    if (host == nullptr) return std::nullopt;
    return Whole{(*host)->data(), (*host)->size(), *host, HandOver::kHostMemory};
  }
  const std::shared_ptr<const DeviceMemory>* memory = segments.FindOnDevice(number);
  if (memory == nullptr || (*memory)->device() != device_use->device) return std::nullopt;
  return Whole{(*memory)->address(), (*memory)->size(), *memory, (*memory)->hand_over()};
}

Result<Range> CheckRegion(const Submission& entry, const Region& region, const char* name,
                          uint64_t bytes, const SegmentTable& segments,
                          const DeviceUse* device_use) {
  std::optional<Whole> segment = FindSegment(entry, region.segment, segments, device_use);
  if (!segment) {
    return Unexpected(
        Bad(entry, absl::StrCat("the session has no segment ", region.segment,
                                entry.on_device != 0 ? " on its GPU" : "", " for the ", name)));
  }
  if (bytes > segment->bytes || region.offset > segment->bytes - bytes) {
    return Unexpected(Bad(entry, absl::StrCat("the ", name, ", ", bytes, " bytes from ",
                                              region.offset, ", lies outside segment ",
                                              region.segment, " of ", segment->bytes, " bytes")));
  }
  if (region.offset % DTypeSize(DType{entry.dtype}) != 0) {
    return Unexpected(
        Bad(entry, absl::StrCat("the ", name, " begins at byte ", region.offset,
                                ", which is not aligned for ", DTypeName(DType{entry.dtype}))));
  }
  return Range{*std::move(segment), region.offset, bytes};
}

// In place is fine where each element is read before it is written, and so is apart; what lies
// between would be read after it was written.
bool OverlapsBadly(OpKind kind, const Range& input, const Range& output) {
  if (input.segment.owner == nullptr || input.segment.owner != output.segment.owner) return false;
  const bool in_place = input.offset == output.offset && input.bytes == output.bytes;
  if (in_place && kind != OpKind::kAllToAll) return false;
  return input.offset < output.offset + output.bytes && output.offset < input.offset + input.bytes;
}

std::shared_ptr<const void> KeepBoth(const Range& input, const Range& output) {
  const std::shared_ptr<const void>& in = input.segment.owner;
  const std::shared_ptr<const void>& out = output.segment.owner;
  if (out == nullptr) return in;
  if (in == nullptr || in == out) return out;
  using Both = std::array<std::shared_ptr<const void>, 2>;
  return std::make_shared<const Both>(Both{in, out});
}

bool IsAmong(Who who, const Submission& entry, const JobTable::Membership& membership) {
  return who == Who::kEverybody || (who == Who::kRoot && entry.root == membership.member);
}

// Bytes of a side of the operation; nullopt if that is more than a number can say.
std::optional<uint64_t> BytesOf(const Submission& entry, bool per_rank, uint32_t ranks) {
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(entry.count, DTypeSize(DType{entry.dtype}), &bytes) ||
      __builtin_mul_overflow(bytes, uint64_t{per_rank ? ranks : 1}, &bytes)) {
    return std::nullopt;
  }
  return bytes;
}

// The memory of an operation with at least one element.
Result<MemberBuffers> CheckBuffers(const Submission& entry, const JobTable::Membership& membership,
                                   const SegmentTable& segments, const DeviceUse* device_use) {
  const OpTraits& traits = TraitsOf(OpKind{entry.kind});
  const auto input_bytes = BytesOf(entry, traits.input_per_rank, membership.size);
  const auto output_bytes = BytesOf(entry, traits.output_per_rank, membership.size);
  if (!input_bytes || !output_bytes) {
    return Unexpected(Bad(entry, absl::StrCat(entry.count, " elements do not fit in memory")));
  }
  Range input;
  if (IsAmong(traits.gives, entry, membership)) {
    Result<Range> checked =
        CheckRegion(entry, entry.input, "input", *input_bytes, segments, device_use);
    if (!checked) return Unexpected(checked.error());
    input = *checked;
  }
  Range output;
  if (IsAmong(traits.takes, entry, membership)) {
    Result<Range> checked =
        CheckRegion(entry, entry.output, "output", *output_bytes, segments, device_use);
    if (!checked) return Unexpected(checked.error());
    output = *checked;
  }
  if (OverlapsBadly(OpKind{entry.kind}, input, output)) {
    return Unexpected(Bad(entry, "the input and the output overlap in a way that it cannot have"));
  }
  MemberBuffers buffers;
  buffers.input = input.data();
  buffers.output = output.data();
  buffers.keep_alive = KeepBoth(input, output);
  buffers.hand_over = std::max(input.segment.hand_over, output.segment.hand_over);
  return buffers;
}

Operation MakeOperation(const Submission& entry) {
  Operation operation;
  operation.sequence = entry.sequence;
  operation.kind = OpKind{entry.kind};
  operation.dtype = DType{entry.dtype};
  // Where nothing is reduced the field means nothing, and must not make two ranks differ.
  operation.reduce_op = ReducesValues(operation.kind) ? ReduceOp{entry.reduce_op} : ReduceOp::kSum;
  operation.root = entry.root;
  operation.bucket = entry.bucket;
  operation.count = entry.count;
  operation.on_device = entry.on_device != 0;
  return operation;
}

}  // namespace

Result<CheckedSubmission> CheckSubmission(const Submission& entry,
                                          const std::optional<JobTable::Membership>& membership,
                                          const SegmentTable& segments,
                                          const DeviceUse* device_use) {
  if (!membership) return Unexpected(Bad(entry, "the session is in no such group"));
  GRADSYNC_RETURN_IF_ERROR(CheckEnums(entry));
  GRADSYNC_RETURN_IF_ERROR(CheckNumbers(entry, *membership));
  if (entry.on_device != 0 && device_use == nullptr) {
    return Unexpected(Bad(entry, "it is on a GPU, and the session uses none for the group"));
  }
  CheckedSubmission result;
  if (entry.count > 0) {
    Result<MemberBuffers> buffers = CheckBuffers(entry, *membership, segments, device_use);
    if (!buffers) return Unexpected(buffers.error());
    result.buffers = *std::move(buffers);
  }
  result.operation = MakeOperation(entry);
  if (entry.on_device != 0) {
    result.buffers.device = device_use->device;
    result.buffers.flags = device_use->flags;
  }
  result.buffers.timeout = std::chrono::milliseconds(std::min(entry.timeout_ms, kMaxTimeoutMs));
  return result;
}

}  // namespace gradsync

#include "server/job/describe.h"

#include <chrono>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace gradsync {
namespace {

bool HasElements(OpKind kind) { return kind != OpKind::kBarrier; }

bool Reduces(OpKind kind) { return TraitsOf(kind).reduces; }

struct Differences {
  bool kind, dtype, count, reduce_op, root, bucket, device;
  bool any() const { return kind || dtype || count || reduce_op || root || bucket || device; }
};

Differences Compare(const Operation& a, const Operation& b) {
  const bool elements = HasElements(a.kind) && HasElements(b.kind);
  const auto both = [&](OpKind kind) { return a.kind == kind && b.kind == kind; };
  return {.kind = a.kind != b.kind,
          .dtype = elements && a.dtype != b.dtype,
          .count = elements && a.count != b.count,
          .reduce_op = Reduces(a.kind) && Reduces(b.kind) && a.reduce_op != b.reduce_op,
          .root = a.kind == b.kind && TraitsOf(a.kind).has_root && a.root != b.root,
          .bucket = both(OpKind::kBucketReduce) && a.bucket != b.bucket,
          .device = a.on_device != b.on_device};
}

}  // namespace

std::string DescribeOperation(const Operation& operation) {
  std::string text = OpKindName(operation.kind);
  if (HasElements(operation.kind)) {
    absl::StrAppend(&text, " of ", operation.count, " ", DTypeName(operation.dtype));
  }
  if (Reduces(operation.kind)) absl::StrAppend(&text, " (", ReduceOpName(operation.reduce_op), ")");
  const OpTraits& traits = TraitsOf(operation.kind);
  if (traits.has_root) {
    absl::StrAppend(&text, traits.gives == Who::kRoot ? " from" : " to", " root ", operation.root);
  }
  if (operation.kind == OpKind::kBucketReduce) {
    absl::StrAppend(&text, ", bucket ", operation.bucket);
  }
  if (operation.on_device) absl::StrAppend(&text, " on GPUs");
  return text;
}

std::string DifferingFields(const Operation& a, const Operation& b) {
  const Differences differences = Compare(a, b);
  std::vector<const char*> fields;
  if (differences.kind) fields.push_back("kind");
  if (differences.dtype) fields.push_back("dtype");
  if (differences.count) fields.push_back("count");
  if (differences.reduce_op) fields.push_back("reduce op");
  if (differences.root) fields.push_back("root");
  if (differences.bucket) fields.push_back("bucket");
  if (differences.device) fields.push_back("device");
  return absl::StrJoin(fields, ", ");
}

bool SameOperation(const Operation& a, const Operation& b) { return !Compare(a, b).any(); }

std::string DescribeRanks(std::span<const uint32_t> ranks) {
  std::vector<std::string> runs;
  for (size_t begin = 0; begin < ranks.size();) {
    size_t end = begin + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    runs.push_back(end - begin == 1 ? absl::StrCat(ranks[begin])
                                    : absl::StrCat(ranks[begin], "-", ranks[end - 1]));
    begin = end;
  }
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(runs, ", "));
}

std::string DescribeDuration(Duration duration) {
  const double seconds = std::chrono::duration<double>(duration).count();
  if (seconds < 0.9995) return absl::StrFormat("%.0f ms", seconds * 1000);
  if (seconds >= 9.95) return absl::StrFormat("%.0f s", seconds);
  const std::string text = absl::StrFormat("%.1f", seconds);
  return absl::StrCat(text.ends_with(".0") ? text.substr(0, text.size() - 2) : text, " s");
}

}  // namespace gradsync

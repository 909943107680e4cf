#include "client/ddp/model_difference.h"

#include <algorithm>

namespace gradsync {
namespace {

std::span<const int64_t> ShapeOf(const ParameterRecord& record) {
  return std::span(record.shape).first(std::min<size_t>(record.ndim, kMaxDims));
}

// The dtype's name, "unknown" for a number that does not even fit.
DType DTypeOf(const ParameterRecord& record) {
  return static_cast<DType>(std::min<uint32_t>(record.dtype, kDTypeCount));
}

bool SameShape(const ParameterRecord& a, const ParameterRecord& b) {
  return a.ndim == b.ndim && a.shape == b.shape;
}

bool SameType(const ParameterRecord& a, const ParameterRecord& b) {
  return a.present == b.present && a.dtype == b.dtype && SameShape(a, b);
}

std::string DescribeSide(const ParameterRecord& record, uint32_t rank) {
  const std::string where = " on rank " + std::to_string(rank);
  if (record.present == 0) return "missing" + where;
  return record.name.Get() + ", " + DescribeType(DTypeOf(record), ShapeOf(record)) + "," + where;
}

}  // namespace

Digest ModelDigest(std::span<const ParameterSpec> parameters) {
  DigestBuilder digest;
  for (const ParameterSpec& parameter : parameters) {
    digest.Add(static_cast<uint64_t>(parameter.dtype));
    digest.Add(parameter.shape.size());
    for (const int64_t extent : parameter.shape) digest.Add(static_cast<uint64_t>(extent));
  }
  return digest.Finish();
}

ParameterRecord MakeRecord(const ParameterSpec& parameter) {
  ParameterRecord record{};
  record.present = 1;
  record.dtype = static_cast<uint32_t>(parameter.dtype);
  record.ndim = static_cast<uint32_t>(std::min(parameter.shape.size(), kMaxDims));
  std::copy_n(parameter.shape.begin(), record.ndim, record.shape.begin());
  record.name.Set(ShortName(parameter.name, record.name.bytes.size() - 1));
  return record;
}

std::optional<ModelDifference> FindDifference(
    std::span<const std::span<const ParameterRecord>> pieces, uint64_t begin, uint32_t from,
    uint32_t to, NamesCount names) {
  for (size_t i = 0; i < pieces[0].size(); ++i) {
    const ParameterRecord& first = pieces[0][i];
    for (uint32_t member = from; member < to; ++member) {
      const ParameterRecord& other = pieces[member][i];
      const bool other_name = names == NamesCount::kYes && first.name.bytes != other.name.bytes;
      if (other_name || !SameType(first, other)) {
        return ModelDifference{begin + i, member, first, other};
      }
    }
  }
  return std::nullopt;
}

std::string CountSentence(uint32_t first_rank, uint64_t first_count, uint32_t other_rank,
                          uint64_t other_count) {
  return "DDP expects same model across all ranks, but Rank " + std::to_string(other_rank) +
         " has " + std::to_string(other_count) + " params, while rank " +
         std::to_string(first_rank) + " has inconsistent " + std::to_string(first_count) +
         " params.";
}

std::string TypeSentence(const ModelDifference& difference, uint32_t first_rank,
                         uint32_t other_rank) {
  const bool sizes = !SameShape(difference.first, difference.other);
  const std::string type = DescribeType(DTypeOf(difference.other), ShapeOf(difference.other));
  const size_t space = type.find(' ');
  const std::string aspect = sizes ? "sizes" : "dtype";
  return "DDP expects same model across all ranks, but params[" +
         std::to_string(difference.parameter) + "] in process " + std::to_string(other_rank) +
         " with " + aspect + " " + (sizes ? type.substr(space + 1) : type.substr(0, space)) +
         " appears not to match " + aspect + " of the same param in process " +
         std::to_string(first_rank) + ".";
}

std::string BothSidesSentence(const ModelDifference& difference, uint32_t first_rank,
                              uint32_t other_rank) {
  return "Parameter " + std::to_string(difference.parameter) + " is " +
         DescribeSide(difference.first, first_rank) + " and " +
         DescribeSide(difference.other, other_rank) +
         ". Build the same model on every rank, with its parameters in the same order.";
}

}  // namespace gradsync

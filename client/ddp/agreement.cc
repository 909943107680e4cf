#include "client/ddp/agreement.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "client/ddp/model_difference.h"
#include "shm/protocol.h"

namespace gradsync {
namespace {

// What the ranks send each other is plain data of a fixed size, the same on every rank whatever its
// model: so no rank's list can make another's collective the wrong one, or its reader stumble.

struct Problem {
  int64_t code;  // Code
  Text<504> text;
};

struct ModelSummary {
  Problem problem;
  uint64_t parameter_count;
  Digest model;
  uint64_t first_bucket_bytes;
  uint64_t bucket_bytes;
  uint64_t fixed_plan;
  uint64_t fill_from_front;
  uint64_t on_gpu;
  Digest caps;
};

struct PlanSummary {
  Problem problem;
  Digest plan;
};

// The lists themselves are sent only once they are known to differ, and piece by piece.
constexpr uint64_t kRecordsPerPiece = 64;
using Piece = std::array<ParameterRecord, kRecordsPerPiece>;

template <typename T>
Result<std::vector<T>> GatherFromAll(Group& group, const T& own, Timeout timeout) {
  static_assert(std::is_trivially_copyable_v<T> && std::has_unique_object_representations_v<T>);
  std::vector<T> all(group.size());
  GRADSYNC_RETURN_IF_ERROR(group.AllGather(&own, all.data(), sizeof(T), DType::kUInt8, timeout));
  return all;
}

Problem MakeProblem(const Status& status) {
  Problem problem{};
  problem.code = static_cast<int64_t>(status.code());
  problem.text.Set(status.message());
  return problem;
}

template <typename Summary>
Status FirstProblem(const Group& group, const std::vector<Summary>& summaries) {
  for (uint32_t member = 0; member < summaries.size(); ++member) {
    const Problem& problem = summaries[member].problem;
    if (problem.code == 0) continue;
    return {static_cast<Code>(problem.code),
            "rank " + std::to_string(group.job_rank(member)) + ": " + problem.text.Get()};
  }
  return OkStatus();
}

ModelSummary Summarise(std::span<const ParameterSpec> parameters, const PlanSettings& settings,
                       const Status& own) {
  ModelSummary summary{};
  summary.problem = MakeProblem(own);
  summary.parameter_count = parameters.size();
  summary.model = ModelDigest(parameters);
  summary.first_bucket_bytes = settings.first_bucket_bytes;
  summary.bucket_bytes = settings.bucket_bytes;
  summary.fixed_plan = settings.fixed_plan ? 1 : 0;
  summary.fill_from_front = settings.fill_from_front ? 1 : 0;
  summary.on_gpu = settings.on_gpu ? 1 : 0;
  summary.caps = settings.caps;
  return summary;
}

Piece MakePiece(std::span<const ParameterSpec> parameters, uint64_t begin) {
  Piece piece{};
  const uint64_t end = std::min<uint64_t>(begin + kRecordsPerPiece, parameters.size());
  for (uint64_t i = begin; i < end; ++i) piece[i - begin] = MakeRecord(parameters[i]);
  return piece;
}

// Gathers the lists until a difference shows. Every rank sees the same pieces, so stops at the
// same.
Result<std::optional<ModelDifference>> LocateDifference(Group& group,
                                                        std::span<const ParameterSpec> parameters,
                                                        uint64_t longest, uint32_t from,
                                                        uint32_t to, NamesCount names,
                                                        Timeout timeout) {
  for (uint64_t begin = 0; begin < longest; begin += kRecordsPerPiece) {
    const Result<std::vector<Piece>> gathered =
        GatherFromAll(group, MakePiece(parameters, begin), timeout);
    if (!gathered) return Unexpected(gathered.error());
    const std::vector<std::span<const ParameterRecord>> pieces(gathered->begin(), gathered->end());
    std::optional<ModelDifference> found = FindDifference(pieces, begin, from, to, names);
    if (found) return found;
  }
  return std::optional<ModelDifference>();
}

Status CountMismatch(Group& group, std::span<const ParameterSpec> parameters,
                     const std::vector<ModelSummary>& summaries, uint32_t member, Timeout timeout) {
  const uint64_t first_count = summaries[0].parameter_count;
  const uint64_t other_count = summaries[member].parameter_count;
  const Result<std::optional<ModelDifference>> difference =
      LocateDifference(group, parameters, std::max(first_count, other_count), member, member + 1,
                       NamesCount::kYes, timeout);
  if (!difference) return difference.error();
  const uint32_t first_rank = group.job_rank(0);
  const uint32_t other_rank = group.job_rank(member);
  std::string text = CountSentence(first_rank, first_count, other_rank, other_count);
  if (*difference) text += " " + BothSidesSentence(**difference, first_rank, other_rank);
  return {Code::kMismatch, std::move(text)};
}

Status TypeMismatch(Group& group, std::span<const ParameterSpec> parameters, Timeout timeout) {
  const Result<std::optional<ModelDifference>> difference = LocateDifference(
      group, parameters, parameters.size(), 1, group.size(), NamesCount::kNo, timeout);
  if (!difference) return difference.error();
  if (!*difference) {
    return {Code::kInternal, "the digests of the ranks' parameters differ, but no parameter does"};
  }
  const uint32_t first_rank = group.job_rank(0);
  const uint32_t other_rank = group.job_rank((*difference)->member);
  return {Code::kMismatch, TypeSentence(**difference, first_rank, other_rank) + " " +
                               BothSidesSentence(**difference, first_rank, other_rank)};
}

Status CompareSettings(const Group& group, const std::vector<ModelSummary>& summaries) {
  struct Setting {
    const char* name;
    uint64_t ModelSummary::*value;
  };
  constexpr std::array<Setting, 5> kSettings = {
      {{"the size of the first bucket", &ModelSummary::first_bucket_bytes},
       {"the bucket size", &ModelSummary::bucket_bytes},
       {"fixed_plan", &ModelSummary::fixed_plan},
       // The last with the setting that asks for it in PyTorch's wrapper.
       {"fill_from_front (find_unused_parameters=True)", &ModelSummary::fill_from_front},
       {"on_gpu (where the parameters are)", &ModelSummary::on_gpu}}};
  for (uint32_t member = 1; member < summaries.size(); ++member) {
    for (const Setting& setting : kSettings) {
      const uint64_t first = summaries[0].*setting.value;
      const uint64_t other = summaries[member].*setting.value;
      if (first == other) continue;
      return {Code::kMismatch, std::string("DDP expects the same options on all ranks, but ") +
                                   setting.name + " is " + std::to_string(first) + " on rank " +
                                   std::to_string(group.job_rank(0)) + " and " +
                                   std::to_string(other) + " on rank " +
                                   std::to_string(group.job_rank(member)) + "."};
    }
    if (summaries[member].caps != summaries[0].caps) {
      return {Code::kMismatch,
              "DDP expects the same options on all ranks, but the lists of bucket sizes of ranks " +
                  std::to_string(group.job_rank(0)) + " and " +
                  std::to_string(group.job_rank(member)) + " differ."};
    }
  }
  return OkStatus();
}

}  // namespace

Status AgreeOnModel(Group& group, std::span<const ParameterSpec> parameters,
                    const PlanSettings& settings, const Status& own, Timeout timeout) {
  const Result<std::vector<ModelSummary>> summaries =
      GatherFromAll(group, Summarise(parameters, settings, own), timeout);
  if (!summaries) return own.ok() ? summaries.error() : own;
  GRADSYNC_RETURN_IF_ERROR(FirstProblem(group, *summaries));

  const ModelSummary& first = summaries->front();
  bool same_model = true;
  for (uint32_t member = 1; member < summaries->size(); ++member) {
    const ModelSummary& other = (*summaries)[member];
    if (other.parameter_count != first.parameter_count) {
      return CountMismatch(group, parameters, *summaries, member, timeout);
    }
    same_model = same_model && other.model == first.model;
  }
  if (!same_model) return TypeMismatch(group, parameters, timeout);
  return CompareSettings(group, *summaries);
}

Status AgreeOnPlan(Group& group, const Digest& plan, const Status& own, Timeout timeout) {
  const Result<std::vector<PlanSummary>> summaries =
      GatherFromAll(group, PlanSummary{MakeProblem(own), plan}, timeout);
  if (!summaries) return own.ok() ? summaries.error() : own;
  GRADSYNC_RETURN_IF_ERROR(FirstProblem(group, *summaries));
  for (uint32_t member = 1; member < summaries->size(); ++member) {
    if ((*summaries)[member].plan == summaries->front().plan) continue;
    return {Code::kMismatch, "ranks " + std::to_string(group.job_rank(0)) + " and " +
                                 std::to_string(group.job_rank(member)) +
                                 " planned different buckets for the same parameters; install the "
                                 "same version of gradsync on every rank."};
  }
  return OkStatus();
}

}  // namespace gradsync

#include "server/ctl/format.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "google/protobuf/util/time_util.h"
#include "server/ctl/table.h"

namespace gradsync {
namespace {

using Align = Table::Align;
using google::protobuf::util::TimeUtil;

constexpr char kNothing[] = "-";

std::chrono::nanoseconds ToNs(const google::protobuf::Duration& time) {
  return std::chrono::nanoseconds(TimeUtil::DurationToNanoseconds(time));
}

std::string Milliseconds(const google::protobuf::Duration& time) {
  return absl::StrFormat("%.3f", std::chrono::duration<double, std::milli>(ToNs(time)).count());
}

std::string StateName(v1::JobState state) {
  switch (state) {
    case v1::JOB_STATE_JOINING:
      return "joining";
    case v1::JOB_STATE_ACTIVE:
      return "active";
    case v1::JOB_STATE_LEAVING:
      return "leaving";
    case v1::JOB_STATE_FAILED:
      return "failed";
    default:
      return "unknown";
  }
}

template <typename Ranks>
std::vector<uint32_t> ToVector(const Ranks& ranks) {
  return {ranks.begin(), ranks.end()};
}

std::string DescribeWait(const v1::Wait& wait) {
  return absl::StrCat("waits ", FormatTime(ToNs(wait.duration())), " for ",
                      FormatRanks(ToVector(wait.missing_ranks())), ": ",
                      Printable(wait.operation()));
}

// What is worth saying about a job in one line; empty if it is as it should be.
std::string Detail(const v1::JobSummary& job) {
  if (!job.failure().empty()) return Printable(job.failure());
  if (job.has_wait()) return DescribeWait(job.wait());
  if (job.state() == v1::JOB_STATE_JOINING) {
    return absl::StrCat("has not all of its ", job.world_size(), " ranks yet");
  }
  return {};
}

std::string RankTable(const v1::Job& job) {
  Table table({{"RANK", Align::kRight},
               {"LOCAL", Align::kRight},
               {"PID", Align::kRight},
               {"STATE", Align::kLeft},
               {"SHARED MEMORY", Align::kRight},
               {"PROGRAM", Align::kLeft}});
  for (const v1::Rank& rank : job.ranks()) {
    table.AddRow({absl::StrCat(rank.rank()), absl::StrCat(rank.local_rank()),
                  absl::StrCat(rank.pid()), rank.connected() ? "connected" : "gone",
                  FormatBytes(rank.segment_bytes()), Printable(rank.program())});
  }
  return table.ToText();
}

// `ranks`: those that take part.
std::string BucketStateText(const v1::Bucket& bucket, const std::vector<uint32_t>& ranks) {
  switch (bucket.state()) {
    case v1::BUCKET_STATE_IDLE:
      return "idle";
    case v1::BUCKET_STATE_RUNNING:
      return "reducing";
    case v1::BUCKET_STATE_WAITING:
      break;
    default:
      return "unknown";
  }
  std::vector<uint32_t> missing;
  std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(missing), [&bucket](uint32_t rank) {
    const auto& ready = bucket.ready_ranks();
    return std::find(ready.begin(), ready.end(), rank) == ready.end();
  });
  if (missing.empty()) return "waits for its turn";
  return absl::StrCat("waits for ", FormatRanks(missing));
}

std::array<std::string, 5> TimeCells(const v1::Bucket& bucket) {
  if (!bucket.has_last()) return {kNothing, kNothing, kNothing, kNothing, kNothing};
  const v1::Timing& last = bucket.last();
  return {absl::StrCat(bucket.last_rank()), Milliseconds(last.wait()), Milliseconds(last.queue()),
          Milliseconds(last.reduce()), Milliseconds(last.total())};
}

std::string MemoryName(v1::HandOver hand_over) {
  switch (hand_over) {
    case v1::HAND_OVER_UNSPECIFIED:
      return kNothing;
    case v1::HAND_OVER_HOST_MEMORY:
      return "host";
    case v1::HAND_OVER_DAEMON_MEMORY:
      return "gpu: daemon memory";
    case v1::HAND_OVER_EXPORTED_MEMORY:
      return "gpu: exported";
    case v1::HAND_OVER_LEGACY_HANDLE:
      return "gpu: legacy IPC";
    default:
      return "unknown";
  }
}

bool IsOnGpu(const v1::Bucket& bucket) {
  return bucket.hand_over() != v1::HAND_OVER_UNSPECIFIED &&
         bucket.hand_over() != v1::HAND_OVER_HOST_MEMORY;
}

std::string BucketTable(const v1::Group& group) {
  std::vector<Table::Column> columns = {
      {"BUCKET", Align::kRight},   {"SIZE", Align::kRight},      {"TYPE", Align::kLeft},
      {"STATE", Align::kLeft},     {"REDUCED", Align::kRight},   {"LAST RANK", Align::kRight},
      {"WAIT ms", Align::kRight},  {"QUEUE ms", Align::kRight},  {"REDUCE ms", Align::kRight},
      {"TOTAL ms", Align::kRight}, {"PARAMETERS", Align::kRight}};
  // On CPUs it would say the same in every line.
  const bool shows_memory = std::any_of(group.buckets().begin(), group.buckets().end(), IsOnGpu);
  if (shows_memory) columns.push_back({"MEMORY", Align::kLeft});
  columns.push_back({"NAMES", Align::kLeft});
  Table table(std::move(columns));
  std::vector<uint32_t> ranks = ToVector(group.ranks());
  for (const uint32_t aside : group.aside_ranks()) std::erase(ranks, aside);
  for (const v1::Bucket& bucket : group.buckets()) {
    auto [last_rank, wait, queue, reduce, total] = TimeCells(bucket);
    std::vector<std::string> cells = {absl::StrCat(bucket.index()),
                                      FormatBytes(bucket.bytes()),
                                      bucket.dtype(),
                                      BucketStateText(bucket, ranks),
                                      absl::StrCat(bucket.reductions()),
                                      std::move(last_rank),
                                      std::move(wait),
                                      std::move(queue),
                                      std::move(reduce),
                                      std::move(total),
                                      absl::StrCat(bucket.parameter_count())};
    if (shows_memory) cells.push_back(MemoryName(bucket.hand_over()));
    cells.push_back(Printable(bucket.parameters()));
    table.AddRow(std::move(cells));
  }
  return table.ToText();
}

// `job_failure` has been shown already.
std::string FormatGroup(const v1::Group& group, const std::string& job_failure) {
  std::string text = absl::StrCat("Group ", Printable(group.tag()), " (",
                                  FormatRanks(ToVector(group.ranks())), "): ");
  if (group.has_last()) {
    absl::StrAppend(&text, group.completed_operations(), " operations, ",
                    FormatBytes(group.bytes()), " per rank, the last in ",
                    Milliseconds(group.last().total()), " ms\n");
  } else {
    absl::StrAppend(&text, "no operation yet\n");
  }
  if (!group.failure().empty() && group.failure() != job_failure) {
    absl::StrAppend(&text, "  failed: ", Printable(group.failure()), "\n");
  }
  if (group.aside_ranks_size() > 0) {
    absl::StrAppend(&text, "  goes on without ", FormatRanks(ToVector(group.aside_ranks())),
                    ", out of input\n");
  }
  if (group.has_wait()) absl::StrAppend(&text, "  ", DescribeWait(group.wait()), "\n");
  if (group.buckets_size() > 0) absl::StrAppend(&text, BucketTable(group));
  return text;
}

bool IsControl(char byte) {
  const auto value = static_cast<unsigned char>(byte);
  return value < 0x20 || value == 0x7F;
}

}  // namespace

std::string FormatJobs(const v1::ListJobsResponse& jobs) {
  if (jobs.jobs_size() == 0) return "No jobs: no trainer is connected to this daemon.\n";
  Table table({{"JOB", Align::kLeft},
               {"UID", Align::kRight},
               {"GENERATION", Align::kRight},
               {"STATE", Align::kLeft},
               {"RANKS", Align::kRight},
               {"AGE", Align::kRight},
               {"DETAIL", Align::kLeft}});
  for (const v1::JobSummary& job : jobs.jobs()) {
    table.AddRow({Printable(job.name()), absl::StrCat(job.uid()), absl::StrCat(job.generation()),
                  StateName(job.state()),
                  absl::StrCat(job.connected_ranks(), "/", job.world_size()),
                  FormatTime(ToNs(job.age())), Detail(job)});
  }
  return table.ToText();
}

std::string FormatJob(const v1::Job& job) {
  const v1::JobSummary& summary = job.summary();
  std::string text =
      absl::StrCat("Job ", Printable(summary.name()), " (uid ", summary.uid(), ", generation ",
                   summary.generation(), "): ", StateName(summary.state()), ", ",
                   summary.connected_ranks(), " of ", summary.world_size(), " ranks connected, ",
                   FormatTime(ToNs(summary.age())), " old\n");
  if (!summary.failure().empty()) {
    absl::StrAppend(&text, "  failed: ", Printable(summary.failure()), "\n");
  }
  absl::StrAppend(&text, "\n", RankTable(job));
  for (const v1::Group& group : job.groups()) {
    absl::StrAppend(&text, "\n", FormatGroup(group, summary.failure()));
  }
  return text;
}

std::string FormatBytes(uint64_t bytes) {
  static constexpr std::array<const char*, 4> kUnits = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  // 1023.95 would be printed as 1024.0.
  while (value >= 1023.95 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string FormatTime(std::chrono::nanoseconds time) {
  using std::chrono::duration_cast;
  const int64_t milliseconds = duration_cast<std::chrono::milliseconds>(time).count();
  const int64_t seconds = milliseconds / 1000;
  if (milliseconds < 1000) return absl::StrCat(milliseconds, " ms");
  if (seconds < 60) return absl::StrFormat("%d.%d s", seconds, milliseconds % 1000 / 100);
  const int64_t minutes = seconds / 60;
  if (minutes < 60) return absl::StrFormat("%dm%02ds", minutes, seconds % 60);
  const int64_t hours = minutes / 60;
  if (hours < 24) return absl::StrFormat("%dh%02dm", hours, minutes % 60);
  return absl::StrFormat("%dd%02dh", hours / 24, hours % 24);
}

std::string FormatRanks(const std::vector<uint32_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (size_t first = 0; first < ranks.size();) {
    size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    absl::StrAppend(&text, first == 0 ? " " : ", ", ranks[first]);
    if (last > first) absl::StrAppend(&text, last == first + 1 ? ", " : "-", ranks[last]);
    first = last + 1;
  }
  return text;
}

std::string Printable(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    // U+0080 to U+009F are control characters too: C2 80 to C2 9F.
    const bool second_control =
        text[i] == '\xC2' && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xA0;
    if (second_control) ++i;
    result += second_control || IsControl(text[i]) ? '?' : text[i];
  }
  return result;
}

}  // namespace gradsync

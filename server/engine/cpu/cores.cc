#include "server/engine/cpu/cores.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace gradsync {
namespace {

// Empty if the file is not there.
std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::optional<double> Quotient(std::string_view quota, std::string_view period) {
  double quota_us = 0;
  double period_us = 0;
  // Neither "max" (version 2) nor -1 (version 1) is a limit.
  if (!absl::SimpleAtod(absl::string_view(quota.data(), quota.size()), &quota_us) ||
      !absl::SimpleAtod(absl::string_view(period.data(), period.size()), &period_us) ||
      quota_us <= 0 || period_us <= 0) {
    return std::nullopt;
  }
  return quota_us / period_us;
}

std::optional<double> QuotaVersion2(const std::string& directory) {
  const std::string text = ReadFile(absl::StrCat(directory, "/cpu.max"));
  const std::vector<std::string> fields = absl::StrSplit(text, absl::ByAnyChar(" \n"));
  if (fields.size() < 2) return std::nullopt;
  return Quotient(fields[0], fields[1]);
}

std::optional<double> QuotaVersion1(const std::string& directory) {
  return Quotient(ReadFile(absl::StrCat(directory, "/cpu.cfs_quota_us")),
                  ReadFile(absl::StrCat(directory, "/cpu.cfs_period_us")));
}

// The least quota of `mount`/`group` and every group above it. Inside a container the path may name
// directories of the host that are not mounted here; those have no file, and so no say.
template <typename Read>
std::optional<double> LeastQuota(const std::string& mount, std::string group, Read read) {
  std::optional<double> least;
  for (;;) {
    const std::optional<double> quota = read(absl::StrCat(mount, group));
    if (quota && (!least || *quota < *least)) least = quota;
    const size_t slash = group.rfind('/');
    if (group.empty() || slash == std::string::npos) return least;
    group.resize(slash);
  }
}

}  // namespace

std::optional<double> CgroupCpuQuota(std::string_view membership, const std::string& root) {
  std::optional<double> least;
  const absl::string_view text(membership.data(), membership.size());
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    // hierarchy-id:controllers:path, controllers empty in version 2.
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const std::vector<std::string> controllers = absl::StrSplit(fields[1], ',');
    std::optional<double> quota;
    if (fields[1].empty()) {
      quota = LeastQuota(root, fields[2], QuotaVersion2);
    } else if (std::find(controllers.begin(), controllers.end(), "cpu") != controllers.end()) {
      quota = LeastQuota(absl::StrCat(root, "/", fields[1]), fields[2], QuotaVersion1);
    }
    if (quota && (!least || *quota < *least)) least = quota;
  }
  return least;
}

int AvailableCores() {
  int cores = static_cast<int>(std::thread::hardware_concurrency());
  cpu_set_t affinity;
  CPU_ZERO(&affinity);
  // Fails on machines with more CPUs than the set holds; the hardware's number is then good enough.
  if (sched_getaffinity(0, sizeof(affinity), &affinity) == 0) cores = CPU_COUNT(&affinity);
  const std::optional<double> quota =
      CgroupCpuQuota(ReadFile("/proc/self/cgroup"), "/sys/fs/cgroup");
  if (quota) cores = std::min(cores, static_cast<int>(std::min(std::ceil(*quota), 1e6)));
  return std::max(cores, 1);
}

}  // namespace gradsync

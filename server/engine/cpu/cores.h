// How many cores this process may use.
#ifndef GRADSYNC_SERVER_ENGINE_CPU_CORES_H_
#define GRADSYNC_SERVER_ENGINE_CPU_CORES_H_

#include <optional>
#include <string>
#include <string_view>

namespace gradsync {

// The smaller of the affinity mask and the CPU quota of the cgroups that this process is in
// (version 1 or 2), a fraction of a core rounded up; at least 1.
int AvailableCores();

// Cores that the cgroups named in `membership` (the text of /proc/self/cgroup) allow, with the
// hierarchies mounted under `root` (/sys/fs/cgroup): the least quota on the way from the process's
// own group to the root. nullopt where there is no quota.
std::optional<double> CgroupCpuQuota(std::string_view membership, const std::string& root);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_ENGINE_CPU_CORES_H_

#include "server/ctl/doctor_gpu.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "server/ctl/format.h"

namespace gradsync {
namespace {

using Level = Finding::Level;

std::string VersionText(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

Finding NoDriver(const GpuFacts& facts) {
  if (!facts.has_device_file) {
    return {Level::kNote, "GPU", "no CUDA driver on this machine",
            "gradients are averaged on CPUs only"};
  }
  return {Level::kProblem, "GPU", "there is one, but this process finds no CUDA driver",
          "install the driver, or start the container with it (NVIDIA's container toolkit)"};
}

Finding NoDevice(const GpuFacts& facts) {
  if (!facts.has_device_file) {
    return {Level::kNote, "GPU", "a CUDA driver, but no device",
            "gradients are averaged on CPUs only"};
  }
  return {Level::kNote, "GPU", facts.driver.message(),
          "gradients of such a process are averaged on CPUs only"};
}

// Why there is nothing more to be said of GPUs.
Finding WithoutGpu(const GpuFacts& facts) {
  if (!facts.is_built) {
    return {Level::kNote, "GPU", "built without the CUDA toolkit",
            "gradients are averaged on CPUs only; for GPUs build gradsync where nvcc is"};
  }
  if (facts.driver_version == 0) return NoDriver(facts);
  if (facts.driver_version < facts.needed_version) {
    return {Level::kProblem, "CUDA driver",
            absl::StrCat("for CUDA ", VersionText(facts.driver_version)),
            absl::StrCat("gradsync needs one for CUDA ", VersionText(facts.needed_version),
                         " or newer: update the driver")};
  }
  if (facts.finds_no_device || facts.driver.ok()) return NoDevice(facts);
  return {Level::kProblem, "CUDA driver", facts.driver.message(),
          "look for Xid in the kernel log and see whether nvidia-smi works; if it does, run "
          "doctor again"};
}

Finding JudgeDevice(size_t index, const GpuDevice& device) {
  Finding finding{
      Level::kOk, absl::StrCat("GPU ", index),
      absl::StrCat(device.name, ", ", UuidText(device.uuid), ", ", FormatBytes(device.bytes)), ""};
  if (!device.waits_for_words) {
    finding.level = Level::kProblem;
    absl::StrAppend(&finding.found, ", without stream memory operations of 64 bits");
    finding.advice = "gradsync cannot use it: train on another GPU, or on CPUs";
  }
  return finding;
}

Finding JudgePeers(const GpuFacts& facts) {
  if (facts.apart.empty()) return {Level::kOk, "peer access", "between all GPUs", ""};
  const std::string pairs = absl::StrJoin(
      facts.apart, ", ", [](std::string* text, const std::pair<size_t, size_t>& pair) {
        absl::StrAppend(text, pair.first, " and ", pair.second);
      });
  return {Level::kNote, "peer access", absl::StrCat("not between GPUs ", pairs),
          "NCCL goes through the machine's memory there, which is slower; IOMMU or PCIe ACS "
          "settings, or virtualisation, may be what keeps them apart"};
}

Finding JudgeNccl(const GpuFacts& facts) {
  if (facts.nccl.loaded.ok()) {
    return {Level::kOk, "NCCL", absl::StrCat(facts.nccl.version, ", ", facts.nccl.file), ""};
  }
  if (facts.devices.size() > 1) {
    return {Level::kProblem, "NCCL", facts.nccl.loaded.message(),
            "without it jobs over several GPUs are refused"};
  }
  return {Level::kNote, "NCCL", facts.nccl.loaded.message(), "on one GPU it is not needed"};
}

Finding JudgeMps(const MpsFacts& mps) {
  const std::string pipes = absl::StrCat(mps.pipe_directory, " (CUDA_MPS_PIPE_DIRECTORY)");
  if (mps.has_pipe && mps.runs_control) {
    return {Level::kOk, "MPS",
            absl::StrCat("runs, with its pipes in ", mps.pipe_directory,
                         ": several trainers on one GPU overlap"),
            ""};
  }
  if (mps.runs_control) {
    return {Level::kNote, "MPS",
            absl::StrCat("nvidia-cuda-mps-control runs, but its pipes are not in ", pipes),
            "give it, gradsyncd and the trainers the same folder: several trainers on one GPU "
            "overlap only under MPS"};
  }
  if (mps.has_pipe) {
    return {Level::kNote, "MPS",
            absl::StrCat("there are pipes in ", pipes, ", but no nvidia-cuda-mps-control is seen"),
            "if it does not run outside this container either, start it, or remove the folder: "
            "several trainers on one GPU overlap only under MPS"};
  }
  return {Level::kNote, "MPS", "does not run",
          "several trainers on one GPU overlap only under MPS, and else take turns: start it with "
          "nvidia-cuda-mps-control -d"};
}

Finding JudgeModule(const ModuleFacts& module) {
  if (!module.found.empty()) return {Level::kOk, "GPU engine", module.found, ""};
  if (!module.knows_program && module.tried.empty()) {
    return {Level::kProblem, "GPU engine", "no gradsyncd to look beside",
            "install gradsyncd, or set GRADSYNC_DAEMON to it"};
  }
  return {Level::kProblem, "GPU engine",
          absl::StrCat("not there: neither ", absl::StrJoin(module.tried, " nor ")),
          "jobs on GPUs are refused: install gradsync_cuda.so there, or start gradsyncd with "
          "--cuda-module"};
}

}  // namespace

std::vector<Finding> JudgeGpu(const GpuFacts& facts) {
  if (!facts.is_built || !facts.driver.ok() || facts.devices.empty()) return {WithoutGpu(facts)};
  std::vector<Finding> findings = {{Level::kOk, "CUDA driver",
                                    absl::StrCat("for CUDA ", VersionText(facts.driver_version)),
                                    ""}};
  for (size_t i = 0; i < facts.devices.size(); ++i) {
    findings.push_back(JudgeDevice(i, facts.devices[i]));
  }
  if (facts.devices.size() > 1) findings.push_back(JudgePeers(facts));
  findings.push_back(JudgeNccl(facts));
  findings.push_back(JudgeMps(facts.mps));
  findings.push_back(JudgeModule(facts.module));
  return findings;
}

std::string UuidText(const DeviceUuid& uuid) {
  std::string text = "GPU-";
  for (size_t i = 0; i < uuid.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppendFormat(&text, "%02x", uuid[i]);
  }
  return text;
}

}  // namespace gradsync

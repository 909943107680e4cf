// What gradsyncctl doctor says of GPUs. Pure functions; the facts are collected by
// doctor_gpu_facts.h.
#ifndef GRADSYNC_SERVER_CTL_DOCTOR_GPU_H_
#define GRADSYNC_SERVER_CTL_DOCTOR_GPU_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "server/ctl/finding.h"
#include "shm/device.h"
#include "shm/status.h"

namespace gradsync {

struct GpuDevice {
  std::string name;
  DeviceUuid uuid{};
  uint64_t bytes = 0;
  bool waits_for_words = false;  // its streams do, of 64 bits (stream memory operations)
};

struct NcclFacts {
  Status loaded;
  std::string version;  // "2.28.9"
  std::string file;     // that was loaded
};

// NVIDIA's Multi-Process Service: kernels of several processes on one GPU at the same time.
struct MpsFacts {
  std::string pipe_directory;
  bool has_pipe = false;      // that clients speak to it through
  bool runs_control = false;  // nvidia-cuda-mps-control, as far as this process sees others
};

struct ModuleFacts {
  bool knows_program = false;      // without, there is no knowing where to look
  std::vector<std::string> tried;  // in this order
  std::string found;               // the first of them that is there; empty: none
};

struct GpuFacts {
  bool is_built = true;          // this program, with the CUDA toolkit; else the rest is empty
  bool has_device_file = false;  // /dev/nvidia0 or another
  int driver_version = 0;        // 12040 for CUDA 12.4; 0: there is no driver
  int needed_version = 0;        // the oldest that will do
  Status driver;                 // of loading it, and of looking at the devices
  bool finds_no_device = false;  // why `driver` is an error
  std::vector<GpuDevice> devices;
  std::vector<std::pair<size_t, size_t>> apart;  // devices that cannot reach each other's memory
  // If there are devices:
  NcclFacts nccl;
  MpsFacts mps;
  ModuleFacts module;
};

std::vector<Finding> JudgeGpu(const GpuFacts& facts);

// As nvidia-smi and CUDA_VISIBLE_DEVICES have it.
std::string UuidText(const DeviceUuid& uuid);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_CTL_DOCTOR_GPU_H_

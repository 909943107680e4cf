#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "server/ctl/doctor_gpu_facts.h"

namespace gradsync {
namespace {

constexpr char kControlProgram[] = "nvidia-cuda-mps-control";

// The name that a process was started by; empty for the kernel's own, and for those that have gone.
std::string ProgramOf(const std::filesystem::path& process) {
  std::ifstream file(process / "cmdline");
  std::string first;
  std::getline(file, first, '\0');
  return std::filesystem::path(first).filename();
}

bool RunsControl(const std::string& proc) {
  std::error_code error;
  for (std::filesystem::directory_iterator entry(proc, error), end; !error && entry != end;
       entry.increment(error)) {
    if (ProgramOf(entry->path()) == kControlProgram) return true;
  }
  return false;
}

}  // namespace

MpsFacts LookForMps(const std::string& pipe_directory, const std::string& proc) {
  MpsFacts facts;
  facts.pipe_directory = pipe_directory;
  facts.has_pipe = access((pipe_directory + "/control").c_str(), F_OK) == 0;
  facts.runs_control = RunsControl(proc);
  return facts;
}

}  // namespace gradsync

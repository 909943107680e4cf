// Another process, for the tests: does what the lines of its input say, and answers each with a
// line that begins with the CUresult.
#include <cuda.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

#include "tests/fakes/cuda/fake_cuda.h"

namespace {

constexpr size_t kSize = size_t{2} << 20;

struct State {
  CUcontext context = nullptr;
  CUdeviceptr memory = 0;
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr reserved = 0;
  CUstream stream = nullptr;
  CUevent event = nullptr;
  void* page = nullptr;
};

std::string Answer(CUresult result) { return std::to_string(result); }

template <typename T>
std::string Answer(CUresult result, const T& value) {
  std::ostringstream text;
  text << result << ' ' << value;
  return text.str();
}

std::string Hex(const char* bytes, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    std::array<char, 3> hex{};
    std::snprintf(hex.data(), hex.size(), "%02x", static_cast<unsigned char>(bytes[i]));
    text += hex.data();
  }
  return text;
}

void Unhex(const std::string& text, char* bytes, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    bytes[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  }
}

CUmemAllocationProp Properties(int device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  return prop;
}

CUresult MapHandle(State& state) {
  CUresult result = cuMemAddressReserve(&state.reserved, kSize, 0, 0, 0);
  if (result == CUDA_SUCCESS) result = cuMemMap(state.reserved, kSize, 0, state.handle, 0);
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (result == CUDA_SUCCESS) result = cuMemSetAccess(state.reserved, kSize, &access, 1);
  state.memory = state.reserved;
  return result;
}

CUresult UnmapHandle(State& state) {
  CUresult result = cuMemUnmap(state.reserved, kSize);
  if (result == CUDA_SUCCESS) result = cuMemAddressFree(state.reserved, kSize);
  if (result == CUDA_SUCCESS) result = cuMemRelease(state.handle);
  return result;
}

CUresult RegisterPage(State& state) {
  state.page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return cuMemHostRegister(state.page, 4096, CU_MEMHOSTREGISTER_DEVICEMAP);
}

// A fork after cuInit, which has no driver: what cuInit and another call say there.
std::string Fork() {
  const pid_t child = fork();
  if (child == 0) {
    int count = 0;
    _exit(cuDeviceGetCount(&count) * 10 + cuInit(0));
  }
  int status = 0;
  waitpid(child, &status, 0);
  return Answer(CUDA_SUCCESS, WEXITSTATUS(status));
}

using Command = std::function<std::string(State&, std::istringstream&)>;

std::map<std::string, Command> MemoryCommands() {
  std::map<std::string, Command> commands;
  commands["alloc"] = [](State& state, std::istringstream& in) {
    size_t size = 0;
    in >> size;
    return Answer(cuMemAlloc(&state.memory, size));
  };
  commands["free"] = [](State& state, auto&) { return Answer(cuMemFree(state.memory)); };
  commands["used"] = [](State&, auto&) {
    size_t free = 0;
    size_t total = 0;
    const CUresult result = cuMemGetInfo(&free, &total);
    return Answer(result, total - free);
  };
  commands["create"] = [](State& state, auto&) {
    const CUmemAllocationProp prop = Properties(0);
    return Answer(cuMemCreate(&state.handle, kSize, &prop, 0));
  };
  commands["import"] = [](State& state, std::istringstream& in) {
    intptr_t fd = 0;
    in >> fd;
    const CUresult result = cuMemImportFromShareableHandle(
        &state.handle, reinterpret_cast<void*>(fd), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result == CUDA_SUCCESS) close(static_cast<int>(fd));
    return Answer(result);
  };
  commands["map"] = [](State& state, auto&) { return Answer(MapHandle(state)); };
  commands["access"] = [](State& state, std::istringstream& in) {
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    in >> access.location.id;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return Answer(cuMemSetAccess(state.reserved, kSize, &access, 1));
  };
  commands["unmap"] = [](State& state, auto&) { return Answer(UnmapHandle(state)); };
  commands["read"] = [](State& state, auto&) {
    uint64_t value = 0;
    const CUresult result = cuMemcpyDtoH(&value, state.memory, sizeof(value));
    return Answer(result, value);
  };
  commands["write"] = [](State& state, std::istringstream& in) {
    uint64_t value = 0;
    in >> value;
    return Answer(cuMemcpyHtoD(state.memory, &value, sizeof(value)));
  };
  commands["touch"] = [](State& state, auto&) {
    return Answer(CUDA_SUCCESS, *reinterpret_cast<volatile int*>(state.memory));
  };
  commands["export"] = [](State& state, auto&) {
    CUipcMemHandle handle;
    const CUresult result = cuIpcGetMemHandle(&handle, state.memory);
    return Answer(result, Hex(handle.reserved, sizeof(handle.reserved)));
  };
  commands["open"] = [](State& state, std::istringstream& in) {
    std::string text;
    in >> text;
    CUipcMemHandle handle;
    Unhex(text, handle.reserved, sizeof(handle.reserved));
    const CUresult result =
        cuIpcOpenMemHandle(&state.memory, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    return Answer(result, state.memory);
  };
  commands["close"] = [](State& state, auto&) { return Answer(cuIpcCloseMemHandle(state.memory)); };
  return commands;
}

void AddDeviceCommands(std::map<std::string, Command>& commands) {
  commands["version"] = [](State&, auto&) {
    int version = 0;
    const CUresult result = cuDriverGetVersion(&version);
    return Answer(result, version);
  };
  commands["init"] = [](State&, auto&) { return Answer(cuInit(0)); };
  commands["count"] = [](State&, auto&) {
    int count = -1;
    const CUresult result = cuDeviceGetCount(&count);
    return Answer(result, count);
  };
  commands["uuid"] = [](State&, std::istringstream& in) {
    int device = 0;
    in >> device;
    CUuuid uuid{};
    const CUresult result = cuDeviceGetUuid(&uuid, device);
    return Answer(result, Hex(uuid.bytes, sizeof(uuid.bytes)));
  };
  commands["peer"] = [](State&, auto&) {
    int can = -1;
    const CUresult result = cuDeviceCanAccessPeer(&can, 0, 1);
    return Answer(result, can);
  };
  commands["retain"] = [](State& state, std::istringstream& in) {
    int device = 0;
    in >> device;
    CUresult result = cuDevicePrimaryCtxRetain(&state.context, device);
    if (result == CUDA_SUCCESS) result = cuCtxSetCurrent(state.context);
    return Answer(result);
  };
  commands["release"] = [](State&, std::istringstream& in) {
    int device = 0;
    in >> device;
    return Answer(cuDevicePrimaryCtxRelease(device));
  };
  commands["sync"] = [](State&, auto&) { return Answer(cuCtxSynchronize()); };
  commands["fork"] = [](State&, auto&) { return Fork(); };
  commands["enter"] = [](State&, auto&) { return Answer(fakeCudaEnter("ncclAllReduce")); };
}

void AddStreamCommands(std::map<std::string, Command>& commands) {
  commands["stream"] = [](State& state, auto&) {
    return Answer(cuStreamCreate(&state.stream, CU_STREAM_NON_BLOCKING));
  };
  commands["nostream"] = [](State& state, auto&) { return Answer(cuStreamDestroy(state.stream)); };
  commands["query"] = [](State& state, auto&) { return Answer(cuStreamQuery(state.stream)); };
  commands["wait"] = [](State& state, auto&) { return Answer(cuStreamSynchronize(state.stream)); };
  commands["page"] = [](State& state, auto&) { return Answer(RegisterPage(state)); };
  commands["await"] = [](State& state, auto&) {
    return Answer(cuStreamWaitValue64(state.stream, reinterpret_cast<CUdeviceptr>(state.page), 1,
                                      CU_STREAM_WAIT_VALUE_GEQ));
  };
  commands["set"] = [](State& state, auto&) {
    std::atomic_ref<uint64_t>(*static_cast<uint64_t*>(state.page)).store(1);
    return Answer(CUDA_SUCCESS);
  };
  commands["event"] = [](State& state, auto&) {
    return Answer(cuEventCreate(&state.event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
  };
  commands["noevent"] = [](State& state, auto&) { return Answer(cuEventDestroy(state.event)); };
  commands["record"] = [](State& state, auto&) {
    return Answer(cuEventRecord(state.event, state.stream));
  };
  commands["recorded"] = [](State& state, auto&) { return Answer(cuEventQuery(state.event)); };
  commands["follow"] = [](State& state, auto&) {
    return Answer(cuStreamWaitEvent(state.stream, state.event, 0));
  };
  commands["exportevent"] = [](State& state, auto&) {
    CUipcEventHandle handle;
    const CUresult result = cuIpcGetEventHandle(&handle, state.event);
    return Answer(result, Hex(handle.reserved, sizeof(handle.reserved)));
  };
  commands["openevent"] = [](State& state, std::istringstream& in) {
    std::string text;
    in >> text;
    CUipcEventHandle handle;
    Unhex(text, handle.reserved, sizeof(handle.reserved));
    return Answer(cuIpcOpenEventHandle(&state.event, handle));
  };
}

}  // namespace

int main() {
  std::map<std::string, Command> commands = MemoryCommands();
  AddDeviceCommands(commands);
  AddStreamCommands(commands);
  State state;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream in(line);
    std::string name;
    in >> name;
    if (name == "exit") return 0;
    const auto command = commands.find(name);
    std::cout << (command == commands.end() ? "no such command" : command->second(state, in))
              << std::endl;
  }
  return 0;
}

// Driver API, "Stream Memory Operations": waits and writes of a word, in a stream.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "tests/fakes/cuda/address_space.h"
#include "tests/fakes/cuda/streams.h"

namespace gradsync::fake_cuda {
namespace {

struct Operation {
  bool write = false;
  CUdeviceptr address = 0;
  uint64_t value = 0;
  unsigned condition = 0;
  unsigned width = 8;
};

// cuda.h, CUstreamBatchMemOpType and cuStreamBatchMemOp: "Must be less than 256".
constexpr unsigned kMostOperations = 255;
constexpr int kYields = 16;
constexpr std::chrono::microseconds kPause(50);

template <typename Word, typename Signed>
bool Holds(Word word, Word value, unsigned condition) {
  switch (condition) {
    case CU_STREAM_WAIT_VALUE_GEQ:  // cyclic: cuStreamWaitValue64
      return static_cast<Signed>(word - value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ:
      return word == value;
    case CU_STREAM_WAIT_VALUE_AND:
      return (word & value) != 0;
    default:
      return static_cast<Word>(~(word | value)) != 0;
  }
}

char* Find(const Lock& lock, const Stream& stream, const Operation& operation) {
  const Use use = operation.write ? Use::kKernelWrite : Use::kKernelRead;
  return Peek(lock, operation.address, operation.width, stream.context->ordinal, use);
}

bool Holds(char* place, const Operation& operation) {
  if (operation.width == 8) {
    const std::atomic_ref<uint64_t> word(*reinterpret_cast<uint64_t*>(place));
    return Holds<uint64_t, int64_t>(word.load(std::memory_order_acquire), operation.value,
                                    operation.condition);
  }
  const std::atomic_ref<uint32_t> word(*reinterpret_cast<uint32_t*>(place));
  return Holds<uint32_t, int32_t>(word.load(std::memory_order_acquire),
                                  static_cast<uint32_t>(operation.value), operation.condition);
}

// Whoever writes may be the host or another process: the word is looked at again and again. The
// address is looked up each time, so that one that goes meanwhile faults as on a device.
CUresult Wait(const Stream& stream, const Operation& operation) {
  for (int round = 0; !stream.IsAbandoned(); ++round) {
    {
      const Lock lock(Process::Get().mutex);
      if (stream.IsAbandoned()) break;
      char* place = Find(lock, stream, operation);
      if (place == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
      if (Holds(place, operation)) break;
    }
    if (round < kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPause);
    }
  }
  return CUDA_SUCCESS;
}

CUresult Write(const Stream& stream, const Operation& operation) {
  const Lock lock(Process::Get().mutex);
  if (stream.IsAbandoned()) return CUDA_SUCCESS;
  char* place = Find(lock, stream, operation);
  if (place == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
  if (operation.width == 8) {
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(place))
        .store(operation.value, std::memory_order_release);
  } else {
    std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(place))
        .store(static_cast<uint32_t>(operation.value), std::memory_order_release);
  }
  return CUDA_SUCCESS;
}

CUresult Check(const Lock& lock, const Stream& stream, const Operation& operation, unsigned flags) {
  const unsigned known = operation.write ? unsigned{CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER} : 3U;
  // CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES is not set.
  if (!operation.write && (flags & CU_STREAM_WAIT_VALUE_FLUSH) != 0)
    return CUDA_ERROR_NOT_SUPPORTED;
  if ((flags & ~known) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (operation.address % operation.width != 0) return CUDA_ERROR_INVALID_VALUE;
  return Find(lock, stream, operation) == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult EnqueueAll(CUstream handle, const std::vector<Operation>& operations,
                    const std::vector<unsigned>& flags) {
  const Lock lock(Process::Get().mutex);
  std::shared_ptr<Stream> stream;
  FAKE_CUDA_CHECK(FindStream(lock, handle, &stream));
  for (size_t i = 0; i < operations.size(); ++i) {
    FAKE_CUDA_CHECK(Check(lock, *stream, operations[i], flags[i]));
  }
  Work work;
  work.run = [operations](Stream& self) -> CUresult {
    for (const Operation& operation : operations) {
      if (self.IsAbandoned()) break;
      FAKE_CUDA_CHECK(operation.write ? Write(self, operation) : Wait(self, operation));
    }
    return CUDA_SUCCESS;
  };
  Enqueue(lock, stream, std::move(work));
  return CUDA_SUCCESS;
}

CUresult Read(const CUstreamBatchMemOpParams& params, std::vector<Operation>* operations,
              std::vector<unsigned>* flags) {
  switch (params.operation) {
    case CU_STREAM_MEM_OP_WAIT_VALUE_32:
    case CU_STREAM_MEM_OP_WAIT_VALUE_64: {
      const bool wide = params.operation == CU_STREAM_MEM_OP_WAIT_VALUE_64;
      const auto& wait = params.waitValue;
      operations->push_back(
          {false, wait.address, wide ? wait.value64 : wait.value, wait.flags & 3U, wide ? 8U : 4U});
      flags->push_back(wait.flags);
      return CUDA_SUCCESS;
    }
    case CU_STREAM_MEM_OP_WRITE_VALUE_32:
    case CU_STREAM_MEM_OP_WRITE_VALUE_64: {
      const bool wide = params.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64;
      const auto& write = params.writeValue;
      operations->push_back(
          {true, write.address, wide ? write.value64 : write.value, 0, wide ? 8U : 4U});
      flags->push_back(write.flags);
      return CUDA_SUCCESS;
    }
    case CU_STREAM_MEM_OP_BARRIER:
      return CUDA_SUCCESS;  // every operation here is one already
    case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
      return CUDA_ERROR_NOT_SUPPORTED;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

}  // namespace
extern "C" {

FAKE_CUDA_API CUresult cuStreamWaitValue64(CUstream stream, CUdeviceptr address, cuuint64_t value,
                                           unsigned flags) {
  FAKE_CUDA_ENTER("cuStreamWaitValue64");
  return EnqueueAll(stream, {{false, address, value, flags & 3U, 8}}, {flags});
}

FAKE_CUDA_API CUresult cuStreamWriteValue64(CUstream stream, CUdeviceptr address, cuuint64_t value,
                                            unsigned flags) {
  FAKE_CUDA_ENTER("cuStreamWriteValue64");
  return EnqueueAll(stream, {{true, address, value, 0, 8}}, {flags});
}

FAKE_CUDA_API CUresult cuStreamBatchMemOp(CUstream stream, unsigned count,
                                          CUstreamBatchMemOpParams* params, unsigned flags) {
  FAKE_CUDA_ENTER("cuStreamBatchMemOp");
  if (flags != 0 || params == nullptr || count == 0 || count > kMostOperations) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::vector<Operation> operations;
  std::vector<unsigned> operation_flags;
  for (unsigned i = 0; i < count; ++i) {
    FAKE_CUDA_CHECK(Read(params[i], &operations, &operation_flags));
  }
  return EnqueueAll(stream, operations, operation_flags);
}

}  // extern "C"

}  // namespace gradsync::fake_cuda

// What every call of the API does first, and what it may find out about its communicator.
#ifndef GRADSYNC_TESTS_FAKES_NCCL_CALL_H_
#define GRADSYNC_TESTS_FAKES_NCCL_CALL_H_

#include "tests/fakes/nccl/world.h"

namespace gradsync::fake_nccl {

// How a call uses its communicator: one that only asks may stand beside others; an operation keeps
// other threads' out; its end keeps everything out.
enum class Use { kAsk, kOperate, kEnd };

// Marks a thread as inside a call on a communicator. A breach if another thread's forbids it.
class Inside {
 public:
  Inside(const char* call, ncclComm* comm, Use use);
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  ~Inside();

 private:
  ncclComm* const comm_;
  const Use use_;
};

// One call: inside its communicator, if it has one, and known to the stand-in for libcuda.
class Call {
 public:
  explicit Call(const char* name);
  Call(const char* name, ncclComm* comm, Use use);

  // What the call must return at once, if not ncclSuccess.
  ncclResult_t result() const { return result_; }

 private:
  void Enter(const char* name);

  std::optional<Inside> inside_;
  ncclResult_t result_ = ncclSuccess;
};

// Whether the next operation may be called on `comm`: its error, if it has one. A breach if an
// earlier call returned ncclInProgress and the caller has not seen the end of that. Locked.
ncclResult_t CheckReady(const char* call, const ncclComm& comm);

// ncclInvalidArgument for NULL.
ncclResult_t CheckPointer(const char* call, const void* pointer, const char* name);

}  // namespace gradsync::fake_nccl

#endif  // GRADSYNC_TESTS_FAKES_NCCL_CALL_H_

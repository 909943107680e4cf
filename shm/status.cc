#include "shm/status.h"

#include <cstring>

namespace gradsync {

std::optional<Code> ErrorCodeFrom(int32_t number) {
  const bool known =
      number > static_cast<int>(Code::kOk) && number <= static_cast<int>(Code::kInternal);
  return known ? std::optional(static_cast<Code>(number)) : std::nullopt;
}

const char* CodeName(Code code) {
  switch (code) {
    case Code::kOk:
      return "OK";
    case Code::kInvalidArgument:
      return "INVALID_ARGUMENT";
    case Code::kMismatch:
      return "MISMATCH";
    case Code::kDeadlineExceeded:
      return "DEADLINE_EXCEEDED";
    case Code::kRankLost:
      return "RANK_LOST";
    case Code::kDaemonLost:
      return "DAEMON_LOST";
    case Code::kProtocol:
      return "PROTOCOL";
    case Code::kPermissionDenied:
      return "PERMISSION_DENIED";
    case Code::kOutOfMemory:
      return "OUT_OF_MEMORY";
    case Code::kAlreadyExists:
      return "ALREADY_EXISTS";
    case Code::kShuttingDown:
      return "SHUTTING_DOWN";
    case Code::kUnsupported:
      return "UNSUPPORTED";
    case Code::kFailedPrecondition:
      return "FAILED_PRECONDITION";
    case Code::kInternal:
      return "INTERNAL";
  }
  return "UNKNOWN";
}

std::string Status::ToString() const {
  if (ok()) return "OK";
  return std::string(CodeName(code_)) + ": " + message_;
}

Status ErrnoStatus(Code code, int error, std::string what) {
  // strerrordesc_np is thread-safe, unlike strerror; null for a number that is no errno.
  const char* description = strerrordesc_np(error);
  what += ": ";
  what += description != nullptr ? description : "unknown error";
  return {code, std::move(what)};
}

}  // namespace gradsync

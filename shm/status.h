// Errors as values, for both sides of the local boundary.
//
// A Status is a code that a program can act on, and a sentence for a person: what happened, to whom
// (job, rank, bucket, parameter) and what to do. A Result<T> is a T or such a Status. No function
// of shm/, client/core or client/ddp throws; allocation failure aborts.
#ifndef GRADSYNC_SHM_STATUS_H_
#define GRADSYNC_SHM_STATUS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <tl/expected.hpp>
#include <utility>

namespace gradsync {

// The values are part of the C ABI (gradsync/gradsync.h) and of the control protocol: append only.
enum class Code : int {
  kOk = 0,
  kInvalidArgument = 1,      // the caller's argument is wrong, whatever the state
  kMismatch = 2,             // ranks disagree: model, world size, operation
  kDeadlineExceeded = 3,     // a wait ended; the text names who was missing
  kRankLost = 4,             // another rank died or left
  kDaemonLost = 5,           // the daemon died, closed the session, or does not answer
  kProtocol = 6,             // a peer of another version, or bytes that make no sense
  kPermissionDenied = 7,     // the socket or the job belongs to somebody else
  kOutOfMemory = 8,          // not enough memory, or a configured limit
  kAlreadyExists = 9,        // another process holds this rank
  kShuttingDown = 10,        // the daemon is ending in an orderly way
  kUnsupported = 11,         // valid, but not offered by this build
  kFailedPrecondition = 12,  // a call out of order, or in a forked child
  kInternal = 13,            // a fault of gradsync itself
};

// The error that a number from another process stands for; nullopt for kOk and for any other
// number.
std::optional<Code> ErrorCodeFrom(int32_t number);

// "INVALID_ARGUMENT" and so on; "UNKNOWN" for a value that is none of the above.
const char* CodeName(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;  // OK
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  // "RANK_LOST: rank 1 ...", or "OK".
  std::string ToString() const;

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

inline Status OkStatus() { return {}; }

// A Status with the text of errno `error` appended: "cannot open X: Permission denied".
Status ErrnoStatus(Code code, int error, std::string what);

template <typename T>
using Result = tl::expected<T, Status>;

inline tl::unexpected<Status> Unexpected(Status status) {
  return tl::unexpected<Status>(std::move(status));
}
inline tl::unexpected<Status> Unexpected(Code code, std::string message) {
  return Unexpected(Status(code, std::move(message)));
}

}  // namespace gradsync

// Returns from the enclosing function (Status or Result<T>) with the Status of `expr` if not OK.
#define GRADSYNC_RETURN_IF_ERROR(expr)                             \
  do {                                                             \
    ::gradsync::Status gradsync_status = (expr);                   \
    if (!gradsync_status.ok()) {                                   \
      return ::gradsync::StatusReturn(std::move(gradsync_status)); \
    }                                                              \
  } while (false)

namespace gradsync {
// Converts to whatever the enclosing function returns; only for GRADSYNC_RETURN_IF_ERROR.
class StatusReturn {
 public:
  explicit StatusReturn(Status status) : status_(std::move(status)) {}
  operator Status() && { return std::move(status_); }  // NOLINT(google-explicit-constructor)
  template <typename T>
  operator Result<T>() && {  // NOLINT(google-explicit-constructor)
    return Unexpected(std::move(status_));
  }

 private:
  Status status_;
};
}  // namespace gradsync

#endif  // GRADSYNC_SHM_STATUS_H_

// What the files of the C ABI share: the handles, and how errors and exceptions leave.
#ifndef GRADSYNC_CLIENT_CORE_C_API_SUPPORT_H_
#define GRADSYNC_CLIENT_CORE_C_API_SUPPORT_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <utility>

#include "client/core/daemon_group.h"
#include "client/core/message_request.h"
#include "client/core/session.h"
#include "client/include/gradsync/gradsync.h"
#include "shm/status.h"

struct gradsync_session {
  std::shared_ptr<gradsync::Session> session;
};

struct gradsync_buffer {
  explicit gradsync_buffer(std::shared_ptr<gradsync::SharedBuffer> shared)
      : buffer(std::move(shared)) {}
  const std::shared_ptr<gradsync::SharedBuffer> buffer;
  std::atomic<uint64_t> references{1};
};

struct gradsync_group {
  std::shared_ptr<gradsync::DaemonGroup> group;
};

struct gradsync_request {
  gradsync::MessageRequest request;
};

namespace gradsync {

inline int Report(const Status& status, gradsync_error* error) {
  const int code = static_cast<int>(status.code());
  if (error == nullptr) return code;
  error->code = code;
  const size_t bytes = std::min(status.message().size(), sizeof(error->message) - 1);
  std::memcpy(error->message, status.message().data(), bytes);
  error->message[bytes] = '\0';
  return code;
}

// Runs `body` (a Status()) and reports. Nothing of gradsync throws, but the standard library does
// where memory is short, and an exception must not reach a caller that may not be C++.
template <typename Body>
int Guarded(gradsync_error* error, Body&& body) noexcept {
  try {
    return Report(std::forward<Body>(body)(), error);
  } catch (const std::bad_alloc&) {
    if (error != nullptr) {
      error->code = GRADSYNC_OUT_OF_MEMORY;
      std::strcpy(error->message, "the process is out of memory");
    }
    return GRADSYNC_OUT_OF_MEMORY;
  } catch (const std::exception& exception) {
    if (error != nullptr) {
      error->code = GRADSYNC_INTERNAL;
      std::strncpy(error->message, exception.what(), sizeof(error->message) - 1);
      error->message[sizeof(error->message) - 1] = '\0';
    }
    return GRADSYNC_INTERNAL;
  }
}

// The enumerations of the ABI have the values of shm/types.h. A C program may pass any number: read
// it as one, and let the group refuse what is none of them.
template <typename To, typename From>
To ToEnum(const From& value) {
  unsigned number = 0;
  static_assert(sizeof(number) == sizeof(value));
  std::memcpy(&number, &value, sizeof(number));
  return static_cast<To>(number < 0xff ? number : 0xff);
}

inline Status MustNotBeNull(const char* function, const char* argument) {
  return {Code::kInvalidArgument, std::string(function) + ": '" + argument + "' must not be NULL"};
}

// Copies the fields that the caller's structure has into `out`, which holds the defaults.
template <typename Options>
Status TakeOptions(const char* function, const Options* options, Options* out) {
  if (options == nullptr) return OkStatus();
  const size_t size = options->struct_size;
  if (size < sizeof(size_t) || size > 4096) {
    return {Code::kInvalidArgument,
            std::string(function) + ": set options.struct_size to sizeof the structure; it is " +
                std::to_string(size)};
  }
  // A newer caller may have fields that this library does not know; they must be unused.
  const auto* bytes = reinterpret_cast<const std::byte*>(options);
  for (size_t i = sizeof(Options); i < size; ++i) {
    if (bytes[i] != std::byte{0}) {
      return {Code::kUnsupported, std::string(function) +
                                      ": an option is set that this version of the library, "
                                      "which is older than the program, does not have"};
    }
  }
  std::memcpy(out, options, std::min(size, sizeof(Options)));
  return OkStatus();
}

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_CORE_C_API_SUPPORT_H_

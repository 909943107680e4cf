// Errors as values for gradsync's C++ interface. C++17, header only; see gradsync.hpp.
#ifndef GRADSYNC_RESULT_HPP_
#define GRADSYNC_RESULT_HPP_

#include <cassert>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "gradsync/gradsync.h"

namespace gradsync::client {

// What went wrong: a code that a program can act on, and a sentence for a person.
struct Error {
  gradsync_code code = GRADSYNC_INTERNAL;
  std::string message;

  // "RANK_LOST: rank 1 of job ..."
  std::string ToString() const { return gradsync_code_name(code) + (": " + message); }
};

// A T, or the Error that kept it from being. Ask before you take: the accessors of what is not
// there must not be called (an assertion in debug builds).
//
//   auto session = Session::Open();
//   if (!session) return Fail(session.error().ToString());
//   session->rank();
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }

  T& operator*() & { return value(); }
  const T& operator*() const& { return const_cast<Result*>(this)->value(); }
  T&& operator*() && { return std::move(value()); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &const_cast<Result*>(this)->value(); }

  const Error& error() const {
    assert(!ok());
    return *std::get_if<1>(&state_);
  }

 private:
  T& value() {
    assert(ok());
    return *std::get_if<0>(&state_);
  }

  std::variant<T, Error> state_;
};

// Success, or an Error.
template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}  // NOLINT

  bool ok() const { return !error_; }
  explicit operator bool() const { return ok(); }

  const Error& error() const {
    assert(!ok());
    return *error_;
  }

 private:
  std::optional<Error> error_;
};

using Status = Result<void>;

}  // namespace gradsync::client

#endif  // GRADSYNC_RESULT_HPP_

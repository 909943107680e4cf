// Python's interpreter lock, where C++ that may or may not hold it has to wait.
#ifndef GRADSYNC_CLIENT_TORCH_INTERPRETER_H_
#define GRADSYNC_CLIENT_TORCH_INTERPRETER_H_

#include <pybind11/pybind11.h>

#include <optional>

namespace gradsync::torch {

// While it lives this thread does not hold the interpreter's lock. For destructors and for virtual
// functions, which are called from Python as well as from threads that it does not know.
class WithoutInterpreter {
 public:
  WithoutInterpreter() {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) release_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> release_;
};

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_INTERPRETER_H_

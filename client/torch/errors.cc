#include "client/torch/errors.h"

#include <pybind11/pybind11.h>

#include <map>

namespace gradsync::torch {
namespace {

namespace py = pybind11;

// The Python class of each code. Never freed: errors may still be translated while the interpreter
// ends.
std::map<int, PyObject*>& Classes() {
  static auto* classes = new std::map<int, PyObject*>;
  return *classes;
}

}  // namespace

PyObject* Error::python_type() {
  const auto found = Classes().find(code_);
  return found == Classes().end() ? PyExc_RuntimeError : found->second;
}

Error WithTorchsWords(const Error& error, const char* title, std::chrono::milliseconds timeout) {
  const std::string words =
      "Timed out waiting " + std::to_string(timeout.count()) + "ms for " + title + " to complete";
  const std::string text = error.what();
  switch (error.code()) {
    case GRADSYNC_DEADLINE_EXCEEDED:
      return {error.code(), words + ": " + text};
    case GRADSYNC_RANK_LOST:
      return {error.code(), text + " (Known before the end of the wait: \"" + words + "\".)"};
    default:
      return error;
  }
}

void BindErrors() {
  const py::object by_code = py::module_::import("gradsync.errors").attr("ERROR_CLASSES");
  for (const auto& [code, type] : by_code.cast<py::dict>()) {
    Classes()[code.cast<int>()] = type.inc_ref().ptr();
  }
  // For pybind11's functions; autograd has its own way. The parameter's type is pybind11's.
  // NOLINTNEXTLINE(performance-unnecessary-value-param)
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (Error& error) {
      PyErr_SetString(error.python_type(), error.what());
    }
  });
}

}  // namespace gradsync::torch

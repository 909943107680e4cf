// libgradsync's errors as exceptions, which reach Python as the classes of gradsync.errors.
#ifndef GRADSYNC_CLIENT_TORCH_ERRORS_H_
#define GRADSYNC_CLIENT_TORCH_ERRORS_H_

#include <torch/csrc/Exceptions.h>

#include <chrono>
#include <string>
#include <utility>

#include "gradsync/gradsync.h"

namespace gradsync::torch {

// Deriving from torch's class is what makes autograd, c10d and futures turn it into its own Python
// class, wherever it was thrown. It must reach them without the GIL, so it holds nothing of Python.
class Error : public ::torch::PyTorchError {
 public:
  Error(int code, std::string message) : PyTorchError(std::move(message)), code_(code) {}

  int code() const { return code_; }
  PyObject* python_type() override;

 private:
  int code_;
};

// Throws what a call of libgradsync has reported, unless that is GRADSYNC_OK.
inline void Check(int code, const gradsync_error& error) {
  if (code != GRADSYNC_OK) throw Error(code, error.message);
}

// The same with torch's words for a wait, of `title`, that was in vain; they stand too where it was
// cut short, because a rank that the others wait for has left.
Error WithTorchsWords(const Error& error, const char* title, std::chrono::milliseconds timeout);

// Once, when the module is loaded: takes the classes from gradsync.errors.
void BindErrors();

}  // namespace gradsync::torch

#endif  // GRADSYNC_CLIENT_TORCH_ERRORS_H_

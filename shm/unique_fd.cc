#include "shm/unique_fd.h"

#include <unistd.h>

namespace gradsync {

void UniqueFd::Reset() {
  // Linux frees the descriptor whatever close() answers, so there is nothing to retry.
  if (valid()) close(std::exchange(fd_, -1));
}

}  // namespace gradsync

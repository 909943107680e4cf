// In a build without the CUDA toolkit.
#include "client/core/device.h"

namespace gradsync {

Result<std::shared_ptr<Device>> OpenDevice(uint32_t /*device*/) {
  return Unexpected(
      Code::kUnsupported,
      "this gradsync was built without the CUDA toolkit, so it handles no GPU memory");
}

}  // namespace gradsync

// Texts from trainers may hold any bytes; what goes over gRPC must be UTF-8.
#ifndef GRADSYNC_SERVER_INSPECT_UTF8_H_
#define GRADSYNC_SERVER_INSPECT_UTF8_H_

#include <string>
#include <string_view>

namespace gradsync {

// `text` with every byte that is not part of a well-formed sequence replaced by U+FFFD.
std::string ToUtf8(std::string_view text);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_INSPECT_UTF8_H_

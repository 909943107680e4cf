#include "server/inspect/utf8.h"

#include <cstddef>
#include <cstdint>

namespace gradsync {
namespace {

bool InRange(char byte, uint8_t low, uint8_t high) {
  const auto value = static_cast<uint8_t>(byte);
  return low <= value && value <= high;
}

// Bytes of the well-formed sequence that `text` begins with; 0 if it begins with none. The second
// byte's range shuts out overlong forms, surrogates and what lies beyond U+10FFFF.
size_t SequenceLength(std::string_view text) {
  const auto lead = static_cast<uint8_t>(text.front());
  if (lead < 0x80) return 1;
  size_t length = 0;
  uint8_t low = 0x80;
  uint8_t high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return 0;
  }
  if (text.size() < length || !InRange(text[1], low, high)) return 0;
  for (size_t i = 2; i < length; ++i) {
    if (!InRange(text[i], 0x80, 0xBF)) return 0;
  }
  return length;
}

}  // namespace

std::string ToUtf8(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const size_t length = SequenceLength(text);
    if (length == 0) {
      result += "\xEF\xBF\xBD";
      text.remove_prefix(1);
    } else {
      result += text.substr(0, length);
      text.remove_prefix(length);
    }
  }
  return result;
}

}  // namespace gradsync

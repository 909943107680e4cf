#include "server/local/text.h"

#include <cstddef>
#include <cstdint>

namespace gradsync {
namespace {

uint32_t ByteAt(std::string_view text, size_t i) { return static_cast<unsigned char>(text[i]); }

// Bytes of the sequence that a first byte announces; 0 if it announces none.
size_t SequenceBytes(uint32_t first) {
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first < 0xe0) return 2;
  if (first >= 0xe0 && first < 0xf0) return 3;
  if (first >= 0xf0 && first < 0xf5) return 4;
  return 0;
}

// Whether a multi-byte code point is the one that its length is for, and not a surrogate or a C1
// control character.
bool IsWellFormed(uint32_t code_point, size_t bytes) {
  switch (bytes) {
    case 2:
      return code_point >= 0xa0;
    case 3:
      return code_point >= 0x800 && (code_point < 0xd800 || code_point > 0xdfff);
    default:
      return code_point >= 0x10000 && code_point <= 0x10ffff;
  }
}

// Bytes of the printable character at `text[i]`; 0 if there is none.
size_t PrintableBytes(std::string_view text, size_t i) {
  const uint32_t first = ByteAt(text, i);
  const size_t bytes = SequenceBytes(first);
  if (bytes == 1) return first >= 0x20 && first != 0x7f ? 1 : 0;
  if (bytes == 0 || i + bytes > text.size()) return 0;
  uint32_t code_point = first & (0x7fu >> bytes);
  for (size_t k = 1; k < bytes; ++k) {
    const uint32_t next = ByteAt(text, i + k);
    if ((next & 0xc0) != 0x80) return 0;
    code_point = code_point << 6 | (next & 0x3f);
  }
  return IsWellFormed(code_point, bytes) ? bytes : 0;
}

std::string Replace(std::string_view text, bool keep_line_ends) {
  std::string result;
  result.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const size_t bytes = PrintableBytes(text, i);
    if (bytes == 0) {
      result += keep_line_ends && text[i] == '\n' ? '\n' : '?';
      ++i;
    } else {
      result += text.substr(i, bytes);
      i += bytes;
    }
  }
  return result;
}

}  // namespace

bool IsPrintable(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const size_t bytes = PrintableBytes(text, i);
    if (bytes == 0) return false;
    i += bytes;
  }
  return true;
}

std::string MakePrintable(std::string_view text) { return Replace(text, false); }

std::string MakePrintableLines(std::string_view text) { return Replace(text, true); }

}  // namespace gradsync

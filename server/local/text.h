// Text that a trainer chose, on its way into logs, errors and inspection.
#ifndef GRADSYNC_SERVER_LOCAL_TEXT_H_
#define GRADSYNC_SERVER_LOCAL_TEXT_H_

#include <string>
#include <string_view>

namespace gradsync {

// Whether `text` is UTF-8 without control characters.
bool IsPrintable(std::string_view text);

// `text` with a '?' for every byte that keeps it from being printable (a name that was cut inside a
// character, say).
std::string MakePrintable(std::string_view text);

// As MakePrintable, but its line ends stay: for errors, which may have several lines.
std::string MakePrintableLines(std::string_view text);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_LOCAL_TEXT_H_

// Text in aligned columns.
#ifndef GRADSYNC_SERVER_CTL_TABLE_H_
#define GRADSYNC_SERVER_CTL_TABLE_H_

#include <string>
#include <vector>

namespace gradsync {

class Table {
 public:
  enum class Align { kLeft, kRight };
  struct Column {
    std::string title;
    Align align = Align::kLeft;
  };

  explicit Table(std::vector<Column> columns);

  // One cell for each column; UTF-8 without control characters.
  void AddRow(std::vector<std::string> cells);

  // A line of titles and one for each row; two spaces between columns, none at a line's end.
  std::string ToText() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_CTL_TABLE_H_

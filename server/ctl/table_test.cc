#include "server/ctl/table.h"

#include <gtest/gtest.h>

namespace gradsync {
namespace {

using Align = Table::Align;

TEST(TableTest, AlignsColumnsAndLeavesNoSpaceAtTheEnd) {
  Table table({{"NAME", Align::kLeft}, {"N", Align::kRight}, {"TEXT", Align::kLeft}});
  table.AddRow({"a", "1", "short"});
  table.AddRow({"longer", "1000", ""});
  EXPECT_EQ(table.ToText(),
            "NAME       N  TEXT\n"
            "a          1  short\n"
            "longer  1000\n");
}

TEST(TableTest, HasTitlesWithoutRows) {
  EXPECT_EQ(Table({{"A", Align::kLeft}, {"B", Align::kRight}}).ToText(), "A  B\n");
}

TEST(TableTest, CountsCharactersNotBytes) {
  Table table({{"NAME", Align::kLeft}, {"X", Align::kLeft}});
  table.AddRow({"größe", "1"});
  table.AddRow({"sizes", "2"});
  EXPECT_EQ(table.ToText(),
            "NAME   X\n"
            "größe  1\n"
            "sizes  2\n");
}

}  // namespace
}  // namespace gradsync

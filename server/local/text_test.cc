#include "server/local/text.h"

#include <gtest/gtest.h>

namespace gradsync {
namespace {

TEST(TextTest, OrdinaryTextIsPrintable) {
  EXPECT_TRUE(IsPrintable(""));
  EXPECT_TRUE(IsPrintable("job 1 ~"));
  EXPECT_TRUE(
      IsPrintable("gr\xc3\xbc\xc3\x9f"
                  "e \xe2\x82\xac \xf0\x9f\x98\x80"));
}

TEST(TextTest, ControlCharactersAreNotPrintable) {
  EXPECT_FALSE(IsPrintable("a\nb"));
  EXPECT_FALSE(IsPrintable("a\x1b[2J"));
  EXPECT_FALSE(IsPrintable("\x7f"));
  EXPECT_FALSE(IsPrintable("\xc2\x85"));  // next line, as a C1 control
}

TEST(TextTest, BrokenUtf8IsNotPrintable) {
  EXPECT_FALSE(IsPrintable("\xc3"));              // cut short
  EXPECT_FALSE(IsPrintable("\xc3\x28"));          // no continuation
  EXPECT_FALSE(IsPrintable("\x80"));              // a continuation alone
  EXPECT_FALSE(IsPrintable("\xc0\xaf"));          // overlong
  EXPECT_FALSE(IsPrintable("\xe0\x80\xaf"));      // overlong
  EXPECT_FALSE(IsPrintable("\xed\xa0\x80"));      // surrogate
  EXPECT_FALSE(IsPrintable("\xf4\x90\x80\x80"));  // beyond Unicode
  EXPECT_FALSE(IsPrintable("\xff"));
}

TEST(TextTest, WhatIsNotPrintableIsReplacedAndTheRestKept) {
  EXPECT_EQ(MakePrintable("gr\xc3\xbc\n\xc3"), "gr\xc3\xbc??");
  EXPECT_EQ(MakePrintable("plain"), "plain");
  EXPECT_EQ(MakePrintableLines("two\nlines\r\xc3"), "two\nlines??");
}

}  // namespace
}  // namespace gradsync

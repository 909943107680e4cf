#include "server/ctl/finding.h"

#include <gtest/gtest.h>

namespace gradsync {
namespace {

using Level = Finding::Level;

const std::vector<Finding> kFindings = {{Level::kOk, "kernel", "Linux 6.12.0", ""},
                                        {Level::kNote, "MPS", "does not run", "start it"},
                                        {Level::kProblem, "private directory", "is \"x\"", "go"}};

TEST(FindingTest, EachIsALine) {
  EXPECT_EQ(FormatFindings(kFindings),
            "ok       kernel             Linux 6.12.0\n"
            "note     MPS                does not run; start it\n"
            "problem  private directory  is \"x\"; go\n");
}

TEST(FindingTest, JsonHasAllOfThem) {
  EXPECT_EQ(FindingsToJson({kFindings[1], kFindings[2]}), R"({
 "findings": [
  {
   "level": "note",
   "check": "MPS",
   "found": "does not run",
   "advice": "start it"
  },
  {
   "level": "problem",
   "check": "private directory",
   "found": "is \"x\"",
   "advice": "go"
  }
 ]
}
)");
}

TEST(FindingTest, WhateverANameHoldsTheAnswerIsALineAndJson) {
  const std::vector<Finding> findings = {{Level::kNote, "c", "a\n\x1B\xFF\\b", "d\te"}};
  EXPECT_EQ(FormatFindings(findings), "note     c                  a??\xFF\\b; d?e\n");
  EXPECT_NE(FindingsToJson(findings).find("\"a??\uFFFD\\\\b\""), std::string::npos)
      << FindingsToJson(findings);
}

TEST(FindingTest, OnlyAProblemIsAProblem) {
  EXPECT_TRUE(HasProblem(kFindings));
  EXPECT_FALSE(HasProblem({kFindings[0], kFindings[1]}));
  EXPECT_FALSE(HasProblem({}));
}

}  // namespace
}  // namespace gradsync

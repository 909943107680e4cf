#include "client/ddp/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "client/ddp/fake_group.h"
#include "client/ddp/model_difference.h"

namespace gradsync {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

using Model = std::vector<ParameterSpec>;

Model MakeModel(uint32_t parameter_count) {
  Model model;
  for (uint32_t i = 0; i < parameter_count; ++i) {
    model.push_back({.name = "layer" + std::to_string(i) + ".weight",
                     .shape = {static_cast<int64_t>(i + 1), 2}});
  }
  return model;
}

// What one rank brings along.
struct Side {
  Model model{};
  PlanSettings settings{};
  Status own{};
};

// Every rank's verdict; fails the test unless all are the same.
Status AgreeOn(const std::vector<Side>& sides, std::vector<uint32_t> job_ranks) {
  FakeNetwork network(std::move(job_ranks));
  std::vector<Status> verdicts(sides.size());
  network.Run([&](const std::shared_ptr<Group>& group) {
    const Side& side = sides[group->rank()];
    verdicts[group->rank()] = AgreeOnModel(*group, side.model, side.settings, side.own, Timeout(0));
  });
  for (uint32_t member = 0; member < sides.size(); ++member) {
    EXPECT_EQ(verdicts[member].ToString(), verdicts[0].ToString()) << "on member " << member;
    EXPECT_EQ(network.log(member).collectives, network.log(0).collectives);
  }
  return verdicts[0];
}

Status AgreeOn(const std::vector<Model>& models) {
  std::vector<Side> sides;
  std::vector<uint32_t> ranks;
  for (const Model& model : models) {
    sides.push_back({.model = model});
    ranks.push_back(static_cast<uint32_t>(ranks.size()));
  }
  return AgreeOn(sides, ranks);
}

class AgreementTest : public ::testing::TestWithParam<uint32_t> {
 protected:
  // The same model on every rank but the last.
  std::vector<Model> AllButLast(const Model& model, const Model& last) const {
    std::vector<Model> models(GetParam() - 1, model);
    models.push_back(last);
    return models;
  }
  std::string Last() const { return std::to_string(GetParam() - 1); }
};

TEST_P(AgreementTest, SameModelsAgreeWithOneCollective) {
  FakeNetwork network(GetParam());
  network.Run([&](const std::shared_ptr<Group>& group) {
    EXPECT_TRUE(AgreeOnModel(*group, MakeModel(300), {}, OkStatus(), Timeout(0)).ok());
  });
  EXPECT_EQ(network.log(0).collectives, 1U);
}

TEST_P(AgreementTest, NamesMayDiffer) {
  Model renamed = MakeModel(5);
  renamed[2].name = "another";
  EXPECT_TRUE(AgreeOn(AllButLast(MakeModel(5), renamed)).ok());
}

TEST_P(AgreementTest, MissingParameterAtTheEndIsNamed) {
  const Status status = AgreeOn(AllButLast(MakeModel(12), MakeModel(10)));
  EXPECT_EQ(status.code(), Code::kMismatch);
  EXPECT_EQ(status.message(),
            "DDP expects same model across all ranks, but Rank " + Last() +
                " has 10 params, while rank 0 has inconsistent 12 params. Parameter 10 is "
                "layer10.weight, float32 [11, 2], on rank 0 and missing on rank " +
                Last() +
                ". Build the same model on every rank, with its parameters in the same order.");
}

TEST_P(AgreementTest, OneMoreInTheMiddleIsFoundByItsName) {
  Model longer;
  for (int i = 0; i < 200; ++i) {
    longer.push_back({.name = "block" + std::to_string(i), .shape = {4}});
  }
  Model shorter = longer;
  shorter.erase(shorter.begin() + 130);
  const Status status = AgreeOn(AllButLast(shorter, longer));
  EXPECT_THAT(status.message(),
              HasSubstr("Parameter 130 is block131, float32 [4], on rank 0 and block130, float32 "
                        "[4], on rank " +
                        Last()));
}

TEST_P(AgreementTest, DifferentShapeIsNamedInPyTorchsWords) {
  Model other = MakeModel(200);
  other[150].shape = {150, 3};
  other[170].shape = {};
  const Status status = AgreeOn(AllButLast(MakeModel(200), other));
  EXPECT_EQ(status.code(), Code::kMismatch);
  EXPECT_EQ(
      status.message(),
      "DDP expects same model across all ranks, but params[150] in process " + Last() +
          " with sizes [150, 3] appears not to match sizes of the same param in process 0. "
          "Parameter 150 is layer150.weight, float32 [151, 2], on rank 0 and layer150.weight, "
          "float32 [150, 3], on rank " +
          Last() + ". Build the same model on every rank, with its parameters in the same order.");
}

TEST_P(AgreementTest, DifferentDTypeIsNamed) {
  Model other = MakeModel(3);
  other[1].dtype = DType::kFloat16;
  const Status status = AgreeOn(AllButLast(MakeModel(3), other));
  EXPECT_THAT(status.message(),
              HasSubstr("params[1] in process " + Last() +
                        " with dtype float16 appears not to match dtype of the same param in "
                        "process 0."));
  EXPECT_THAT(status.message(), HasSubstr("float32 [2, 2], on rank 0"));
}

TEST_P(AgreementTest, AnotherNumberOfDimensionsIsADifference) {
  Model other = MakeModel(2);
  other[1].shape = {2, 2, 1};
  const Status status = AgreeOn(AllButLast(MakeModel(2), other));
  EXPECT_THAT(status.message(), HasSubstr("with sizes [2, 2, 1] appears not to match sizes"));
}

TEST_P(AgreementTest, AnotherOrderIsADifference) {
  Model other = MakeModel(4);
  std::swap(other[1], other[2]);
  const Status status = AgreeOn(AllButLast(MakeModel(4), other));
  EXPECT_THAT(status.message(), HasSubstr("Parameter 1 is layer1.weight, float32 [2, 2], on rank 0 "
                                          "and layer2.weight, float32 [3, 2]"));
}

TEST_P(AgreementTest, ModelWithoutParametersIsSaidOnEveryRank) {
  std::vector<Side> sides(GetParam());
  std::vector<uint32_t> ranks;
  for (uint32_t i = 0; i < GetParam(); ++i) {
    if (i > 0) sides[i].model = MakeModel(3);
    sides[i].own = CheckParameters(sides[i].model);
    ranks.push_back(i);
  }
  const Status status = AgreeOn(sides, ranks);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), StartsWith("rank 0: there is no parameter"));
}

TEST_P(AgreementTest, DifferentSettingsAreNamed) {
  std::vector<Side> sides(GetParam(), Side{.model = MakeModel(3), .settings = {100, 200, false}});
  std::vector<uint32_t> ranks;
  for (uint32_t i = 0; i < GetParam(); ++i) ranks.push_back(i);
  sides.back().settings.bucket_bytes = 300;
  EXPECT_EQ(AgreeOn(sides, ranks).message(),
            "DDP expects the same options on all ranks, but the bucket size is 200 on rank 0 and "
            "300 on rank " +
                Last() + ".");
  sides.back().settings = {100, 200, true};
  EXPECT_THAT(AgreeOn(sides, ranks).message(), HasSubstr("fixed_plan is 0 on rank 0 and 1"));
  sides.back().settings = {.first_bucket_bytes = 100, .bucket_bytes = 200, .fill_from_front = true};
  EXPECT_THAT(AgreeOn(sides, ranks).message(),
              HasSubstr("fill_from_front (find_unused_parameters=True) is 0 on rank 0 and 1"));
  sides.back().settings = {101, 200, false};
  EXPECT_THAT(AgreeOn(sides, ranks).message(), HasSubstr("first bucket is 100 on rank 0 and 101"));
}

TEST_P(AgreementTest, RandomlyChangedModelsGetOneVerdictThatNamesAFirstDifference) {
  std::mt19937 random(GetParam());
  for (int round = 0; round < 60; ++round) {
    std::vector<Model> models(GetParam(), MakeModel(1 + static_cast<uint32_t>(random() % 150)));
    size_t first_change = models[0].size();
    for (size_t member = 1; member < models.size(); ++member) {
      if (random() % 2 == 0) continue;
      const size_t index = random() % models[member].size();
      models[member][index].shape.push_back(7);
      first_change = std::min(first_change, index);
    }
    const Status status = AgreeOn(models);
    if (first_change == models[0].size()) {
      EXPECT_TRUE(status.ok()) << status.ToString();
    } else {
      EXPECT_THAT(status.message(),
                  HasSubstr("params[" + std::to_string(first_change) + "] in process"));
    }
  }
}

TEST_P(AgreementTest, PlanThatDiffersIsSaidOnEveryRank) {
  FakeNetwork network(GetParam());
  std::vector<Status> verdicts(GetParam());
  network.Run([&](const std::shared_ptr<Group>& group) {
    const bool last = group->rank() + 1 == group->size();
    verdicts[group->rank()] = AgreeOnPlan(*group, {1, last ? 3U : 2U}, OkStatus(), Timeout(0));
  });
  for (const Status& verdict : verdicts) {
    EXPECT_EQ(verdict.code(), Code::kMismatch);
    EXPECT_THAT(verdict.message(), StartsWith("ranks 0 and " + Last() + " planned different"));
  }
}

TEST_P(AgreementTest, GroupThatFailsIsAnErrorOnEveryRankThatIsLeft) {
  FakeNetwork network(GetParam());
  std::vector<Status> verdicts(GetParam());
  network.Run([&](const std::shared_ptr<Group>& group) {
    if (group->rank() + 1 == group->size()) return;  // never takes part
    verdicts[group->rank()] = AgreeOnModel(*group, MakeModel(3), {}, OkStatus(), Timeout(0));
  });
  for (uint32_t member = 0; member + 1 < GetParam(); ++member) {
    EXPECT_EQ(verdicts[member].code(), Code::kRankLost);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, AgreementTest, ::testing::Values(2U, 3U, 4U));

TEST(AgreementRanksTest, FirstDifferenceIsTheSmallestParameterThenTheSmallestRank) {
  std::vector<Model> models(4, MakeModel(5));
  models[1][4].shape = {9};
  models[2][3].shape = {8};
  models[3][3].shape = {7};
  EXPECT_THAT(AgreeOn(models).message(),
              HasSubstr("params[3] in process 2 with sizes [8] appears not to match"));
}

TEST(AgreementRanksTest, CountsAreComparedBeforeShapes) {
  std::vector<Model> models(3, MakeModel(5));
  models[1][0].shape = {9};
  models[2].pop_back();
  const Status status = AgreeOn(models);
  EXPECT_THAT(status.message(),
              StartsWith("DDP expects same model across all ranks, but Rank 2 has "
                         "4 params, while rank 0 has inconsistent 5 params."));
  EXPECT_THAT(status.message(), HasSubstr("Parameter 4 is layer4.weight"));
}

TEST(AgreementRanksTest, ShapesThatDifferOnlyByAnEmptyDimensionAreTold) {
  const Model flat = {{.name = "w", .shape = {2}}};
  const Model empty = {{.name = "w", .shape = {2, 0}}};
  EXPECT_THAT(AgreeOn({flat, empty}).message(), HasSubstr("with sizes [2, 0] appears not to"));
  const Model scalar_first = {{.name = "s", .shape = {}}, {.name = "e", .shape = {0}}};
  const Model empty_first = {{.name = "e", .shape = {0}}, {.name = "s", .shape = {}}};
  EXPECT_THAT(AgreeOn({scalar_first, empty_first}).message(),
              HasSubstr("with sizes [0] appears not to"));
}

// The lists are compared in pieces of 64: the difference may lie beyond the shorter one's last
// piece.
TEST(AgreementRanksTest, ListThatEndsWhereAPieceEndsIsComparedToo) {
  EXPECT_THAT(AgreeOn({MakeModel(65), MakeModel(64)}).message(),
              HasSubstr("Parameter 64 is layer64.weight, float32 [65, 2], on rank 0 and missing"));
  EXPECT_THAT(AgreeOn({MakeModel(64), MakeModel(65)}).message(),
              HasSubstr("Parameter 64 is missing on rank 0 and layer64.weight"));
}

TEST(AgreementRanksTest, RanksAreThoseOfTheJob) {
  const std::vector<Side> sides = {{.model = MakeModel(2)}, {.model = MakeModel(1)}};
  const Status status = AgreeOn(sides, {5, 7});
  EXPECT_THAT(status.message(), HasSubstr("Rank 7 has 1 params, while rank 5 has inconsistent 2"));
  EXPECT_THAT(status.message(), HasSubstr("on rank 5 and missing on rank 7"));
}

TEST(AgreementRanksTest, LongTextsAreCutNotOverrun) {
  Model model = {{.name = std::string(5000, 'x') + ".weight", .shape = {2}}};
  Model other = model;
  other[0].shape = {3};
  EXPECT_THAT(AgreeOn({model, other}).message(), HasSubstr("xxx.weight, float32 [2], on rank 0"));

  const std::vector<Side> sides = {
      {.model = model},
      {.model = model, .own = Status(Code::kInvalidArgument, std::string(9000, 'y'))}};
  const Status status = AgreeOn(sides, {0, 1});
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), StartsWith("rank 1: yyyy"));
}

TEST(ModelDifferenceTest, RecordOfAnyBytesIsSafeToDescribe) {
  ParameterRecord garbage{};
  std::memset(static_cast<void*>(&garbage), 0xff, sizeof(garbage));
  const ModelDifference difference{3, 1, MakeRecord({.name = "w", .shape = {2}}), garbage};
  EXPECT_THAT(TypeSentence(difference, 0, 1), HasSubstr("params[3]"));
  EXPECT_THAT(BothSidesSentence(difference, 0, 1), HasSubstr("unknown [-1, -1"));
}

}  // namespace
}  // namespace gradsync

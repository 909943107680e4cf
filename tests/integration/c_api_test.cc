// libgradsync.so as its users see it: the C ABI, and the C++ wrapper over it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <latch>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "gradsync/gradsync.hpp"
#include "tests/integration/daemon_fixture.h"

namespace gradsync::testing {
namespace {

namespace gs = gradsync::client;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CApiTest : public ::testing::Test {
 protected:
  gs::SessionOptions Options(uint32_t rank, uint32_t world_size) const {
    gs::SessionOptions options;
    options.socket = daemon_.socket();
    options.job = "job";
    options.rank = rank;
    options.world_size = world_size;
    options.timeout = std::chrono::seconds(60);
    return options;
  }
  gs::Session Open(uint32_t rank, uint32_t world_size) const {
    auto session = gs::Session::Open(Options(rank, world_size));
    EXPECT_TRUE(session) << (session ? "" : session.error().ToString());
    return *std::move(session);
  }

  // Runs `body` for two ranks, each on a thread.
  void RunTwo(const std::function<void(const gs::Session&, const gs::Group&)>& body) const {
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < 2; ++rank) {
      threads.emplace_back([this, rank, &body] {
        const gs::Session session = Open(rank, 2);
        auto group = session.CreateGroup("all");
        ASSERT_TRUE(group) << group.error().ToString();
        body(session, *group);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  InProcessDaemon daemon_;
};

TEST_F(CApiTest, NamesItsVersionAndItsCodes) {
  EXPECT_THAT(gradsync_version(), ::testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+"));
  EXPECT_STREQ(gradsync_code_name(GRADSYNC_RANK_LOST), "RANK_LOST");
  EXPECT_STREQ(gradsync_code_name(-5), "UNKNOWN");
}

TEST_F(CApiTest, ArgumentsThatMustNotBeNullAreNamed) {
  gradsync_error error{};
  EXPECT_EQ(gradsync_session_open(nullptr, nullptr, &error), GRADSYNC_INVALID_ARGUMENT);
  EXPECT_EQ(error.code, GRADSYNC_INVALID_ARGUMENT);
  EXPECT_STREQ(error.message, "gradsync_session_open: 'session' must not be NULL");
  EXPECT_EQ(gradsync_session_open(nullptr, nullptr, nullptr), GRADSYNC_INVALID_ARGUMENT);

  const gs::Session session = Open(0, 1);
  const auto group = session.CreateGroup("g");
  ASSERT_TRUE(group);
  gradsync_buffer* buffer = nullptr;
  gradsync_group* other = nullptr;
  gradsync_ddp* ddp = nullptr;
  EXPECT_EQ(gradsync_buffer_create(nullptr, 1, "x", &buffer, &error), GRADSYNC_INVALID_ARGUMENT);
  EXPECT_EQ(gradsync_buffer_create(session.handle(), 1, "x", nullptr, &error),
            GRADSYNC_INVALID_ARGUMENT);
  EXPECT_EQ(gradsync_group_create(session.handle(), nullptr, nullptr, 0, 0, &other, &error),
            GRADSYNC_INVALID_ARGUMENT);
  const uint32_t rank = 0;
  EXPECT_EQ(gradsync_group_create(session.handle(), "t", &rank, 0, 0, &other, &error),
            GRADSYNC_INVALID_ARGUMENT);
  EXPECT_EQ(gradsync_all_reduce(nullptr, nullptr, 0, GRADSYNC_INT8, GRADSYNC_SUM, 0, &error),
            GRADSYNC_INVALID_ARGUMENT);
  EXPECT_EQ(
      gradsync_all_reduce(group->handle(), nullptr, 1, GRADSYNC_INT8, GRADSYNC_SUM, 0, &error),
      GRADSYNC_INVALID_ARGUMENT);
  EXPECT_EQ(gradsync_broadcast(group->handle(), nullptr, 1, GRADSYNC_INT8, 0, 0, &error),
            GRADSYNC_INVALID_ARGUMENT);
  EXPECT_EQ(gradsync_all_gather(group->handle(), nullptr, nullptr, 1, GRADSYNC_INT8, 0, &error),
            GRADSYNC_INVALID_ARGUMENT);
  EXPECT_EQ(gradsync_barrier(nullptr, 0, &error), GRADSYNC_INVALID_ARGUMENT);
  EXPECT_EQ(gradsync_share(group->handle(), nullptr, 1, GRADSYNC_INT8, 0, &error),
            GRADSYNC_INVALID_ARGUMENT);
  EXPECT_EQ(gradsync_stand_aside(nullptr, GRADSYNC_ASIDE_FORBID, 0, &error),
            GRADSYNC_INVALID_ARGUMENT);
  EXPECT_EQ(gradsync_rejoin(nullptr, nullptr, &error), GRADSYNC_INVALID_ARGUMENT);
  EXPECT_EQ(gradsync_ddp_stand_aside(nullptr, GRADSYNC_ASIDE_FORBID, &error),
            GRADSYNC_INVALID_ARGUMENT);
  EXPECT_EQ(gradsync_ddp_create(group->handle(), nullptr, 1, nullptr, &ddp, &error),
            GRADSYNC_INVALID_ARGUMENT);
  EXPECT_EQ(gradsync_ddp_begin(nullptr, &error), GRADSYNC_INVALID_ARGUMENT);
  gradsync_session_close(nullptr);
  gradsync_buffer_release(nullptr);
  gradsync_group_destroy(nullptr);
  gradsync_ddp_destroy(nullptr);
}

TEST_F(CApiTest, OptionsOfOlderAndNewerCallersAreTaken) {
  struct Newer {
    gradsync_session_options known;
    uint64_t unknown;
  } newer{};
  const std::string socket = daemon_.socket();
  newer.known.struct_size = sizeof(newer);
  newer.known.socket = socket.c_str();
  newer.known.job = "job";
  newer.known.world_size = 1;
  gradsync_error error{};
  gradsync_session* session = nullptr;
  EXPECT_EQ(gradsync_session_open(&newer.known, &session, &error), GRADSYNC_OK) << error.message;
  gradsync_session_close(session);
  newer.unknown = 1;
  EXPECT_EQ(gradsync_session_open(&newer.known, &session, &error), GRADSYNC_UNSUPPORTED);
  EXPECT_EQ(session, nullptr);
  newer.known.struct_size = 0;
  EXPECT_EQ(gradsync_session_open(&newer.known, &session, &error), GRADSYNC_INVALID_ARGUMENT);
  EXPECT_THAT(error.message, HasSubstr("set options.struct_size"));
  // An older one, that ends before the time-out.
  newer.known.struct_size = offsetof(gradsync_session_options, timeout_ms);
  newer.known.timeout_ms = 1;
  EXPECT_EQ(gradsync_session_open(&newer.known, &session, &error), GRADSYNC_OK) << error.message;
  gradsync_session_close(session);
}

TEST_F(CApiTest, CollectivesWorkThroughTheWrapper) {
  RunTwo([](const gs::Session& session, const gs::Group& group) {
    EXPECT_EQ(session.world_size(), 2);
    EXPECT_EQ(group.rank(), session.rank());
    EXPECT_EQ(group.size(), 2);
    std::array<float, 2> values = {1.0F + static_cast<float>(group.rank()), 4};
    ASSERT_TRUE(group.AllReduce(values.data(), 2, gs::Op::kAvg));
    EXPECT_THAT(values, ElementsAre(1.5F, 4));
    int64_t root = group.rank();
    ASSERT_TRUE(group.Broadcast(&root, 1, 1));
    EXPECT_EQ(root, 1);
    const auto mine = static_cast<uint8_t>(group.rank() + 5);
    std::array<uint8_t, 2> all = {};
    ASSERT_TRUE(group.AllGather(&mine, all.data(), 1));
    EXPECT_THAT(all, ElementsAre(5, 6));
    ASSERT_TRUE(group.Barrier());
    const auto refused = group.AllReduce(&root, 1, gs::Op::kAvg);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, GRADSYNC_INVALID_ARGUMENT);
    EXPECT_THAT(refused.error().ToString(), HasSubstr("INVALID_ARGUMENT: elements of type int64"));
    // Enumerators that are none, as a C program may pass.
    EXPECT_EQ(gradsync_all_reduce(group.handle(), &root, 1, static_cast<gradsync_dtype>(15),
                                  GRADSYNC_SUM, 0, nullptr),
              GRADSYNC_INVALID_ARGUMENT);
  });
}

TEST_F(CApiTest, BuffersLiveAsLongAsTheirLastReference) {
  std::optional<gs::Buffer> kept;
  {
    const gs::Session session = Open(0, 1);
    auto buffer = session.CreateBuffer(100);
    ASSERT_TRUE(buffer);
    EXPECT_GE(buffer->size(), 100);
    kept = buffer->Share();
  }
  kept->as<char>()[99] = 'x';
  EXPECT_EQ(static_cast<char*>(kept->data())[99], 'x');
}

TEST_F(CApiTest, GroupsOutliveTheirSessionAndSaySo) {
  std::optional<gs::Group> group;
  {
    const gs::Session session = Open(0, 1);
    auto created = session.CreateGroup("g");
    ASSERT_TRUE(created);
    group = *std::move(created);
  }
  const auto status = group->Barrier();
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, GRADSYNC_FAILED_PRECONDITION);
}

void RunIteration(const gs::Ddp& ddp, const std::vector<uint32_t>& order, float value) {
  ASSERT_TRUE(ddp.Begin());
  for (size_t i = 0; i < order.size(); ++i) {
    const auto slot = ddp.Slot(order[i]);
    ASSERT_TRUE(slot);
    std::fill_n(static_cast<float*>(slot->data), slot->count, value + static_cast<float>(order[i]));
    const auto all = ddp.Ready(order[i]);
    ASSERT_TRUE(all) << all.error().ToString();
    EXPECT_EQ(*all, i + 1 == order.size());
  }
  for (uint32_t bucket = 0; bucket < ddp.bucket_count(); ++bucket) {
    const auto done = ddp.Wait(bucket);
    ASSERT_TRUE(done) << done.error().ToString();
  }
  ASSERT_TRUE(ddp.End());
}

void ExpectAverages(const gs::Ddp& ddp, uint32_t parameters, float average) {
  for (uint32_t parameter = 0; parameter < parameters; ++parameter) {
    const auto slot = ddp.Slot(parameter);
    ASSERT_TRUE(slot);
    const auto* const data = static_cast<const float*>(slot->data);
    for (uint64_t i = 0; i < slot->count; ++i) {
      ASSERT_EQ(data[i], average + static_cast<float>(parameter));
    }
  }
}

TEST_F(CApiTest, DdpAveragesGradientsBeforeAndAfterItsReplan) {
  RunTwo([](const gs::Session&, const gs::Group& group) {
    gs::DdpOptions options;
    options.bucket_bytes = 64;
    const auto ddp = gs::Ddp::Create(group,
                                     {{"a", GRADSYNC_FLOAT32, {4, 4}, 0},
                                      {"b", GRADSYNC_FLOAT32, {}, 0},
                                      {"c", GRADSYNC_FLOAT32, {3}, 0}},
                                     options);
    ASSERT_TRUE(ddp) << ddp.error().ToString();
    const float own = group.rank() == 0 ? 1 : 3;
    RunIteration(*ddp, {1, 0, 2}, own);
    ExpectAverages(*ddp, 3, 2);
    const auto slot = ddp->Slot(0);
    ASSERT_TRUE(slot);
    const gs::Buffer before = gs::Buffer::Retain(slot->buffer);
    const auto replanned = ddp->Replan();
    ASSERT_TRUE(replanned) << replanned.error().ToString();
    EXPECT_TRUE(*replanned);
    EXPECT_NE(ddp->Slot(0)->buffer, before.handle());
    EXPECT_EQ(*static_cast<float*>(slot->data), 2);  // the old memory is still there
    ExpectAverages(*ddp, 3, 2);
    RunIteration(*ddp, {2, 1, 0}, own + 10);
    ExpectAverages(*ddp, 3, 12);
    const auto bucket = ddp->Bucket(0);
    ASSERT_TRUE(bucket);
    EXPECT_EQ(bucket->dtype, GRADSYNC_FLOAT32);
    EXPECT_EQ(bucket->parameters[0], 1);
    EXPECT_FALSE(ddp->Bucket(99));
    EXPECT_FALSE(ddp->Slot(3));
  });
}

TEST_F(CApiTest, RanksMayStandAsideAndRejoinThroughTheWrapper) {
  const gs::Session session = Open(0, 1);
  const auto group = session.CreateGroup("g");
  ASSERT_TRUE(group);
  int32_t value = 7;
  EXPECT_TRUE(group->Share(&value, 1).ok());
  ASSERT_TRUE(group->StandAside(GRADSYNC_ASIDE_AVERAGE_OVER_PRESENT).ok());
  EXPECT_FALSE(group->Barrier().ok());
  const auto last = group->Rejoin();
  ASSERT_TRUE(last);
  EXPECT_EQ(*last, 0U);
  EXPECT_TRUE(group->Barrier().ok());
  EXPECT_FALSE(group->StandAside(static_cast<gradsync_aside_policy>(3)).ok());
}

TEST_F(CApiTest, DdpNamesTheParametersWithoutAGradient) {
  std::latch both_began(2);  // what one does next fails the group for the other
  RunTwo([&](const gs::Session&, const gs::Group& group) {
    const auto ddp = gs::Ddp::Create(
        group, {{"first", GRADSYNC_FLOAT32, {2}, 0}, {"second", GRADSYNC_FLOAT32, {2}, 0}});
    ASSERT_TRUE(ddp);
    ASSERT_TRUE(ddp->Begin());
    ASSERT_TRUE(ddp->Ready(0));
    both_began.arrive_and_wait();
    EXPECT_THAT(ddp->Unready(), ElementsAre(1));
    const auto again = ddp->Begin();
    ASSERT_FALSE(again);
    EXPECT_EQ(again.error().code, GRADSYNC_FAILED_PRECONDITION);
    EXPECT_THAT(again.error().message,
                HasSubstr("Expected to have finished reduction in the prior iteration before "
                          "starting a new one."));
    EXPECT_THAT(again.error().message, HasSubstr("second"));
  });
}

TEST_F(CApiTest, DdpsOfDifferentModelsAreRefusedOnEveryRank) {
  RunTwo([](const gs::Session&, const gs::Group& group) {
    const int64_t size = group.rank() == 0 ? 2 : 3;
    const auto ddp = gs::Ddp::Create(
        group, {{"same", GRADSYNC_FLOAT32, {2}, 0}, {"weight", GRADSYNC_FLOAT32, {size}, 0}});
    ASSERT_FALSE(ddp);
    EXPECT_EQ(ddp.error().code, GRADSYNC_MISMATCH);
    EXPECT_THAT(ddp.error().message, HasSubstr("weight"));
  });
}

TEST_F(CApiTest, ParametersThatMakeNoSenseAreRefused) {
  const gs::Session session = Open(0, 1);
  const auto group = session.CreateGroup("g");
  ASSERT_TRUE(group);
  gradsync_parameter parameter{};
  gradsync_ddp* ddp = nullptr;
  gradsync_error error{};
  EXPECT_EQ(gradsync_ddp_create(group->handle(), &parameter, 1, nullptr, &ddp, &error),
            GRADSYNC_INVALID_ARGUMENT);
  EXPECT_THAT(error.message, HasSubstr("parameter 0 has no name"));
  parameter.name = "p";
  parameter.dtype = static_cast<gradsync_dtype>(15);
  EXPECT_EQ(gradsync_ddp_create(group->handle(), &parameter, 1, nullptr, &ddp, &error),
            GRADSYNC_INVALID_ARGUMENT);
  EXPECT_THAT(error.message, HasSubstr("'p' has element type 15"));
}

}  // namespace
}  // namespace gradsync::testing

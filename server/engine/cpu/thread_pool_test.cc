#include "server/engine/cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <latch>
#include <semaphore>
#include <set>
#include <string>
#include <vector>

namespace gradsync {
namespace {

using std::chrono::nanoseconds;

TEST(ThreadPoolTest, EveryPartRunsOnceAndDoneAfterAll) {
  ThreadPool pool(3, nanoseconds::zero());
  std::vector<int> runs(1000, 0);  // not atomic: each part is one thread's, `done` sees them all
  std::binary_semaphore done(0);
  int finished = 0;
  pool.Submit({runs.size(), [&](int, uint64_t part) { ++runs[part]; },
               [&] {
                 finished = 1;
                 for (const int count : runs) EXPECT_EQ(count, 1);
                 done.release();
               }});
  done.acquire();
  EXPECT_EQ(finished, 1);
}

TEST(ThreadPoolTest, WorkersWorkAtOnceAndHaveNumbersAndNames) {
  ThreadPool pool(2, nanoseconds::zero());
  std::latch both(2);
  std::array<std::string, 2> names;
  std::binary_semaphore done(0);
  pool.Submit({2,
               [&](int worker, uint64_t) {
                 both.arrive_and_wait();
                 std::array<char, 16> name{};
                 pthread_getname_np(pthread_self(), name.data(), name.size());
                 names.at(static_cast<size_t>(worker)) = name.data();
               },
               [&] { done.release(); }});
  done.acquire();
  EXPECT_EQ(names[0], "gradsync-cpu-0");
  EXPECT_EQ(names[1], "gradsync-cpu-1");
}

TEST(ThreadPoolTest, LaterWorkIsNotHeldUpByEarlierWork) {
  ThreadPool pool(1, nanoseconds::zero());
  std::binary_semaphore started(0);
  std::binary_semaphore proceed(0);
  std::atomic<uint64_t> large_parts{0};
  uint64_t large_parts_at_small_done = 0;
  std::latch done(2);
  pool.Submit({10000,
               [&](int, uint64_t part) {
                 if (part == 0) {
                   started.release();
                   proceed.acquire();
                 }
                 ++large_parts;
               },
               [&] { done.count_down(); }});
  started.acquire();
  pool.Submit({1, [](int, uint64_t) {},
               [&] {
                 large_parts_at_small_done = large_parts;
                 done.count_down();
               }});
  proceed.release();
  done.wait();
  EXPECT_LT(large_parts_at_small_done, 10U);
}

TEST(ThreadPoolTest, ManyWorksFromManyThreadsAllFinish) {
  ThreadPool pool(3, std::chrono::microseconds(50));
  constexpr int kSubmitters = 3;
  constexpr int kWorks = 300;
  std::atomic<uint64_t> parts{0};
  std::latch done(kSubmitters * kWorks);
  std::vector<std::thread> submitters;
  for (int s = 0; s < kSubmitters; ++s) {
    submitters.emplace_back([&] {
      for (int i = 0; i < kWorks; ++i) {
        pool.Submit({static_cast<uint64_t>(i % 7 + 1), [&](int, uint64_t) { ++parts; },
                     [&] { done.count_down(); }});
      }
    });
  }
  for (std::thread& submitter : submitters) submitter.join();
  done.wait();
  uint64_t expected = 0;
  for (int i = 0; i < kWorks; ++i) expected += static_cast<uint64_t>(i % 7 + 1);
  EXPECT_EQ(parts, kSubmitters * expected);
}

TEST(ThreadPoolTest, DestructorFinishesWorkAndWhatItsDoneSubmits) {
  std::atomic<int> done{0};
  {
    ThreadPool pool(2, nanoseconds::zero());
    for (int i = 0; i < 20; ++i) {
      pool.Submit({5, [](int, uint64_t) {},
                   [&] {
                     ++done;
                     pool.Submit({1, [](int, uint64_t) {}, [&] { ++done; }});
                   }});
    }
  }
  EXPECT_EQ(done, 40);
}

}  // namespace
}  // namespace gradsync

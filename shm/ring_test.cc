#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <thread>

#include "shm/ring_reader.h"
#include "shm/ring_writer.h"

namespace gradsync {
namespace {

std::unique_ptr<RingLayout> NewRing() {
  auto ring = std::make_unique<RingLayout>();
  std::memset(static_cast<void*>(ring.get()), 0, sizeof(RingLayout));
  return ring;
}

Submission Entry(uint64_t sequence) {
  Submission submission{};
  submission.sequence = sequence;
  submission.count = sequence * 3;
  return submission;
}

TEST(RingTest, EntriesComeOutInOrderAcrossManyWraps) {
  const auto ring = NewRing();
  RingWriter writer(ring.get());
  RingReader reader(ring.get());
  Submission out{};
  uint64_t pushed = 0;
  uint64_t popped = 0;
  while (popped < 5 * kRingEntries) {
    for (int i = 0; i < 700; ++i) pushed += writer.TryPush(Entry(pushed)) ? 1 : 0;
    for (int i = 0; i < 500; ++i) {
      if (reader.TryPop(&out) != RingReader::Pop::kEntry) break;
      ASSERT_EQ(out.sequence, popped);
      ASSERT_EQ(out.count, popped * 3);
      ++popped;
    }
  }
}

TEST(RingTest, AFullRingRefusesUntilAnEntryIsTaken) {
  const auto ring = NewRing();
  RingWriter writer(ring.get());
  RingReader reader(ring.get());
  for (uint64_t i = 0; i < kRingEntries; ++i) ASSERT_TRUE(writer.TryPush(Entry(i)));
  EXPECT_FALSE(writer.TryPush(Entry(kRingEntries)));
  Submission out{};
  EXPECT_EQ(reader.TryPop(&out), RingReader::Pop::kEntry);
  EXPECT_TRUE(writer.TryPush(Entry(kRingEntries)));
  EXPECT_FALSE(writer.TryPush(Entry(0)));
}

TEST(RingTest, AnImpossibleHeadIsCorrupt) {
  const auto ring = NewRing();
  RingReader reader(ring.get());
  Submission out{};
  EXPECT_EQ(reader.TryPop(&out), RingReader::Pop::kEmpty);
  ring->head.store(kRingEntries + 1);
  EXPECT_EQ(reader.TryPop(&out), RingReader::Pop::kCorrupt);
  ring->head.store(~uint64_t{0});
  EXPECT_EQ(reader.TryPop(&out), RingReader::Pop::kCorrupt);
}

TEST(RingTest, ATailForgedByTheTrainerDoesNotMoveTheReader) {
  const auto ring = NewRing();
  RingWriter writer(ring.get());
  RingReader reader(ring.get());
  ASSERT_TRUE(writer.TryPush(Entry(0)));
  ASSERT_TRUE(writer.TryPush(Entry(1)));
  ring->tail.store(1);
  Submission out{};
  ASSERT_EQ(reader.TryPop(&out), RingReader::Pop::kEntry);
  EXPECT_EQ(out.sequence, 0U);
}

TEST(RingTest, ASleepingDaemonIsToBeWokenOnce) {
  const auto ring = NewRing();
  RingWriter writer(ring.get());
  RingReader reader(ring.get());
  EXPECT_FALSE(writer.MustWakeDaemon()) << "it is awake";
  ASSERT_TRUE(reader.PrepareToSleep());
  ASSERT_TRUE(writer.TryPush(Entry(0)));
  EXPECT_TRUE(writer.MustWakeDaemon());
  EXPECT_FALSE(writer.MustWakeDaemon());
  EXPECT_FALSE(reader.PrepareToSleep()) << "there is an entry";
  reader.WakeUp();
  EXPECT_FALSE(writer.MustWakeDaemon());
}

// The reader gives up its sleep only when told or when it sees an entry itself; were either side's
// fence missing, an entry would be left behind and the test would not end.
TEST(RingTest, NoWakeUpIsLostBetweenTwoThreads) {
  constexpr uint64_t kEntries = 50000;
  const auto ring = NewRing();
  std::atomic<uint32_t> doorbell{0};
  std::thread trainer([&] {
    RingWriter writer(ring.get());
    for (uint64_t i = 0; i < kEntries;) {
      if (!writer.TryPush(Entry(i))) {
        std::this_thread::yield();
        continue;
      }
      ++i;
      if (writer.MustWakeDaemon()) {
        doorbell.fetch_add(1);
        doorbell.notify_one();
      }
    }
  });
  RingReader reader(ring.get());
  Submission out{};
  for (uint64_t popped = 0; popped < kEntries;) {
    const uint32_t before = doorbell.load();
    if (reader.TryPop(&out) == RingReader::Pop::kEntry) {
      ASSERT_EQ(out.sequence, popped++);
      continue;
    }
    if (reader.PrepareToSleep()) doorbell.wait(before);
    reader.WakeUp();
  }
  trainer.join();
}

}  // namespace
}  // namespace gradsync

#include "client/torch/monitored_barrier.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "client/torch/errors.h"
#include "client/torch/message_tags.h"

namespace gradsync::torch {
namespace {

using Clock = std::chrono::steady_clock;

enum class Word : int64_t { kAsk = 1, kAnswer = 2, kPass = 3 };

struct Note {
  Word word;
  int64_t number;
};

// What is left until `end`; at least the shortest wait that is one.
Timeout LeftUntil(Clock::time_point end) {
  return std::max(Timeout(1), std::chrono::ceil<Timeout>(end - Clock::now()));
}

void Send(const Group& group, uint32_t to, const Note& note, Clock::time_point end) {
  group.BeginSend(&note, sizeof(note), to, kTagOfMonitoredBarrier, LeftUntil(end)).End(nullptr, 0);
}

Note Receive(const Group& group, uint32_t from, Clock::time_point end) {
  Note note{};
  group.BeginReceive(from, kTagOfMonitoredBarrier, LeftUntil(end)).End(&note, sizeof(note));
  return note;
}

[[noreturn]] void Fail(const std::string& text) { throw Error(GRADSYNC_DEADLINE_EXCEEDED, text); }

// "[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 100 ms"
std::string FailedText(const std::vector<uint32_t>& failed, Timeout timeout) {
  std::string text = failed.size() == 1 ? "[Rank 0]: Rank " : "[Rank 0]: Ranks ";
  for (size_t i = 0; i < failed.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(failed[i]);
  }
  return text + " failed to pass monitoredBarrier in " + std::to_string(timeout.count()) + " ms";
}

}  // namespace

void MonitoredBarrier::Run(Timeout timeout, bool all) {
  if (group_.rank() == 0) {
    Lead(timeout, all);
  } else {
    Follow(timeout);
  }
}

void MonitoredBarrier::Lead(Timeout timeout, bool all) {
  const Clock::time_point end = Clock::now() + timeout;
  if (timeout <= Timeout::zero()) {
    Fail("[Rank 0]: Rank 0 timed out in monitoredBarrier after " + std::to_string(timeout.count()) +
         " ms.");
  }
  const Note question{Word::kAsk, ++number_};
  std::vector<uint32_t> failed;
  std::string cause;
  const auto attempt = [&](uint32_t rank, const auto& step) {
    if (std::find(failed.begin(), failed.end(), rank) != failed.end()) return;
    try {
      step();
    } catch (const Error& error) {
      failed.push_back(rank);
      cause = error.what();
    }
  };
  // All are asked before one is waited for: so the last ones are not out of time when their turn
  // comes.
  for (uint32_t rank = 1; rank < group_.size(); ++rank) {
    attempt(rank, [&] { Send(group_, rank, question, end); });
  }
  for (uint32_t rank = 1; rank < group_.size() && (all || failed.empty()); ++rank) {
    attempt(rank, [&] {
      while (Receive(group_, rank, end).number != number_) {
      }
    });
  }
  std::sort(failed.begin(), failed.end());
  if (!failed.empty()) {
    Fail(FailedText(failed, timeout) + "\n Original exception: \n" + cause);
  }
  for (uint32_t rank = 1; rank < group_.size(); ++rank) {
    Send(group_, rank, {Word::kPass, number_}, end);
  }
}

void MonitoredBarrier::Follow(Timeout timeout) {
  const Clock::time_point end = Clock::now() + timeout;
  try {
    int64_t answered = 0;
    while (true) {
      const Note note = Receive(group_, 0, end);
      if (note.word == Word::kPass && note.number == answered) return;
      if (note.word != Word::kAsk) continue;  // left over from a barrier that this rank gave up
      answered = note.number;
      Send(group_, 0, {Word::kAnswer, answered}, end);
    }
  } catch (const Error& error) {
    Fail("Rank " + std::to_string(group_.rank()) +
         " successfully reached monitoredBarrier, but received errors while waiting for send/recv "
         "from rank 0. Please check rank 0 logs for faulty rank.\n Original exception: \n" +
         error.what());
  }
}

}  // namespace gradsync::torch

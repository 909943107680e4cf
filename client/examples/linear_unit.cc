// The smallest data-parallel training step there is: one linear unit, y = w x + b.
//
//   linear_unit [--ranks N]     N = 1, 2 (the default) or 4
//
// It is to learn y = 2x + 1 from x = 1, 2, 3, 4, and starts from w = 0.5, b = 0. Each rank, a
// process of its own, takes its share of the samples and finds the gradients of the mean squared
// error over that share; gradsync averages them. Equal shares make that the gradients over all
// samples: every rank must get exactly dw = -27.5 and db = -9.5. The exit status says whether it
// did.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "gradsync/gradsync.hpp"

namespace {

namespace gs = gradsync::client;

constexpr std::array<float, 4> kX = {1, 2, 3, 4};
constexpr float kStartW = 0.5F;
constexpr float kStartB = 0.0F;
constexpr float kExpectedDw = -27.5F;
constexpr float kExpectedDb = -9.5F;

float Target(float x) { return 2 * x + 1; }

struct Gradients {
  float dw = 0;
  float db = 0;
};

// Backward by hand: the derivatives of mean((w x + b - y)^2) over the samples [begin, end).
Gradients Backward(size_t begin, size_t end) {
  Gradients sum;
  for (size_t i = begin; i < end; ++i) {
    const float error = kStartW * kX[i] + kStartB - Target(kX[i]);
    sum.dw += 2 * error * kX[i];
    sum.db += 2 * error;
  }
  const auto samples = static_cast<float>(end - begin);
  return {sum.dw / samples, sum.db / samples};
}

int Fail(uint32_t rank, const char* what, const gs::Error& error) {
  std::fprintf(stderr, "rank %u: %s: %s\n", rank, what, error.ToString().c_str());
  return EXIT_FAILURE;
}

// One rank's training step.
int RunRank(const std::string& job, uint32_t rank, uint32_t ranks) {
  gs::SessionOptions options;
  options.job = job;
  options.world_size = ranks;
  options.rank = rank;
  options.timeout = std::chrono::seconds(60);
  auto session = gs::Session::Open(options);
  if (!session) return Fail(rank, "cannot open a session", session.error());
  auto group = session->CreateGroup("training");
  if (!group) return Fail(rank, "cannot form the group", group.error());
  auto ddp =
      gs::Ddp::Create(*group, {{"w", GRADSYNC_FLOAT32, {1}, 0}, {"b", GRADSYNC_FLOAT32, {1}, 0}});
  if (!ddp) return Fail(rank, "cannot agree on the model", ddp.error());

  // The gradients are made where the daemon reads them: in the slots.
  const auto w_slot = ddp->Slot(0);
  const auto b_slot = ddp->Slot(1);
  if (!w_slot) return Fail(rank, "no slot for w", w_slot.error());
  if (!b_slot) return Fail(rank, "no slot for b", b_slot.error());
  auto* const dw = static_cast<float*>(w_slot->data);
  auto* const db = static_cast<float*>(b_slot->data);

  if (auto begun = ddp->Begin(); !begun) return Fail(rank, "begin", begun.error());
  const size_t share = kX.size() / ranks;
  const Gradients local = Backward(rank * share, (rank + 1) * share);
  // Backward reaches the last parameter first.
  *db = local.db;
  if (auto ready = ddp->Ready(1); !ready) return Fail(rank, "ready", ready.error());
  *dw = local.dw;
  if (auto ready = ddp->Ready(0); !ready) return Fail(rank, "ready", ready.error());
  for (uint32_t bucket = 0; bucket < ddp->bucket_count(); ++bucket) {
    if (auto done = ddp->Wait(bucket); !done) return Fail(rank, "wait", done.error());
  }
  if (auto ended = ddp->End(); !ended) return Fail(rank, "end", ended.error());

  const bool exact = *dw == kExpectedDw && *db == kExpectedDb;
  std::printf("rank %u of %u: own dw = %5.1f, db = %5.1f   averaged dw = %5.1f, db = %4.1f   %s\n",
              rank, ranks, static_cast<double>(local.dw), static_cast<double>(local.db),
              static_cast<double>(*dw), static_cast<double>(*db), exact ? "exact" : "WRONG");
  std::fflush(stdout);
  return exact ? EXIT_SUCCESS : EXIT_FAILURE;
}

// Starts the ranks as processes of their own, before any session is open, and waits for them.
int Launch(uint32_t ranks) {
  const Gradients whole = Backward(0, kX.size());
  std::printf("y = w x + b, to become y = 2x + 1; from w = %.1f, b = %.1f; x = 1, 2, 3, 4\n",
              static_cast<double>(kStartW), static_cast<double>(kStartB));
  std::printf("one process, whole batch:        dw = %.1f, db = %.1f\n",
              static_cast<double>(whole.dw), static_cast<double>(whole.db));
  std::fflush(stdout);
  const std::string job = "linear_unit-" + std::to_string(getpid());
  std::vector<pid_t> children;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) std::exit(RunRank(job, rank, ranks));
    if (child < 0) {
      std::perror("fork");
      return EXIT_FAILURE;
    }
    children.push_back(child);
  }
  bool all_exact = true;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    all_exact = all_exact && WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS;
  }
  std::printf("%s\n", all_exact ? "Every rank has the gradients of the whole batch."
                                : "FAILED: see above.");
  return all_exact ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  int ranks = 2;
  const bool chosen = argc == 3 && std::strcmp(argv[1], "--ranks") == 0;
  if (chosen) ranks = std::atoi(argv[2]);
  if ((argc != 1 && !chosen) || (ranks != 1 && ranks != 2 && ranks != 4)) {
    std::fprintf(stderr, "usage: %s [--ranks 1|2|4]\n", argv[0]);
    return 2;
  }
  return Launch(static_cast<uint32_t>(ranks));
}

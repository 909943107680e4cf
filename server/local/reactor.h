// The daemon's one deciding thread: waits, and sees to it that everything gets its turn.
#ifndef GRADSYNC_SERVER_LOCAL_REACTOR_H_
#define GRADSYNC_SERVER_LOCAL_REACTOR_H_

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "server/engine/engine.h"
#include "server/job/job_table.h"
#include "server/local/dispatcher.h"
#include "server/local/executor.h"
#include "server/local/inbox.h"
#include "server/local/listener.h"
#include "server/local/options.h"
#include "server/local/poller.h"
#include "shm/status.h"

namespace gradsync {

// Behind Server, whose comments hold.
class Reactor {
 public:
  // The options' zeros have been replaced.
  static Result<std::unique_ptr<Reactor>> Create(ServerOptions options,
                                                 std::unique_ptr<Engine> engine,
                                                 DeviceEngineFactory devices);

  Status Run();
  void Stop();
  Status Call(PostedCall::Function function, Time deadline);

 private:
  enum class Phase : uint8_t { kServing, kDraining, kEnded };

  Reactor(ServerOptions options, std::unique_ptr<Engine> engine, DeviceEngineFactory devices,
          Listener listener, Poller poller, std::unique_ptr<Inbox> inbox);

  void Step();
  bool Work();
  bool DrainInbox();
  bool SpinForWork();
  void Sleep();
  void HandleEvents(std::span<const PollEvent> events);
  void AcceptSome(Time now);
  void PauseAccepting(const Status& why, Time now);
  void ResumeAccepting(Time now);
  void CheckTimers(Time now);
  Time NextDeadline() const;

  void BeginDrain(Time now);
  bool IsDrained() const;
  void EndDrain();

  void NoteIdleness(Time now);
  void EndIfIdle(Time now);

  const ServerOptions options_;
  Poller poller_;
  std::unique_ptr<Inbox> inbox_;
  Listener listener_;
  Executor executor_;  // its engine's threads use the inbox, so it goes first
  Dispatcher dispatcher_;

  std::atomic<bool> stop_requested_{false};
  Phase phase_ = Phase::kServing;
  Status result_;
  Time drain_deadline_;
  std::optional<Time> idle_deadline_;  // while there is no connection
  std::optional<Time> accept_again_;   // while nobody is accepted
  bool worked_ = false;                // in the step before
  int busy_steps_ = 0;                 // since the last poll
  Duration spin_;                      // what seems worth it at present
  std::vector<Inbox::Message> messages_;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_LOCAL_REACTOR_H_

// Carries out what the JobTable decides: runs tasks, completes and fails operations, answers and
// ends sessions. The owner of the sessions, of the jobs and of the engine.
#ifndef GRADSYNC_SERVER_LOCAL_EXECUTOR_H_
#define GRADSYNC_SERVER_LOCAL_EXECUTOR_H_

#include <spdlog/logger.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "server/engine/device_engine.h"
#include "server/engine/engine.h"
#include "server/job/actions.h"
#include "server/job/job_table.h"
#include "server/local/inbox.h"
#include "server/local/poller.h"
#include "server/local/trainer_session.h"
#include "shm/status.h"

namespace gradsync {

// The reactor's thread only. Sessions that end stay as objects, closed, until Reap(): callers may
// hold on to them across any call but that.
class Executor {
 public:
  // Borrows `poller`, `inbox` and `logger`.
  Executor(std::unique_ptr<Engine> engine, DeviceEngineFactory devices, Poller* poller,
           Inbox* inbox, spdlog::logger* logger);

  JobTable& jobs() { return jobs_; }
  const JobTable& jobs() const { return jobs_; }

  void Add(std::unique_ptr<TrainerSession> session);
  TrainerSession* Find(SessionId id);                                     // null if gone or closed
  size_t connections() const { return sessions_.size(); }                 // joined or not
  const std::vector<TrainerSession*>& joined() const { return joined_; }  // some may be closed

  // Hello was accepted by the JobTable: from now on the end of the session is the end of the rank.
  void MarkJoined(TrainerSession* session, JoinRequest who);

  // The engine for GPUs, made when it is first asked for; or why there is none.
  Result<DeviceEngine*> device_engine();

  void Apply(Actions actions);
  void Finished(const OperationDone& done);

  // The session broke the rules or was refused: `why` is the last that it hears.
  void Break(TrainerSession* session, const Status& why);
  // The trainer died, hung up, or stopped reading.
  void Lost(TrainerSession* session);
  // The trainer said so. The reply has been sent.
  void Leave(TrainerSession* session);
  // The daemon ends: tells every session why.
  void CloseAll(const Status& why);

  // Destroys the sessions that have ended.
  void Reap();

 private:
  void Run(StartTask& action);
  void Run(const CompleteOperations& action);
  void Run(const FailGroup& action);
  void Run(const ReplyCreateGroup& action);
  void Run(const AnswerMessage& action);
  void Run(const AnswerAside& action);
  void Run(const CloseSession& action);
  void Run(const AbandonTasks& action);
  void Run(const ForgetGroup& action);

  CompletionWriter* WordsOf(SessionId session, uint32_t number);
  void Close(TrainerSession* session, const Status& why);
  void EndRank(TrainerSession* session, Departure departure);
  void LogEnd(const TrainerSession& session, const char* reason, const Status& why);

  JobTable jobs_;
  Poller* poller_;
  Inbox* inbox_;
  spdlog::logger* logger_;
  absl::flat_hash_map<SessionId, std::unique_ptr<TrainerSession>> sessions_;
  std::vector<TrainerSession*> joined_;
  std::vector<SessionId> ended_;
  std::vector<Action> pending_;  // while applying_
  bool applying_ = false;
  DeviceEngineFactory make_devices_;
  std::unique_ptr<DeviceEngine> devices_;  // once asked for
  std::unique_ptr<Engine> engine_;  // last: its threads post to what is above until it is gone
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_LOCAL_EXECUTOR_H_

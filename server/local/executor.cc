#include "server/local/executor.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/local/log.h"
#include "shm/protocol.h"

namespace gradsync {
namespace {

Time Now() { return std::chrono::steady_clock::now(); }

Status EndedStatus(const TrainerSession& session, const Status& why) {
  return {why.code(),
          absl::StrCat("gradsyncd ended the session of ", session.Describe(), ": ", why.message())};
}

}  // namespace

Executor::Executor(std::unique_ptr<Engine> engine, DeviceEngineFactory devices, Poller* poller,
                   Inbox* inbox, spdlog::logger* logger)
    : poller_(poller),
      inbox_(inbox),
      logger_(logger),
      make_devices_(std::move(devices)),
      engine_(std::move(engine)) {}

// What is missing now may be there when the next trainer asks.
Result<DeviceEngine*> Executor::device_engine() {
  if (devices_ != nullptr) return devices_.get();
  if (make_devices_ == nullptr) {
    return Unexpected(Code::kUnsupported, "this gradsyncd was made without a GPU engine");
  }
  Result<std::unique_ptr<DeviceEngine>> made = make_devices_();
  if (!made) {
    LogEvent(*logger_, spdlog::level::warn, "gpu_engine_off", "reason", made.error().message());
    return Unexpected(made.error());
  }
  devices_ = *std::move(made);
  LogEvent(*logger_, spdlog::level::info, "gpu_engine", "devices", devices_->devices().size(),
           "what", devices_->Describe());
  return devices_.get();
}

void Executor::Add(std::unique_ptr<TrainerSession> session) {
  const SessionId id = session->id();
  sessions_.emplace(id, std::move(session));
}

TrainerSession* Executor::Find(SessionId id) {
  const auto it = sessions_.find(id);
  return it == sessions_.end() || it->second->closed() ? nullptr : it->second.get();
}

void Executor::MarkJoined(TrainerSession* session, JoinRequest who) {
  LogEvent(*logger_, spdlog::level::info, "session_open", "session", session->id(), "job", who.job,
           "generation", who.generation, "rank", who.rank, "world_size", who.world_size, "uid",
           who.uid, "pid", who.pid, "program", who.program);
  session->MarkJoined(std::move(who));
  joined_.push_back(session);
}

// What an action brings about (an inline task that is finished, a session that cannot be answered)
// is queued behind the actions that are there, so that a long run of small operations needs no deep
// stack.
void Executor::Apply(Actions actions) {
  for (Action& action : actions) pending_.push_back(std::move(action));
  if (applying_) return;
  applying_ = true;
  for (size_t i = 0; i < pending_.size(); ++i) {
    Action action = std::move(pending_[i]);  // the vector may grow under what runs
    std::visit([this](auto& what) { Run(what); }, action);
  }
  pending_.clear();
  applying_ = false;
}

void Executor::Finished(const OperationDone& done) {
  Apply(jobs_.Finished(done.group, done.sequence, done.result, Now()));
}

void Executor::Run(StartTask& action) {
  const OperationDone done{action.group, action.sequence, OkStatus()};
  LogEvent(*logger_, spdlog::level::trace, "operation_start", "group", done.group, "operation",
           done.sequence);
  Inbox* inbox = inbox_;
  if (action.task->device != nullptr) {
    // There is one: the flag pages of the task are its own.
    devices_->Run(std::move(action.task), action.timeout, [inbox, done](const Status& result) {
      inbox->Post(OperationDone{done.group, done.sequence, result});
    });
    return;
  }
  const bool finished = engine_->Run(std::move(action.task), [inbox, done] { inbox->Post(done); });
  if (finished) Finished(done);
}

CompletionWriter* Executor::WordsOf(SessionId id, uint32_t number) {
  TrainerSession* session = Find(id);
  return session == nullptr ? nullptr : session->group_words(number);
}

void Executor::Run(const CompleteOperations& action) {
  CompletionWriter* words = WordsOf(action.session, action.number);
  if (words != nullptr) words->Complete(action.completed);
}

void Executor::Run(const FailGroup& action) {
  TrainerSession* session = Find(action.session);
  if (session == nullptr) return;
  CompletionWriter* words = session->group_words(action.number);
  if (words == nullptr) return;
  words->Fail(action.status);
  // Nothing of the group is in an engine any more: what its streams wait for never comes.
  if (const DeviceUse* use = session->device_use(action.number); use != nullptr) {
    ReleaseDone(use->flags->page());
  }
  LogEvent(*logger_, spdlog::level::warn, "group_failed", "session", session->id(), "job",
           session->who().job, "rank", session->who().rank, "group", action.number, "code",
           CodeName(action.status.code()), "reason", action.status.message());
}

void Executor::Run(const ReplyCreateGroup& action) {
  TrainerSession* session = Find(action.session);
  if (session == nullptr) return;
  Status sent;
  if (action.status.ok()) {
    auto reply = MakeMessage<GroupCreated>(action.request_id);
    reply.group = action.number;
    if (CompletionWriter* words = session->group_words(action.number); words != nullptr) {
      words->Reset();
    }
    session->EndDeviceUse(action.number);
    LogEvent(*logger_, spdlog::level::debug, "group_open", "session", session->id(), "job",
             session->who().job, "rank", session->who().rank, "group", action.number);
    sent = session->Send(reply);
  } else {
    sent = session->SendError(action.request_id, action.status);
  }
  if (!sent.ok()) Lost(session);
}

void Executor::Run(const AnswerMessage& action) {
  TrainerSession* session = Find(action.session);
  if (session == nullptr) return;
  Status sent;
  if (!action.status.ok()) {
    sent = session->SendError(action.request_id, action.status);
  } else if (action.message == nullptr) {
    sent = session->Send(MakeMessage<Done>(action.request_id));
  } else {
    const Message& message = *action.message;
    auto reply = MakeMessage<MessageReceived>(action.request_id);
    reply.bytes = message.bytes;
    reply.from = message.from;
    std::copy(message.data.begin(), message.data.end(), reply.data.begin());
    const std::array<int, 1> fds = {message.memory.get()};
    sent = session->Send(reply, std::span(fds).first(message.memory.valid() ? 1 : 0));
  }
  if (!sent.ok()) Lost(session);
}

void Executor::Run(const AnswerAside& action) {
  TrainerSession* session = Find(action.session);
  if (session == nullptr) return;
  const AsideAnswer& answer = action.answer;
  Status sent;
  if (!answer.status.ok()) {
    sent = session->SendError(answer.request_id, answer.status);
  } else {
    auto reply = MakeMessage<Rejoined>(answer.request_id);
    reply.next_sequence = answer.next_sequence;
    reply.last = answer.last_member;
    sent = session->Send(reply);
  }
  if (!sent.ok()) Lost(session);
}

void Executor::Run(const CloseSession& action) {
  TrainerSession* session = Find(action.session);
  if (session == nullptr) return;
  LogEnd(*session, "closed", action.status);
  Close(session, action.status);
}

void Executor::Run(const AbandonTasks& action) { devices_->Abandon(action.group); }

void Executor::Run(const ForgetGroup& action) { devices_->Forget(action.group); }

void Executor::Break(TrainerSession* session, const Status& why) {
  LogEnd(*session, session->joined() ? "broken" : "refused", why);
  Close(session, session->joined() ? EndedStatus(*session, why) : why);
  EndRank(session, Departure::kLost);
}

void Executor::Lost(TrainerSession* session) {
  LogEnd(*session, "lost", OkStatus());
  Close(session, OkStatus());
  EndRank(session, Departure::kLost);
}

void Executor::Leave(TrainerSession* session) {
  LogEnd(*session, "goodbye", OkStatus());
  Close(session, OkStatus());
  EndRank(session, Departure::kGoodbye);
}

void Executor::EndRank(TrainerSession* session, Departure departure) {
  if (session->joined()) Apply(jobs_.Leave(session->id(), departure, Now()));
}

void Executor::CloseAll(const Status& why) {
  for (auto& [id, session] : sessions_) {
    if (session->closed()) continue;
    LogEnd(*session, "daemon_end", why);
    Close(session.get(), why);
  }
}

void Executor::Close(TrainerSession* session, const Status& why) {
  session->Close(poller_, why);
  ended_.push_back(session->id());
}

void Executor::LogEnd(const TrainerSession& session, const char* reason, const Status& why) {
  const auto level = why.ok() ? spdlog::level::info : spdlog::level::warn;
  if (!session.joined()) {
    LogEvent(*logger_, why.ok() ? spdlog::level::debug : level, "session_refused", "session",
             session.id(), "uid", session.uid(), "reason", reason, "code", CodeName(why.code()),
             "error", why.message());
    return;
  }
  LogEvent(*logger_, level, "session_close", "session", session.id(), "job", session.who().job,
           "rank", session.who().rank, "uid", session.uid(), "reason", reason, "code",
           CodeName(why.code()), "error", why.message());
}

void Executor::Reap() {
  if (ended_.empty()) return;
  std::erase_if(joined_, [](const TrainerSession* session) { return session->closed(); });
  for (const SessionId id : ended_) sessions_.erase(id);
  ended_.clear();
}

}  // namespace gradsync

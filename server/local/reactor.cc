#include "server/local/reactor.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "server/local/log.h"
#include "shm/socket_lock.h"
#include "shm/spin.h"

namespace gradsync {
namespace {

// While the rings are never empty, sockets and timers get their turn this often.
constexpr int kBusyStepsPerPoll = 64;

// Those who connect in a loop must not keep the reactor from its sessions.
constexpr int kAcceptsPerTurn = 64;

// Without a deadline the reactor still wakes now and then; costs nothing, and bounds arithmetic.
constexpr Duration kLongestSleep = std::chrono::minutes(1);

// How long nobody is accepted after the system had no memory for it.
constexpr Duration kAcceptPause = std::chrono::milliseconds(100);

constexpr Duration kIdleRetry = std::chrono::seconds(1);
constexpr Duration kShortestSpin = std::chrono::microseconds(2);

Time Now() { return std::chrono::steady_clock::now(); }

Status ShuttingDown() {
  return {Code::kShuttingDown, "gradsyncd is shutting down; restart the trainers when it is back"};
}

}  // namespace

Result<std::unique_ptr<Reactor>> Reactor::Create(ServerOptions options,
                                                 std::unique_ptr<Engine> engine,
                                                 DeviceEngineFactory devices) {
  Result<Poller> poller = Poller::Create();
  if (!poller) return Unexpected(poller.error());
  Result<std::unique_ptr<Inbox>> inbox = Inbox::Create();
  if (!inbox) return Unexpected(inbox.error());
  Result<Listener> listener = Listener::Open(options.socket, options.socket_mode);
  if (!listener) return Unexpected(listener.error());
  GRADSYNC_RETURN_IF_ERROR(poller->Add(listener->fd(), {EventSource::kListener}));
  GRADSYNC_RETURN_IF_ERROR(poller->Add((*inbox)->fd(), {EventSource::kInbox}, /*edge=*/true));
  return std::unique_ptr<Reactor>(new Reactor(std::move(options), std::move(engine),
                                              std::move(devices), *std::move(listener),
                                              *std::move(poller), *std::move(inbox)));
}

Reactor::Reactor(ServerOptions options, std::unique_ptr<Engine> engine, DeviceEngineFactory devices,
                 Listener listener, Poller poller, std::unique_ptr<Inbox> inbox)
    : options_(std::move(options)),
      poller_(std::move(poller)),
      inbox_(std::move(inbox)),
      listener_(std::move(listener)),
      executor_(std::move(engine), std::move(devices), &poller_, inbox_.get(),
                options_.logger.get()),
      dispatcher_(options_, &executor_, &poller_),
      spin_(options_.spin) {}

Status Reactor::Run() {
  LogEvent(*options_.logger, spdlog::level::info, "serving", "socket", options_.socket, "cores",
           options_.cores, "max_total_bytes", options_.max_total_bytes);
  while (phase_ != Phase::kEnded) Step();
  inbox_->Close();
  inbox_->Take(&messages_);
  for (Inbox::Message& message : messages_) {
    if (auto* call = std::get_if<std::shared_ptr<PostedCall>>(&message)) {
      (*call)->Refuse(ShuttingDown());
    }
  }
  messages_.clear();
  return result_;
}

void Reactor::Stop() {
  stop_requested_.store(true, std::memory_order_release);
  inbox_->Ring();
}

Status Reactor::Call(PostedCall::Function function, Time deadline) {
  auto call = std::make_shared<PostedCall>(std::move(function));
  if (!inbox_->Post(call)) return ShuttingDown();
  return call->Wait(deadline);
}

void Reactor::Step() {
  if (phase_ == Phase::kDraining && IsDrained()) {
    EndDrain();
    return;
  }
  const bool worked_before = std::exchange(worked_, Work());
  if (!worked_ && worked_before) worked_ = SpinForWork();
  if (worked_) {
    if (++busy_steps_ < kBusyStepsPerPoll) return;
    HandleEvents(poller_.Wait(Duration::zero()));
  } else {
    Sleep();
  }
  executor_.Reap();
}

// The hot path: memory only, no system call but those that wake somebody.
bool Reactor::Work() {
  const bool inbox = DrainInbox();
  const bool rings = dispatcher_.DrainRings();
  return inbox || rings;
}

bool Reactor::DrainInbox() {
  inbox_->Take(&messages_);
  if (messages_.empty()) return false;
  for (Inbox::Message& message : messages_) {
    if (const auto* done = std::get_if<OperationDone>(&message)) {
      executor_.Finished(*done);
    } else {
      std::get<std::shared_ptr<PostedCall>>(message)->Run(executor_.jobs(), Now());
    }
  }
  messages_.clear();
  return true;
}

// Worth it only while every trainer can run beside the daemon. Adapts to whether it paid: trainers
// that compute for long between operations soon cost next to nothing.
bool Reactor::SpinForWork() {
  if (options_.spin == Duration::zero() ||
      static_cast<size_t>(options_.cores) <= executor_.joined().size()) {
    return false;
  }
  const Time until = Now() + spin_;
  do {
    for (int i = 0; i < 32; ++i) {
      if (Work()) {
        spin_ = std::min(options_.spin, spin_ * 2);
        return true;
      }
      SpinPause();
    }
  } while (Now() < until);
  spin_ = std::max(std::min(options_.spin, kShortestSpin), spin_ / 2);
  return false;
}

void Reactor::Sleep() {
  const Time now = Now();
  NoteIdleness(now);
  // Every ring and the inbox must have said "asleep" before one of them is looked at for the last
  // time, or an entry could come in unannounced.
  const bool rings_empty = dispatcher_.PrepareToSleep();
  const bool inbox_empty = inbox_->PrepareToSleep();
  const bool may_sleep = rings_empty && inbox_empty;
  const auto events = poller_.Wait(may_sleep ? NextDeadline() - now : Duration::zero());
  inbox_->WakeUp();
  dispatcher_.WakeUp();
  HandleEvents(events);
}

void Reactor::HandleEvents(std::span<const PollEvent> events) {
  busy_steps_ = 0;
  const Time now = Now();
  for (const PollEvent& event : events) {
    switch (event.source) {
      case EventSource::kListener:
        AcceptSome(now);
        break;
      case EventSource::kSocket:
      case EventSource::kProcess:
        dispatcher_.HandleEvent(event, now);
        break;
      case EventSource::kInbox:
      case EventSource::kDoorbell:
        break;  // woke us; Work() looks at every ring anyway
    }
  }
  CheckTimers(now);
}

void Reactor::AcceptSome(Time now) {
  for (int i = 0; i < kAcceptsPerTurn && listener_.is_open(); ++i) {
    Result<UniqueFd> socket = listener_.Accept();
    if (!socket) {
      if (socket.error().code() != Code::kDeadlineExceeded) PauseAccepting(socket.error(), now);
      return;
    }
    idle_deadline_.reset();
    dispatcher_.Accept(*std::move(socket), now);
  }
}

// Else the listener would be readable all the time, and keep the reactor awake.
void Reactor::PauseAccepting(const Status& why, Time now) {
  LogEvent(*options_.logger, spdlog::level::warn, "accept_failed", "error", why.message());
  poller_.Remove(listener_.fd());
  accept_again_ = now + kAcceptPause;
}

void Reactor::ResumeAccepting(Time now) {
  accept_again_.reset();
  const Status watched = poller_.Add(listener_.fd(), {EventSource::kListener});
  if (!watched.ok()) PauseAccepting(watched, now);
}

void Reactor::CheckTimers(Time now) {
  dispatcher_.CloseSilent(now);
  dispatcher_.AnswerReleased(now);
  if (const std::optional<Time> next = executor_.jobs().NextDeadline(); next && *next <= now) {
    executor_.Apply(executor_.jobs().CheckDeadlines(now));
  }
  if (phase_ != Phase::kServing) return;
  if (accept_again_ && *accept_again_ <= now) ResumeAccepting(now);
  if (stop_requested_.load(std::memory_order_acquire)) {
    BeginDrain(now);
  } else if (idle_deadline_ && *idle_deadline_ <= now) {
    EndIfIdle(now);
  }
}

Time Reactor::NextDeadline() const {
  Time next = Now() + kLongestSleep;
  const auto consider = [&next](std::optional<Time> time) {
    if (time) next = std::min(next, *time);
  };
  consider(executor_.jobs().NextDeadline());
  consider(dispatcher_.NextDeadline());
  consider(idle_deadline_);
  consider(accept_again_);
  if (phase_ == Phase::kDraining) consider(drain_deadline_);
  return next;
}

void Reactor::BeginDrain(Time now) {
  LogEvent(*options_.logger, spdlog::level::info, "drain", "running",
           executor_.jobs().running_count(), "sessions", executor_.jobs().session_count());
  phase_ = Phase::kDraining;
  accept_again_.reset();
  drain_deadline_ = now + options_.drain_timeout;
  poller_.Remove(listener_.fd());
  listener_.Close();
  executor_.Apply(executor_.jobs().Drain(now));
}

bool Reactor::IsDrained() const {
  return executor_.jobs().running_count() == 0 || Now() >= drain_deadline_;
}

void Reactor::EndDrain() {
  if (const size_t running = executor_.jobs().running_count(); running > 0) {
    result_ = {Code::kDeadlineExceeded,
               absl::StrCat(running,
                            " operations were still running at the end of the drain "
                            "timeout")};
  }
  executor_.CloseAll(ShuttingDown());
  executor_.Reap();
  phase_ = Phase::kEnded;
}

void Reactor::NoteIdleness(Time now) {
  if (options_.idle_exit == Duration::zero() || phase_ != Phase::kServing) return;
  if (executor_.connections() > 0) {
    idle_deadline_.reset();
  } else if (!idle_deadline_) {
    idle_deadline_ = now + options_.idle_exit;
  }
}

void Reactor::EndIfIdle(Time now) {
  if (executor_.connections() > 0) return;
  idle_deadline_ = now + std::min(options_.idle_exit, kIdleRetry);
  const auto lock = SocketLock::TryTake(options_.socket, SocketLock::Right::kStarting);
  if (!lock) {
    LogEvent(*options_.logger, spdlog::level::warn, "idle_end_failed", "error",
             lock.error().message());
    return;
  }
  if (!lock->has_value()) return;
  AcceptSome(now);
  if (executor_.connections() > 0) return;
  LogEvent(*options_.logger, spdlog::level::info, "idle_end");
  poller_.Remove(listener_.fd());
  listener_.Close();
  phase_ = Phase::kEnded;
}

}  // namespace gradsync

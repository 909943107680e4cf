#include "server/local/dispatcher.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/local/frames.h"
#include "server/local/submissions.h"
#include "server/local/text.h"
#include "shm/protocol.h"

namespace gradsync {
namespace {

Duration TimeoutOf(uint32_t milliseconds) {
  return std::chrono::milliseconds(std::min(milliseconds, kMaxTimeoutMs));
}

// How much of one session is handled before the others have their turn.
constexpr uint32_t kEntriesPerRound = 64;
constexpr int kFramesPerRound = 16;

// Messages that a user's ranks have sent, that no rank has received, and that are too long for a
// frame: each takes a descriptor.
constexpr uint64_t kMaxUserMessages = 4096;

// An operation that is done lets go of its memory within this order of time.
constexpr Duration kReleaseCheck = std::chrono::milliseconds(1);

constexpr char kVersion[] = GRADSYNC_VERSION;

}  // namespace

Dispatcher::Dispatcher(const ServerOptions& options, Executor* executor, Poller* poller)
    : options_(options),
      executor_(executor),
      poller_(poller),
      total_bytes_(std::make_shared<Budget>(options.max_total_bytes)) {}

void Dispatcher::Accept(UniqueFd socket, Time now) {
  if (executor_->connections() >= options_.max_sessions) {
    CloseWithError(std::move(socket),
                   {Code::kOutOfMemory, absl::StrCat("gradsyncd serves ", options_.max_sessions,
                                                     " sessions already, as many as it may; raise "
                                                     "its --max-sessions")});
    return;
  }
  const Result<uid_t> uid = PeerUid(socket.get());
  if (!uid) {
    CloseWithError(std::move(socket), uid.error());
    return;
  }
  const User& user = UserOf(*uid);
  std::optional<Charge> place = Charge::Take(user.sessions, 1);
  if (!place) {
    CloseWithError(
        std::move(socket),
        {Code::kOutOfMemory,
         absl::StrCat("user ", *uid, " has ", options_.max_user_sessions,
                      " sessions with gradsyncd",
                      ", as many as it may; end some, or raise its --max-user-sessions")});
    return;
  }
  const SegmentLimits limits{options_.max_segments_per_session, options_.max_session_bytes,
                             options_.max_session_device_bytes};
  auto session =
      std::make_unique<TrainerSession>(++last_session_, std::move(socket), *uid, *std::move(place),
                                       SegmentTable(limits, {user.bytes, total_bytes_}));
  TrainerSession* added = session.get();
  executor_->Add(std::move(session));
  silent_.emplace_back(now + options_.hello_timeout, added->id());
  if (const Status watched = added->Watch(poller_); !watched.ok()) {
    executor_->Break(added, watched);
  }
}

const Dispatcher::User& Dispatcher::UserOf(uid_t uid) {
  absl::erase_if(users_, [](const auto& entry) {
    return entry.second.sessions->used() == 0 && entry.second.bytes->used() == 0 &&
           entry.second.messages->used() == 0;
  });
  User& user = users_[uid];
  if (user.sessions == nullptr) {
    user = {.sessions = std::make_shared<Budget>(options_.max_user_sessions),
            .bytes = std::make_shared<Budget>(options_.max_user_bytes),
            .messages = std::make_shared<Budget>(kMaxUserMessages)};
  }
  return user;
}

void Dispatcher::CloseSilent(Time now) {
  while (!silent_.empty() && silent_.front().first <= now) {
    TrainerSession* session = executor_->Find(silent_.front().second);
    silent_.pop_front();
    if (session == nullptr || session->joined()) continue;
    executor_->Break(session, {Code::kDeadlineExceeded, "the connection sent no HELLO in time"});
  }
}

std::optional<Time> Dispatcher::NextDeadline() const {
  std::optional<Time> next;
  if (!silent_.empty()) next = silent_.front().first;
  if (!releases_.empty()) next = next ? std::min(*next, next_release_check_) : next_release_check_;
  return next;
}

void Dispatcher::AnswerReleased(Time now) {
  if (releases_.empty() || now < next_release_check_) return;
  next_release_check_ = now + kReleaseCheck;
  std::vector<Release> waiting;
  std::swap(waiting, releases_);
  for (Release& release : waiting) {
    TrainerSession* session = executor_->Find(release.session);
    if (session == nullptr) continue;
    if (release.closed->load(std::memory_order_acquire)) {
      Acknowledge(session, release.request_id);
    } else {
      releases_.push_back(std::move(release));
    }
  }
}

void Dispatcher::HandleEvent(const PollEvent& event, Time now) {
  TrainerSession* session = executor_->Find(event.session);
  if (session == nullptr) return;
  session->Flush();
  ReceiveFrames(session, now);
  if (event.source != EventSource::kProcess || session->closed()) return;
  CatchUp();
  if (!session->closed()) executor_->Lost(session);
}

bool Dispatcher::DrainRings() { return DrainRings(kEntriesPerRound); }

bool Dispatcher::DrainRings(uint32_t limit) {
  bool any = false;
  // Entries change no list here: sessions that end in the meantime stay in it until they are
  // reaped.
  for (TrainerSession* session : executor_->joined()) {
    if (!session->closed()) any |= DrainRing(session, limit);
  }
  return any;
}

// To be called after a frame or a hang-up was read and before it is acted upon: what trainers wrote
// to their rings before that comes first, as it did for them.
void Dispatcher::CatchUp() { DrainRings(kRingEntries); }

bool Dispatcher::DrainRing(TrainerSession* session, uint32_t limit) {
  Submission entry;
  uint32_t taken = 0;
  for (; taken < limit && !session->closed(); ++taken) {
    const RingReader::Pop pop = session->ring().TryPop(&entry);
    if (pop == RingReader::Pop::kEmpty) break;
    if (pop == RingReader::Pop::kCorrupt) {
      executor_->Break(session,
                       {Code::kProtocol, "the submission ring is corrupt: its head is impossible"});
    } else {
      HandleEntry(session, entry);
    }
  }
  return taken > 0;
}

void Dispatcher::HandleEntry(TrainerSession* session, const Submission& entry) {
  JobTable& jobs = executor_->jobs();
  Result<CheckedSubmission> checked =
      CheckSubmission(entry, jobs.FindGroup(session->id(), entry.group), session->segments(),
                      session->device_use(entry.group));
  if (!checked) {
    executor_->Break(session, checked.error());
    return;
  }
  executor_->Apply(jobs.Submit(session->id(), entry.group, checked->operation,
                               std::move(checked->buffers), std::chrono::steady_clock::now()));
}

bool Dispatcher::PrepareToSleep() {
  bool may_sleep = true;
  for (TrainerSession* session : executor_->joined()) may_sleep &= session->ring().PrepareToSleep();
  return may_sleep;
}

void Dispatcher::WakeUp() {
  for (TrainerSession* session : executor_->joined()) session->ring().WakeUp();
}

void Dispatcher::ReceiveFrames(TrainerSession* session, Time now) {
  for (int i = 0; i < kFramesPerRound && !session->closed(); ++i) {
    Result<Frame> frame = session->Receive();
    if (!frame && frame.error().code() == Code::kDeadlineExceeded) return;  // nothing more there
    CatchUp();
    if (session->closed()) return;
    if (frame) {
      HandleFrame(session, *std::move(frame), now);
      continue;
    }
    if (frame.error().code() == Code::kDaemonLost) {  // seen from this end: the trainer is gone
      executor_->Lost(session);
    } else {
      executor_->Break(session, frame.error());
    }
  }
}

void Dispatcher::HandleFrame(TrainerSession* session, Frame frame, Time now) {
  const Result<FrameHeader> header = CheckHeader(frame.bytes);
  if (!header) {
    executor_->Break(session, header.error());
    return;
  }
  const auto type = static_cast<FrameType>(header->type);
  const bool may_carry = type == FrameType::kSendMessage || type == FrameType::kImportDeviceSegment;
  Status handled = frame.fds.empty() || may_carry
                       ? HandleRequest(session, *header, std::move(frame), now)
                       : Status(Code::kProtocol, absl::StrCat("a ", FrameTypeName(header->type),
                                                              " frame carries descriptors"));
  if (!handled.ok()) executor_->Break(session, handled);
}

Status Dispatcher::HandleRequest(TrainerSession* session, const FrameHeader& header, Frame whole,
                                 Time now) {
  const std::span<const std::byte> frame = whole.bytes;
  const auto type = static_cast<FrameType>(header.type);
  if (session->joined() == (type == FrameType::kHello)) {
    return {Code::kProtocol,
            absl::StrCat("the first frame of a session, and no other, must be HELLO; this is ",
                         FrameTypeName(header.type))};
  }
  switch (type) {
    case FrameType::kHello:
      return HandleHello(session, frame, now);
    case FrameType::kAllocateSegment:
      return HandleAllocate(session, frame);
    case FrameType::kFreeSegment:
      return HandleFree(session, frame, now);
    case FrameType::kCreateGroup:
      return HandleCreateGroup(session, frame, now);
    case FrameType::kDestroyGroup:
      return HandleDestroyGroup(session, frame, now);
    case FrameType::kAbortGroup:
      return HandleAbortGroup(session, frame, now);
    case FrameType::kDescribeBucket:
      return HandleDescribeBucket(session, frame);
    case FrameType::kSendMessage:
      return HandleSendMessage(session, std::move(whole), now);
    case FrameType::kReceiveMessage:
      return HandleReceiveMessage(session, frame, now);
    case FrameType::kCancelMessage:
      return HandleCancelMessage(session, frame);
    case FrameType::kStandAside:
      return HandleStandAside(session, frame, now);
    case FrameType::kAllocateDeviceSegment:
      return HandleAllocateOnDevice(session, frame);
    case FrameType::kImportDeviceSegment:
      return HandleImportFromDevice(session, std::move(whole));
    case FrameType::kUseDevice:
      return HandleUseDevice(session, frame);
    case FrameType::kGoodbye:
      return HandleGoodbye(session, frame);
    case FrameType::kWelcome:
    case FrameType::kSegmentAllocated:
    case FrameType::kGroupCreated:
    case FrameType::kDone:
    case FrameType::kError:
    case FrameType::kMessageReceived:
    case FrameType::kRejoined:
      break;
  }
  return {Code::kProtocol,
          absl::StrCat(FrameTypeName(header.type), " is no request that a trainer can make")};
}

Status Dispatcher::HandleHello(TrainerSession* session, std::span<const std::byte> frame,
                               Time now) {
  const Result<Hello> hello = CheckMessage<Hello>(frame);
  if (!hello) return hello.error();
  Result<JoinRequest> request = CheckHello(*hello, session->uid());
  if (!request) return request.error();
  // Before the job hears of the rank: a daemon that is short of memory must not disturb the others.
  GRADSYNC_RETURN_IF_ERROR(session->OpenControl(poller_));
  Actions actions;
  Status joined = executor_->jobs().Join(session->id(), *request, now, &actions);
  if (joined.ok()) {
    auto welcome = MakeMessage<Welcome>(hello->header.request_id);
    welcome.session = session->id();
    welcome.spin_us = SpinMicroseconds(request->local_world_size);
    welcome.daemon_version.Set(kVersion);
    executor_->MarkJoined(session, *std::move(request));
    LoseUnlessSent(session, session->SendWelcome(welcome));
  }
  executor_->Apply(std::move(actions));
  return joined;
}

// A trainer may spin as long as every trainer and the daemon have a core of their own. The ranks of
// this job that have not joined yet count too.
uint32_t Dispatcher::SpinMicroseconds(uint32_t local_world_size) const {
  const size_t trainers = std::max<size_t>(local_world_size, executor_->joined().size() + 1);
  if (static_cast<size_t>(options_.cores) <= trainers) return 0;
  return static_cast<uint32_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(options_.spin).count());
}

Status Dispatcher::HandleAllocate(TrainerSession* session, std::span<const std::byte> frame) {
  const Result<AllocateSegment> request = CheckMessage<AllocateSegment>(frame);
  if (!request) return request.error();
  const Result<SegmentTable::NewSegment> segment =
      session->segments().Allocate(request->bytes, MakePrintable(request->label.Get()));
  if (segment) executor_->jobs().SetSegmentBytes(session->id(), session->segments().bytes());
  AnswerSegment(session, request->header.request_id, segment);
  return OkStatus();
}

Status Dispatcher::HandleFree(TrainerSession* session, std::span<const std::byte> frame, Time now) {
  const Result<FreeSegment> request = CheckMessage<FreeSegment>(frame);
  if (!request) return request.error();
  const auto closed = session->segments().ClosedMark(request->segment);
  if (!session->segments().Free(request->segment)) {
    return {Code::kProtocol,
            absl::StrCat("FREE_SEGMENT of segment ", request->segment, ", which it has not")};
  }
  executor_->jobs().SetSegmentBytes(session->id(), session->segments().bytes());
  if (closed == nullptr || closed->load(std::memory_order_acquire)) {
    Acknowledge(session, request->header.request_id);
    return OkStatus();
  }
  // The trainer may free it as soon as it has the answer.
  releases_.push_back({session->id(), request->header.request_id, closed});
  next_release_check_ = now + kReleaseCheck;
  return OkStatus();
}

Status Dispatcher::HandleCreateGroup(TrainerSession* session, std::span<const std::byte> frame,
                                     Time now) {
  const Result<CreateGroup> request = CheckMessage<CreateGroup>(frame);
  if (!request) return request.error();
  const Result<GroupRequest> checked = CheckCreateGroup(*request);
  if (!checked) {
    ReplyError(session, request->header.request_id, checked.error());
    return OkStatus();
  }
  executor_->Apply(executor_->jobs().CreateGroup(session->id(), *checked, now));
  return OkStatus();
}

Status Dispatcher::HandleDestroyGroup(TrainerSession* session, std::span<const std::byte> frame,
                                      Time now) {
  const Result<DestroyGroup> request = CheckMessage<DestroyGroup>(frame);
  if (!request) return request.error();
  JobTable& jobs = executor_->jobs();
  if (!jobs.FindGroup(session->id(), request->group)) {
    return {Code::kProtocol,
            absl::StrCat("DESTROY_GROUP of group ", request->group, ", which it is not in")};
  }
  executor_->Apply(jobs.DestroyGroup(session->id(), request->group, now));
  session->EndDeviceUse(request->group);
  Acknowledge(session, request->header.request_id);
  return OkStatus();
}

Status Dispatcher::HandleAbortGroup(TrainerSession* session, std::span<const std::byte> frame,
                                    Time now) {
  const Result<AbortGroup> request = CheckMessage<AbortGroup>(frame);
  if (!request) return request.error();
  const Result<Status> why = CheckAbortGroup(*request);
  if (!why) return why.error();
  JobTable& jobs = executor_->jobs();
  if (!jobs.FindGroup(session->id(), request->group)) {
    return {Code::kProtocol,
            absl::StrCat("ABORT_GROUP of group ", request->group, ", which it is not in")};
  }
  executor_->Apply(jobs.AbortGroup(session->id(), request->group, *why, now));
  Acknowledge(session, request->header.request_id);
  return OkStatus();
}

Status Dispatcher::HandleDescribeBucket(TrainerSession* session, std::span<const std::byte> frame) {
  const Result<DescribeBucket> request = CheckMessage<DescribeBucket>(frame);
  if (!request) return request.error();
  Result<BucketDescription> description = CheckDescribeBucket(*request);
  if (!description) return description.error();
  const Status described =
      executor_->jobs().DescribeBucket(session->id(), request->group, *std::move(description));
  if (described.ok()) {
    Acknowledge(session, request->header.request_id);
  } else {
    ReplyError(session, request->header.request_id, described);
  }
  return OkStatus();
}

Status Dispatcher::HandleSendMessage(TrainerSession* session, Frame frame, Time now) {
  const Result<SendMessage> request = CheckMessage<SendMessage>(frame.bytes);
  if (!request) return request.error();
  JobTable& jobs = executor_->jobs();
  Result<std::shared_ptr<Message>> message =
      CheckSendMessage(*request, &frame.fds, jobs.FindGroup(session->id(), request->group));
  if (!message) return message.error();
  if (const Status charged = ChargeMessage(session->uid(), message->get()); !charged.ok()) {
    ReplyError(session, request->header.request_id, charged);
    return OkStatus();
  }
  executor_->Apply(jobs.Send(session->id(), request->group, request->header.request_id, request->to,
                             *std::move(message), TimeoutOf(request->timeout_ms), now));
  return OkStatus();
}

Status Dispatcher::ChargeMessage(uid_t uid, Message* message) {
  if (!message->memory.valid()) return OkStatus();
  const User& user = UserOf(uid);
  std::optional<Charge> place = Charge::Take(user.messages, 1);
  std::optional<Charge> bytes = Charge::Take(user.bytes, message->bytes);
  std::optional<Charge> total = Charge::Take(total_bytes_, message->bytes);
  if (!place || !bytes || !total) {
    return {
        Code::kOutOfMemory,
        absl::StrCat("a message of ", message->bytes, " bytes does not fit: the messages of this ",
                     "user's ranks that nobody has received are too many, or too long; receive ",
                     "some, or raise gradsyncd's --max-user-bytes or --max-total-bytes")};
  }
  using Charges = std::array<Charge, 3>;
  message->charge = std::make_shared<const Charges>(
      Charges{*std::move(place), *std::move(bytes), *std::move(total)});
  return OkStatus();
}

Status Dispatcher::HandleReceiveMessage(TrainerSession* session, std::span<const std::byte> frame,
                                        Time now) {
  const Result<ReceiveMessage> request = CheckMessage<ReceiveMessage>(frame);
  if (!request) return request.error();
  JobTable& jobs = executor_->jobs();
  GRADSYNC_RETURN_IF_ERROR(
      CheckReceiveMessage(*request, jobs.FindGroup(session->id(), request->group)));
  const auto from =
      request->from == kAnyMember ? std::nullopt : std::optional<uint32_t>(request->from);
  executor_->Apply(jobs.Receive(session->id(), request->group, request->header.request_id, from,
                                request->tag, TimeoutOf(request->timeout_ms), now));
  return OkStatus();
}

Status Dispatcher::HandleCancelMessage(TrainerSession* session, std::span<const std::byte> frame) {
  const Result<CancelMessage> request = CheckMessage<CancelMessage>(frame);
  if (!request) return request.error();
  executor_->Apply(
      executor_->jobs().CancelMessage(session->id(), request->group, request->request));
  Acknowledge(session, request->header.request_id);
  return OkStatus();
}

Status Dispatcher::HandleStandAside(TrainerSession* session, std::span<const std::byte> frame,
                                    Time now) {
  const Result<StandAside> request = CheckMessage<StandAside>(frame);
  if (!request) return request.error();
  JobTable& jobs = executor_->jobs();
  const Result<AsideRequest> checked =
      CheckStandAside(*request, jobs.FindGroup(session->id(), request->group));
  if (!checked) return checked.error();
  executor_->Apply(jobs.StandAside(session->id(), request->group, *checked, now));
  return OkStatus();
}

Status Dispatcher::HandleGoodbye(TrainerSession* session, std::span<const std::byte> frame) {
  const Result<Goodbye> request = CheckMessage<Goodbye>(frame);
  if (!request) return request.error();
  Acknowledge(session, request->header.request_id);
  if (!session->closed()) executor_->Leave(session);
  return OkStatus();
}

void Dispatcher::Acknowledge(TrainerSession* session, uint32_t request_id) {
  if (session->closed()) return;  // what the request brought about ended the session
  LoseUnlessSent(session, session->Send(MakeMessage<Done>(request_id)));
}

void Dispatcher::ReplyError(TrainerSession* session, uint32_t request_id, const Status& why) {
  LoseUnlessSent(session, session->SendError(request_id, why));
}

void Dispatcher::LoseUnlessSent(TrainerSession* session, const Status& sent) {
  if (!sent.ok()) executor_->Lost(session);
}

}  // namespace gradsync

#include "client/core/daemon_group.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include "shm/protocol.h"

namespace gradsync {
namespace {

constexpr size_t kMaxTagBytes = sizeof(CreateGroup::tag) - 1;
// Operations of one collective that may be in the ring when nothing is staged.
constexpr uint64_t kInPlaceWindow = kRingEntries / 2;
constexpr std::chrono::seconds kReplyWait{10};
constexpr std::chrono::microseconds kShortestEventPause{10};
constexpr std::chrono::microseconds kLongestEventPause{200};

Deadline After(std::chrono::nanoseconds wait) { return std::chrono::steady_clock::now() + wait; }

uint32_t MillisecondsUntil(Deadline deadline) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  return static_cast<uint32_t>(std::clamp<int64_t>(left.count(), 1, kMaxTimeoutMs));
}

Status CheckRanks(const std::vector<uint32_t>& ranks, const Identity& identity) {
  if (ranks.size() > kMaxLocalRanks) {
    return {Code::kUnsupported, "a group of " + std::to_string(ranks.size()) + " ranks; at most " +
                                    std::to_string(kMaxLocalRanks) + " can be"};
  }
  std::vector<uint32_t> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    return {Code::kInvalidArgument, "a group names a rank twice"};
  }
  if (sorted.back() >= identity.world_size) {
    return {Code::kInvalidArgument, "a group names rank " + std::to_string(sorted.back()) +
                                        ", but job '" + identity.job + "' has " +
                                        std::to_string(identity.world_size) + " ranks"};
  }
  if (!std::binary_search(sorted.begin(), sorted.end(), identity.rank)) {
    return {Code::kInvalidArgument,
            "a group does not name this rank, " + std::to_string(identity.rank)};
  }
  return OkStatus();
}

Status CheckTypes(DType dtype, ReduceOp op) {
  if (static_cast<uint8_t>(dtype) >= kDTypeCount) {
    return {Code::kInvalidArgument,
            "there is no element type " + std::to_string(static_cast<int>(dtype))};
  }
  if (static_cast<uint8_t>(op) >= kReduceOpCount) {
    return {Code::kInvalidArgument,
            "there is no reduction " + std::to_string(static_cast<int>(op))};
  }
  if (!IsSupported(dtype, op)) {
    return {Code::kInvalidArgument, std::string("elements of type ") + DTypeName(dtype) +
                                        " cannot be combined by " + ReduceOpName(op)};
  }
  return OkStatus();
}

bool Overlap(const std::byte* a, uint64_t a_bytes, const std::byte* b, uint64_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

// One collective on its way: where each piece lies for the daemon, and the copies from and to the
// caller's memory.
class DaemonGroup::Run {
 public:
  Run(DaemonGroup* group, const Collective& what, Deadline deadline)
      : group_(group),
        what_(what),
        deadline_(deadline),
        traits_(TraitsOf(what.kind)),
        input_blocks_(traits_.input_per_rank ? group->size() : 1),
        output_blocks_(traits_.output_per_rank ? group->size() : 1),
        plan_(PlanPieces(what.count, DTypeSize(what.dtype),
                         in_place() ? 1 : input_blocks_ + output_blocks_, input_blocks_)) {}
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;
  ~Run() {
    if (staging_ != nullptr) group_->session_->ReturnStaging(std::move(staging_));
  }

  // Decides what is used in place, and gets a staging buffer for the rest.
  Status Prepare();
  Status Execute();

 private:
  // Whether the result may take the input's place.
  bool in_place() const { return !traits_.input_per_rank && !traits_.output_per_rank; }
  uint64_t block_bytes() const { return what_.count * plan_.element_size; }
  std::optional<Region> FindInPlace(const std::byte* data, uint64_t blocks) const;
  std::byte* StagedInput(uint64_t piece) const { return staging_->data() + SlotOffset(piece); }
  std::byte* StagedOutput(uint64_t piece) const {
    return StagedInput(piece) + (in_place() ? 0 : plan_.input_stride());
  }
  uint64_t SlotOffset(uint64_t piece) const { return piece % window_ * kPieceBytes; }
  Region StagedRegion(uint64_t offset) const;
  Region InputRegion(uint64_t piece) const;
  Region OutputRegion(uint64_t piece) const;
  void CopyIn(uint64_t piece) const;
  void CopyOut(uint64_t piece) const;
  Status Submit(uint64_t piece) const;

  DaemonGroup* const group_;
  const Collective& what_;
  const Deadline deadline_;
  const OpTraits& traits_;
  const uint64_t input_blocks_;
  const uint64_t output_blocks_;
  const PiecePlan plan_;
  std::optional<Region> input_;  // in place
  std::optional<Region> output_;
  std::shared_ptr<SharedBuffer> staging_;
  Region staging_region_{};
  uint64_t window_ = kInPlaceWindow;
  uint64_t first_sequence_ = 0;
};

std::optional<Region> DaemonGroup::Run::FindInPlace(const std::byte* data, uint64_t blocks) const {
  // Several blocks that are cut into pieces do not lie together piece by piece.
  if (data == nullptr || (blocks > 1 && plan_.pieces > 1)) return std::nullopt;
  const auto region = group_->session_->Find(data, blocks * block_bytes());
  // The daemon takes aligned memory only; the segments themselves are.
  if (region && region->offset % plan_.element_size != 0) return std::nullopt;
  return region;
}

Status DaemonGroup::Run::Prepare() {
  input_ = FindInPlace(what_.input, input_blocks_);
  output_ = FindInPlace(what_.output, output_blocks_);
  if (in_place()) {
    if (what_.output == nullptr) output_ = input_;
    if (what_.input == nullptr) input_ = output_;
  } else if (what_.input != nullptr && what_.output != nullptr &&
             Overlap(what_.input, input_blocks_ * block_bytes(), what_.output,
                     output_blocks_ * block_bytes())) {
    input_.reset();
  }
  if ((input_ || what_.input == nullptr) && (output_ || what_.output == nullptr)) return OkStatus();
  const bool small = plan_.pieces == 1 && plan_.slot_bytes() <= kSmallStagingBytes;
  auto staging = group_->session_->BorrowStaging(small ? kSmallStagingBytes : kStagingBytes);
  if (!staging) return staging.error();
  staging_ = *std::move(staging);
  staging_region_ = *group_->session_->Find(staging_->data(), staging_->size());
  window_ = kWindow;
  return OkStatus();
}

Region DaemonGroup::Run::StagedRegion(uint64_t offset) const {
  if (staging_ == nullptr) return {kNoSegment, 0, 0};  // this rank has no such side
  return {staging_region_.segment, 0, staging_region_.offset + offset};
}

Region DaemonGroup::Run::InputRegion(uint64_t piece) const {
  if (!input_) return StagedRegion(SlotOffset(piece));
  return {input_->segment, 0, input_->offset + plan_.first_element(piece) * plan_.element_size};
}

Region DaemonGroup::Run::OutputRegion(uint64_t piece) const {
  if (!output_) return StagedRegion(SlotOffset(piece) + (in_place() ? 0 : plan_.input_stride()));
  return {output_->segment, 0, output_->offset + plan_.first_element(piece) * plan_.element_size};
}

void DaemonGroup::Run::CopyIn(uint64_t piece) const {
  if (input_ || what_.input == nullptr) return;
  const uint64_t bytes = plan_.elements_of(piece) * plan_.element_size;
  const std::byte* from = what_.input + plan_.first_element(piece) * plan_.element_size;
  for (uint64_t block = 0; block < input_blocks_; ++block) {
    std::memcpy(StagedInput(piece) + block * bytes, from + block * block_bytes(), bytes);
  }
}

void DaemonGroup::Run::CopyOut(uint64_t piece) const {
  if (output_ || what_.output == nullptr) return;
  const uint64_t bytes = plan_.elements_of(piece) * plan_.element_size;
  std::byte* to = what_.output + plan_.first_element(piece) * plan_.element_size;
  for (uint64_t block = 0; block < output_blocks_; ++block) {
    std::memcpy(to + block * block_bytes(), StagedOutput(piece) + block * bytes, bytes);
  }
}

Status DaemonGroup::Run::Submit(uint64_t piece) const {
  Submission submission{};
  submission.sequence = first_sequence_ + piece;
  submission.count = plan_.elements_of(piece);
  submission.group = group_->number_;
  submission.timeout_ms = MillisecondsUntil(deadline_);
  submission.root = what_.root;
  submission.kind = static_cast<uint8_t>(what_.kind);
  submission.dtype = static_cast<uint8_t>(what_.dtype);
  submission.reduce_op = static_cast<uint8_t>(what_.op);
  submission.input = InputRegion(piece);
  submission.output = OutputRegion(piece);
  return group_->session_->connection().Submit(submission, deadline_ + kDaemonGrace);
}

Status DaemonGroup::Run::Execute() {
  first_sequence_ = group_->next_sequence_.fetch_add(plan_.pieces, std::memory_order_relaxed);
  const uint64_t window = std::min(window_, plan_.pieces);
  for (uint64_t step = 0; step < plan_.pieces + window; ++step) {
    if (step >= window) {
      GRADSYNC_RETURN_IF_ERROR(
          group_->WaitUntil(first_sequence_ + step - window, deadline_ + kDaemonGrace));
      CopyOut(step - window);
    }
    if (step < plan_.pieces) {
      CopyIn(step);
      GRADSYNC_RETURN_IF_ERROR(Submit(step));
    }
  }
  return OkStatus();
}

DaemonGroup::DaemonGroup(std::shared_ptr<Session> session, std::string tag,
                         std::vector<uint32_t> ranks, uint32_t rank, uint32_t number)
    : session_(std::move(session)),
      tag_(std::move(tag)),
      ranks_(std::move(ranks)),
      rank_(rank),
      number_(number),
      completion_(session_->connection().group_words(number)) {}

DaemonGroup::~DaemonGroup() {
  Connection& connection = session_->connection();
  if (connection.in_child()) return;
  if (aside_request_ != 0) connection.Forget(aside_request_);
  auto request = MakeMessage<DestroyGroup>();
  request.group = number_;
  static_cast<void>(connection.Call<Done>(request, After(kReplyWait)));
  published_lane_.store(nullptr);
  lane_ = nullptr;  // nothing waits for the group any more
}

Result<std::shared_ptr<DaemonGroup>> DaemonGroup::Create(std::shared_ptr<Session> session,
                                                         const std::string& tag,
                                                         std::vector<uint32_t> ranks,
                                                         Timeout timeout) {
  const Identity& identity = session->identity();
  if (ranks.empty()) {
    for (uint32_t rank = 0; rank < identity.world_size; ++rank) ranks.push_back(rank);
  }
  GRADSYNC_RETURN_IF_ERROR(CheckRanks(ranks, identity));
  if (tag.empty() || tag.size() > kMaxTagBytes) {
    return Unexpected(Code::kInvalidArgument, "a group's tag, '" + tag + "', must have 1 to " +
                                                  std::to_string(kMaxTagBytes) + " bytes");
  }
  auto request = MakeMessage<CreateGroup>();
  request.tag.Set(tag);
  request.timeout_ms = static_cast<uint32_t>(session->Resolve(timeout).count());
  request.rank_count = static_cast<uint32_t>(ranks.size());
  std::copy(ranks.begin(), ranks.end(), request.ranks.begin());
  Connection& connection = session->connection();
  const auto reply =
      connection.Call<GroupCreated>(request, After(session->Resolve(timeout) + kDaemonGrace));
  if (!reply) return Unexpected(reply.error());
  if (reply->group >= kMaxGroupsPerSession) {
    return Unexpected(connection.GiveUp(Code::kProtocol, "gradsyncd sent a malformed group"));
  }
  const auto own = std::find(ranks.begin(), ranks.end(), identity.rank);
  const auto index = static_cast<uint32_t>(own - ranks.begin());
  return std::shared_ptr<DaemonGroup>(
      new DaemonGroup(std::move(session), tag, std::move(ranks), index, reply->group));
}

Status DaemonGroup::CheckUsable() const {
  Connection& connection = session_->connection();
  // Neither a lock nor a word of shared memory is ours to touch in a child.
  if (connection.in_child() || connection.is_lost()) return connection.CheckAlive();
  GRADSYNC_RETURN_IF_ERROR(CheckNotFailing());
  return completion_.Failure();
}

// Once streams are let go, the trainer must not take what they find for a result: the reason is
// about to be told.
Status DaemonGroup::CheckNotFailing() const {
  const DeviceLane* lane = published_lane_.load(std::memory_order_acquire);
  if (lane == nullptr || !lane->IsFailing()) return OkStatus();
  Connection& connection = session_->connection();
  const Deadline deadline = After(kDaemonGrace);
  while (completion_.Failure().ok()) {
    GRADSYNC_RETURN_IF_ERROR(connection.CheckAlive());
    if (std::chrono::steady_clock::now() >= deadline) return connection.GiveUpSilentDaemon();
    std::this_thread::sleep_for(kLongestEventPause);
  }
  return completion_.Failure();
}

Status DaemonGroup::Failure() const {
  const Connection& connection = session_->connection();
  if (connection.in_child() || connection.is_lost()) return OkStatus();
  return completion_.Failure();
}

Status DaemonGroup::CheckTakesPart() const {
  GRADSYNC_RETURN_IF_ERROR(CheckUsable());
  if (aside_request_ == 0) return OkStatus();
  return {Code::kFailedPrecondition, "rank " + std::to_string(session_->identity().rank) +
                                         " stands aside in group '" + tag_ +
                                         "'; it must rejoin before it can do anything there"};
}

// The others count on an operation that this rank cannot take part in.
Status DaemonGroup::LateTurn() {
  Status late(Code::kDeadlineExceeded,
              "rank " + std::to_string(session_->identity().rank) + " of group '" + tag_ +
                  "' could not begin a collective before its timeout: another thread's was under "
                  "way; give it more time, or a group of its own");
  Abort(late);
  return late;
}

Status DaemonGroup::Perform(const Collective& collective, Timeout timeout) {
  GRADSYNC_RETURN_IF_ERROR(CheckTakesPart());
  const Deadline deadline = After(session_->Resolve(timeout));
  const Turns::Turn turn(&collectives_, deadline);
  if (!turn.taken()) return LateTurn();
  GRADSYNC_RETURN_IF_ERROR(
      CheckTakesPart());  // another thread may have had its turn to stand aside
  if (collective.count == 0) return PerformEmpty(collective, deadline);
  Run run(this, collective, deadline);
  // The others count on an operation that this rank cannot take part in.
  if (Status prepared = run.Prepare(); !prepared.ok()) {
    Abort(prepared);
    return prepared;
  }
  return run.Execute();
}

Status DaemonGroup::AllReduce(void* data, uint64_t count, DType dtype, ReduceOp op,
                              Timeout timeout) {
  GRADSYNC_RETURN_IF_ERROR(CheckTypes(dtype, op));
  auto* bytes = static_cast<std::byte*>(data);
  return Perform({OpKind::kAllReduce, dtype, op, 0, count, bytes, bytes}, timeout);
}

Status DaemonGroup::CheckMember(const std::string& what, uint32_t member) const {
  if (member < size()) return OkStatus();
  return {Code::kInvalidArgument, what + " member " + std::to_string(member) + " of group '" +
                                      tag_ + "', which has " + std::to_string(size())};
}

Status DaemonGroup::CheckRoot(OpKind kind, uint32_t root) const {
  return CheckMember(std::string(OpKindName(kind)) + " with the root", root);
}

Status DaemonGroup::Broadcast(void* data, uint64_t count, DType dtype, uint32_t root,
                              Timeout timeout) {
  GRADSYNC_RETURN_IF_ERROR(CheckTypes(dtype, ReduceOp::kSum));
  GRADSYNC_RETURN_IF_ERROR(CheckRoot(OpKind::kBroadcast, root));
  auto* bytes = static_cast<std::byte*>(data);
  const bool is_root = root == rank_;
  return Perform({OpKind::kBroadcast, dtype, ReduceOp::kSum, root, count, is_root ? bytes : nullptr,
                  is_root ? nullptr : bytes},
                 timeout);
}

Status DaemonGroup::Reduce(void* data, uint64_t count, DType dtype, ReduceOp op, uint32_t root,
                           Timeout timeout) {
  GRADSYNC_RETURN_IF_ERROR(CheckTypes(dtype, op));
  GRADSYNC_RETURN_IF_ERROR(CheckRoot(OpKind::kReduce, root));
  auto* bytes = static_cast<std::byte*>(data);
  return Perform({OpKind::kReduce, dtype, op, root, count, bytes, root == rank_ ? bytes : nullptr},
                 timeout);
}

Status DaemonGroup::Gather(const void* input, void* output, uint64_t count, DType dtype,
                           uint32_t root, Timeout timeout) {
  GRADSYNC_RETURN_IF_ERROR(CheckTypes(dtype, ReduceOp::kSum));
  GRADSYNC_RETURN_IF_ERROR(CheckRoot(OpKind::kGather, root));
  return Perform(
      {OpKind::kGather, dtype, ReduceOp::kSum, root, count, static_cast<const std::byte*>(input),
       root == rank_ ? static_cast<std::byte*>(output) : nullptr},
      timeout);
}

Status DaemonGroup::Scatter(const void* input, void* output, uint64_t count, DType dtype,
                            uint32_t root, Timeout timeout) {
  GRADSYNC_RETURN_IF_ERROR(CheckTypes(dtype, ReduceOp::kSum));
  GRADSYNC_RETURN_IF_ERROR(CheckRoot(OpKind::kScatter, root));
  return Perform({OpKind::kScatter, dtype, ReduceOp::kSum, root, count,
                  root == rank_ ? static_cast<const std::byte*>(input) : nullptr,
                  static_cast<std::byte*>(output)},
                 timeout);
}

Status DaemonGroup::ReduceScatter(const void* input, void* output, uint64_t count, DType dtype,
                                  ReduceOp op, Timeout timeout) {
  GRADSYNC_RETURN_IF_ERROR(CheckTypes(dtype, op));
  return Perform({OpKind::kReduceScatter, dtype, op, 0, count, static_cast<const std::byte*>(input),
                  static_cast<std::byte*>(output)},
                 timeout);
}

Status DaemonGroup::AllToAll(const void* input, void* output, uint64_t count, DType dtype,
                             Timeout timeout) {
  GRADSYNC_RETURN_IF_ERROR(CheckTypes(dtype, ReduceOp::kSum));
  return Perform({OpKind::kAllToAll, dtype, ReduceOp::kSum, 0, count,
                  static_cast<const std::byte*>(input), static_cast<std::byte*>(output)},
                 timeout);
}

Status DaemonGroup::AllGather(const void* input, void* output, uint64_t count, DType dtype,
                              Timeout timeout) {
  GRADSYNC_RETURN_IF_ERROR(CheckTypes(dtype, ReduceOp::kSum));
  return Perform({OpKind::kAllGather, dtype, ReduceOp::kSum, 0, count,
                  static_cast<const std::byte*>(input), static_cast<std::byte*>(output)},
                 timeout);
}

Status DaemonGroup::Barrier(Timeout timeout) { return Perform({}, timeout); }

Status DaemonGroup::Share(void* data, uint64_t count, DType dtype, Timeout timeout) {
  GRADSYNC_RETURN_IF_ERROR(CheckTypes(dtype, ReduceOp::kSum));
  auto* bytes = static_cast<std::byte*>(data);
  return Perform({OpKind::kShare, dtype, ReduceOp::kSum, 0, count, bytes, bytes}, timeout);
}

Status DaemonGroup::StandAside(AsidePolicy policy, Timeout timeout) {
  GRADSYNC_RETURN_IF_ERROR(CheckTakesPart());
  if (static_cast<uint8_t>(policy) >= kAsidePolicyCount) {
    return {
        Code::kInvalidArgument,
        "there is no policy " + std::to_string(static_cast<int>(policy)) + " of standing aside"};
  }
  const Timeout resolved = session_->Resolve(timeout);
  // What another thread is in the middle of comes first.
  const Turns::Turn turn(&collectives_, After(resolved));
  if (!turn.taken()) {
    return {Code::kDeadlineExceeded, "rank " + std::to_string(session_->identity().rank) +
                                         " could not stand aside in group '" + tag_ +
                                         "': a collective of another thread was under way"};
  }
  GRADSYNC_RETURN_IF_ERROR(CheckTakesPart());
  auto request = MakeMessage<gradsync::StandAside>();
  request.group = number_;
  request.next_sequence = next_sequence_.load(std::memory_order_relaxed);
  request.policy = static_cast<uint8_t>(policy);
  request.timeout_ms = static_cast<uint32_t>(resolved.count());
  const auto id = session_->connection().Post(request, {}, After(resolved));
  if (!id) return id.error();
  aside_timeout_ = resolved;
  aside_request_ = *id;
  return OkStatus();
}

Result<uint32_t> DaemonGroup::Rejoin() {
  if (aside_request_ == 0) {
    GRADSYNC_RETURN_IF_ERROR(CheckUsable());
    return Unexpected(Code::kFailedPrecondition,
                      "rank " + std::to_string(session_->identity().rank) +
                          " does not stand aside in group '" + tag_ + "'");
  }
  const Result<Frame> answer = AwaitRejoined();
  if (!answer) return Unexpected(answer.error());
  Connection& connection = session_->connection();
  GRADSYNC_RETURN_IF_ERROR(CheckReply(*answer, connection.path(), Rejoined::kType));
  const auto rejoined = ReadMessage<Rejoined>(answer->bytes);
  if (!rejoined || rejoined->last >= size() ||
      rejoined->next_sequence < next_sequence_.load(std::memory_order_relaxed)) {
    return Unexpected(connection.GiveUp(Code::kProtocol, "gradsyncd sent a malformed reply"));
  }
  next_sequence_.store(rejoined->next_sequence, std::memory_order_relaxed);
  return rejoined->last;
}

// As long as the others get on, this takes as long as they need. The daemon counts the timeout from
// what was submitted last, which must then be complete within another.
Result<Frame> DaemonGroup::AwaitRejoined() {
  Connection& connection = session_->connection();
  const uint32_t id = aside_request_.exchange(0);
  const std::array<uint32_t, 1> ids = {id};
  for (;;) {
    const uint64_t seen = completion_.Completed();
    const Deadline deadline = After(2 * aside_timeout_.load() + kDaemonGrace);
    while (completion_.Completed() == seen) {
      const Result<size_t> answered = connection.AwaitAny(ids, deadline);
      if (!answered) return Unexpected(answered.error());
      if (*answered == 0) return connection.Await(id, deadline);
    }
  }
}

// A collective without elements takes its place in the order all the same: so a rank that passes
// another count than the others is told. A barrier is one.
Status DaemonGroup::PerformEmpty(const Collective& collective, Deadline deadline) {
  Submission submission{};
  submission.sequence = ReserveSequences(1);
  submission.group = number_;
  submission.timeout_ms = MillisecondsUntil(deadline);
  submission.root = collective.root;
  submission.kind = static_cast<uint8_t>(collective.kind);
  submission.dtype = static_cast<uint8_t>(collective.dtype);
  submission.reduce_op = static_cast<uint8_t>(collective.op);
  submission.input = {kNoSegment, 0, 0};
  submission.output = {kNoSegment, 0, 0};
  const Deadline last = deadline + kDaemonGrace;
  GRADSYNC_RETURN_IF_ERROR(session_->connection().Submit(submission, last));
  return WaitUntil(submission.sequence, last);
}

Result<MessageRequest> DaemonGroup::BeginSend(const std::byte* data, uint64_t bytes, uint32_t to,
                                              uint64_t tag, Timeout timeout) {
  GRADSYNC_RETURN_IF_ERROR(CheckUsable());
  GRADSYNC_RETURN_IF_ERROR(CheckMember("a message to", to));
  const Deadline deadline = After(session_->Resolve(timeout));
  auto request = MakeMessage<SendMessage>();
  request.group = number_;
  request.to = to;
  request.tag = tag;
  request.timeout_ms = MillisecondsUntil(deadline);
  return MessageRequest::Send(session_, request, data, bytes, deadline + kDaemonGrace);
}

Result<MessageRequest> DaemonGroup::BeginReceive(std::optional<uint32_t> from, uint64_t tag,
                                                 Timeout timeout) {
  GRADSYNC_RETURN_IF_ERROR(CheckUsable());
  if (from) GRADSYNC_RETURN_IF_ERROR(CheckMember("a message from", *from));
  const Deadline deadline = After(session_->Resolve(timeout));
  auto request = MakeMessage<ReceiveMessage>();
  request.group = number_;
  request.from = from.value_or(kAnyMember);
  request.tag = tag;
  request.timeout_ms = MillisecondsUntil(deadline);
  return MessageRequest::Receive(session_, request, deadline + kDaemonGrace);
}

Result<std::shared_ptr<SharedBuffer>> DaemonGroup::Allocate(uint64_t bytes,
                                                            const std::string& label,
                                                            uint32_t device) {
  return session_->Allocate(bytes, label, device);
}

Status DaemonGroup::DescribeBucket(const BucketInfo& info) {
  GRADSYNC_RETURN_IF_ERROR(CheckUsable());
  auto request = MakeMessage<gradsync::DescribeBucket>();
  request.group = number_;
  request.bucket = info.index;
  request.bucket_count = info.bucket_count;
  request.parameter_count = info.parameter_count;
  request.count = info.count;
  request.dtype = static_cast<uint8_t>(info.dtype);
  request.parameters.Set(info.parameters);
  const auto reply = session_->connection().Call<Done>(request, After(kReplyWait));
  return reply ? OkStatus() : reply.error();
}

uint64_t DaemonGroup::ReserveSequences(uint32_t count) {
  return next_sequence_.fetch_add(count, std::memory_order_relaxed);
}

Status DaemonGroup::SubmitBucket(uint64_t sequence, const BucketInfo& info,
                                 const SharedBuffer& buffer, uint64_t offset, ReduceOp op,
                                 Timeout timeout, Stream stream) {
  Submission submission{};
  submission.sequence = sequence;
  submission.count = info.count;
  submission.bucket = info.index;
  submission.kind = static_cast<uint8_t>(OpKind::kBucketReduce);
  submission.dtype = static_cast<uint8_t>(info.dtype);
  submission.reduce_op = static_cast<uint8_t>(op);
  return SubmitInPlace(submission, buffer, offset, timeout, stream);
}

Status DaemonGroup::SubmitAllReduce(uint64_t sequence, uint64_t count, DType dtype,
                                    const SharedBuffer& buffer, uint64_t offset, ReduceOp op,
                                    Timeout timeout) {
  Submission submission{};
  submission.sequence = sequence;
  submission.count = count;
  submission.kind = static_cast<uint8_t>(OpKind::kAllReduce);
  submission.dtype = static_cast<uint8_t>(dtype);
  submission.reduce_op = static_cast<uint8_t>(op);
  return SubmitInPlace(submission, buffer, offset, timeout, /*stream=*/nullptr);
}

Status DaemonGroup::SubmitInPlace(Submission submission, const SharedBuffer& buffer,
                                  uint64_t offset, Timeout timeout, Stream stream) {
  Connection& connection = session_->connection();
  GRADSYNC_RETURN_IF_ERROR(CheckTakesPart());
  const uint64_t bytes = submission.count * DTypeSize(static_cast<DType>(submission.dtype));
  const auto region = session_->Find(buffer.data() + offset, bytes);
  if (!region) {
    return {Code::kInvalidArgument, "operation " + std::to_string(submission.sequence) +
                                        " of group '" + tag_ +
                                        "' does not lie in a buffer of this session"};
  }
  const Deadline deadline = After(session_->Resolve(timeout));
  submission.group = number_;
  submission.timeout_ms = MillisecondsUntil(deadline);
  submission.input = *region;
  submission.output = *region;
  if (buffer.device() != kCpu) {
    const Result<DeviceLane*> lane = Lane(buffer.device());
    if (!lane) return lane.error();
    GRADSYNC_RETURN_IF_ERROR((*lane)->device().CheckNotCapturing(stream));
    GRADSYNC_RETURN_IF_ERROR((*lane)->MarkReady(submission.sequence, stream, deadline));
    submission.on_device = 1;
  }
  return connection.Submit(submission, deadline + kDaemonGrace);
}

Status DaemonGroup::Wait(uint64_t sequence, Timeout timeout) {
  Connection& connection = session_->connection();
  if (connection.in_child()) return connection.CheckAlive();
  return WaitUntil(sequence, After(session_->Resolve(timeout) + kDaemonGrace));
}

Status DaemonGroup::EnqueueWait(uint64_t sequence, uint32_t device, Stream stream) {
  GRADSYNC_RETURN_IF_ERROR(CheckUsable());
  const Result<DeviceLane*> lane = Lane(device);
  if (!lane) return lane.error();
  return (*lane)->EnqueueWait(sequence, stream);
}

Status DaemonGroup::CopyOnDevice(uint32_t device, std::span<const DeviceCopy> copies,
                                 Stream stream) {
  const Result<std::shared_ptr<Device>> opened = session_->GetDevice(device);
  if (!opened) return opened.error();
  for (const DeviceCopy& copy : copies) {
    GRADSYNC_RETURN_IF_ERROR((*opened)->Copy(stream, copy.to, copy.from, copy.bytes));
  }
  return (*opened)->Synchronize(stream);
}

Result<DeviceLane*> DaemonGroup::Lane(uint32_t device) {
  if (session_->connection().in_child()) return Unexpected(session_->connection().CheckAlive());
  const std::lock_guard lock(lane_mutex_);
  if (lane_ == nullptr) {
    Result<std::unique_ptr<DeviceLane>> opened = DeviceLane::Open(session_, number_, device);
    if (!opened) return Unexpected(opened.error());
    lane_ = *std::move(opened);
    published_lane_.store(lane_.get(), std::memory_order_release);
  }
  if (lane_->device().device() == device) return lane_.get();
  return Unexpected(Code::kUnsupported, "group '" + tag_ + "' is on CUDA device " +
                                            std::to_string(lane_->device().device() - 1) +
                                            " of this rank, not on " + std::to_string(device - 1) +
                                            ": a rank uses one GPU in a group");
}

Status DaemonGroup::CheckCollective(const Collective& collective) const {
  if (static_cast<uint8_t>(collective.kind) >= kOpKindCount ||
      collective.kind == OpKind::kBucketReduce) {
    return {Code::kInvalidArgument, "there is no such collective"};
  }
  const OpTraits& traits = TraitsOf(collective.kind);
  GRADSYNC_RETURN_IF_ERROR(
      CheckTypes(collective.dtype, traits.reduces ? collective.op : ReduceOp::kSum));
  if (traits.has_root) GRADSYNC_RETURN_IF_ERROR(CheckRoot(collective.kind, collective.root));
  return OkStatus();
}

Result<std::unique_ptr<DeviceWork>> DaemonGroup::Enqueue(const Collective& collective,
                                                         uint32_t device, Stream stream,
                                                         Timeout timeout) {
  GRADSYNC_RETURN_IF_ERROR(CheckCollective(collective));
  GRADSYNC_RETURN_IF_ERROR(CheckTakesPart());
  const Deadline deadline = After(session_->Resolve(timeout));
  const Turns::Turn turn(&collectives_, deadline);
  if (!turn.taken()) return Unexpected(LateTurn());
  GRADSYNC_RETURN_IF_ERROR(CheckTakesPart());
  const Result<DeviceLane*> lane = Lane(device);
  if (!lane) {
    Abort(lane.error());
    return Unexpected(lane.error());
  }
  GRADSYNC_RETURN_IF_ERROR((*lane)->device().CheckNotCapturing(stream));
  const Result<DeviceEvent> event = (*lane)->device().CreateEvent();
  if (!event) return Unexpected(event.error());
  DeviceRun run(session_.get(), *lane, collective, size());
  const uint64_t first = ReserveSequences(static_cast<uint32_t>(run.operations()));
  const std::shared_ptr<Device> owner = *session_->GetDevice(device);
  auto work = std::make_unique<DeviceWork>(shared_from_this(), owner, *event,
                                           first + run.operations() - 1, timeout);
  // The others count on an operation that this rank cannot take part in.
  if (Status done = EnqueueRun(&run, *lane, stream, *event, first, deadline); !done.ok()) {
    Abort(done);
    return Unexpected(done);
  }
  return work;
}

Status DaemonGroup::EnqueueRun(DeviceRun* run, DeviceLane* lane, Stream stream, DeviceEvent event,
                               uint64_t first_sequence, Deadline deadline) {
  Device& device = lane->device();
  GRADSYNC_RETURN_IF_ERROR(run->Prepare());
  GRADSYNC_RETURN_IF_ERROR(device.Record(event, stream));
  GRADSYNC_RETURN_IF_ERROR(device.WaitForEvent(lane->own_stream(), event));
  GRADSYNC_RETURN_IF_ERROR(
      run->Enqueue(first_sequence, deadline, [this, deadline](Submission submission) {
        submission.group = number_;
        submission.timeout_ms = MillisecondsUntil(deadline);
        return session_->connection().Submit(submission, deadline + kDaemonGrace);
      }));
  return device.Record(event, lane->own_stream());
}

Status DaemonGroup::CheckCompleted(uint64_t sequence) const {
  Connection& connection = session_->connection();
  if (connection.in_child()) return connection.CheckAlive();
  if (completion_.IsComplete(sequence)) return OkStatus();
  GRADSYNC_RETURN_IF_ERROR(CheckNotFailing());
  // Streams are also let go by a failure, which is told first, or by the end of the daemon. With
  // neither it is complete, and the daemon has not come to saying so.
  GRADSYNC_RETURN_IF_ERROR(completion_.Failure());
  return connection.CheckAlive();
}

Status DaemonGroup::AwaitEvent(const Device& device, DeviceEvent event, Timeout timeout) const {
  const Deadline deadline = After(session_->Resolve(timeout) + kDaemonGrace);
  for (auto pause = kShortestEventPause;; pause = std::min(2 * pause, kLongestEventPause)) {
    const Result<bool> over = device.IsOver(event);
    if (!over) return over.error();
    if (*over) return OkStatus();
    if (std::chrono::steady_clock::now() >= deadline) {
      return session_->connection().GiveUpSilentDaemon();
    }
    std::this_thread::sleep_for(pause);
  }
}

Status DaemonGroup::WaitUntil(uint64_t sequence, Deadline deadline) {
  Connection* connection = &session_->connection();
  Status status = completion_.Wait(sequence, deadline, connection->spin(),
                                   [connection] { return connection->CheckAlive(); });
  // The daemon's own deadline comes first, and is a failure of the group.
  if (status.code() == Code::kDeadlineExceeded && completion_.Failure().ok()) {
    return connection->GiveUpSilentDaemon();
  }
  return status;
}

void DaemonGroup::Abort(const Status& why) {
  if (!CheckUsable().ok()) return;
  auto request = MakeMessage<AbortGroup>();
  request.group = number_;
  request.code = static_cast<int32_t>(why.code());
  request.text.Set(why.message());
  // Without an answer the daemon is gone, and with it the group.
  static_cast<void>(session_->connection().Call<Done>(request, After(kReplyWait)));
}

}  // namespace gradsync

#include "server/job/job_texts.h"

#include <algorithm>
#include <bitset>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/job/describe.h"
#include "shm/protocol.h"
#include "shm/session_layout.h"

namespace gradsync {
namespace {

// Longer lists would bury the rest of the sentence.
constexpr size_t kMaxListed = 6;

constexpr char kLookAtRank[] = "Look at that rank's own output for the cause.";

std::string JobText(const Incarnation& incarnation) {
  return absl::StrCat("job ", incarnation.key.name);
}

std::string ListText(const std::vector<std::string>& names) {
  const size_t listed = std::min(names.size(), kMaxListed);
  std::string text = absl::StrJoin(names.begin(), names.begin() + listed, ", ");
  if (listed < names.size()) absl::StrAppend(&text, " and ", names.size() - listed, " more");
  return text;
}

std::vector<std::string> TagsAskedFor(const Incarnation& incarnation, uint32_t rank) {
  std::vector<std::string> tags;
  for (const auto& [tag, rendezvous] : incarnation.rendezvous) {
    if (rendezvous.requests.contains(rank)) tags.push_back(tag);
  }
  return tags;
}

// What a connected rank does instead of asking: "it has groups a, b and waits for group c".
std::string OccupationText(std::vector<std::string> groups, std::vector<std::string> asked) {
  std::string text =
      groups.empty()
          ? "it has no group"
          : absl::StrCat(groups.size() == 1 ? "it has group " : "it has groups ", ListText(groups));
  if (!asked.empty()) absl::StrAppend(&text, " and waits for group ", ListText(asked));
  return text;
}

}  // namespace

Status CheckJoinRequest(const JoinRequest& request) {
  if (request.job.empty()) {
    return {Code::kInvalidArgument,
            "the job has no name; set GRADSYNC_JOB, the same on every rank of the job"};
  }
  if (request.rank >= request.world_size) {
    return {Code::kInvalidArgument,
            absl::StrCat("job ", request.job, ": rank ", request.rank,
                         " is not below the world size, ", request.world_size)};
  }
  if (request.local_world_size != request.world_size) {
    return {Code::kUnsupported,
            absl::StrCat("job ", request.job, ": rank ", request.rank, " says that ",
                         request.local_world_size, " of the job's ", request.world_size,
                         " ranks are on this node; this version joins the ranks of one node only."
                         " Start all of them here.")};
  }
  if (request.world_size > kMaxLocalRanks) {
    return {Code::kUnsupported,
            absl::StrCat("job ", request.job, ": a world size of ", request.world_size,
                         " is more than the ", kMaxLocalRanks, " ranks that a node may have")};
  }
  return OkStatus();
}

Status CheckGroupRequest(const Incarnation& incarnation, uint32_t rank,
                         const GroupRequest& request) {
  const std::string where =
      absl::StrCat(JobText(incarnation), ": rank ", rank, " asked for group ", request.tag);
  if (request.ranks.empty()) {
    return {Code::kInvalidArgument, absl::StrCat(where, " without ranks")};
  }
  std::bitset<kMaxLocalRanks> seen;
  for (const uint32_t member : request.ranks) {
    if (member >= incarnation.world_size) {
      return {Code::kInvalidArgument, absl::StrCat(where, " with rank ", member,
                                                   "; the world size is ", incarnation.world_size)};
    }
    if (seen[member]) {
      return {Code::kInvalidArgument, absl::StrCat(where, " with rank ", member, " twice")};
    }
    seen.set(member);
  }
  if (!seen[rank]) {
    return {Code::kInvalidArgument, absl::StrCat(where, " of ", DescribeRanks(request.ranks),
                                                 ", which does not include itself")};
  }
  return OkStatus();
}

Status RankTakenStatus(const Incarnation& incarnation, uint32_t rank) {
  const RankRecord& holder = incarnation.ranks[rank];
  return {Code::kAlreadyExists,
          absl::StrCat(JobText(incarnation), ": rank ", rank, " is taken by another process (pid ",
                       holder.pid, ", ", holder.program,
                       "). Give every process a rank of its own, and every job a name of its own"
                       " (GRADSYNC_JOB).")};
}

Status WorldSizeStatus(const Incarnation& incarnation, const JoinRequest& request) {
  return {Code::kMismatch,
          absl::StrCat(JobText(incarnation), ": rank ", request.rank,
                       " says that the world size is ", request.world_size, ", rank ",
                       incarnation.first_rank, " said ", incarnation.world_size,
                       ". Start every rank of a job with the same world size (WORLD_SIZE), and"
                       " every job with a name of its own (GRADSYNC_JOB).")};
}

Status GoneClause(const Incarnation& incarnation, uint32_t rank, Departure departure) {
  return {Code::kRankLost, absl::StrCat(JobText(incarnation), ": rank ", rank,
                                        departure == Departure::kLost
                                            ? " died (its process ended or its connection broke)"
                                            : " has left the job")};
}

Status BrokeRulesClause(const Incarnation& incarnation, uint32_t rank, const Status& rule) {
  return {Code::kRankLost,
          absl::StrCat(JobText(incarnation), ": rank ", rank,
                       " was cut off because it broke the protocol (", rule.message(), ")")};
}

Status DestroyedClause(const Incarnation& incarnation, uint32_t rank, const std::string& tag) {
  return {Code::kRankLost,
          absl::StrCat(JobText(incarnation), ": rank ", rank, " has destroyed its group ", tag)};
}

Status IncarnationFailure(const Status& clause) {
  return {clause.code(), absl::StrCat(clause.message(), ". ", kLookAtRank)};
}

Status NotFormedStatus(const Status& clause, const std::string& tag) {
  return {clause.code(),
          absl::StrCat(clause.message(), "; group ", tag, " cannot be formed. ", kLookAtRank)};
}

Status GroupsDifferStatus(const Incarnation& incarnation, const Rendezvous& rendezvous,
                          uint32_t rank, const std::vector<uint32_t>& ranks) {
  return {
      Code::kMismatch,
      absl::StrCat(JobText(incarnation), ": group ", rendezvous.tag, " differs: rank ",
                   rendezvous.first_rank, " asked for it with ", DescribeRanks(rendezvous.ranks),
                   ", rank ", rank, " with ", DescribeRanks(ranks),
                   ". Every rank of a group must name the same ranks in the same order.")};
}

Status TagInUseStatus(const Incarnation& incarnation, uint32_t rank, const std::string& tag) {
  return {Code::kInvalidArgument,
          absl::StrCat(JobText(incarnation), ": rank ", rank, " asked for group ", tag,
                       ", which it already has or has asked for. Destroy that group first, or use"
                       " another tag.")};
}

Status TooManyGroupsStatus(const Incarnation& incarnation, uint32_t rank, const std::string& tag) {
  return {Code::kOutOfMemory,
          absl::StrCat(JobText(incarnation), ": rank ", rank, " asked for group ", tag, " but has ",
                       kMaxGroupsPerSession,
                       " groups already, which is the limit. Destroy groups that are done with.")};
}

Status TooManyOperationsStatus(const Incarnation& incarnation, uint32_t rank) {
  return {Code::kOutOfMemory,
          absl::StrCat(JobText(incarnation), ": more than ", kMaxSessionOperations,
                       " operations are under way in the groups of rank ", rank,
                       ". Wait for some before more are submitted.")};
}

Status TooManyBucketsStatus(const Incarnation& incarnation, uint32_t rank) {
  return {Code::kOutOfMemory,
          absl::StrCat(JobText(incarnation), ": the groups of rank ", rank, " have more than ",
                       kMaxSessionBuckets,
                       " buckets. Make buckets larger, or destroy groups that are done with.")};
}

Status TooManyMessagesStatus(const Incarnation& incarnation, uint32_t rank) {
  return {Code::kOutOfMemory,
          absl::StrCat(JobText(incarnation), ": rank ", rank, " has ", kMaxSessionMessages,
                       " messages sent, or being waited for, that have not been received; receive "
                       "some before more")};
}

Status NoSuchGroupStatus(const Incarnation& incarnation, uint32_t rank, uint32_t number) {
  return {Code::kProtocol, absl::StrCat(JobText(incarnation), ": rank ", rank,
                                        " submitted an operation to its group number ", number,
                                        ", which it does not have")};
}

Status ShuttingDownStatus(const std::string& job) {
  return {Code::kShuttingDown,
          absl::StrCat("job ", job,
                       ": the daemon is shutting down. Start the job again when"
                       " gradsyncd is back.")};
}

Status NotFormedInTimeStatus(const Incarnation& incarnation, const Rendezvous& rendezvous,
                             const std::function<std::vector<std::string>(SessionId)>& groups_of) {
  std::vector<uint32_t> waiting;
  std::vector<uint32_t> absent;
  std::vector<std::string> idle;
  for (const uint32_t rank : rendezvous.ranks) {
    const RankRecord& record = incarnation.ranks[rank];
    if (rendezvous.requests.contains(rank)) {
      waiting.push_back(rank);
    } else if (!record.connected) {
      absent.push_back(rank);
    } else {
      idle.push_back(absl::StrCat(
          "rank ", rank, " is connected but has not asked for it (",
          OccupationText(groups_of(record.session), TagsAskedFor(incarnation, rank)), ")"));
    }
  }
  std::vector<std::string> reasons;
  if (!absent.empty()) {
    reasons.push_back(absl::StrCat(DescribeRanks(absent), absent.size() == 1 ? " has" : " have",
                                   " not connected"));
  }
  if (!idle.empty()) reasons.push_back(ListText(idle));
  return {Code::kDeadlineExceeded,
          absl::StrCat(JobText(incarnation), ": group ", rendezvous.tag, " of ",
                       DescribeRanks(rendezvous.ranks), " was not formed within ",
                       DescribeDuration(rendezvous.timeout), ": ", absl::StrJoin(reasons, "; "),
                       ". Waiting: ", DescribeRanks(waiting),
                       ". Check that the missing ranks run, that they name the same job and"
                       " generation, and that they make the same calls.")};
}

}  // namespace gradsync

// One run of a job: who has joined it, who is still there, which groups are being formed. Records
// only; JobTable decides.
#ifndef GRADSYNC_SERVER_JOB_INCARNATION_H_
#define GRADSYNC_SERVER_JOB_INCARNATION_H_

#include <sys/types.h>

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/btree_map.h"
#include "server/job/actions.h"
#include "server/job/group_scheduler.h"
#include "server/job/mailboxes.h"
#include "server/job/operation.h"
#include "shm/status.h"

namespace gradsync {

struct JobKey {
  uid_t uid = 0;
  std::string name;
  uint32_t generation = 0;
  auto operator<=>(const JobKey&) const = default;
};

// A group that some of its ranks have asked for.
struct Rendezvous {
  struct Request {
    SessionId session = 0;
    uint32_t request_id = 0;
    uint32_t number = 0;  // reserved in the session
  };
  uint64_t id = 0;
  std::string tag;
  std::vector<uint32_t> ranks;
  uint32_t first_rank = 0;  // that asked first
  Duration timeout{};
  Time deadline{};
  std::map<uint32_t, Request> requests;  // by rank
};

// What a rank of a job is or was.
struct RankRecord {
  bool joined = false;
  bool connected = false;  // joined, and has not left
  SessionId session = 0;
  uint32_t local_rank = 0;
  uint32_t pid = 0;
  std::string program;
};

struct FormedGroup;

struct Incarnation {
  JobKey key;
  uint32_t world_size = 0;
  uint32_t first_rank = 0;  // that joined first
  Time created{};
  std::vector<RankRecord> ranks;
  uint32_t joined = 0;                           // ranks that ever joined
  uint32_t connected = 0;                        // ranks that are here
  Status failure;                                // why nothing more can be formed in it
  std::map<std::string, Rendezvous> rendezvous;  // by tag
  absl::btree_map<GroupId, FormedGroup*> groups;

  // Whether ranks may still join. One that everybody has left only waits for the engine.
  bool open() const { return failure.ok() && connected > 0; }
  bool complete() const { return joined == world_size; }
  bool has_been_in(uint32_t rank) const { return rank < world_size && ranks[rank].joined; }
};

struct FormedGroup {
  struct Member {
    SessionId session = 0;
    uint32_t number = 0;  // the session's, while active
    bool active = true;   // has neither left nor destroyed the group
  };

  FormedGroup(GroupId group_id, Incarnation* of, const std::string& tag_text,
              const std::vector<uint32_t>& ranks)
      : id(group_id),
        incarnation(of),
        tag(tag_text),
        scheduler(of->key.name, tag_text, ranks, group_id),
        mailboxes(of->key.name, tag_text, ranks) {}

  GroupId id;
  Incarnation* incarnation;
  std::string tag;
  GroupScheduler scheduler;
  Mailboxes mailboxes;
  std::vector<Member> members;
  uint32_t active = 0;
  // What its active members' sessions are charged with, as JobTable last saw it.
  uint64_t operations = 0;
  uint64_t buckets = 0;
  // When JobTable will look at its deadlines; may be too early, never too late.
  std::optional<Time> alarm;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_JOB_INCARNATION_H_

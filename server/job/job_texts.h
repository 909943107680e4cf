// The sentences of JobTable.
#ifndef GRADSYNC_SERVER_JOB_JOB_TEXTS_H_
#define GRADSYNC_SERVER_JOB_JOB_TEXTS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "server/job/incarnation.h"
#include "server/job/job_table.h"
#include "shm/status.h"

namespace gradsync {

// OK, or what is wrong with the request by itself.
Status CheckJoinRequest(const JoinRequest& request);
Status CheckGroupRequest(const Incarnation& incarnation, uint32_t rank,
                         const GroupRequest& request);

Status RankTakenStatus(const Incarnation& incarnation, uint32_t rank);
Status WorldSizeStatus(const Incarnation& incarnation, const JoinRequest& request);

// Why the rank is gone, as a clause without an end: others add what it means to them.
Status GoneClause(const Incarnation& incarnation, uint32_t rank, Departure departure);
Status BrokeRulesClause(const Incarnation& incarnation, uint32_t rank, const Status& rule);
Status DestroyedClause(const Incarnation& incarnation, uint32_t rank, const std::string& tag);

// What such a clause means to the whole incarnation, and to a group that was to be formed.
Status IncarnationFailure(const Status& clause);
Status NotFormedStatus(const Status& clause, const std::string& tag);

Status GroupsDifferStatus(const Incarnation& incarnation, const Rendezvous& rendezvous,
                          uint32_t rank, const std::vector<uint32_t>& ranks);
Status TagInUseStatus(const Incarnation& incarnation, uint32_t rank, const std::string& tag);
Status TooManyGroupsStatus(const Incarnation& incarnation, uint32_t rank, const std::string& tag);
Status TooManyOperationsStatus(const Incarnation& incarnation, uint32_t rank);
Status TooManyBucketsStatus(const Incarnation& incarnation, uint32_t rank);
Status TooManyMessagesStatus(const Incarnation& incarnation, uint32_t rank);
Status NoSuchGroupStatus(const Incarnation& incarnation, uint32_t rank, uint32_t number);
Status ShuttingDownStatus(const std::string& job);

// A rendezvous has reached its deadline. `groups_of` lists the tags of a connected rank's groups.
Status NotFormedInTimeStatus(const Incarnation& incarnation, const Rendezvous& rendezvous,
                             const std::function<std::vector<std::string>(SessionId)>& groups_of);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_JOB_JOB_TEXTS_H_

// Agreement of all ranks before gradients are sent: on the model, and on the plan.
//
// What differs is found by gathering, never by assuming: whatever the ranks bring along, all of
// them make the same collectives and come to the same verdict in the same words. So a rank that
// cannot go on does not leave the others waiting; it takes part and says why.
#ifndef GRADSYNC_CLIENT_DDP_AGREEMENT_H_
#define GRADSYNC_CLIENT_DDP_AGREEMENT_H_

#include <cstdint>
#include <span>

#include "client/core/group.h"
#include "client/ddp/digest.h"
#include "client/ddp/parameter.h"
#include "shm/status.h"

namespace gradsync {

// What decides the plan besides the parameters.
struct PlanSettings {
  uint64_t first_bucket_bytes = 0;
  uint64_t bucket_bytes = 0;
  bool fixed_plan = false;
  Digest caps{};  // of a list of bucket sizes
  bool fill_from_front = false;
  bool on_gpu = false;
};

// OK on every rank if all have the same parameters, in dtype, shape and order, and the same
// settings; names may differ. Otherwise the same error on every rank: the first rank's `own` that
// is not OK, or kMismatch, naming the first parameter that differs, both values and both ranks.
// `own` is what this rank knows to be wrong with its parameters.
Status AgreeOnModel(Group& group, std::span<const ParameterSpec> parameters,
                    const PlanSettings& settings, const Status& own, Timeout timeout);

// OK on every rank if all have the same plan and every `own` is OK, which says whether this rank
// could make the memory for it. Otherwise the same error on every rank.
Status AgreeOnPlan(Group& group, const Digest& plan, const Status& own, Timeout timeout);

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_DDP_AGREEMENT_H_

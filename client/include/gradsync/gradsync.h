/* gradsync: the client's C interface.
 *
 * A trainer process opens a session with its node's daemon (gradsyncd), forms groups of ranks, and
 * averages gradients, either by collectives over plain memory or by a gradsync_ddp, which is the
 * core of a DDP wrapper: it plans buckets, signals each one as its gradients become ready, and
 * waits for the averages.
 *
 * Conventions, for every function unless it says otherwise:
 *  - Returns GRADSYNC_OK (0) or a gradsync_code. `error`, which may be NULL, then holds the code
 *    and a sentence that names the job, rank, bucket or parameter and says what to do. No function
 *    throws.
 *  - Blocks at most until its timeout (milliseconds; 0 stands for the session's), plus a few
 *    seconds' grace for a daemon that does not answer. There is no way to wait without a deadline.
 *  - May be called from any thread. Calls on one group keep the order in which they are made; every
 *    rank must make the same calls on a group in the same order.
 *  - Handles are owned by the caller and freed by the function that its create function names. A
 *    handle is invalid in a forked child: calls there return GRADSYNC_FAILED_PRECONDITION, and
 *    nothing that the child does disturbs the parent.
 *  - Strings are UTF-8, borrowed for the call. Sizes are bytes, counts are elements.
 *  - Structures that may grow begin with `struct_size`: set it to sizeof the structure; zero every
 *    field that you do not use.
 */
#ifndef GRADSYNC_GRADSYNC_H_
#define GRADSYNC_GRADSYNC_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define GRADSYNC_API __attribute__((visibility("default")))
#else
#define GRADSYNC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gradsync_code {
  GRADSYNC_OK = 0,
  GRADSYNC_INVALID_ARGUMENT = 1,     /* the argument is wrong, whatever the state */
  GRADSYNC_MISMATCH = 2,             /* ranks disagree: model, world size, operation */
  GRADSYNC_DEADLINE_EXCEEDED = 3,    /* the wait ended; the message names who was missing */
  GRADSYNC_RANK_LOST = 4,            /* another rank died or left */
  GRADSYNC_DAEMON_LOST = 5,          /* no daemon, or it died, or it closed the session */
  GRADSYNC_PROTOCOL = 6,             /* a daemon of another version */
  GRADSYNC_PERMISSION_DENIED = 7,    /* the socket belongs to somebody else */
  GRADSYNC_OUT_OF_MEMORY = 8,        /* not enough memory, or a configured limit */
  GRADSYNC_ALREADY_EXISTS = 9,       /* another process holds this rank */
  GRADSYNC_SHUTTING_DOWN = 10,       /* the daemon is ending in an orderly way */
  GRADSYNC_UNSUPPORTED = 11,         /* valid, but not offered by this build */
  GRADSYNC_FAILED_PRECONDITION = 12, /* a call out of order, or in a forked child */
  GRADSYNC_INTERNAL = 13             /* a fault of gradsync itself */
} gradsync_code;

typedef enum gradsync_dtype {
  GRADSYNC_FLOAT32 = 0,
  GRADSYNC_FLOAT64 = 1,
  GRADSYNC_FLOAT16 = 2,
  GRADSYNC_BFLOAT16 = 3,
  GRADSYNC_INT8 = 4,
  GRADSYNC_UINT8 = 5,
  GRADSYNC_INT16 = 6,
  GRADSYNC_INT32 = 7,
  GRADSYNC_INT64 = 8,
  GRADSYNC_BOOL = 9, /* one byte, 0 or 1: sum and max are "or", product and min are "and" */
  GRADSYNC_COMPLEX64 = 10,
  GRADSYNC_COMPLEX128 = 11
} gradsync_dtype;

/* Results are bitwise the same on every rank and from run to run: ranks are combined in rank order.
 * float16 and bfloat16 are combined in float32 and rounded once. The average of float32 is the sum
 * divided; of float64 and the complex types the sum of the values divided. */
typedef enum gradsync_reduce_op {
  GRADSYNC_SUM = 0,
  GRADSYNC_AVG = 1, /* floating-point and complex types only */
  GRADSYNC_MIN = 2, /* not for complex types; a NaN anywhere gives NaN */
  GRADSYNC_MAX = 3, /* likewise */
  GRADSYNC_PRODUCT = 4,
  GRADSYNC_BIT_AND = 5, /* the bitwise ones for integer types and bool only */
  GRADSYNC_BIT_OR = 6,
  GRADSYNC_BIT_XOR = 7
} gradsync_reduce_op;

typedef struct gradsync_error {
  int code; /* gradsync_code */
  char message[2048];
} gradsync_error;

/* The version of the library that is loaded, "0.1.0". Static. */
GRADSYNC_API const char* gradsync_version(void);

/* "RANK_LOST" and so on; "UNKNOWN" for other values. Static. */
GRADSYNC_API const char* gradsync_code_name(int code);

/* ---- Session: this process as one rank of a job ---------------------------------------------- */

typedef struct gradsync_session gradsync_session;

typedef struct gradsync_session_options {
  size_t struct_size;
  const char* socket;  /* the daemon's socket. NULL: GRADSYNC_SOCKET, else the system daemon at
                          /run/gradsync/gradsyncd.sock, else a private daemon of this user, which
                          is started if need be and ends by itself when idle. */
  const char* job;     /* ranks that name the same job meet; NULL: GRADSYNC_JOB, else from
                          torchrun's environment */
  uint32_t generation; /* of the job: one more after each restart of all ranks */
  uint32_t world_size; /* 0: rank, world_size, local_rank, local_world_size and generation come
                          from torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK,
                          LOCAL_WORLD_SIZE, TORCHELASTIC_RESTART_COUNT) */
  uint32_t rank;
  uint32_t local_rank;
  uint32_t local_world_size; /* 0: all ranks are on this node, and local_rank is rank */
  uint32_t timeout_ms;       /* for every wait that names none; 0: 600000 (ten minutes) */
} gradsync_session_options;

/* Opens a session; does not wait for the other ranks. `options` may be NULL (all from the
 * environment). Free with gradsync_session_close. */
GRADSYNC_API int gradsync_session_open(const gradsync_session_options* options,
                                       gradsync_session** session, gradsync_error* error);

/* Says goodbye and frees the handle; NULL is allowed. Groups, buffers and ddps made from the
 * session stay valid handles that answer with GRADSYNC_FAILED_PRECONDITION; buffers keep their
 * memory. */
GRADSYNC_API void gradsync_session_close(gradsync_session* session);

GRADSYNC_API uint32_t gradsync_session_rank(const gradsync_session* session);
GRADSYNC_API uint32_t gradsync_session_world_size(const gradsync_session* session);

/* The path of the daemon's socket. Borrowed from the session. */
GRADSYNC_API const char* gradsync_session_socket(const gradsync_session* session);

/* ---- Where memory is ------------------------------------------------------------------------- */

/* The processor's, or that of the n-th CUDA device of this process, as the driver counts. */
#define GRADSYNC_CPU 0u
#define GRADSYNC_CUDA(n) ((uint32_t)(n) + 1u)

/* A CUstream (cudaStream_t) of the device's primary context, which is the one that frameworks use;
 * NULL is its default stream. The CUDA driver is loaded when the first call names a device. */
typedef void* gradsync_stream;

/* ---- Buffers: memory that the daemon reads and writes where it lies -------------------------- */

typedef struct gradsync_buffer gradsync_buffer; /* reference-counted */

/* Allocates at least `bytes` of shared memory, zeroed, page-aligned, its pages already there and
 * charged to this process. GRADSYNC_OUT_OF_MEMORY if they are not to be had. `label` is for
 * people. A forked child finds the parent's memory there, and must not write to it. */
GRADSYNC_API int gradsync_buffer_create(gradsync_session* session, uint64_t bytes,
                                        const char* label, gradsync_buffer** buffer,
                                        gradsync_error* error);
/* The same on a GPU: allocated there by the daemon and mapped into this process, zeroed. Its data
 * is an address of the GPU's, for kernels and copies. Freeing it waits for the GPU. */
GRADSYNC_API int gradsync_buffer_create_on(gradsync_session* session, uint32_t device,
                                           uint64_t bytes, const char* label,
                                           gradsync_buffer** buffer, gradsync_error* error);

/* Lets the daemon use memory of a GPU where this process has allocated it: the whole allocation in
 * which [memory, memory + bytes) lies, and with it whatever else is there, until it is
 * unregistered, before it is freed. GRADSYNC_UNSUPPORTED, saying why, for memory that cannot be
 * shared: memory of cudaMalloc can, and memory of cuMemCreate if a POSIX descriptor was asked for.
 * GRADSYNC_PERMISSION_DENIED if the daemon takes none (its --import-gpu-memory). Memory that is
 * not registered is copied on the GPU instead. Unregistering waits for the GPU. */
GRADSYNC_API int gradsync_memory_register(gradsync_session* session, uint32_t device,
                                          const void* memory, uint64_t bytes,
                                          gradsync_error* error);
GRADSYNC_API int gradsync_memory_unregister(gradsync_session* session, const void* memory,
                                            gradsync_error* error);

GRADSYNC_API void* gradsync_buffer_data(const gradsync_buffer* buffer);
GRADSYNC_API uint64_t gradsync_buffer_size(const gradsync_buffer* buffer);
GRADSYNC_API void gradsync_buffer_retain(gradsync_buffer* buffer);
/* Drops one reference; the last one unmaps the memory. NULL is allowed. */
GRADSYNC_API void gradsync_buffer_release(gradsync_buffer* buffer);

/* ---- Groups: an ordered set of ranks with one stream of operations --------------------------- */

typedef struct gradsync_group gradsync_group;

/* Forms a group of `rank_count` ranks of the job, which must include this one; `ranks` NULL stands
 * for all of them in order. Blocks until each of them has asked for the same ranks under the same
 * `tag` (any text that tells this group from others). Free with gradsync_group_destroy. */
GRADSYNC_API int gradsync_group_create(gradsync_session* session, const char* tag,
                                       const uint32_t* ranks, uint32_t rank_count,
                                       uint32_t timeout_ms, gradsync_group** group,
                                       gradsync_error* error);
/* Frees the handle; NULL is allowed. Does not wait for the other ranks. */
GRADSYNC_API void gradsync_group_destroy(gradsync_group* group);

GRADSYNC_API uint32_t gradsync_group_rank(const gradsync_group* group); /* index in the group */
GRADSYNC_API uint32_t gradsync_group_size(const gradsync_group* group);

/* Collectives. Each blocks until the result is there. Memory that lies in a gradsync_buffer of the
 * session is used in place; any other goes through a small shared staging buffer, piece by piece
 * (so does the output of a large all-gather). The ranks need not agree on where their memory lies.
 * A count of zero is allowed, if it is zero on every rank. A failed collective leaves the output
 * undefined, and the group unusable; a refused argument (GRADSYNC_INVALID_ARGUMENT) does neither.
 */

/* data[count]: combined over the ranks, in place. */
GRADSYNC_API int gradsync_all_reduce(gradsync_group* group, void* data, uint64_t count,
                                     gradsync_dtype dtype, gradsync_reduce_op op,
                                     uint32_t timeout_ms, gradsync_error* error);
/* data[count]: the root's (an index in the group), on every rank. */
GRADSYNC_API int gradsync_broadcast(gradsync_group* group, void* data, uint64_t count,
                                    gradsync_dtype dtype, uint32_t root, uint32_t timeout_ms,
                                    gradsync_error* error);
/* output[size][count]: every rank's input[count], in the group's order. */
GRADSYNC_API int gradsync_all_gather(gradsync_group* group, const void* input, void* output,
                                     uint64_t count, gradsync_dtype dtype, uint32_t timeout_ms,
                                     gradsync_error* error);
/* Returns once every rank has called it. */
GRADSYNC_API int gradsync_barrier(gradsync_group* group, uint32_t timeout_ms,
                                  gradsync_error* error);
/* data[count]: the last rank's, of those that do not stand aside, on every one of them. */
GRADSYNC_API int gradsync_share(gradsync_group* group, void* data, uint64_t count,
                                gradsync_dtype dtype, uint32_t timeout_ms, gradsync_error* error);
/* data[count] of the root: combined over the ranks, in place. The others' stays as it is. */
GRADSYNC_API int gradsync_reduce(gradsync_group* group, void* data, uint64_t count,
                                 gradsync_dtype dtype, gradsync_reduce_op op, uint32_t root,
                                 uint32_t timeout_ms, gradsync_error* error);
/* output[size][count] of the root: every rank's input[count], in the group's order. The others'
 * `output` is ignored and may be NULL. */
GRADSYNC_API int gradsync_gather(gradsync_group* group, const void* input, void* output,
                                 uint64_t count, gradsync_dtype dtype, uint32_t root,
                                 uint32_t timeout_ms, gradsync_error* error);
/* output[count]: block r of the root's input[size][count], on rank r. The others' `input` is
 * ignored and may be NULL. */
GRADSYNC_API int gradsync_scatter(gradsync_group* group, const void* input, void* output,
                                  uint64_t count, gradsync_dtype dtype, uint32_t root,
                                  uint32_t timeout_ms, gradsync_error* error);
/* output[count]: block r of every rank's input[size][count] combined, on rank r. `output` may be
 * that block of `input`. */
GRADSYNC_API int gradsync_reduce_scatter(gradsync_group* group, const void* input, void* output,
                                         uint64_t count, gradsync_dtype dtype,
                                         gradsync_reduce_op op, uint32_t timeout_ms,
                                         gradsync_error* error);
/* output[size][count]: as block r, this rank's block of rank r's input[size][count]. `output` may
 * be `input`. */
GRADSYNC_API int gradsync_all_to_all(gradsync_group* group, const void* input, void* output,
                                     uint64_t count, gradsync_dtype dtype, uint32_t timeout_ms,
                                     gradsync_error* error);

/* ---- Collectives on GPUs: enqueued, never waited for by the host ------------------------------
 */

typedef enum gradsync_collective_kind {
  GRADSYNC_ALL_REDUCE = 0,
  GRADSYNC_BROADCAST = 1,
  GRADSYNC_ALL_GATHER = 2,
  GRADSYNC_BARRIER = 3,
  GRADSYNC_REDUCE_SCATTER = 8,
  GRADSYNC_SHARE = 10
} gradsync_collective_kind;

/* With the meaning that the calls above have for memory of the processor. */
typedef struct gradsync_collective {
  size_t struct_size;
  gradsync_collective_kind kind;
  gradsync_dtype dtype;
  gradsync_reduce_op op; /* of a kind that reduces */
  uint32_t root;         /* of a broadcast */
  uint64_t count;
  const void* input; /* of all_gather and reduce_scatter */
  void* output;      /* of every kind but a barrier; in place where there is no input */
  uint32_t timeout_ms;
} gradsync_collective;

typedef struct gradsync_work gradsync_work;

/* Enqueues a collective over memory of `device`, behind what `stream` has been given so far, and
 * returns at once. The memory must stay as it is until a wait for the work. All ranks of the group
 * must be on GPUs; each uses one GPU in a group. Results are those of the calls above where the
 * ranks share one GPU; between GPUs they are NCCL's: the same on every rank, in an order of its
 * own, and of float16 and bfloat16 rounded at every step. Any failure of the group is told by the
 * calls on the work, and lets every stream go. A stream that captures a CUDA graph is refused
 * (GRADSYNC_UNSUPPORTED). Free with gradsync_work_free. */
GRADSYNC_API int gradsync_enqueue(gradsync_group* group, uint32_t device,
                                  const gradsync_collective* collective, gradsync_stream stream,
                                  gradsync_work** work, gradsync_error* error);
/* Makes `stream` wait for the result, and returns at once. */
GRADSYNC_API int gradsync_work_wait(const gradsync_work* work, gradsync_stream stream,
                                    gradsync_error* error);
/* Sets `done` to 1 if the result is there, else to 0. An error if it will never be. */
GRADSYNC_API int gradsync_work_query(const gradsync_work* work, int* done, gradsync_error* error);
/* Blocks until the result is there. */
GRADSYNC_API int gradsync_work_synchronize(const gradsync_work* work, gradsync_error* error);
/* NULL is allowed. Does not wait. */
GRADSYNC_API void gradsync_work_free(gradsync_work* work);

/* ---- Standing aside: ranks with less input than others --------------------------------------- */

/* What becomes of the others' averages. */
typedef enum gradsync_aside_policy {
  GRADSYNC_ASIDE_AVERAGE_OVER_ALL = 0,     /* divided by the group's size: as if it gave zeros */
  GRADSYNC_ASIDE_AVERAGE_OVER_PRESENT = 1, /* of the ranks that take part */
  GRADSYNC_ASIDE_FORBID = 2 /* the group fails, on every rank, with the first operation that lacks
                               it: "Detected at least one rank that exhausted inputs." */
} gradsync_aside_policy;

/* This rank submits nothing more to the group, and the others go on without it: sums and averages
 * (all_reduce, buckets), gradsync_share and barriers. Anything else that they submit fails the
 * group. Until gradsync_rejoin every collective and bucket of the group is refused. With the same
 * policy on every rank. `timeout_ms`: how long nothing may come from the others. Does not wait. */
GRADSYNC_API int gradsync_stand_aside(gradsync_group* group, gradsync_aside_policy policy,
                                      uint32_t timeout_ms, gradsync_error* error);

/* Waits until every rank stands aside, as long as the others get on; then all take part again.
 * `last`, which may be NULL, is set to the rank (index in the group) that took part longest, of
 * several to the last, the same on every rank. */
GRADSYNC_API int gradsync_rejoin(gradsync_group* group, uint32_t* last, gradsync_error* error);

/* ---- Messages: from one rank of a group to another ------------------------------------------- */

/* Messages keep no order with the group's operations. Those of one sender to one receiver under one
 * tag arrive in the order in which they were sent; receives take them in the order in which they
 * were begun. A message is copied when it is sent and waits for its receiver, so that two ranks may
 * send to each other before either receives; only a rank that has sent 64 messages of a group, or
 * 1 GiB, that nobody has received yet waits for the next to be received. */
typedef struct gradsync_request gradsync_request;

#define GRADSYNC_ANY_RANK UINT32_MAX

/* Begins to send `bytes` of `data`, which may be used again at once, to rank `to` of the group.
 * Free the request with gradsync_request_free; its end is that of the wait, not of the message. */
GRADSYNC_API int gradsync_send_begin(gradsync_group* group, const void* data, uint64_t bytes,
                                     uint32_t to, uint64_t tag, uint32_t timeout_ms,
                                     gradsync_request** request, gradsync_error* error);
/* Begins to receive a message from rank `from` of the group, or GRADSYNC_ANY_RANK. Its bytes are
 * kept until they are taken. */
GRADSYNC_API int gradsync_receive_begin(gradsync_group* group, uint32_t from, uint64_t tag,
                                        uint32_t timeout_ms, gradsync_request** request,
                                        gradsync_error* error);
/* Blocks until one of `count` requests is done, the same thread's or not, and sets `index` to the
 * first that is; or until any other request of the session is, and sets `index` to `count`: so a
 * thread that waits for all can look whether there are more of them now. What came of the request
 * is said by gradsync_request_end. One thread at a time may wait for, or end, a request. */
GRADSYNC_API int gradsync_request_wait_any(gradsync_request* const* requests, uint32_t count,
                                           uint32_t* index, gradsync_error* error);
/* Blocks until the request is done. Of a send: that it was taken. Of a receive: copies the message
 * to `data`, and its sender to `from`, which may be NULL. `bytes` must be the message's size; else
 * GRADSYNC_MISMATCH, and it is lost. */
GRADSYNC_API int gradsync_request_end(gradsync_request* request, void* data, uint64_t bytes,
                                      uint32_t* from, gradsync_error* error);
/* From any thread: the request is done now, with GRADSYNC_FAILED_PRECONDITION, unless it was. */
GRADSYNC_API void gradsync_request_cancel(gradsync_request* request);
/* NULL is allowed. A request that has not ended is cancelled. */
GRADSYNC_API void gradsync_request_free(gradsync_request* request);

/* ---- DDP: bucketed averaging of gradients while backward goes on ----------------------------- */

typedef struct gradsync_ddp gradsync_ddp;

#define GRADSYNC_MAX_DIMS 8

typedef struct gradsync_parameter {
  const char* name; /* "encoder.5.weight": in every message about it */
  gradsync_dtype dtype;
  uint32_t ndim; /* more than GRADSYNC_MAX_DIMS: the last of `shape` is the product of the rest */
  int64_t shape[GRADSYNC_MAX_DIMS];
  uint32_t device; /* GRADSYNC_CPU or GRADSYNC_CUDA(n), the same for every parameter of a ddp */
} gradsync_parameter;

typedef struct gradsync_ddp_options {
  size_t struct_size;
  uint64_t bucket_bytes; /* a bucket is closed by the parameter that reaches this; 0: 25 MiB */
  uint64_t first_bucket_bytes; /* the same, of the first; 0: 1 MiB, or bucket_bytes if given */
  uint32_t timeout_ms;         /* for each bucket and each agreement; 0: the session's */
  uint32_t fixed_plan;         /* not 0: never replan in the order seen (gradsync_ddp_replan) */
  /* Instead of the two sizes above: those of the first bucket, the second and so on; the last one
   * holds for all that follow. NULL: none. */
  const uint64_t* bucket_bytes_list;
  uint32_t bucket_bytes_count;
  /* Not 0: the buckets of the first plan are filled from the first parameter on, not from the last,
   * so that the sizes hold from the last bucket on. For a plan that stays: the last bucket, which
   * nothing hides, is then the small one. */
  uint32_t fill_from_front;
} gradsync_ddp_options;

/* Agrees with every rank of `group` on the parameters, plans the buckets (numbered in the reverse
 * order of registration) and allocates them. Parameters that differ are GRADSYNC_MISMATCH on every
 * rank, naming the first one that differs, both values and both ranks. The group must be used for
 * nothing else while the ddp lives, and outlive it. Free with gradsync_ddp_destroy. */
GRADSYNC_API int gradsync_ddp_create(gradsync_group* group, const gradsync_parameter* parameters,
                                     uint32_t parameter_count, const gradsync_ddp_options* options,
                                     gradsync_ddp** ddp, gradsync_error* error);
GRADSYNC_API void gradsync_ddp_destroy(gradsync_ddp* ddp);

/* Where the gradient of a parameter lies: `data` points at its elements, row-major, in shared
 * memory. `buffer` is borrowed; retain it to keep the memory beyond a replan or the ddp. */
typedef struct gradsync_slot {
  void* data;
  uint64_t count;
  uint32_t bucket;
  gradsync_buffer* buffer;
} gradsync_slot;
GRADSYNC_API int gradsync_ddp_slot(const gradsync_ddp* ddp, uint32_t parameter, gradsync_slot* slot,
                                   gradsync_error* error);

GRADSYNC_API uint32_t gradsync_ddp_bucket_count(const gradsync_ddp* ddp);
/* The parameters of a bucket, in the order of their memory. `parameters` is borrowed until a
 * replan. */
typedef struct gradsync_bucket {
  void* data;
  uint64_t count;
  gradsync_dtype dtype;
  const uint32_t* parameters;
  uint32_t parameter_count;
} gradsync_bucket;
GRADSYNC_API int gradsync_ddp_bucket(const gradsync_ddp* ddp, uint32_t index,
                                     gradsync_bucket* bucket, gradsync_error* error);

/* One iteration: begin, then ready for each parameter once, in any order, then wait for each
 * bucket. The calls on one ddp must not overlap, but each may come from another thread. Begin also
 * gives up an iteration in which nothing became ready (a forward without a backward).
 * GRADSYNC_FAILED_PRECONDITION, with PyTorch's own words "Expected to have finished reduction in
 * the prior iteration before starting a new one." and the names of the parameters without a
 * gradient, if the last iteration is unfinished: that is final, and fails the group on every rank
 * with those words, because this rank's buckets will never come. The others are told by wait, not
 * by begin or ready, which let them go on: a rank that comes later may be about to fail in the same
 * way, and then names what it lacks itself. */
GRADSYNC_API int gradsync_ddp_begin(gradsync_ddp* ddp, gradsync_error* error);

/* The gradient lies in its slot, complete. Hands the bucket over when it is the bucket's last; does
 * not block. `all_ready`, which may be NULL, is set to 1 with the iteration's last parameter, else
 * to 0. GRADSYNC_FAILED_PRECONDITION outside an iteration or the second time for a parameter. */
GRADSYNC_API int gradsync_ddp_ready(gradsync_ddp* ddp, uint32_t parameter, int* all_ready,
                                    gradsync_error* error);

/* Parameters that get no gradient. By default an iteration that has one can never finish. */
typedef enum gradsync_unused_policy {
  GRADSYNC_UNUSED_ERROR = 0,
  GRADSYNC_UNUSED_FIND = 1,  /* in each iteration any may be unused; the plan stays as it is */
  GRADSYNC_UNUSED_STATIC = 2 /* those of the first iteration are unused for ever */
} gradsync_unused_policy;

/* Before the first iteration, with the same policy on every rank. From then on the ranks also add
 * up who used which parameter, behind the last bucket (with GRADSYNC_UNUSED_STATIC in the first
 * iteration only): the wait for that bucket waits for both. */
GRADSYNC_API int gradsync_ddp_set_unused_policy(gradsync_ddp* ddp, gradsync_unused_policy policy,
                                                gradsync_error* error);

/* As gradsync_ddp_ready, for a parameter that this rank has not used: its slot holds what the rank
 * contributes all the same, zeros in most cases. */
GRADSYNC_API int gradsync_ddp_ready_unused(gradsync_ddp* ddp, uint32_t parameter, int* all_ready,
                                           gradsync_error* error);

/* How many ranks used the parameter: none, and its average means nothing. Known from the wait for
 * the last bucket until the next iteration's, with GRADSYNC_UNUSED_STATIC for good. The group's
 * size under GRADSYNC_UNUSED_ERROR. */
GRADSYNC_API uint32_t gradsync_ddp_used_by(const gradsync_ddp* ddp, uint32_t parameter);

/* No rank uses any parameter of the bucket in this iteration: nothing is done for it, and its
 * content means nothing. On every rank, before the first parameter of the iteration is ready. */
GRADSYNC_API int gradsync_ddp_skip(gradsync_ddp* ddp, uint32_t bucket, gradsync_error* error);

/* From now on the caller reduces the buckets by means of its own (compressed, say), in whatever
 * order it keeps the same on every rank: ready hands none over, wait waits for none. Before the
 * first iteration, on every rank. */
GRADSYNC_API int gradsync_ddp_reduce_elsewhere(gradsync_ddp* ddp, gradsync_error* error);

/* 1 if every parameter of the bucket is ready in this iteration, else 0. */
GRADSYNC_API int gradsync_ddp_bucket_ready(const gradsync_ddp* ddp, uint32_t bucket);

/* On a GPU: the stream on which the gradients that become ready next are made, and which waits for
 * the averages. To be called before either, whenever it is another one; the default stream to begin
 * with. */
GRADSYNC_API int gradsync_ddp_set_stream(gradsync_ddp* ddp, gradsync_stream stream,
                                         gradsync_error* error);

/* Blocks until the bucket holds the averages over all ranks. On a GPU it makes the stream wait
 * instead, and returns at once; but with GRADSYNC_UNUSED_FIND, and in the first iteration with
 * GRADSYNC_UNUSED_STATIC, it blocks for the last bucket. A failure that comes later lets the stream
 * go, with undefined averages, and is returned by the ddp's next call. */
GRADSYNC_API int gradsync_ddp_wait(gradsync_ddp* ddp, uint32_t bucket, gradsync_error* error);

/* Ends an iteration whose buckets have all been waited for. */
GRADSYNC_API int gradsync_ddp_end(gradsync_ddp* ddp, gradsync_error* error);

/* After the first whole iteration, once: plans anew in the order in which rank 0's gradients became
 * ready, and moves the slots; what lies in them goes along. Every rank must call it at the same
 * point between iterations. `replanned`, which may be NULL, is set to 1 if slots moved, else
 * to 0. */
GRADSYNC_API int gradsync_ddp_replan(gradsync_ddp* ddp, int* replanned, gradsync_error* error);

/* Gives the ddp other memory, zeroed, and leaves the old to those who retain it: for an adapter
 * that lets the slots be used outside, and finds that they still are. Not an operation of the
 * group: a rank may do it alone, at any time before the first parameter of an iteration is ready.
 */
GRADSYNC_API int gradsync_ddp_renew(gradsync_ddp* ddp, gradsync_error* error);

/* Ends this rank's part in its group for now, as gradsync_stand_aside does, between iterations: the
 * others' buckets are averaged without it, and no plan is made anew. Go on with gradsync_rejoin of
 * the group. Not while buckets are reduced elsewhere, nor with GRADSYNC_UNUSED_STATIC. */
GRADSYNC_API int gradsync_ddp_stand_aside(gradsync_ddp* ddp, gradsync_aside_policy policy,
                                          gradsync_error* error);

/* The parameters of the current iteration that have not become ready: writes up to `capacity`
 * indices and returns how many there are in all. */
GRADSYNC_API uint32_t gradsync_ddp_unready(const gradsync_ddp* ddp, uint32_t* parameters,
                                           uint32_t capacity);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* GRADSYNC_GRADSYNC_H_ */

/* Tessera on many devices: which rank computes what, and which data travel between ranks, as plain data.
 *
 * One batch of sequences is sharded by rows over N ranks (context parallelism). A plan for the ranks is a pure function
 * of the layout, the number of ranks, the lengths and the masks: it can be made, printed and checked without a device,
 * a communicator or a process group, and every rank makes the same one.
 *
 *   1. describe    tessera_ranks_problem: lengths, heads, masks, ranks, layout, strategy
 *   2. plan        tessera_make_ranks_plan: every rule is checked here; `auto` becomes the strategy with the shortest
 *                  predicted time, listed beside every other strategy's time or refusal
 *   3. schedule    tessera_ranks_schedule: one rank's list of steps, which a caller executes one after another
 *
 * A step is a list of pairs {run of queries x run of keys}, each a contiguous range of positions of one sequence,
 * computed from data that the rank holds when the step begins, and a list of transfers that run meanwhile and are
 * complete when the step ends. So a step's exchange overlaps its computation, and no other ordering is needed.
 *
 * tessera_ranks_attention executes the lists: over NCCL on GPUs, or between threads on the CPU.
 *
 * The names of Liu et al., "Ring Attention" (2023), and Jacobs et al., "DeepSpeed Ulysses" (2023):
 *   ring        K and V travel, queries stay; the key block of step t comes from its owner, t ranks away, but only the
 *               chunks that some query of the receiver sees. Backward, partial dK and dV travel back to the owner.
 *   all_to_all  heads are exchanged for rows: each rank has all rows of Hq / N heads, and computes their attention
 *   mesh        all_to_all within groups of `head_ranks` consecutive ranks, ring across the groups
 *   all_gather  every rank first receives all the keys and values that its queries see; forward needs no merge
 *
 * Versions follow the rules of tessera.h: structs that the caller fills in grow at their end, structs that the library
 * fills in have a fixed size. */
#ifndef TESSERA_DISTRIBUTED_H
#define TESSERA_DISTRIBUTED_H

#include "tessera/tessera.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the problem -------------------------------------------------------------------------------------------- */

typedef enum tessera_strategy {
  TESSERA_STRATEGY_AUTO = 0,
  TESSERA_STRATEGY_RING = 1,
  TESSERA_STRATEGY_ALL_TO_ALL = 2,
  TESSERA_STRATEGY_MESH = 3,
  TESSERA_STRATEGY_ALL_GATHER = 4
} tessera_strategy;

/* The rows of each rank, T / N of them; the layout depends on neither strategy nor masks. contiguous: rank r has chunk
 * r of N. zig_zag: chunks r and 2N - 1 - r of 2N, so that causal areas are equal. planned: long sequences are cut into
 * chunks that are distributed in zig-zag order, short sequences stay whole, so that areas and rows are equal. The
 * sequences of a packed batch are concatenated; the first two layouts cut them where a chunk ends. */
typedef enum tessera_rank_layout {
  TESSERA_RANKS_CONTIGUOUS = 0,
  TESSERA_RANKS_ZIG_ZAG = 1,
  TESSERA_RANKS_PLANNED = 2
} tessera_rank_layout;

/* Self-attention: queries and keys have the same lengths. A number in parentheses at the end of a member's comment is
 * its default, which 0 selects. */
typedef struct tessera_ranks_problem {
  size_t struct_size; /* sizeof(tessera_ranks_problem), which tessera_ranks_problem_init sets */
  int32_t ranks;      /* 1 .. 1024 */
  int32_t strategy;   /* tessera_strategy */
  int32_t layout;     /* tessera_rank_layout */
  int32_t head_ranks; /* mesh: ranks per group, which divide the heads; 0: the fastest number by the model */
  int32_t direction;  /* tessera_direction */
  int32_t dtype;      /* tessera_dtype of q, k, v, o: float32, float16 or bfloat16 */
  int32_t causal;     /* 0 or 1 */
  int32_t reserved_0; /* 0 */
  int64_t window_left, window_right; /* as tessera_problem: keys on each side of the diagonal, -1 = all */
  int64_t num_sequences;             /* 1: dense; more: packed */
  const int64_t* lengths;            /* [num_sequences] rows of each sequence; must outlive the plan */
  int64_t batch;                     /* dense: sequences of that length, all with the same schedule (1) */
  int64_t heads_q, heads_kv, head_dim, head_dim_v;
  int64_t chunk_rows; /* planned: chunks begin at multiples of this number of rows where that is possible (128) */
  /* The model's constants, measured on H100s. Predictions are only as good as they are: set those of your machine. */
  double tflops_forward;  /* of one device without exchanges (765), counting 2 (D + Dv) Hq per visible pair */
  double tflops_backward; /* the same, counting 5 (D + Dv) Hq (590) */
  double link_gbps;       /* 10^9 bytes a second in each direction between two ranks of one host (237) */
  double network_gbps;    /* the same between hosts, per rank (45: 400 Gbit/s, not measured) */
  double memory_gbps;     /* of device memory, for packing and merging (2600) */
  double step_us;         /* fixed cost of a pass, and of a step's exchange (200: PyTorch's calls on 2 H200s) */
  double overlap_loss;    /* fraction of the computing rate lost while an exchange runs (0.1) */
  int64_t ranks_per_host; /* consecutive ranks (8) */
  /* New members are appended here, 8 bytes at a time, and have no effect while they are zero. */
} tessera_ranks_problem;

/* An empty problem of `struct_size` bytes: one rank, auto, zig_zag, forward, bfloat16, windows unbounded. */
TESSERA_API void tessera_ranks_problem_init_sized(tessera_ranks_problem* problem, size_t struct_size);

#ifdef __cplusplus
inline void tessera_ranks_problem_init(tessera_ranks_problem* problem) {
  tessera_ranks_problem_init_sized(problem, sizeof *problem);
}
#else
static inline void tessera_ranks_problem_init(tessera_ranks_problem* problem) {
  tessera_ranks_problem_init_sized(problem, sizeof *problem);
}
#endif

/* ---- the plan ----------------------------------------------------------------------------------------------- */

/* A strategy's predicted time, or the reason why it is refused. */
typedef struct tessera_ranks_answer {
  int32_t strategy;   /* tessera_strategy */
  int32_t head_ranks; /* ranks that divide the heads: 1 for ring and all_gather */
  int32_t accepted;
  int32_t steps;
  double predicted_us; /* of the slowest rank */
  double compute_us;   /* of it without any exchange; the ideal time is the mean of this over ranks */
  double sent_bytes;   /* the most that a rank sends */
  char reason[104];    /* accepted: the exposed part of the exchange; otherwise why it is refused */
} tessera_ranks_answer;

#define TESSERA_RANKS_MAX_ANSWERS 24
#define TESSERA_RANKS_PLAN_PROBLEM_BYTES 512
typedef struct tessera_ranks_plan {
  size_t struct_size; /* sizeof(tessera_ranks_plan) */
  uint64_t hash;      /* of the problem and its lengths: equal on all ranks that agree */
  int32_t version;    /* TESSERA_VERSION of the library that made it */
  int32_t num_answers;
  tessera_ranks_problem problem; /* with every default filled in, `strategy` and `head_ranks` chosen */
  char problem_reserved[TESSERA_RANKS_PLAN_PROBLEM_BYTES - sizeof(tessera_ranks_problem)];
  int64_t rows_per_rank;
  int64_t num_chunks;
  double visible_area;           /* visible (query, key) pairs of one head and one sequence of the batch */
  double largest_area;           /* the most that one rank computes, in units of whole heads */
  double predicted_us, ideal_us; /* by the model: of this plan, and of the mean area without exchanges */
  tessera_ranks_answer answers[TESSERA_RANKS_MAX_ANSWERS]; /* the chosen one first */
  char reserved[256];                                      /* for later members: 0 */
} tessera_ranks_plan;

/* Checks every rule and chooses a strategy. INVALID_ARGUMENT: a member is wrong, or the rows do not divide over the
 * ranks. UNSUPPORTED: the strategy cannot be used for the problem (heads that do not divide). *plan is then
 * unchanged. */
TESSERA_API tessera_status tessera_make_ranks_plan(const tessera_ranks_problem* problem, tessera_ranks_plan* plan);

/* ---- a rank's schedule -------------------------------------------------------------------------------------- */

/* A contiguous range of rows of one sequence that one rank has. Chunks are numbered in the order of (sequence, begin);
 * a rank's rows are its chunks in that order. */
typedef struct tessera_chunk {
  int32_t rank;
  int32_t sequence;
  int64_t begin, length; /* positions in the sequence */
  int64_t row;           /* its first row among the rank's rows */
} tessera_chunk;

/* Attention of a range of queries over a range of keys of one sequence, cropped to the visible part: every query sees a
 * key of the range, and every key is seen. Each range lies in a run of consecutive chunks. Query i of q_length sees key
 * j of k_length if i + k_length - q_length - window_left <= j <= i + k_length - q_length + window_right: the window of
 * tessera_problem, bottom-right aligned, with -1 = unbounded. If both are -1, every key is visible. */
typedef struct tessera_rank_pair {
  int32_t sequence;
  int32_t reserved;
  int64_t q_begin, q_length, k_begin, k_length; /* positions in the sequence */
  int64_t window_left, window_right;
  int64_t q_chunk, q_chunks, k_chunk, k_chunks; /* first chunk of each run, and its number of chunks */
  int64_t area;                                 /* visible (query, key) pairs */
} tessera_rank_pair;

typedef enum tessera_travels {
  TESSERA_TRAVELS_Q = 0,
  TESSERA_TRAVELS_KV = 1, /* K and V */
  TESSERA_TRAVELS_O = 2,  /* O and LSE (float32) */
  TESSERA_TRAVELS_D_O = 3,
  TESSERA_TRAVELS_D_Q = 4,
  TESSERA_TRAVELS_D_KV = 5 /* dK and dV */
} tessera_travels;

typedef struct tessera_rank_transfer {
  int32_t receive; /* 1: from `peer`; 0: to it */
  int32_t peer;
  int32_t travels;    /* tessera_travels */
  int32_t partial;    /* 1: a partial sum, in float32, that the receiver adds to its own; 0: in the tensor's dtype */
  int64_t chunk;      /* the chunk whose rows travel */
  int32_t first_head; /* of query heads; K, V, dK and dV: of KV heads */
  int32_t num_heads;
  int64_t bytes;
} tessera_rank_transfer;

typedef struct tessera_rank_step {
  int64_t first_pair, num_pairs, first_transfer, num_transfers; /* in the schedule's lists */
  int64_t area;                                                 /* of its pairs */
  int64_t sent_bytes, received_bytes;
  double compute_us, exchange_us; /* the model's */
} tessera_rank_step;

/* The start of a block of plain data without pointers; the lists lie at byte offsets from its start. All ranks have the
 * same number of steps. A transfer is in the same step of both its ranks' lists, and transfers of one step and
 * direction between two ranks are in the same order in both lists. */
typedef struct tessera_rank_schedule {
  size_t struct_size; /* sizeof(tessera_rank_schedule) */
  size_t bytes;       /* of the block */
  uint64_t hash;      /* the plan's */
  int32_t rank, ranks;
  int32_t first_head_q, num_heads_q;   /* the query heads that this rank computes */
  int32_t first_head_kv, num_heads_kv; /* and the KV heads that they read */
  int64_t num_chunks, num_steps, num_pairs, num_transfers;
  int64_t chunks_offset, steps_offset, pairs_offset, transfers_offset;
  char reserved[64];
} tessera_rank_schedule;

/* Bytes of the schedule of `rank`; 0 if `plan` was not made by this library or lacks that rank. */
TESSERA_API size_t tessera_ranks_schedule_bytes(const tessera_ranks_plan* plan, int32_t rank);

/* Writes the schedule to `memory`, which is aligned to 8 bytes. */
TESSERA_API tessera_status tessera_ranks_schedule(const tessera_ranks_plan* plan, int32_t rank, void* memory,
                                                  size_t bytes);

/* As text: with `rank` -1 the plan, otherwise that rank's schedule as a table. As JSON: the plan, and with a rank also
 * its schedule. Both return lengths as tessera_plan_describe does. */
TESSERA_API size_t tessera_ranks_plan_describe(const tessera_ranks_plan* plan, int32_t rank, char* text, size_t size);
TESSERA_API size_t tessera_ranks_plan_json(const tessera_ranks_plan* plan, int32_t rank, char* text, size_t size);

TESSERA_API const char* tessera_strategy_name(int32_t strategy);  /* "ring" ..., "unknown" */
TESSERA_API const char* tessera_rank_layout_name(int32_t layout); /* "zig_zag" ... */
TESSERA_API const char* tessera_travels_name(int32_t travels);    /* "K, V" ... */

/* ---- communicators ------------------------------------------------------------------------------------------ */

/* One rank's connection with the others. Each rank has its own, and one call at a time uses it: a second one is
 * refused. */
typedef struct tessera_communicator tessera_communicator;

/* Over NCCL, for calls on the communicator's GPU. `comm` is an ncclComm_t of the caller, who keeps it alive, and
 * aborts it if a peer is lost. Neither building nor loading this library needs NCCL: the functions are those of the
 * process, which has made `comm`, if it exports them; otherwise those of libnccl.so.2, or of the file that TESSERA_NCCL
 * names. UNSUPPORTED if none can be opened, or if it is older than 2.7; the message says what to install. Makes a
 * stream for messages, and allocates a few bytes on the GPU.
 * Other ranks do not learn that a call of one rank has failed, or is another one than theirs: their streams wait, and
 * in the first call of a problem also their threads. The caller then aborts the communicators of all ranks, with
 * ncclCommAbort, before it frees memory that failed calls used: messages may still be under way. */
struct ncclComm;
TESSERA_API tessera_status tessera_communicator_nccl(struct ncclComm* comm, tessera_communicator** communicator);

/* `ranks` communicators of threads of this process, for calls on the CPU: communicators[r] is that of rank r. If a
 * call of one rank fails, also because it is refused, the calls of the others that wait for it end with an error, too,
 * as do all later ones. Ranks that make different calls all get an error, and so does a call that waits for a rank
 * whose communicator is destroyed: destroy that of a rank that cannot go on. Memory of a failed call is no longer read
 * by other ranks when it returns. */
TESSERA_API tessera_status tessera_communicator_threads(int32_t ranks, tessera_communicator** communicators);

/* NULL is ignored. No call may use it any more. */
TESSERA_API void tessera_communicator_destroy(tessera_communicator* communicator);

/* ---- attention on ranks ------------------------------------------------------------------------------------- */

/* The options of a score, the same on all ranks, with the meanings and limits that they have in tessera_problem. */
typedef struct tessera_ranks_options {
  size_t struct_size TESSERA_CXX_DEFAULT(sizeof(tessera_ranks_options));
  double scale TESSERA_CXX_DEFAULT(0);
  int32_t has_scale TESSERA_CXX_DEFAULT(0); /* 0: 1 / sqrt(D) */
  int32_t deterministic TESSERA_CXX_DEFAULT(0);
  double softcap TESSERA_CXX_DEFAULT(0);
  double dropout_p TESSERA_CXX_DEFAULT(0); /* chunks must then begin at multiples of 32 rows */
  uint64_t dropout_seed TESSERA_CXX_DEFAULT(0);
  uint64_t dropout_offset TESSERA_CXX_DEFAULT(0);
  int32_t alibi TESSERA_CXX_DEFAULT(0); /* alibi_slopes: 0: none; 1: [Hq]; 2: [B, Hq] */
  int32_t sink TESSERA_CXX_DEFAULT(0);  /* 1: a sink joins each row's denominator, once for all its keys */
  /* A score program and the tensors that it names, as in tessera_problem; NULL: none. Its names mean on each rank what
   * they mean in the whole, and every rank has the whole of each captured tensor. The handle must live until the
   * attention is created. */
  tessera_program* program TESSERA_CXX_DEFAULT(NULL);
  tessera_layout captured[TESSERA_MAX_CAPTURED_TENSORS] TESSERA_CXX_DEFAULT({});
  /* Bit n: backward computes the gradient of captured[n], a floating-point tensor. */
  uint64_t grad_captured TESSERA_CXX_DEFAULT(0);
  /* [B|1, Hq|1, S|1, S], of all rows and keys, which every rank has whole, with any strides; rank 0: absent. bias is
   * float32 or of the problem's dtype, mask bool. Of a packed batch B is the number of sequences and S the longest. */
  tessera_layout bias TESSERA_CXX_DEFAULT({});
  tessera_layout mask TESSERA_CXX_DEFAULT({});
  uint64_t grad_bias TESSERA_CXX_DEFAULT(0); /* 1: backward computes the gradient of bias */
} tessera_ranks_options;

/* One rank's part of an attention, prepared: which calls, messages and copies follow each other, and their places in a
 * workspace. It is immutable, and serves any number of calls. */
typedef struct tessera_ranks_attention tessera_ranks_attention;

/* Prepares the part of `rank`. problem->direction: FORWARD prepares the forward pass; BACKWARD both, and `head_ranks`,
 * if it is left open, is the fastest for both together. options NULL: all defaults. device NULL: this machine's CPU.
 * INVALID_ARGUMENT and UNSUPPORTED are those of tessera_make_ranks_plan, and of tessera_make_plan for a part.
 *
 * Partial results merge exactly. On the CPU, and on GPUs whose fastest kernel accumulates, every call adds to a sum in
 * float32, which is rounded once; on other GPUs a call's result is rounded before tessera_combine merges it. Gradients
 * are summed in float32. Sums have the order of the schedule, so that their bits do not depend on when a message
 * arrives. */
TESSERA_API tessera_status tessera_ranks_attention_create(const tessera_ranks_problem* problem,
                                                          const tessera_ranks_options* options,
                                                          const tessera_device* device, int32_t rank,
                                                          tessera_ranks_attention** attention);

/* NULL is ignored. */
TESSERA_API void tessera_ranks_attention_destroy(tessera_ranks_attention* attention);

/* The plan of a direction, which lives as long as `attention`; NULL if that direction is not prepared. */
TESSERA_API const tessera_ranks_plan* tessera_ranks_attention_plan(const tessera_ranks_attention* attention,
                                                                   int32_t direction);

/* Bytes of workspace that a pass needs, with any alignment and content; 0 if it is not prepared. */
TESSERA_API size_t tessera_ranks_workspace_bytes(const tessera_ranks_attention* attention, int32_t direction);

/* Bytes that the forward pass leaves for the backward pass, in `saved`; 0 if only the forward pass is prepared. */
TESSERA_API size_t tessera_ranks_saved_bytes(const tessera_ranks_attention* attention);

/* Data pointers. Every tensor is contiguous and has this rank's rows, R of them, of all heads, in the order of the
 * chunks; q, k, v, o, d_o and the gradients have the problem's dtype. A packed batch (more than one sequence) has B 1.
 *   q, d_q         [B, R, Hq, D]         k, d_k  [B, R, Hkv, D]        lse  float32 [B, Hq, R]
 *   o, d_o         [B, R, Hq, Dv]        v, d_v  [B, R, Hkv, Dv]
 *   alibi_slopes   float32 [Hq] or [B, Hq], all heads
 *   sink           float32 [Hq], all heads, the same on all ranks
 *   d_sink         float32 [Hq]: this rank's part of the gradient. The gradient is the sum over all ranks, which the
 *                  caller takes, as for any parameter that all ranks share.
 *   d_captured[n]  float32, contiguous, shaped as captured[n], which every rank has whole: likewise this rank's part
 *   d_bias         float32, contiguous, shaped as bias: likewise
 *   saved          tessera_ranks_saved_bytes, aligned to 64 bytes */
typedef struct tessera_ranks_buffers {
  size_t struct_size TESSERA_CXX_DEFAULT(sizeof(tessera_ranks_buffers));
  const void* q TESSERA_CXX_DEFAULT(NULL);
  const void* k TESSERA_CXX_DEFAULT(NULL);
  const void* v TESSERA_CXX_DEFAULT(NULL);
  void* o TESSERA_CXX_DEFAULT(NULL);    /* forward: written; backward: read */
  float* lse TESSERA_CXX_DEFAULT(NULL); /* forward: written; backward: read */
  const float* alibi_slopes TESSERA_CXX_DEFAULT(NULL);
  void* saved TESSERA_CXX_DEFAULT(NULL); /* forward: written; backward: read */
  const void* d_o TESSERA_CXX_DEFAULT(NULL);
  void* d_q TESSERA_CXX_DEFAULT(NULL);
  void* d_k TESSERA_CXX_DEFAULT(NULL);
  void* d_v TESSERA_CXX_DEFAULT(NULL);
  const float* sink TESSERA_CXX_DEFAULT(NULL); /* options.sink */
  float* d_sink TESSERA_CXX_DEFAULT(NULL);     /* options.sink, backward: written */
  /* Of the program: tensors, and scalars, which are on the host. */
  const void* captured[TESSERA_MAX_CAPTURED_TENSORS] TESSERA_CXX_DEFAULT({});
  double scalars[TESSERA_MAX_CAPTURED_SCALARS] TESSERA_CXX_DEFAULT({});
  float* d_captured[TESSERA_MAX_CAPTURED_TENSORS] TESSERA_CXX_DEFAULT({}); /* grad_captured, backward: written */
  const void* bias TESSERA_CXX_DEFAULT(NULL);
  const uint8_t* mask TESSERA_CXX_DEFAULT(NULL);
  float* d_bias TESSERA_CXX_DEFAULT(NULL); /* grad_bias, backward: written */
} tessera_ranks_buffers;

/* This rank's part of o and lse, or of the gradients. Every rank makes the same calls in the same order. The
 * first call of a problem and direction compares a hash of it with those of the other ranks, which waits for them (on a
 * GPU also for the stream, unless it is captured into a graph, where nothing is compared): ranks that disagree all get
 * INVALID_ARGUMENT, and their communicators go on to serve other calls.
 * INVALID_ARGUMENT also if an argument or a required pointer is NULL, a pointer is misaligned or in another device's
 * memory, an output or the workspace shares memory with any other buffer, the workspace is too small, or the
 * communicator is another rank's or in use. INTERNAL: another rank's call has failed, or NCCL has.
 * Later calls allocate nothing on a device. On a GPU they return at once: messages have a stream of their own, and
 * overlap the computation in executor->stream. CPU: returns when this rank's part is complete; `cancel` of the executor
 * ends the call of this rank, also while it waits for another, and with it those of the others. */
TESSERA_API tessera_status tessera_ranks_forward(const tessera_ranks_attention* attention,
                                                 tessera_communicator* communicator,
                                                 const tessera_ranks_buffers* buffers, void* workspace,
                                                 size_t workspace_bytes, const tessera_executor* executor);
TESSERA_API tessera_status tessera_ranks_backward(const tessera_ranks_attention* attention,
                                                  tessera_communicator* communicator,
                                                  const tessera_ranks_buffers* buffers, void* workspace,
                                                  size_t workspace_bytes, const tessera_executor* executor);

#ifdef __cplusplus
}
#endif

#endif /* TESSERA_DISTRIBUTED_H */

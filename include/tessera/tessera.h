/* Tessera: exact, IO-aware attention. The C interface, and the library's only exported symbols.
 *
 *   O = softmax(scale * Q K^T + ...) V,   LSE = log sum exp of the scaled, masked scores,
 *
 * and the gradients of both, without ever storing the Sq x Sk score matrix
 * (Dao et al., "FlashAttention", 2022, algorithms 1 and 4; "FlashAttention-2", 2023, algorithms 1 and 2).
 *
 * How a call flows:
 *   1. describe       tessera_problem: layouts and options, no data pointers
 *   2. plan           tessera_make_plan: every rule is checked here; the plan says which kernel, tiles, workspace
 *   3. execute        tessera_forward / tessera_backward: data pointers and the caller's workspace, no allocation
 *
 * One plan serves any number of calls and threads. C++ programs include <tessera/tessera.hpp> instead.
 *
 * What is compatible: a program runs with every library of its minor version (the soname is libtessera.so.MAJOR.MINOR until
 * 1.0, then libtessera.so.MAJOR). Within it structs only grow, and in two ways:
 *   - those that the caller fills in (tessera_problem, tessera_buffers, tessera_executor, tessera_combine_call,
 *     tessera_append_call) at their end. They begin with
 *     `struct_size`, their size in the header that the caller was compiled with. Members that an older header lacks
 *     stand at their defaults; a newer header's are refused unless they are zero.
 *   - those that the library fills in (tessera_device, tessera_plan) within a size that stays: their last bytes are
 *     reserved, and zero.
 * A struct that nothing initialised has a size of 0, and is refused.
 */
#ifndef TESSERA_H
#define TESSERA_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define TESSERA_API
#else
#define TESSERA_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define TESSERA_VERSION_MAJOR 0
#define TESSERA_VERSION_MINOR 1
#define TESSERA_VERSION_PATCH 0
#define TESSERA_VERSION (10000 * TESSERA_VERSION_MAJOR + 100 * TESSERA_VERSION_MINOR + TESSERA_VERSION_PATCH)

/* In C++ these members need not be set: `tessera_executor executor{}` has the right size. */
#ifdef __cplusplus
#define TESSERA_CXX_DEFAULT(value) = value
#else
#define TESSERA_CXX_DEFAULT(value)
#endif

/* ---- status ------------------------------------------------------------------------------------------------- */

typedef enum tessera_code {
  TESSERA_OK = 0,
  TESSERA_INVALID_ARGUMENT = 1, /* a shape, stride, dtype, option or index is wrong: the message names it */
  TESSERA_UNSUPPORTED = 2,      /* valid, but no kernel takes it: the message lists each candidate's refusal */
  TESSERA_INTERNAL = 3,         /* a defect of this library */
  TESSERA_CANCELLED = 4         /* the executor's `cancel` said so: outputs are undefined */
} tessera_code;

/* What a call answers, by value. `message` is one line: what was wrong, what was given, what is accepted. */
typedef struct tessera_status {
  int32_t code; /* tessera_code */
  char message[508];
} tessera_status;

/* ---- tensors ------------------------------------------------------------------------------------------------ */

typedef enum tessera_dtype {
  TESSERA_FLOAT32 = 0,
  TESSERA_FLOAT16 = 1,
  TESSERA_BFLOAT16 = 2,
  TESSERA_FLOAT64 = 3, /* served by the reference kernel, for checks */
  TESSERA_INT32 = 4,
  TESSERA_BOOL = 5, /* one byte, 0 or 1 */
  TESSERA_INT64 = 6
} tessera_dtype;

#define TESSERA_MAX_RANK 5

/* Shape and strides of a tensor in caller-owned memory. rank 0 means: this tensor is absent.
 * Strides are in elements and may be anything (0 and negative included, for inputs) as long as the last dimension of
 * q, k, v, o and their gradients is contiguous. */
typedef struct tessera_layout {
  int32_t dtype; /* tessera_dtype */
  int32_t rank;
  int64_t shape[TESSERA_MAX_RANK];
  int64_t strides[TESSERA_MAX_RANK];
} tessera_layout;

/* ---- the problem -------------------------------------------------------------------------------------------- */

typedef enum tessera_direction { TESSERA_FORWARD = 0, TESSERA_BACKWARD = 1 } tessera_direction;

/* Where the diagonal lies that `causal` and the window are measured from: query i stands over key i + Sk - Sq
 * (bottom-right, the default) or over key i (top-left). */
typedef enum tessera_alignment { TESSERA_BOTTOM_RIGHT = 0, TESSERA_TOP_LEFT = 1 } tessera_alignment;

/* Attention over one batch: plain data, no pointers to tensors.
 *
 *   symbol            dense                 packed (cu_seqlens_q present)     paged (a page table present)
 *   q                 [B, Sq, Hq, D]        [Tq, Hq, D]                       as dense or packed
 *   k                 [B, Sk, Hkv, D]       [Tk, Hkv, D]                      [pages, page_size, Hkv, D]
 *   v                 [B, Sk, Hkv, Dv]      [Tk, Hkv, Dv]                     [pages, page_size, Hkv, Dv]
 *   o                 [B, Sq, Hq, Dv]       [Tq, Hq, Dv]                      as q
 *   lse  float32      [B, Hq, Sq]           [Hq, Tq]                          as q
 *   lse_low float32   as lse                as lse                            as q
 *
 * Hq is a multiple of Hkv; query head h reads KV head floor(h * Hkv / Hq). q, k, v and o share one dtype.
 *
 * For query i and key j of one sequence, with Sq and Sk that sequence's own lengths, in this order:
 *   1. s = scale * (q_i . k_j)            2. softcap c > 0: s = c * tanh(s / c)      3. s += bias[b, h, i, j]
 *   4. ALiBi: s -= slope * |i + Sk - Sq - j|                       5. s = -inf where j is not visible.
 * Visible: causal, window, key length, mask, block_mask and tree_mask all allow it. A sink adds exp(sink[h]) to the denominator
 * only. Dropout zeroes entries of softmax(s) and scales what is kept by 1 / (1 - p); the LSE is that before dropout.
 * A finite score is a score, whatever its size: a score of -inf alone is hidden beside what is not visible.
 * A query that sees nothing: o = 0, lse = -inf, gradients 0, whatever its hidden keys hold.
 * A call owns the whole of o, lse and the gradients: rows of packed tensors that belong to no sequence, before
 * cu_seqlens[0] and from cu_seqlens[B] on, and keys from a sequence's seqused_k on, get o = 0, lse = -inf, gradients 0.
 * What lies there, or in no page in use, never reaches a result. A NaN or an infinity in k or v reaches o of every query
 * that sees its key, and d_q of it, and d_k of the keys that such a query sees; in q or d_o, d_q of its query and d_k of
 * what that sees (in q and k d_v, too); never another sequence or head. On the CPU it reaches nothing else; on CUDA it may
 * reach queries and keys of its own tiles that it is hidden from (docs/reference/cuda.md). */
typedef struct tessera_problem {
  size_t struct_size; /* sizeof(tessera_problem), which tessera_problem_init sets */
  int32_t direction;  /* tessera_direction */
  int32_t causal;     /* 0 or 1: key j <= diagonal */

  tessera_layout q, k, v, o;
  tessera_layout lse; /* optional forward, required backward */

  tessera_layout cu_seqlens_q; /* int32 [B + 1]: packed queries; sequence b is rows cu[b] .. cu[b + 1], 0 <= cu[0] */
  tessera_layout cu_seqlens_k; /* int32 [B + 1]: packed keys and values */
  tessera_layout seqused_k;    /* int32 [B]: key length of each sequence, at most Sk; required when paged */
  tessera_layout page_table;   /* int32 [B, max_pages]: keys and values are paged; or page_indptr and page_indices */

  tessera_layout bias;         /* float32 or q's dtype, [B|1, Hq|1, Sq|1, Sk|1], or fewer: leading axes are then 1 */
  tessera_layout mask;         /* bool, shaped as bias, 1 = visible */
  tessera_layout block_mask;   /* bool [B|1, Hq|1, ceil(Sq / mask_block_q), ceil(Sk / mask_block_k)], 1 = visible */
  tessera_layout alibi_slopes; /* float32 [Hq] or [B, Hq] */
  tessera_layout sink;         /* float32 [Hq], a logit */

  /* backward: cotangent of o, gradients of q, k, v, each of its twin's dtype and shape */
  tessera_layout d_o, d_q, d_k, d_v;
  tessera_layout d_lse;  /* optional: cotangent of lse, float32 */
  tessera_layout d_bias; /* optional: gradient of bias, float32, bias's shape (Sk keys), contiguous last dimension */
  tessera_layout d_sink; /* optional: gradient of sink, float32 */

  double scale;          /* 0, or 1e-18 .. 1e18 of either sign */
  int32_t has_scale;     /* 0: the scale is 1 / sqrt(D), and `scale` must be 0 */
  int32_t alignment;     /* tessera_alignment */
  int64_t window_left;   /* keys left of the diagonal that are visible, -1 = all */
  int64_t window_right;  /* keys right of it, -1 = all */
  double softcap;        /* 0 = none, or 1e-18 .. 1e18 */
  double dropout_p;      /* 0 <= p < 1, in steps of 2^-16 */
  uint64_t dropout_seed; /* Philox4x32-10's key */
  uint64_t dropout_offset;
  int64_t mask_block_q, mask_block_k; /* queries and keys an entry of block_mask stands for */
  /* Packed or paged: bounds of a sequence's queries and keys, 0 = what the layouts allow. A plan reads no lengths: it serves
   * every call below its bounds, sequences without a query or a key among them. Beyond them a call is refused where it can
   * see the lengths (CPU; CUDA with check_indices); otherwise o of such a sequence is undefined, and nothing is read or
   * written past what the bounds allow. */
  int64_t max_seqlen_q, max_seqlen_k;
  int32_t deterministic;   /* backward: the same bits every time (the CPU kernels always are) */
  int32_t batch_invariant; /* forward: a sequence's bits do not depend on the batch it stands in */

  tessera_layout causal_seqs; /* bool [B]: causal, a sequence at a time; `causal` is then 0 */
  /* int32 [B + 1] and [N], in place of page_table (CSR): sequence b's pages are page_indices[page_indptr[b]] up to, without
   * it, page_indices[page_indptr[b + 1]], of which the last is full up to seqused_k[b]. N and page_indptr[B] may differ. */
  tessera_layout page_indptr, page_indices;
  /* int32 [B, Sq, W], packed [Tq, W]; forward only. Drafted tokens: of key Sk - Sq + t, t < 32 W, bit t of a query's words
   * says whether that query sees it: bit t % 32 of word t / 32. Other keys have no bit. The other masks hold as well. */
  tessera_layout tree_mask;
  /* Shared prefixes; forward only. int32 [G + 1] and [G]: the sequences prefix_groups[g] up to, without it, prefix_groups[g + 1]
   * begin with the same prefix_lens[g] keys, in the same pages or in equal copies, of which one may be read for all: a promise,
   * which changes no result. Read once are the keys before the first query of every causal member, in whole pages. Sequences
   * of no group share nothing. Not with options that measure from a query's place or are tensors of scores (window,
   * alibi_slopes, bias, mask, block_mask), top-left alignment, dropout or batch_invariant. */
  tessera_layout prefix_groups, prefix_lens;
  /* Bounds, 0 = unknown: of the keys of a prefix that are read once; of a sequence's other keys. */
  int64_t max_prefix_k, max_suffix_k;
  /* Optional, float32 as lse: what lse's rounding leaves out, so that LSE = lse + lse_low to twice the digits; -inf + 0 in a
   * row that sees nothing. Forward writes it, beside lse; backward reads it, and makes weights exp(s - lse - lse_low) that add
   * up to 1 whatever large number a row's scores share. Without it they add up to 1 within |lse| 2^-24, lse's last digit. */
  tessera_layout lse_low;
  /* int64 [2], in place of dropout_seed and dropout_offset, which are then 0: the bits of both, as the kernels find them there
   * when they run. On CUDA it is device memory: a captured graph's replay draws by what it holds then. It may be given
   * with dropout_p = 0, as seed and offset may, and is not read then. */
  tessera_layout dropout_state;
  /* New members come here, 8 bytes at a time, and mean nothing while they are zero. */
} tessera_problem;

/* An empty problem of `struct_size` bytes: every tensor absent, no option set, windows unbounded. */
TESSERA_API void tessera_problem_init_sized(tessera_problem* problem, size_t struct_size);

/* The same for the header that it is called with. */
#ifdef __cplusplus
inline void tessera_problem_init(tessera_problem* problem) { tessera_problem_init_sized(problem, sizeof *problem); }
#else
static inline void tessera_problem_init(tessera_problem* problem) {
  tessera_problem_init_sized(problem, sizeof *problem);
}
#endif

/* ---- the device and the plan -------------------------------------------------------------------------------- */

typedef enum tessera_isa {
  TESSERA_ISA_BASELINE = 0, /* the compiler's portable vectors */
  TESSERA_ISA_AVX2 = 1,     /* AVX2, FMA, F16C */
  TESSERA_ISA_AVX512 = 2,   /* AVX-512 F, BW, DQ, VL */
  TESSERA_ISA_AVX512_BF16 = 3,
  TESSERA_ISA_AMX_BF16 = 4 /* bfloat16 by AMX's tiles; the rest by tessera_device.vector_isa, or by AVX512_BF16 */
} tessera_isa;

typedef enum tessera_backend { TESSERA_BACKEND_CPU = 0, TESSERA_BACKEND_CUDA = 1 } tessera_backend;

typedef enum tessera_kernel {
  TESSERA_KERNEL_AUTO = 0,
  TESSERA_KERNEL_REFERENCE = 1, /* CPU: float64, O(S^2) time: the oracle */
  TESSERA_KERNEL_DECODE = 2,    /* CPU: few query rows, split over keys */
  TESSERA_KERNEL_TILED = 3,     /* CPU: FlashAttention's tiles, forward and backward */
  TESSERA_KERNEL_FWD_SM80 = 4,  /* CUDA: forward by mma.sync, on every GPU from Ampere on */
  TESSERA_KERNEL_BWD_SM80 = 5,  /* CUDA: backward by mma.sync, on every GPU from Ampere on */
  TESSERA_KERNEL_FWD_SM90 = 6,  /* CUDA: forward by TMA and wgmma, on Hopper */
  TESSERA_KERNEL_BWD_SM90 = 7,  /* CUDA: backward by TMA and wgmma, on Hopper */
  /* For comparison, on request alone: the first FlashAttention's schedule, and standard attention, which stores its scores. */
  TESSERA_KERNEL_FWD_FA1 = 8,
  TESSERA_KERNEL_BWD_FA1 = 9,
  TESSERA_KERNEL_FWD_STANDARD = 10,
  TESSERA_KERNEL_BWD_STANDARD = 11,
  TESSERA_KERNEL_DECODE_SM90 = 12, /* CUDA: few query rows against long keys, one launch, on Hopper */
  /* CUDA: packed queries against a cache, on Hopper: decode_sm90 for the sequences of few query rows, fwd_sm90 or fwd_sm80 for
   * the others, two launches. */
  TESSERA_KERNEL_MIXED_SM90 = 13,
  /* Shared prefixes: every group's queries against its prefix and every sequence's against its other keys, each by another
   * kernel, and their merge. */
  TESSERA_KERNEL_SHARED_PREFIX = 14
} tessera_kernel;

/* Where a plan is to run: plain data, of this size in all minor versions. */
#define TESSERA_DEVICE_BYTES 256
typedef struct tessera_device {
  size_t struct_size TESSERA_CXX_DEFAULT(sizeof(tessera_device)); /* TESSERA_DEVICE_BYTES */
  int32_t backend;                                                /* tessera_backend */
  int32_t isa;       /* tessera_isa: the fastest on this CPU, or TESSERA_ISA from the environment */
  int32_t isa_limit; /* tessera_isa: the best that this CPU has */
  int32_t kernel;    /* tessera_kernel: AUTO, or the only candidate to be considered */
  int32_t cores;     /* this process may use (CUDA: multiprocessors). How work is split, and so a result's last bits */
  int32_t threads;   /* CPU: threads to use. Never changes a bit of a result */
  int32_t ordinal;   /* CUDA: which GPU; -1: none of this machine's, see tessera_device_cuda_arch */
  int32_t arch;      /* CUDA: compute capability, 10 * major + minor */
  /* CUDA, 1: cu_seqlens, seqused_k and page tables are fetched and checked before a launch, which waits for the stream.
   * 0: what lies outside is read as if it were the nearest valid value */
  int32_t check_indices;
  /* CPU, with isa AMX_BF16: tessera_isa of the problems that its tiles are not the fastest for, which the plan then has as
   * its isa. 0: they take every tiled problem in bfloat16, as TESSERA_ISA asks */
  int32_t vector_isa;
  int64_t l1_bytes, l2_bytes;
  int64_t smem_bytes; /* CUDA: the most shared memory that a block may have */
  char name[64];
  char reserved[TESSERA_DEVICE_BYTES - 128 - sizeof(size_t)]; /* for later members: 0 */
} tessera_device;

/* This machine's CPU. Reads TESSERA_ISA (baseline, avx2, avx512, avx512_bf16, amx_bf16) and TESSERA_NUM_THREADS
 * from the environment; INVALID_ARGUMENT if one of them says what this machine cannot do. */
TESSERA_API tessera_status tessera_device_cpu(tessera_device* device);

/* GPU number `ordinal`. UNSUPPORTED when there is no driver, no such GPU, or one older than compute capability 8.0: the
 * message says which. Opens the driver on first use, and nothing else of CUDA. */
TESSERA_API tessera_status tessera_device_cuda(int32_t ordinal, tessera_device* device);

/* A GPU that need not be here: the usual one of compute capability `arch` (90: an H100), whose multiprocessors, shared
 * memory and name may then be edited. Opens nothing. Plans can be made for it and tessera_prepare compiles their kernels; execution
 * refuses them. INVALID_ARGUMENT lists the architectures that are known. */
TESSERA_API tessera_status tessera_device_cuda_arch(int32_t arch, tessera_device* device);

/* How shared_prefix does one of its two parts, which is attention by itself: members as a plan has them. */
typedef struct tessera_plan_part {
  int32_t kernel; /* tessera_kernel */
  int32_t isa;
  int32_t block_m, block_n, tiles_per_item, num_splits, use_dot;
  int32_t decode_queries, decode_heads_kv;
  int32_t reserved; /* 0 */
  int64_t decode_parts, num_items, scratch_bytes, shared_bytes;
} tessera_plan_part;

/* What will be done: plain data, a pure function of problem and device, of this size in all minor versions. It may be
 * copied and kept, but not changed, and serves the library's version that made it: others refuse it, as they do one made
 * for an instruction set that this machine lacks. */
#define TESSERA_PLAN_BYTES 7168
#define TESSERA_PLAN_PROBLEM_BYTES 4096
#define TESSERA_PLAN_CONFIG_BYTES 768
typedef struct tessera_plan {
  size_t struct_size; /* TESSERA_PLAN_BYTES */
  uint64_t seal;      /* of every member below: tells a plan that was changed */
  int32_t version;    /* TESSERA_VERSION of the library that made it */
  int32_t kernel;     /* tessera_kernel */

  tessera_problem problem; /* as given, with every default filled in */
  char problem_reserved[TESSERA_PLAN_PROBLEM_BYTES - sizeof(tessera_problem)];
  tessera_device device;

  int64_t batch, max_seqlen_q, max_seqlen_k, heads_q, heads_kv, head_dim, head_dim_v;
  int32_t block_m;        /* queries a tile */
  int32_t block_n;        /* keys a tile */
  int32_t tiles_per_item; /* query tiles (decode: KV heads) that share one pass over keys and values */
  int32_t num_splits; /* parts that the keys are split into, merged exactly; CPU: at most, fewer for shorter lengths */
  int32_t use_dot;    /* 1: products of bf16 by an instruction: the dot product, or AMX's tiles */
  int32_t num_warps;  /* CUDA: warps a block */
  int32_t num_stages; /* CUDA: tiles of keys and values in flight */
  int32_t num_v_stages;  /* fwd_sm90: tiles of values, where num_stages are those of keys */
  int32_t num_q_stages;  /* fwd_sm90: tiles of 64 queries in flight */
  int32_t cluster;       /* CUDA: above 1, blocks that fetch keys and values for each other */
  int64_t num_items;     /* work items, an upper bound when packed */
  int64_t scratch_bytes; /* a thread */
  int64_t shared_bytes;  /* partial results and accumulators, linear in the sequence length */
  int64_t smem_bytes;    /* CUDA: shared memory of a block */
  int64_t workspace_bytes;

  double flops;                /* of the matrix products, on the visible area where it is known without data */
  double bytes_moved;          /* to and from memory, every tensor once; paged: the pages that max_seqlen_k needs */
  double standard_bytes;       /* what three-step attention moves: the same, and the score matrix written and read */
  double standard_extra_bytes; /* memory that three-step attention holds for the score matrix */
  int32_t lengths_are_data;    /* 1: how many keys are in use only seqused_k says; flops and bytes are at most those */

  int32_t after_another;                          /* of a part: 1: other parts of the call come before it */
  uint64_t config[TESSERA_PLAN_CONFIG_BYTES / 8]; /* CUDA: of the kernel's family, what its launches are made of */
  /* A call serves every sequence by its own rows. Those with at most so many queries go by the decode kernel (CUDA:
   * decode_sm90), the others by the tiled one (fwd_sm90, fwd_sm80); 0: none goes by it. */
  int32_t decode_queries;
  int32_t decode_heads_kv; /* CPU: KV heads that share one pass over the keys */
  /* CPU: parts that the keys of all sequences are split into, at most; each has its partial results. */
  int64_t decode_parts;
  /* shared_prefix: the groups against their prefixes, of which `config` is, and the sequences against their other keys. */
  tessera_plan_part parts[2];
  uint64_t suffix_config[TESSERA_PLAN_CONFIG_BYTES / 8];
  char reserved[920]; /* for later members: 0 */
} tessera_plan;

/* Checks every rule of `problem` and chooses. INVALID_ARGUMENT or UNSUPPORTED otherwise; *plan is then untouched.
 * `device` NULL: this machine's CPU, as tessera_device_cpu found it at the first call that asks so. */
TESSERA_API tessera_status tessera_make_plan(const tessera_problem* problem, const tessera_device* device,
                                             tessera_plan* plan);

/* Bytes of workspace that forward or backward needs, of any alignment and content; 0 for what is no plan of this
 * library's. */
TESSERA_API size_t tessera_workspace_bytes(const tessera_plan* plan);

/* ---- what a plan means --------------------------------------------------------------------------------------- */

/* A kernel's answer to a plan's problem. */
typedef struct tessera_candidate {
  char kernel[32]; /* tessera_kernel_name */
  double
      estimate_us; /* what a call would take, in microseconds, by the kernel's own table of measurements; 0 where it refuses */
  int32_t accepted;
  char reason[148];
} tessera_candidate;

/* How many kernels the plan's back end has; 0 for what is no plan of this library's. */
TESSERA_API int32_t tessera_plan_num_candidates(const tessera_plan* plan);

/* The answer of number `index`. Of the kernels that accept the one with the least estimate was chosen, the first of equal ones. INVALID_ARGUMENT: there is none. */
TESSERA_API tessera_status tessera_plan_candidate(const tessera_plan* plan, int32_t index,
                                                  tessera_candidate* candidate);

/* A launch of a CUDA kernel. */
typedef struct tessera_launch {
  char kernel[64];
  char config[936]; /* what it is compiled for, as an initialiser in C++ */
  int64_t blocks, smem_bytes;
  int32_t threads, cluster; /* of a block; blocks */
} tessera_launch;

/* What a call launches, in order: on the CPU nothing. aligned 1: where every row of the data starts at a multiple of 16 bytes
 * in memory wherever its strides allow that, 0: elsewhere. 0 for what is no plan of this library's. */
TESSERA_API int32_t tessera_plan_num_launches(const tessera_plan* plan, int32_t aligned);

/* Launch number `index` of these. INVALID_ARGUMENT: there is none. */
TESSERA_API tessera_status tessera_plan_launch(const tessera_plan* plan, int32_t aligned, int32_t index,
                                               tessera_launch* launch);

/* ---- execution ---------------------------------------------------------------------------------------------- */

/* CUDA: compiles or loads every kernel that the plan needs, which its first call would otherwise do. The device need not
 * be this machine's: its kernels are then compiled into the cache on disk. UNSUPPORTED when NVRTC is wanted and not there.
 * CPU: nothing. */
TESSERA_API tessera_status tessera_prepare(const tessera_plan* plan);

/* Data pointers, one for each tensor that the problem describes; the others are ignored. In C:
 *   tessera_buffers buffers = {.struct_size = sizeof buffers, .q = q, .k = k, .v = v, .o = o};
 * Inputs may share memory with each other. What is written shares no element with anything else: not with an input, not
 * with another output, not with the workspace. */
typedef struct tessera_buffers {
  size_t struct_size TESSERA_CXX_DEFAULT(sizeof(tessera_buffers));
  const void *q, *k, *v;
  void* o; /* forward: written; backward: read */
  float* lse;
  const int32_t *cu_seqlens_q, *cu_seqlens_k, *seqused_k, *page_table;
  const void* bias;
  const uint8_t *mask, *block_mask;
  const float *alibi_slopes, *sink;
  const void* d_o;
  void *d_q, *d_k, *d_v;
  const float* d_lse;
  float *d_bias, *d_sink;
  const uint8_t* causal_seqs;
  const int32_t *page_indptr, *page_indices, *tree_mask;
  const int32_t *prefix_groups, *prefix_lens;
  float* lse_low; /* forward: written; backward: read */
  const int64_t* dropout_state;
} tessera_buffers;

/* Where the work of a call is done; NULL means the library's threads, or on CUDA the default stream. Every member may be
 * NULL. In C: tessera_executor executor = {.struct_size = sizeof executor, .run = run}.
 * CPU: `run` runs task(argument, w) once for each w in 0 .. workers - 1, in any order, concurrently or not, and returns
 * when all are done; NULL: the library's threads. Give one to run on your own threads. What it throws is caught, and the
 * call answers INVALID_ARGUMENT with undefined outputs.
 * `cancel` is asked between work items and within long ones, some thousand times a second, from every thread that works.
 * Other than 0: no further work is begun, and the call answers CANCELLED, its outputs undefined. It should be quick (an
 * atomic load), and throw nothing. CUDA never asks: there a call returns at once.
 * CUDA: the stream (a CUstream or cudaStream_t) that the kernels are put into; the call returns at once. */
typedef struct tessera_executor {
  size_t struct_size TESSERA_CXX_DEFAULT(sizeof(tessera_executor));
  void (*run)(void* context, int32_t workers, void (*task)(void* argument, int32_t worker), void* argument)
      TESSERA_CXX_DEFAULT(NULL);
  void* context TESSERA_CXX_DEFAULT(NULL);
  void* stream TESSERA_CXX_DEFAULT(NULL);
  int32_t (*cancel)(void* cancel_context) TESSERA_CXX_DEFAULT(NULL);
  void* cancel_context TESSERA_CXX_DEFAULT(NULL);
} tessera_executor;

/* Computes o (and lse). INVALID_ARGUMENT when the plan is none of this library's, a required pointer is NULL, misaligned or of
 * another device's memory, an output shares memory with anything else, the workspace is too small, or cu_seqlens,
 * seqused_k or a page table hold what the layouts do not allow (CUDA: where tessera_device asks for that check); outputs
 * are untouched then. On CUDA all pointers but `plan` and `buffers` are
 * the device's, nothing waits for the stream, and a call can be captured into a graph. */
TESSERA_API tessera_status tessera_forward(const tessera_plan* plan, const tessera_buffers* buffers, void* workspace,
                                           size_t workspace_bytes, const tessera_executor* executor);

/* Computes d_q, d_k, d_v (and d_bias, d_sink) from q, k, v, o, lse, d_o (and d_lse). Errors as forward. Paged keys and
 * values are a cache, for inference: their plan is refused. */
TESSERA_API tessera_status tessera_backward(const tessera_plan* plan, const tessera_buffers* buffers, void* workspace,
                                            size_t workspace_bytes, const tessera_executor* executor);

/* A tensor with its data. rank 0: absent. */
typedef struct tessera_tensor {
  tessera_layout layout;
  void* data;
} tessera_tensor;

/* Partial results over disjoint sets of keys, and where they become one.
 *
 *   o_parts                 [N, B, S, H, Dv]   float32, float16 or bfloat16
 *   lse_parts               [N, B, H, S]       float32
 *   lse_low_parts           [N, B, H, S]       float32, optional: LSE_n = lse_parts + lse_low_parts; absent: 0
 *   o                       [B, S, H, Dv]      float32, float16 or bfloat16
 *   lse, lse_low            [B, H, S]          float32, optional, lse_low with lse alone */
typedef struct tessera_combine_call {
  size_t struct_size TESSERA_CXX_DEFAULT(sizeof(tessera_combine_call));
  tessera_tensor o_parts, lse_parts;
  tessera_tensor o, lse;
  tessera_tensor lse_low_parts, lse_low;
} tessera_combine_call;

/* Merges N partial results exactly: with m = max_n LSE_n,
 *   w_n = exp(LSE_n - m) / sum_n exp(LSE_n - m),   LSE = m + log sum_n exp(LSE_n - m),   o = sum_n w_n o_n.
 * Weights come from differences of what the parts know, never from the rounded LSE, so that they add up to 1 whatever
 * large number all parts share; but a part knows its own sum only as well as its LSE has digits: without lse_low_parts a weight
 * is off by up to |LSE_n| 2^-24, relatively. Parts that saw nothing (lse = -inf) do not count, whatever their o holds.
 * The gradient takes the same weights: d_o_n = w_n d_o, d_LSE_n = w_n (d_o . (o_n - o) + d_LSE), and has no other use for LSE;
 * that of lse_low_parts is that of lse_parts.
 * `device` says where, NULL: on this machine's CPU. There the calling thread does the work and only `cancel` of
 * `executor` is asked; CUDA: all pointers to data are the device's, and the kernel is put into executor->stream, NULL: the default stream.
 * INVALID_ARGUMENT when a layout is wrong, a pointer NULL, misaligned or of another device's memory, or an output shares
 * memory with anything else: outputs are untouched then. */
TESSERA_API tessera_status tessera_combine(const tessera_combine_call* call, const tessera_device* device,
                                           const tessera_executor* executor);

/* New tokens of a step, and the cache that they join.
 *
 *   symbol                dense               packed (cu_seqlens present)
 *   k                     [B, S, Hkv, D]      [T, Hkv, D]          new keys, as they are before rotation
 *   v                     [B, S, Hkv, Dv]     [T, Hkv, Dv]
 *   q, q_out              [B, Sq, Hq, D]      [T, Hq, D]           optional; q_out absent: q is rotated in place
 *   positions_k  int32    [B, S]              [T]                  optional: the rows of cos and sin that a token takes
 *   positions_q  int32    [B, Sq]             [T]
 *   k_cache, v_cache      [B, Smax, Hkv, D], [B, Smax, Hkv, Dv]; with page_table [pages, page_size, Hkv, D | Dv]
 *   seqused_k    int32    [B]                                      keys of each sequence, the new ones included
 *   page_table   int32    [B, max_pages]
 *   cos, sin              [R, rotary_dim / 2], float32 or k's dtype: absent, nothing is rotated
 *
 * New key i of n of sequence b is key seqused_k[b] - n + i of it: a forward call with the same seqused_k sees it. Without
 * positions this is its position, too, and query i stands at seqused_k[b] - n + i.
 * Rotation (Su et al., "RoFormer", 2021), in float32: columns (x, y) of a pair become (x cos - y sin, x sin + y cos), pair j
 * by column j of cos and sin; columns from rotary_dim on stay. */
typedef struct tessera_append_call {
  size_t struct_size TESSERA_CXX_DEFAULT(sizeof(tessera_append_call));
  /* 0: pair j is columns j and j + rotary_dim / 2 (GPT-NeoX); 1: columns 2j and 2j + 1 (GPT-J) */
  int32_t interleaved TESSERA_CXX_DEFAULT(0);
  int32_t reserved_0 TESSERA_CXX_DEFAULT(0);
  tessera_tensor k, v, k_cache, v_cache, seqused_k;
  tessera_tensor cu_seqlens, page_table;
  tessera_tensor q, q_out, cos, sin, positions_q, positions_k;
  tessera_tensor dropped; /* optional int32 [1]: how many tokens of k and q wrote nothing is added to it; CPU: 0 */
} tessera_append_call;

/* Rotates q and the new keys, and writes the new keys and values at each sequence's end in the cache, in one pass. k and v stay
 * as they are; tokens of no sequence are passed over. Two tokens that go to one place of the cache are the caller's mistake,
 * which is not looked for: either may stand there.
 * INVALID_ARGUMENT when a layout is wrong, a pointer NULL, misaligned or of another device's memory, what is written shares
 * memory with anything else, or (CPU) cu_seqlens, seqused_k, page_table or a position is out of range: nothing is written
 * then. CUDA: all pointers to data are the device's, the kernel is put into executor->stream, and what is out of range is found
 * there: such a token writes nothing, and counts in `dropped`. `device` NULL: this machine's CPU. */
TESSERA_API tessera_status tessera_append(const tessera_append_call* call, const tessera_device* device,
                                          const tessera_executor* executor);

/* ---- words -------------------------------------------------------------------------------------------------- */

/* The plan in words, and as JSON. Writes at most `size` bytes with the closing zero, returns the length that is needed
 * without it (as snprintf does); 0 for what is no plan of this library's. */
TESSERA_API size_t tessera_plan_describe(const tessera_plan* plan, char* text, size_t size);
TESSERA_API size_t tessera_plan_json(const tessera_plan* plan, char* text, size_t size);

TESSERA_API const char* tessera_dtype_name(int32_t dtype); /* "float32" ..., "unknown" */
TESSERA_API size_t tessera_dtype_bytes(int32_t dtype);     /* 0 when unknown */
TESSERA_API const char* tessera_isa_name(int32_t isa);     /* "avx512_bf16" ..., as TESSERA_ISA takes them */
TESSERA_API const char* tessera_kernel_name(int32_t kernel);
TESSERA_API const char* tessera_version(void); /* "0.1.0" */

#ifdef __cplusplus
}
#endif

#endif /* TESSERA_H */

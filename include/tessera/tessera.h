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
 * Compatibility: a program runs with every library of its minor version (the soname is libtessera.so.MAJOR.MINOR until
 * 1.0, then libtessera.so.MAJOR). Within a minor version, structs only grow, in one of two ways:
 *   - Structs that the caller fills in (tessera_problem, tessera_buffers, tessera_executor, tessera_combine_call,
 *     tessera_append_call) grow at their end. They begin with `struct_size`, their size in the header that the caller
 *     was compiled with. Members that an older header lacks have their defaults; members of a newer header are refused
 *     unless they are zero.
 *   - Structs that the library fills in (tessera_device, tessera_plan) have a fixed size: their last bytes are
 *     reserved, and zero.
 * An uninitialised struct has size 0, and is refused.
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

/* In C++ these members have defaults: `tessera_executor executor{}` has the right size. */
#ifdef __cplusplus
#define TESSERA_CXX_DEFAULT(value) = value
#else
#define TESSERA_CXX_DEFAULT(value)
#endif

/* ---- status ------------------------------------------------------------------------------------------------- */

typedef enum tessera_code {
  TESSERA_OK = 0,
  TESSERA_INVALID_ARGUMENT = 1, /* a shape, stride, dtype, option or index is wrong: the message names it */
  TESSERA_UNSUPPORTED = 2,      /* valid, but no kernel supports it: the message lists each candidate's refusal */
  TESSERA_INTERNAL = 3,         /* a defect of this library */
  TESSERA_CANCELLED = 4         /* the executor's `cancel` ended the call: outputs are undefined */
} tessera_code;

/* The result of a call, by value. `message` is one line: what was wrong, what was given, what is accepted. */
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
  TESSERA_INT64 = 6,
  TESSERA_INT8 = 7,  /* a cache of keys and values on the CPU, and tensors of a score program */
  TESSERA_INT16 = 8, /* with UINT8: only for the tensors of a score program */
  TESSERA_UINT8 = 9,
  TESSERA_FLOAT8_E4M3 = 10, /* 1 sign, 4 exponent and 3 mantissa bits: up to 448, NaN, no infinity ("e4m3fn") */
  TESSERA_FLOAT8_E5M2 = 11  /* 5 exponent and 2 mantissa bits: up to 57344, infinity, NaN */
} tessera_dtype;

#define TESSERA_MAX_RANK 5

/* Shape and strides of a tensor in caller-owned memory; rank 0 means that the tensor is absent. Strides are in elements
 * and may have any value (including 0 and negative ones, for inputs) as long as the last dimension of q, k, v, o and
 * their gradients is contiguous. */
typedef struct tessera_layout {
  int32_t dtype; /* tessera_dtype */
  int32_t rank;
  int64_t shape[TESSERA_MAX_RANK];
  int64_t strides[TESSERA_MAX_RANK];
} tessera_layout;

/* ---- score programs ------------------------------------------------------------------------------------------ */

/* A function of one (query, key) pair that the caller writes as text: `score` computes a new score from it;
 * `mask` says whether the key is visible. docs/guide/score-programs.md describes the language.
 *   score  "50 * tanh(s / 50) + bias[h, i - j + 512]"
 *   mask   "j <= q_pos && doc[b, i] == doc[b, j]"
 * Names: s is the score so far; b is the sequence, h the query head and h_kv its KV head; i and j are the indices of
 * the query and the key in their sequence, from 0; q_pos = i + len_k - len_q; len_q and len_k are the lengths. The
 * caller declares further names: tensors, which are indexed by integers, and scalars. */

typedef enum tessera_value_type {
  TESSERA_VALUE_FLOAT = 0, /* a tensor's dtype: float32, float16, bfloat16, or float64 on the CPU */
  TESSERA_VALUE_INT = 1,   /* 32 bits; a tensor's dtype: int8 .. int64 (with values that fit 32 bits), uint8 */
  TESSERA_VALUE_BOOL = 2
} tessera_value_type;

#define TESSERA_MAX_CAPTURED_TENSORS 8
#define TESSERA_MAX_CAPTURED_SCALARS 16
#define TESSERA_SCALAR_RANK (-1)

/* A name that a program's text may use: a letter, then up to 30 letters, digits and underscores. */
typedef struct tessera_program_name {
  const char* name;
  int32_t type; /* tessera_value_type */
  int32_t rank; /* 0 .. 4: a tensor with this number of indices; TESSERA_SCALAR_RANK: a scalar */
} tessera_program_name;

/* A checked program. It is immutable and reference-counted, and serves any number of problems and threads. */
typedef struct tessera_program tessera_program;

/* Creates a program with one reference. If `score` is NULL or "", the score is unchanged; if `mask` is NULL or "",
 * every key is visible. The n-th tensor among `names` is bound by captured[n] of the problem and the buffers, the n-th
 * scalar by scalars[n] of the buffers. INVALID_ARGUMENT names the text, the column (from 1), what was found and what is
 * accepted, or the limit that is exceeded: 128 operations, 8 tensors, 16 scalars, 16 KiB of text, expressions nested 64
 * deep. *program is then unchanged. */
TESSERA_API tessera_status tessera_program_create(const char* score, const char* mask,
                                                  const tessera_program_name* names, int32_t num_names,
                                                  tessera_program** program);

/* Add and remove a reference; removing the last one frees the program. NULL is ignored. A plan keeps a copy of what it
 * needs. */
TESSERA_API void tessera_program_retain(tessera_program* program);
TESSERA_API void tessera_program_release(tessera_program* program);

typedef enum tessera_program_text {
  TESSERA_PROGRAM_SCORE = 0, /* canonical: equal for programs that mean the same operations; "" if there is no score */
  TESSERA_PROGRAM_MASK = 1,
  /* One line for each result, as a function of g, the gradient of the new score: "d_s = ...", and for each element that
   * is read from a floating-point tensor "d_bias[h, i - j + 512] += ..." */
  TESSERA_PROGRAM_GRADIENT = 2
} tessera_program_text;

/* Writes at most `size` bytes including the terminating zero, and returns the length without it of the whole text (like
 * snprintf); 0 for a NULL program or an unknown `which`. */
TESSERA_API size_t tessera_program_describe(const tessera_program* program, int32_t which, char* text, size_t size);

/* A hash of the canonical texts and of the types and ranks of the names in them, equal in all processes and on all
 * machines; 0 for NULL. */
TESSERA_API uint64_t tessera_program_hash(const tessera_program* program);

/* ---- the problem -------------------------------------------------------------------------------------------- */

typedef enum tessera_direction { TESSERA_FORWARD = 0, TESSERA_BACKWARD = 1 } tessera_direction;

/* The diagonal from which `causal` and the window are measured: query i is aligned with key i + Sk - Sq (bottom-right,
 * the default) or with key i (top-left). */
typedef enum tessera_alignment { TESSERA_BOTTOM_RIGHT = 0, TESSERA_TOP_LEFT = 1 } tessera_alignment;

/* Attention over one batch: plain data, no pointers to tensors.
 *
 *   symbol            dense                 packed (cu_seqlens present)       paged (a page table present)
 *   q                 [B, Sq, Hq, D]        [Tq, Hq, D]                       as dense or packed
 *   k                 [B, Sk, Hkv, D]       [Tk, Hkv, D]                      [pages, page_size, Hkv, D]
 *   v                 [B, Sk, Hkv, Dv]      [Tk, Hkv, Dv]                     [pages, page_size, Hkv, Dv]
 *   o                 [B, Sq, Hq, Dv]       [Tq, Hq, Dv]                      as q
 *   lse  float32      [B, Hq, Sq]           [Hq, Tq]                          as q
 *   lse_low float32   as lse                as lse                            as q
 *
 * Hq is a multiple of Hkv; query head h reads KV head floor(h * Hkv / Hq). q, k, v and o have the same dtype: float32,
 * float16, bfloat16 or float64 (o: also `accumulate`). Two exceptions, forward only:
 *   - An 8-bit cache: q and o are float16 or bfloat16, and k and v are both float8_e4m3, float8_e5m2 or (CPU) int8.
 *   - q, k and v are float8_e4m3 or float8_e5m2; o is then bfloat16, float16 or float32.
 * An element of 8 bits has the value scale * code. q_descale, k_descale and v_descale hold the scales; without them
 * they are 1. A bias may have o's dtype in place of q's.
 *
 * The score of query i and key j of one sequence, whose lengths are Sq and Sk, is computed in this order:
 *   1. s = scale * (q_i . k_j)
 *   2. softcap c > 0: s = c * tanh(s / c)
 *   3. s += bias[b, h, i, j]
 *   4. ALiBi: s -= slope * |i + Sk - Sq - j|
 *   5. the program's score
 *   6. s = -inf if j is not visible
 * A key is visible if causal, window, key length, mask, block_mask, tree_mask and the program's mask all allow it. A
 * sink adds exp(sink[h]) to the denominator only. Dropout zeroes entries of softmax(s) and multiplies the others by 1 /
 * (1 - p); the LSE is that before dropout. Every finite score counts, whatever its magnitude; a score of -inf hides its
 * key.
 *
 * If a query sees no key, o = 0, lse = -inf and its gradients are 0, whatever its hidden keys contain. A call writes
 * the whole of o, lse and the gradients: packed rows that belong to no sequence (before cu_seqlens[0] and from
 * cu_seqlens[B] on) and keys from a sequence's seqused_k on get o = 0, lse = -inf and gradients 0. The contents of
 * these rows and of unused pages never affect a result.
 *
 * A NaN or an infinity affects these results, and never another sequence or head:
 * - in k or v: o and d_q of every query that sees its key, and d_k of every key that such a query sees;
 * - in q or d_o: d_q of its query, and d_k of the keys that this query sees;
 * - in q or k: d_v as well.
 * On the CPU it affects nothing else. On CUDA it may also affect queries and keys in its own tiles that the mask hides
 * from it (docs/reference/cuda.md). */
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

  tessera_layout bias;         /* float32 or q's dtype, [B|1, Hq|1, Sq|1, Sk|1]; omitted leading axes are 1 */
  tessera_layout mask;         /* bool, shaped as bias, 1 = visible */
  tessera_layout block_mask;   /* bool [B|1, Hq|1, ceil(Sq / mask_block_q), ceil(Sk / mask_block_k)], 1 = visible */
  tessera_layout alibi_slopes; /* float32 [Hq] or [B, Hq] */
  tessera_layout sink;         /* float32 [Hq], a logit */

  /* backward: the cotangent of o and the gradients of q, k, v, with the dtypes and shapes of o, q, k, v */
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
  int64_t mask_block_q, mask_block_k; /* queries and keys that one entry of block_mask covers */
  /* Packed or paged: upper bounds of a sequence's number of queries and of keys; 0: what the layouts allow. A plan does
   * not read lengths. It serves every call within its bounds, including sequences without queries or keys. If a
   * sequence exceeds them, the call is refused where the lengths are checked (CPU; CUDA with check_indices). Elsewhere
   * o of that sequence is undefined, and no access goes past the bounds. */
  int64_t max_seqlen_q, max_seqlen_k;
  int32_t deterministic;   /* backward: the same bits every time (the CPU kernels always are) */
  int32_t batch_invariant; /* forward: a sequence's bits do not depend on the other sequences of its batch */

  tessera_layout causal_seqs; /* bool [B]: causal for each sequence separately; `causal` is then 0 */
  /* int32 [B + 1] and [N], instead of page_table (CSR): the pages of sequence b are page_indices[page_indptr[b] ..
   * page_indptr[b + 1] - 1], the last of them filled up to seqused_k[b]. N and page_indptr[B] may differ. */
  tessera_layout page_indptr, page_indices;
  /* int32 [B, Sq, W], packed [Tq, W]; forward only. The visibility of draft tokens: bit t % 32 of a query's word t / 32
   * says whether that query sees key Sk - Sq + t, t < 32 W. Other keys have no bit. The other masks apply as well. */
  tessera_layout tree_mask;
  /* Shared prefixes, int32 [G + 1] and [G]; forward only. The sequences prefix_groups[g] .. prefix_groups[g + 1] - 1
   * begin with the same prefix_lens[g] keys, in the same pages or in equal copies. The caller promises this, so that
   * one copy may be read for all; it changes no result. The keys that are read once are those before the first query of
   * every causal member, in whole pages. Sequences of no group share no keys. Not supported together with options that
   * depend on a query's position or that are tensors of scores (window, alibi_slopes, bias, mask, block_mask), top-left
   * alignment, dropout or batch_invariant. */
  tessera_layout prefix_groups, prefix_lens;
  /* Upper bounds, 0 = unknown: of a group's prefix keys that are read once, and of a sequence's other keys. */
  int64_t max_prefix_k, max_suffix_k;
  /* Optional, float32, shaped as lse: the rounding error of lse, so that LSE = lse + lse_low to twice the digits; -inf
   * + 0 in a row that sees nothing. Forward writes it beside lse. Backward reads it and computes weights exp(s - lse -
   * lse_low), which sum to 1 however large a number a row's scores share. Without it, they sum to 1 within |lse| 2^-24,
   * the last digit of lse. */
  tessera_layout lse_low;
  /* int64 [2], instead of dropout_seed and dropout_offset, which are then 0: the bits of both, read by the kernels when
   * they run. On CUDA it is device memory, so each replay of a captured graph uses the values of that time. With
   * dropout_p = 0 it may be given, as seed and offset may, and is not read. */
  tessera_layout dropout_state;
  /* A score program and the tensors that it names; NULL: none. The handle must live until the plan is made. captured[n]
   * is its n-th tensor, with any strides; a tensor of rank 0 is given with the shape [1]. Tensors that the program does
   * not use may be absent. Together with prefix_groups it may not use b, i, j, q_pos, len_q, len_k. */
  tessera_program* program;
  tessera_layout captured[TESSERA_MAX_CAPTURED_TENSORS];
  /* backward, optional: the gradient of a floating-point captured[n], of its shape, float32 or its dtype, written
   * completely */
  tessera_layout d_captured[TESSERA_MAX_CAPTURED_TENSORS];
  /* Scales of q, k and v, if these have 8 bits; absent: 1. float32, with any strides, of one of these shapes:
   *   [1] or [Hkv]; [B, Hkv]; [B, ceil(S / 128), Hkv], one for 128 tokens and a head, with S = Sq for q, Sk for k and v
   *   (packed: max_seqlen_q, max_seqlen_k); with paged keys in place of it [pages, page_size, Hkv], one for a token and
   *   a head
   * A scale of q belongs to all query heads of a KV head. Scales of hidden keys do not affect a result. */
  tessera_layout q_descale, k_descale, v_descale;
  /* Global places: the problem is a part of a whole, such as a rank's chunk of a sequence that several devices share.
   * Each sequence's queries are rows first_q .. first_q + Sq - 1 of total_q in the whole, and its keys first_k .. of
   * total_k; its heads are heads first_head .. first_head + Hq - 1 of total_heads, and its sequences begin with number
   * first_sequence. Then causal, windows, ALiBi, dropout and a program's b, h, h_kv, i, j, q_pos, len_q and len_k mean
   * the same as in the whole. Tensors of scores and of heads (bias, mask, block_mask, alibi_slopes, sink) are those of
   * the part: views of the whole's. If one of first_q .. total_k is given, both totals must be; all 0: each sequence is
   * a whole. total_heads 0: the heads are all. total_heads_kv: KV heads of the whole; 0: as many for each query head as
   * in the problem. With dropout, first_k must be a multiple of 32. Not supported together with tree_mask or
   * prefix_groups. */
  int64_t first_q, total_q, first_k, total_k;
  int64_t first_head, total_heads, total_heads_kv;
  int64_t first_sequence;
  /* int32 [B, 4], instead of first_q, total_q, first_k and total_k, which are then 0: these four for each sequence.
   * GPUs: not together with causal_seqs. */
  tessera_layout places;
  /* Partial results over disjoint sets of keys, which are summed without loss.
   * Forward: o may be float32 where q is not. With accumulate = 1, o, lse and lse_low, which are then all required,
   * hold a partial result on entry (0, -inf and 0: nothing yet; in a row with lse = -inf, o may hold anything), and the
   * call merges its own with it, exactly, as tessera_combine does. o must be float32, unless o_accum holds the partial
   * result in its place: thus the last of several calls rounds once, into o of any dtype. A sink is to be given to that
   * call alone. Rows that belong to no sequence keep the partial result.
   * Backward: d_q, d_k and d_v may, all three, be float32 where q is not. With accumulate = 1 they must be, and the
   * call adds to them; rows that belong to no sequence are unchanged. Other gradients are written as usual.
   * Not supported together with prefix_groups. */
  int64_t accumulate;     /* 0 or 1 */
  tessera_layout o_accum; /* float32, shaped as o; forward with accumulate */
  /* The most entries, of 4 bytes of the workspace, in the lists that a GPU makes of the blocks which a program's mask
   * shows; at most 2^31 - 1. 0: one for each block that is visible by causal and the window, up to 64 MiB or, if more,
   * 64 entries a list. A tile whose list finds no room visits every block that it sees by position and evaluates the
   * mask there: the result is the same. deterministic: an entry takes 8 bytes, and if one list of a call finds no room,
   * none counts. Has no effect on the CPU, where no lists are made, and with batch_invariant: every list has room. */
  int64_t list_capacity;
  /* New members are added here, 8 bytes at a time; the value 0 always means that they are unused. */
} tessera_problem;

/* An empty problem of `struct_size` bytes: every tensor absent, no option set, windows unbounded. */
TESSERA_API void tessera_problem_init_sized(tessera_problem* problem, size_t struct_size);

/* The same for the version of this header. */
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
  TESSERA_ISA_AMX_BF16 = 4, /* bfloat16 by AMX tiles; other dtypes by tessera_device.vector_isa, or by AVX512_BF16 */
  TESSERA_ISA_NEON = 5,     /* AArch64, whose sets begin here */
  TESSERA_ISA_NEON_BF16 = 6 /* and FEAT_BF16 */
} tessera_isa;

typedef enum tessera_backend { TESSERA_BACKEND_CPU = 0, TESSERA_BACKEND_CUDA = 1 } tessera_backend;

/* Numbers of the first families (tessera_family), as aliases of their names. Later families have only a name. */
typedef enum tessera_kernel {
  TESSERA_KERNEL_AUTO = 0,
  TESSERA_KERNEL_REFERENCE = 1, /* CPU: float64, O(S^2) time; the reference of all tests */
  TESSERA_KERNEL_DECODE = 2,    /* CPU: few query rows, split over keys */
  TESSERA_KERNEL_TILED = 3,     /* CPU: FlashAttention's tiles, forward and backward */
  TESSERA_KERNEL_FWD_SM80 = 4,  /* CUDA: forward by mma.sync, on every GPU from Ampere on */
  TESSERA_KERNEL_BWD_SM80 = 5,  /* CUDA: backward by mma.sync, on every GPU from Ampere on */
  TESSERA_KERNEL_FWD_SM90 = 6,  /* CUDA: forward by TMA and wgmma, on Hopper */
  TESSERA_KERNEL_BWD_SM90 = 7,  /* CUDA: backward by TMA and wgmma, on Hopper */
  /* For comparison, only on request: the first FlashAttention's schedule, and standard attention, which stores its
   * scores. */
  TESSERA_KERNEL_FWD_FA1 = 8,
  TESSERA_KERNEL_BWD_FA1 = 9,
  TESSERA_KERNEL_FWD_STANDARD = 10,
  TESSERA_KERNEL_BWD_STANDARD = 11,
  TESSERA_KERNEL_DECODE_SM90 = 12, /* CUDA: few query rows with many keys, one launch, on Hopper */
  /* CUDA: packed queries with a KV cache, on Hopper, in two launches: decode_sm90 for the sequences with few query
   * rows, fwd_sm90 or fwd_sm80 for the others. */
  TESSERA_KERNEL_MIXED_SM90 = 13,
  /* Shared prefixes, in two parts and a merge: each group's queries against its prefix, and each sequence's queries
   * against its other keys. Each part has its own kernel. */
  TESSERA_KERNEL_SHARED_PREFIX = 14
} tessera_kernel;

/* The device that a plan is made for: plain data, of this size in all minor versions. */
#define TESSERA_DEVICE_BYTES 256
typedef struct tessera_device {
  size_t struct_size TESSERA_CXX_DEFAULT(sizeof(tessera_device)); /* TESSERA_DEVICE_BYTES */
  int32_t backend;                                                /* tessera_backend */
  int32_t isa;       /* tessera_isa: the fastest on this CPU, or TESSERA_ISA from the environment */
  int32_t isa_limit; /* tessera_isa: the best that this CPU supports */
  int32_t kernel;    /* tessera_kernel: AUTO, or the only candidate to consider; `family` may name it instead */
  int32_t cores;   /* usable by this process (CUDA: multiprocessors). A result's last bits depend on it, by the split */
  int32_t threads; /* CPU: threads to use. No bit of a result depends on it */
  int32_t ordinal; /* CUDA: index of the GPU; -1: no GPU of this machine, see tessera_device_cuda_arch */
  int32_t arch;    /* CUDA: compute capability, 10 * major + minor */
  /* CUDA. 1: cu_seqlens, seqused_k and page tables are copied to the host and checked before a launch, which waits for
   * the stream. 0: a value out of range is read as the nearest valid one. */
  int32_t check_indices;
  /* CPU with isa AMX_BF16: the tessera_isa for problems on which AMX tiles are not the fastest; it becomes the isa of
   * their plans. 0: AMX tiles serve every tiled problem in bfloat16 (TESSERA_ISA requested it). */
  int32_t vector_isa;
  int64_t l1_bytes, l2_bytes;
  int64_t smem_bytes; /* CUDA: the most shared memory that a block may have */
  char name[64];
  char family[32]; /* "", or the name of the only candidate to consider (tessera_family) */
  char reserved[TESSERA_DEVICE_BYTES - 160 - sizeof(size_t)]; /* for later members: 0 */
} tessera_device;

/* A kernel family that plans choose from: one kernel, or several that serve one purpose together. */
typedef struct tessera_family {
  char name[32];           /* as in tessera_device.family, tessera_plan.family and tessera_candidate.kernel */
  int32_t kernel;          /* its tessera_kernel; TESSERA_KERNEL_AUTO if it has none */
  int32_t on_cpu, on_cuda; /* 1: it has kernels for this back end */
  int32_t for_comparison;  /* 1: chosen only if requested by name */
} tessera_family;

/* Number of kernel families that the library has. */
TESSERA_API int32_t tessera_num_families(void);

/* Family number `index`. INVALID_ARGUMENT if `index` is out of range. */
TESSERA_API tessera_status tessera_family_at(int32_t index, tessera_family* family);

/* Describes this machine's CPU. Reads TESSERA_ISA (baseline; avx2, avx512, avx512_bf16, amx_bf16; neon, neon_bf16) and
 * TESSERA_NUM_THREADS from the environment. INVALID_ARGUMENT if one of them exceeds what this machine supports. */
TESSERA_API tessera_status tessera_device_cpu(tessera_device* device);

/* Describes GPU number `ordinal`. UNSUPPORTED if there is no driver, no such GPU, or its compute capability is below
 * 8.0; the message says which. Opens the CUDA driver on first use, and no other part of CUDA. */
TESSERA_API tessera_status tessera_device_cuda(int32_t ordinal, tessera_device* device);

/* Describes a typical GPU of compute capability `arch` (90: an H100), which need not be in this machine; its
 * multiprocessors, shared memory and name may be edited. Opens nothing. Plans can be made for it, and tessera_prepare
 * compiles their kernels; execution refuses them. INVALID_ARGUMENT lists the known architectures. */
TESSERA_API tessera_status tessera_device_cuda_arch(int32_t arch, tessera_device* device);

#define TESSERA_PLAN_BYTES 16384
#define TESSERA_PLAN_PROBLEM_BYTES 8192
#define TESSERA_PLAN_PROGRAM_BYTES 4096
#define TESSERA_PLAN_MAX_STEPS 4
#define TESSERA_PLAN_CONFIG_BYTES 256

/* The copy of a problem's score program that its plan keeps, so that the program may be released. */
typedef struct tessera_plan_program {
  uint64_t hash;      /* tessera_program_hash; 0: no program, or one that consists of options only */
  int32_t text_bytes; /* without the terminating zero */
  int32_t num_tensors, num_scalars;
  /* For the tensors and scalars that the program uses, in the order of first use: their indices in `captured` and
   * `scalars`. */
  uint8_t tensors[TESSERA_MAX_CAPTURED_TENSORS], scalars[TESSERA_MAX_CAPTURED_SCALARS];
  int32_t alibi_slopes; /* 1 + the index in `captured` of the tensor that the call reads as alibi_slopes; 0: none */
  char text[TESSERA_PLAN_PROGRAM_BYTES - 48]; /* canonical: a version, score, mask and names, one line each */
} tessera_plan_program;

/* The keys of a step. If sequences share prefixes, one step reads each group's prefix once for the queries of all its
 * sequences, another one reads every sequence's other keys, and the two results are merged exactly. */
typedef enum tessera_step_keys {
  TESSERA_STEP_ALL_KEYS = 0,
  TESSERA_STEP_PREFIXES = 1,
  TESSERA_STEP_OTHER_KEYS = 2
} tessera_step_keys;

/* The sequences of a step: of a mixed batch, those with at most tessera_plan.decode_queries queries, or the others. */
typedef enum tessera_step_sequences {
  TESSERA_STEP_ALL_SEQUENCES = 0,
  TESSERA_STEP_FEW_QUERIES = 1,
  TESSERA_STEP_MANY_QUERIES = 2
} tessera_step_sequences;

/* One kernel family's part of a call. */
typedef struct tessera_plan_step {
  char family[32];         /* the kernel family's name */
  int32_t keys, sequences; /* tessera_step_keys, tessera_step_sequences */
  /* CUDA. 1: if the data's addresses are not multiples of 16 bytes where the other steps need that, this step alone
   * serves the call. */
  int32_t unaligned;
  int32_t isa;              /* CPU: tessera_isa */
  int32_t block_m, block_n; /* queries and keys of a tile; CPU, decode: query rows of a KV head, and keys */
  int32_t num_splits;       /* parts of the keys, merged exactly; CPU: an upper bound, fewer for shorter lengths */
  int32_t num_warps;        /* CUDA: warps of a block */
  int32_t num_stages;       /* CUDA: tiles of keys and values in flight; fwd_sm90: tiles of keys */
  int32_t most_queries;     /* of a sequence; 0: any number */
  int64_t num_items;        /* work items, an upper bound when packed */
  int64_t smem_bytes;       /* CUDA: shared memory of a block */
  int64_t workspace_at, workspace_bytes; /* its place in the plan's shared_bytes: steps may use the same memory */
  unsigned char config[TESSERA_PLAN_CONFIG_BYTES]; /* the family's own description of what it runs */
} tessera_plan_step;

/* The decisions for a problem on a device: plain data, a pure function of the two, of this size in all minor versions.
 * It may be copied and kept, but not changed. Only the version of the library that made it accepts it, and only on a
 * machine that has its instruction set. */
typedef struct tessera_plan {
  size_t struct_size; /* TESSERA_PLAN_BYTES */
  uint64_t seal;      /* a checksum of every member below, which detects a changed plan */
  int32_t version;    /* TESSERA_VERSION of the library that made it */
  int32_t kernel;     /* tessera_kernel: the number of `family` */

  tessera_problem problem; /* as given, with every default filled in */
  char problem_reserved[TESSERA_PLAN_PROBLEM_BYTES - sizeof(tessera_problem)];
  tessera_device device;

  int64_t batch, max_seqlen_q, max_seqlen_k, heads_q, heads_kv, head_dim, head_dim_v;
  double flops;                /* of the matrix products, over the visible area as far as it is known without data */
  double bytes_moved;          /* to and from memory, every tensor once; paged: the pages that max_seqlen_k needs */
  double standard_bytes;       /* the same for three-step attention, which also writes and reads the score matrix */
  double standard_extra_bytes; /* memory that three-step attention allocates for the score matrix */
  int32_t lengths_are_data;    /* 1: key lengths are known only from seqused_k; flops and bytes are then upper bounds */
  /* Each sequence of a call is routed by its own number of queries: those with at most this number are served by the
   * step of few queries. 0: there is none. */
  int32_t decode_queries;

  int64_t scratch_bytes; /* CPU: of one thread */
  int64_t shared_bytes;  /* of all steps: partial results and accumulators, linear in the sequence length */
  int64_t workspace_bytes;

  char family[32];    /* name of the kernel family that serves the problem; its steps may be other families' */
  int32_t num_steps;  /* what a call runs, in this order */
  int32_t reserved_0; /* 0 */
  tessera_plan_step steps[TESSERA_PLAN_MAX_STEPS];
  tessera_plan_program program;
  char reserved[2216]; /* for later members: 0 */
} tessera_plan;

/* Checks every rule of `problem` and chooses a kernel. On INVALID_ARGUMENT or UNSUPPORTED, *plan is unchanged. `device`
 * NULL: this machine's CPU, as tessera_device_cpu described it at the first such call. */
TESSERA_API tessera_status tessera_make_plan(const tessera_problem* problem, const tessera_device* device,
                                             tessera_plan* plan);

/* Bytes of workspace that forward or backward needs, with any alignment and content; 0 if `plan` was not made by this
 * library. */
TESSERA_API size_t tessera_workspace_bytes(const tessera_plan* plan);

/* ---- what a plan means --------------------------------------------------------------------------------------- */

/* A kernel's answer to a plan's problem. */
typedef struct tessera_candidate {
  char kernel[32];    /* the family's name */
  double estimate_us; /* time of a call in microseconds, by the kernel's own table of measurements; 0 if it refuses */
  int32_t accepted;
  char reason[148];
} tessera_candidate;

/* Number of kernels that the plan's back end has; 0 if `plan` was not made by this library. */
TESSERA_API int32_t tessera_plan_num_candidates(const tessera_plan* plan);

/* The answer of kernel number `index`. Of the kernels that accept, the plan has the one with the least estimate, and of
 * equal ones the first. INVALID_ARGUMENT if `index` is out of range. */
TESSERA_API tessera_status tessera_plan_candidate(const tessera_plan* plan, int32_t index,
                                                  tessera_candidate* candidate);

/* A launch of a CUDA kernel. */
typedef struct tessera_launch {
  char kernel[64];
  char config[936]; /* the config that it is compiled for, as a C++ initialiser */
  int64_t blocks, smem_bytes;
  int32_t threads, cluster; /* threads of a block; blocks of a cluster */
} tessera_launch;

/* Number of kernel launches of a call, in order; 0 on the CPU, or if `plan` was not made by this library. aligned 1:
 * for data whose rows start at multiples of 16 bytes in memory wherever their strides allow it; 0: for other data. */
TESSERA_API int32_t tessera_plan_num_launches(const tessera_plan* plan, int32_t aligned);

/* Launch number `index` of these. INVALID_ARGUMENT if `index` is out of range. */
TESSERA_API tessera_status tessera_plan_launch(const tessera_plan* plan, int32_t aligned, int32_t index,
                                               tessera_launch* launch);

/* ---- execution ---------------------------------------------------------------------------------------------- */

/* CUDA: compiles or loads every kernel that the plan needs; otherwise its first call does so. The device need not be in
 * this machine: its kernels are then compiled into the cache on disk. UNSUPPORTED if NVRTC is needed and missing. CPU:
 * does nothing. */
TESSERA_API tessera_status tessera_prepare(const tessera_plan* plan);

/* Data pointers, one for each tensor that the problem describes; the others are ignored. In C:
 *   tessera_buffers buffers = {.struct_size = sizeof buffers, .q = q, .k = k, .v = v, .o = o};
 * Inputs may share memory with each other. An output shares no element with an input, another output or the
 * workspace. */
typedef struct tessera_buffers {
  size_t struct_size TESSERA_CXX_DEFAULT(sizeof(tessera_buffers));
  const void* q TESSERA_CXX_DEFAULT(NULL);
  const void* k TESSERA_CXX_DEFAULT(NULL);
  const void* v TESSERA_CXX_DEFAULT(NULL);
  void* o TESSERA_CXX_DEFAULT(NULL); /* forward: written; backward: read */
  float* lse TESSERA_CXX_DEFAULT(NULL);
  const int32_t* cu_seqlens_q TESSERA_CXX_DEFAULT(NULL);
  const int32_t* cu_seqlens_k TESSERA_CXX_DEFAULT(NULL);
  const int32_t* seqused_k TESSERA_CXX_DEFAULT(NULL);
  const int32_t* page_table TESSERA_CXX_DEFAULT(NULL);
  const void* bias TESSERA_CXX_DEFAULT(NULL);
  const uint8_t* mask TESSERA_CXX_DEFAULT(NULL);
  const uint8_t* block_mask TESSERA_CXX_DEFAULT(NULL);
  const float* alibi_slopes TESSERA_CXX_DEFAULT(NULL);
  const float* sink TESSERA_CXX_DEFAULT(NULL);
  const void* d_o TESSERA_CXX_DEFAULT(NULL);
  void* d_q TESSERA_CXX_DEFAULT(NULL);
  void* d_k TESSERA_CXX_DEFAULT(NULL);
  void* d_v TESSERA_CXX_DEFAULT(NULL);
  const float* d_lse TESSERA_CXX_DEFAULT(NULL);
  float* d_bias TESSERA_CXX_DEFAULT(NULL);
  float* d_sink TESSERA_CXX_DEFAULT(NULL);
  const uint8_t* causal_seqs TESSERA_CXX_DEFAULT(NULL);
  const int32_t* page_indptr TESSERA_CXX_DEFAULT(NULL);
  const int32_t* page_indices TESSERA_CXX_DEFAULT(NULL);
  const int32_t* tree_mask TESSERA_CXX_DEFAULT(NULL);
  const int32_t* prefix_groups TESSERA_CXX_DEFAULT(NULL);
  const int32_t* prefix_lens TESSERA_CXX_DEFAULT(NULL);
  float* lse_low TESSERA_CXX_DEFAULT(NULL); /* forward: written; backward: read */
  const int64_t* dropout_state TESSERA_CXX_DEFAULT(NULL);
  /* Of the problem's program: its tensors, their gradients, its scalars, which are on the host: an int or bool (0 or 1)
   * exactly. */
  const void* captured[TESSERA_MAX_CAPTURED_TENSORS] TESSERA_CXX_DEFAULT({});
  void* d_captured[TESSERA_MAX_CAPTURED_TENSORS] TESSERA_CXX_DEFAULT({});
  double scalars[TESSERA_MAX_CAPTURED_SCALARS] TESSERA_CXX_DEFAULT({});
  const float* q_descale TESSERA_CXX_DEFAULT(NULL);
  const float* k_descale TESSERA_CXX_DEFAULT(NULL);
  const float* v_descale TESSERA_CXX_DEFAULT(NULL);
  const int32_t* places TESSERA_CXX_DEFAULT(NULL);
  const void* o_accum TESSERA_CXX_DEFAULT(NULL);
} tessera_buffers;

/* Where a call runs. NULL means the library's threads, or on CUDA the default stream; every member may be NULL. In C:
 * tessera_executor executor = {.struct_size = sizeof executor, .run = run}.
 * CPU: `run` runs task(argument, w) once for each w in 0 .. workers - 1, in any order, concurrently or not, and returns
 * when all are done. NULL: the library's threads. Set it to use your own threads. Exceptions that it throws are caught,
 * and the call returns INVALID_ARGUMENT with undefined outputs.
 * `cancel` is called between and within work items, about a thousand times a second, by every working thread. If it
 * returns a value other than 0, no further work begins, and the call returns CANCELLED with undefined outputs. It
 * should be fast (an atomic load), and must not throw. CUDA never calls it, since calls return at once there.
 * CUDA: `stream` (a CUstream or cudaStream_t) is the stream in which the kernels are launched; the call returns at
 * once. */
typedef struct tessera_executor {
  size_t struct_size TESSERA_CXX_DEFAULT(sizeof(tessera_executor));
  void (*run)(void* context, int32_t workers, void (*task)(void* argument, int32_t worker), void* argument)
      TESSERA_CXX_DEFAULT(NULL);
  void* context TESSERA_CXX_DEFAULT(NULL);
  void* stream TESSERA_CXX_DEFAULT(NULL);
  int32_t (*cancel)(void* cancel_context) TESSERA_CXX_DEFAULT(NULL);
  void* cancel_context TESSERA_CXX_DEFAULT(NULL);
} tessera_executor;

/* Computes o (and lse). INVALID_ARGUMENT if the plan was not made by this library, a required pointer is NULL,
 * misaligned or in another device's memory, an output shares memory with any other buffer, the workspace is too small,
 * or cu_seqlens, seqused_k or a page table hold values that the layouts do not allow (CUDA: if tessera_device enables
 * that check); outputs are then unchanged. On CUDA all pointers except `plan` and `buffers` are device pointers, the
 * call does not wait for the stream, and it can be captured into a graph. */
TESSERA_API tessera_status tessera_forward(const tessera_plan* plan, const tessera_buffers* buffers, void* workspace,
                                           size_t workspace_bytes, const tessera_executor* executor);

/* Computes d_q, d_k, d_v (and d_bias, d_sink, d_captured) from q, k, v, o, lse, d_o (and d_lse). Errors are those of
 * tessera_forward. Paged keys and values are a cache for inference: no plan for their backward pass is made. */
TESSERA_API tessera_status tessera_backward(const tessera_plan* plan, const tessera_buffers* buffers, void* workspace,
                                            size_t workspace_bytes, const tessera_executor* executor);

/* A tensor with its data. rank 0: the tensor is absent. */
typedef struct tessera_tensor {
  tessera_layout layout;
  void* data;
} tessera_tensor;

/* Partial results over disjoint sets of keys, and the tensors into which they are merged.
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
 * Weights are computed from differences of the parts' LSEs, never from the rounded merged LSE, so they sum to 1 however
 * large a number all parts share. A part's own sum is only as accurate as its LSE: without lse_low_parts, a weight has
 * a relative error of up to |LSE_n| 2^-24. Parts that saw no key (lse = -inf) are skipped, whatever their o holds. The
 * gradient uses the same weights: d_o_n = w_n d_o, d_LSE_n = w_n (d_o . (o_n - o) + d_LSE), and needs the LSE for
 * nothing else; the gradient of lse_low_parts equals that of lse_parts.
 * `device` NULL: this machine's CPU, where the calling thread does the work and only `cancel` of `executor` is used.
 * CUDA: all data pointers are device pointers, and the kernel is launched in executor->stream (NULL: the default
 * stream).
 * INVALID_ARGUMENT if a layout is wrong, a pointer is NULL, misaligned or in another device's memory, or an output
 * shares memory with any other buffer; outputs are then unchanged. */
TESSERA_API tessera_status tessera_combine(const tessera_combine_call* call, const tessera_device* device,
                                           const tessera_executor* executor);

/* New tokens of a step, and the cache that they are appended to.
 *
 *   symbol                dense               packed (cu_seqlens present)
 *   k                     [B, S, Hkv, D]      [T, Hkv, D]          new keys, before rotation
 *   v                     [B, S, Hkv, Dv]     [T, Hkv, Dv]
 *   q, q_out              [B, Sq, Hq, D]      [T, Hq, D]           optional; q_out absent: q is rotated in place
 *   positions_k  int32    [B, S]              [T]                  optional: the token's row of cos and sin
 *   positions_q  int32    [B, Sq]             [T]
 *   k_cache, v_cache      [B, Smax, Hkv, D], [B, Smax, Hkv, Dv]; with page_table [pages, page_size, Hkv, D | Dv]; k's
 *                         dtype or, both, float8_e4m3, float8_e5m2 or, on the CPU, int8
 *   seqused_k    int32    [B]                                      keys of each sequence, including the new ones
 *   page_table   int32    [B, max_pages]
 *   cos, sin              [R, rotary_dim / 2], float32 or k's dtype: absent, nothing is rotated
 *
 * The i-th of n new keys of sequence b becomes its key seqused_k[b] - n + i: a forward call with the same seqused_k
 * sees it. Without positions, this is also its position, and query i has position seqused_k[b] - n + i.
 * Rotation (Su et al., "RoFormer", 2021) is computed in float32: columns (x, y) of a pair become (x cos - y sin, x
 * sin + y cos); pair j uses column j of cos and sin; columns from rotary_dim on are unchanged. */
typedef struct tessera_append_call {
  size_t struct_size TESSERA_CXX_DEFAULT(sizeof(tessera_append_call));
  /* 0: pair j is columns j and j + rotary_dim / 2 (GPT-NeoX); 1: columns 2j and 2j + 1 (GPT-J) */
  int32_t interleaved TESSERA_CXX_DEFAULT(0);
  int32_t reserved_0 TESSERA_CXX_DEFAULT(0);
  tessera_tensor k, v, k_cache, v_cache, seqused_k;
  tessera_tensor cu_seqlens, page_table;
  tessera_tensor q, q_out, cos, sin, positions_q, positions_k;
  tessera_tensor dropped; /* optional int32 [1]: the number of tokens of k and q not written is added to it; CPU: 0 */
  /* Scales of an 8-bit cache, float32. An element is stored as its value / scale, rounded to nearest (ties to even); it
   * saturates at the dtype's largest finite number, and a NaN stays a NaN. Absent: 1. */
  tessera_tensor k_descale, v_descale;
  /* 0: the scales are given, [1], [Hkv] or [B, Hkv]. 1: they are computed and written for each new token and head, the
   * largest finite magnitude of its columns over the dtype's largest number (1 if that is 0; NaN if an int8 token holds
   * a NaN): [pages, page_size, Hkv], with page_table alone. */
  int32_t compute_scales TESSERA_CXX_DEFAULT(0);
  int32_t reserved_1 TESSERA_CXX_DEFAULT(0);
} tessera_append_call;

/* Rotates q and the new keys, and writes the new keys and values at each sequence's end in the cache, in one pass. k
 * and v are unchanged; tokens that belong to no sequence are skipped. Two tokens for the same place of the cache are a
 * mistake of the caller that is not detected: either may be written.
 * INVALID_ARGUMENT if a layout is wrong, a pointer is NULL, misaligned or in another device's memory, an output shares
 * memory with any other buffer, or (CPU) cu_seqlens, seqused_k, page_table or a position is out of range; nothing is
 * then written. CUDA: all data pointers are device pointers, the kernel is launched in executor->stream, and values out
 * of range are detected there: such a token is not written, and is counted in `dropped`. `device` NULL: this machine's
 * CPU. */
TESSERA_API tessera_status tessera_append(const tessera_append_call* call, const tessera_device* device,
                                          const tessera_executor* executor);

/* ---- text --------------------------------------------------------------------------------------------------- */

/* The plan as text, and as JSON. Writes at most `size` bytes including the terminating zero, and returns the length
 * without it of the whole text (like snprintf); 0 if `plan` was not made by this library. */
TESSERA_API size_t tessera_plan_describe(const tessera_plan* plan, char* text, size_t size);
TESSERA_API size_t tessera_plan_json(const tessera_plan* plan, char* text, size_t size);

TESSERA_API const char* tessera_dtype_name(int32_t dtype); /* "float32" ..., "unknown" */
TESSERA_API size_t tessera_dtype_bytes(int32_t dtype);     /* 0 if unknown */
TESSERA_API const char* tessera_isa_name(int32_t isa);     /* "avx512_bf16" ..., the values of TESSERA_ISA */
TESSERA_API const char* tessera_kernel_name(int32_t kernel);
TESSERA_API const char* tessera_version(void); /* "0.1.0" */

#ifdef __cplusplus
}
#endif

#endif /* TESSERA_H */

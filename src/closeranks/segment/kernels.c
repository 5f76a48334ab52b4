/* Sums over the buffers of several ranks, and waiting for their words, without Python or torch.
 *
 * Loaded with ctypes. Compiled with -ffp-contract=off and without any fast-math, so that every
 * element is the same sequence of rounded operations whatever the width of the machine's vectors,
 * and the same as in twin.py:
 *
 *   sum      in one binary tree over ranks (exchange/tree.py): s(lo, hi) = s(lo, mid) + s(mid, hi),
 *            where mid - lo is the largest power of two below hi - lo
 *   scale    once, at the root
 *   16 bit   is widened to float32 at the leaves and rounded once, at the root
 *
 * Words are those of page.py; the offsets are repeated here. Not for big-endian machines.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { ARRIVED = 0, DONE = 64, ASLEEP = 128 };
enum { FLOAT32 = 0, FLOAT64 = 1, BFLOAT16 = 2, FLOAT16 = 3 };
enum { BLOCK = 2048 }; /* elements that are summed at a time, so that they stay in the first cache */

/* One function for several machines; the linker's choice. Elsewhere the compiler's own default. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define FOR_EVERY_MACHINE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EVERY_MACHINE
#endif

typedef _Atomic uint32_t word;

typedef struct {
    int32_t n;
    int32_t self;
    int32_t polls;     /* looks at a word before the first yield */
    int32_t yield_us;  /* how long to yield before sleeping */
    uint8_t *pages[];  /* one per rank */
} team;

typedef struct {
    team *ranks;
    void *const *buffers; /* one per rank */
    int64_t from, to;     /* the share of this rank, in elements */
    int32_t kind;
} push;

int cr_version(void) { return 1; }

/* Words. */

static word *word_of(const team *t, int rank, int which) {
    return (word *)(t->pages[rank] + which);
}

static int64_t now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

static void pause_a_moment(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Set a word of this rank, and wake whoever sleeps. */
void cr_publish(team *t, int which, uint32_t value) {
    word *mine = word_of(t, t->self, which);
    /* Sequentially consistent, as the load below: either the sleeper sees the word, or we see it. */
    atomic_store(mine, value);
    for (int rank = 0; rank < t->n; rank++) {
        if (rank != t->self && atomic_load(word_of(t, rank, ASLEEP))) {
            syscall(SYS_futex, mine, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
            return;
        }
    }
}

/* The first rank whose word is not yet at value, or -1. */
static int first_late(const team *t, int which, uint32_t value) {
    for (int rank = 0; rank < t->n; rank++) {
        uint32_t seen = atomic_load_explicit(word_of(t, rank, which), memory_order_acquire);
        if ((int32_t)(seen - value) < 0) return rank;
    }
    return -1;
}

static void sleep_on(const team *t, int rank, int which, uint32_t value, int64_t for_ns) {
    word *mine = word_of(t, t->self, ASLEEP), *theirs = word_of(t, rank, which);
    struct timespec ts = {for_ns / 1000000000, for_ns % 1000000000};
    atomic_store(mine, 1);
    uint32_t seen = atomic_load(theirs);
    if ((int32_t)(seen - value) < 0)
        syscall(SYS_futex, theirs, FUTEX_WAIT, seen, &ts, NULL, 0);
    atomic_store(mine, 0);
}

/* Wait until that word of every rank is at value, for at most slice_us: -1, or a rank that is late.
 * First a few looks, then the core is offered to others, then sleep in the kernel. */
int cr_await(team *t, int which, uint32_t value, int64_t slice_us) {
    int late = first_late(t, which, value);
    for (int look = 0; late >= 0 && look < t->polls; look++) {
        pause_a_moment();
        late = first_late(t, which, value);
    }
    if (late < 0 || slice_us <= 0) return late;
    int64_t start = now_ns(), end = start + slice_us * 1000;
    int64_t yield_end = start + (int64_t)t->yield_us * 1000;
    for (int64_t now = start; late >= 0 && now < end; now = now_ns()) {
        if (now < yield_end)
            sched_yield();
        else
            sleep_on(t, late, which, value, end - now);
        late = first_late(t, which, value);
    }
    return late;
}

/* Sums. */

static inline float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t to_bf16(float value) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)rounded;
}

/* Halves through integers: every compiler can make vectors of this, with or without F16C. No float
 * on the way is subnormal, so that a processor that was told to flush those flushes none here. */
static inline float from_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    uint32_t small_bits = 0x3f000000 + magnitude; /* 0.5 plus so many units of 2^-24 */
    float small;
    memcpy(&small, &small_bits, 4);
    small -= 0.5f;
    memcpy(&small_bits, &small, 4);
    uint32_t bits = magnitude < 0x400 ? small_bits : (magnitude << 13) + 0x38000000;
    bits = magnitude >= 0x7c00 ? magnitude << 13 | 0x7f800000 : bits; /* infinities and NaNs */
    bits |= sign;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t to_f16(float value) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    /* Subnormal results: adding 0.5 lets the adder do the rounding at the right place. */
    float small, half = 0.5f;
    memcpy(&small, &magnitude, 4);
    small += half;
    uint32_t small_bits, half_bits;
    memcpy(&small_bits, &small, 4);
    memcpy(&half_bits, &half, 4);
    uint32_t subnormal = small_bits - half_bits;
    uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    uint32_t result = magnitude < 0x38800000 ? subnormal : normal;
    result = magnitude >= 0x477ff000 ? 0x7c00 : result; /* rounds to infinity */
    result = magnitude > 0x7f800000 ? 0x7e00 : result;
    return (uint16_t)(sign | result);
}

static inline float as_is_f32(float value) { return value; }
static inline double as_is_f64(double value) { return value; }

/* For each type: the sum of two leaves, a leaf added to a sum, the tree below [lo, hi), and the
 * whole: `count` elements from every `from`, times scale, into every `to`. */
#define DEFINE_FOLD(NAME, STORED, WIDE, LOAD, STORE)                                               \
    FOR_EVERY_MACHINE static void add_leaves_##NAME(                                               \
        WIDE *restrict out, const STORED *a, const STORED *b, int64_t count) {                     \
        for (int64_t i = 0; i < count; i++) out[i] = LOAD(a[i]) + LOAD(b[i]);                      \
    }                                                                                              \
    FOR_EVERY_MACHINE static void add_leaf_##NAME(                                                 \
        WIDE *restrict out, const STORED *restrict a, int64_t count) {                             \
        for (int64_t i = 0; i < count; i++) out[i] = out[i] + LOAD(a[i]);                          \
    }                                                                                              \
    FOR_EVERY_MACHINE static void add_sum_##NAME(                                                  \
        WIDE *restrict out, const WIDE *restrict sum, int64_t count) {                             \
        for (int64_t i = 0; i < count; i++) out[i] = out[i] + sum[i];                              \
    }                                                                                              \
    FOR_EVERY_MACHINE static void store_##NAME(                                                    \
        STORED *restrict out, const WIDE *restrict sum, WIDE scale, int64_t count) {               \
        for (int64_t i = 0; i < count; i++) out[i] = STORE(sum[i] * scale);                        \
    }                                                                                              \
    FOR_EVERY_MACHINE static void load_##NAME(                                                     \
        WIDE *restrict out, const STORED *restrict a, int64_t count) {                             \
        for (int64_t i = 0; i < count; i++) out[i] = LOAD(a[i]);                                   \
    }                                                                                              \
    /* Two ranks, in place: one pass over both buffers. */                                         \
    FOR_EVERY_MACHINE static void both_##NAME(                                                     \
        STORED *restrict a, STORED *restrict b, WIDE scale, int64_t count) {                       \
        for (int64_t i = 0; i < count; i++) {                                                      \
            STORED sum = STORE((LOAD(a[i]) + LOAD(b[i])) * scale);                                 \
            a[i] = sum;                                                                            \
            b[i] = sum;                                                                            \
        }                                                                                          \
    }                                                                                              \
    static void tree_##NAME(                                                                       \
        WIDE *out, WIDE *spare, STORED *const *from, int lo, int hi, int64_t at, int64_t count) {  \
        int half = 1;                                                                              \
        while (2 * half < hi - lo) half *= 2;                                                      \
        if (hi - lo == 1) {                                                                        \
            load_##NAME(out, from[lo] + at, count);                                                \
        } else if (hi - lo == 2) {                                                                 \
            add_leaves_##NAME(out, from[lo] + at, from[lo + 1] + at, count);                       \
        } else {                                                                                   \
            tree_##NAME(out, spare, from, lo, lo + half, at, count);                               \
            if (hi - lo - half == 1) {                                                             \
                add_leaf_##NAME(out, from[hi - 1] + at, count);                                    \
            } else {                                                                               \
                tree_##NAME(spare, spare + BLOCK, from, lo + half, hi, at, count);                 \
                add_sum_##NAME(out, spare, count);                                                 \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
    static void fold_##NAME(                                                                       \
        void *const *from, int n, void *const *to, int m, int64_t at, int64_t end, double scale) { \
        WIDE sums[BLOCK * 12]; /* a tree over 2^11 ranks is 11 deep */                             \
        STORED *const *sources = (STORED *const *)from;                                            \
        STORED *const *targets = (STORED *const *)to;                                              \
        if (n == 2 && m == 2 && from == to) {                                                      \
            both_##NAME(sources[0] + at, sources[1] + at, (WIDE)scale, end - at);                  \
            return;                                                                                \
        }                                                                                          \
        for (; at < end; at += BLOCK) {                                                            \
            int64_t count = end - at < BLOCK ? end - at : BLOCK;                                   \
            tree_##NAME(sums, sums + BLOCK, sources, 0, n, at, count);                             \
            store_##NAME(targets[0] + at, sums, (WIDE)scale, count);                               \
            for (int k = 1; k < m; k++)                                                            \
                memcpy(targets[k] + at, targets[0] + at, count * sizeof(STORED));                  \
        }                                                                                          \
    }

DEFINE_FOLD(f32, float, float, as_is_f32, as_is_f32)
DEFINE_FOLD(f64, double, double, as_is_f64, as_is_f64)
DEFINE_FOLD(bf16, uint16_t, float, from_bf16, to_bf16)
DEFINE_FOLD(f16, uint16_t, float, from_f16, to_f16)

/* Elements [at, end) of n buffers, summed times scale, into the same place of m buffers. */
void cr_fold(int kind, void *const *from, int n, void *const *to, int m, int64_t at, int64_t end,
             double scale) {
    switch (kind) {
    case FLOAT32: fold_f32(from, n, to, m, at, end, scale); break;
    case FLOAT64: fold_f64(from, n, to, m, at, end, scale); break;
    case BFLOAT16: fold_bf16(from, n, to, m, at, end, scale); break;
    case FLOAT16: fold_f16(from, n, to, m, at, end, scale); break;
    }
}

/* The whole of an all-reduce by pushing: from a phase on, until a phase, as far as the others allow
 * within slice_us. Returns the phase that is reached.
 *   phase 0 -> 1   tell that the data of this rank is there
 *   phase 1 -> 2   everybody's is: sum this rank's share, write it into all buffers, tell
 *   phase 2 -> 3   everybody has: the buffer holds the result */
int cr_push(push *p, uint32_t tick, int phase, int until, double scale, int64_t slice_us) {
    team *t = p->ranks;
    if (phase == 0 && until > 0) {
        cr_publish(t, ARRIVED, tick);
        phase = 1;
    }
    if (phase == 1 && until > 1) {
        if (cr_await(t, ARRIVED, tick, slice_us) >= 0) return 1;
        cr_fold(p->kind, p->buffers, t->n, p->buffers, t->n, p->from, p->to, scale);
        cr_publish(t, DONE, tick);
        phase = 2;
    }
    if (phase == 2 && until > 2 && cr_await(t, DONE, tick, slice_us) < 0) phase = 3;
    return phase;
}

/* The handshake of two ranks, `count` times over: for a test that a word is never lost. */
int64_t cr_handshakes(team *t, uint32_t first, int64_t count, int64_t slice_us) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t tick = first + (uint32_t)i;
        cr_publish(t, ARRIVED, tick);
        if (cr_await(t, ARRIVED, tick, slice_us) >= 0) return i;
    }
    return count;
}

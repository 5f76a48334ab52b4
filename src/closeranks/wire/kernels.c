/* int8 in blocks, and products of thin matrices, without Python or torch: in one pass over the values.
 *
 * Loaded with ctypes. Compiled with -ffp-contract=off and without any fast-math, so that every
 * element is the same sequence of rounded operations whatever the width of the machine's vectors,
 * and the same as in int8.py and factors.py, where it is told what the numbers mean.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 256, DEPTH = 12 }; /* a tree over 2^11 sources is 11 deep */
enum { INFINITE = 0x7f800000 };   /* the bits of the smallest magnitude that is not finite */

static const float PER_STEP = 1.0f / 127, PER_STEP_MARKED = 1.0f / 126;
static const float SCALE_MIN = 1.17549435e-38f; /* the smallest normal float32 */
static const float ROUND = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, ties to even */

/* One function for several machines; the linker's choice. Elsewhere the compiler's own default. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define FOR_EVERY_MACHINE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EVERY_MACHINE
#endif

int cw_version(void) { return 1; }

static inline int32_t bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float from_bits(int32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline float scale_for(float largest, float per_step) {
    float scale = largest * per_step;
    return scale < SCALE_MIN ? SCALE_MIN : scale;
}

/* A block in which something is not finite. Its scale is negative, which marks it. */
static float encode_marked(float *values, float *residual, int8_t *codes, int count) {
    float largest = 0;
    for (int i = 0; i < count; i++) {
        float magnitude = from_bits(bits_of(values[i]) & 0x7fffffff);
        if (bits_of(magnitude) < INFINITE && magnitude > largest) largest = magnitude;
    }
    float scale = scale_for(largest, PER_STEP_MARKED), inverse = 1.0f / scale;
    for (int i = 0; i < count; i++) {
        int32_t magnitude = bits_of(values[i]) & 0x7fffffff;
        float error = 0;
        if (magnitude > INFINITE) {
            codes[i] = -128;
        } else if (magnitude == INFINITE) {
            codes[i] = values[i] > 0 ? 127 : -127;
        } else {
            float rounded = values[i] * inverse + ROUND;
            codes[i] = (int8_t)bits_of(rounded);
            error = values[i] - (rounded - ROUND) * scale;
        }
        if (residual) residual[i] = error;
    }
    return -scale;
}

/* values + residual into codes and one scale for each block; the residual becomes what is lost. */
FOR_EVERY_MACHINE void cw_int8_encode(const float *restrict values, float *restrict residual,
                                      int8_t *restrict codes, float *restrict scales,
                                      int64_t count) {
    float given[BLOCK];
    for (int64_t at = 0; at < count; at += BLOCK, scales++) {
        int length = count - at < BLOCK ? (int)(count - at) : BLOCK;
        int32_t top = 0;
        if (residual)
            for (int i = 0; i < length; i++) given[i] = residual[at + i] + values[at + i];
        else
            memcpy(given, values + at, length * sizeof(float));
        for (int i = 0; i < length; i++) {
            int32_t magnitude = bits_of(given[i]) & 0x7fffffff;
            top = magnitude > top ? magnitude : top;
        }
        if (top >= INFINITE) {
            *scales = encode_marked(given, residual ? residual + at : NULL, codes + at, length);
            continue;
        }
        float scale = scale_for(from_bits(top), PER_STEP), inverse = 1.0f / scale;
        *scales = scale;
        for (int i = 0; i < length; i++) codes[at + i] = (int8_t)bits_of(given[i] * inverse + ROUND);
        if (residual)
            for (int i = 0; i < length; i++) {
                float rounded = given[i] * inverse + ROUND;
                residual[at + i] = given[i] - (rounded - ROUND) * scale;
            }
    }
}

static void decode_marked(const int8_t *codes, float scale, float *out, int count) {
    for (int i = 0; i < count; i++) {
        if (codes[i] == -128)
            out[i] = from_bits(0x7fc00000);
        else if (codes[i] == 127 || codes[i] == -127)
            out[i] = codes[i] > 0 ? from_bits(INFINITE) : -from_bits(INFINITE);
        else
            out[i] = (float)codes[i] * -scale;
    }
}

FOR_EVERY_MACHINE static void decode_plain(const int8_t *restrict codes, float scale,
                                           float *restrict out, int count) {
    for (int i = 0; i < count; i++) out[i] = (float)codes[i] * scale;
}

FOR_EVERY_MACHINE static void add(float *restrict out, const float *restrict more, int count) {
    for (int i = 0; i < count; i++) out[i] = out[i] + more[i];
}

static void decode(const int8_t *codes, float scale, float *out, int count) {
    if (bits_of(scale) < 0)
        decode_marked(codes, scale, out, count);
    else
        decode_plain(codes, scale, out, count);
}

/* The sum over sources [lo, hi) of one block, in the order of the tree. */
static void tree(float (*sums)[BLOCK], int8_t *const *codes, float *const *scales, int lo, int hi,
                 int64_t block, int count) {
    if (hi - lo == 1) {
        decode(codes[lo] + block * BLOCK, scales[lo][block], sums[0], count);
        return;
    }
    int half = 1;
    while (2 * half < hi - lo) half *= 2;
    tree(sums, codes, scales, lo, lo + half, block, count);
    tree(sums + 1, codes, scales, lo + half, hi, block, count);
    add(sums[0], sums[1], count);
}

FOR_EVERY_MACHINE static void sum_two(const int8_t *restrict a, float of_a, const int8_t *restrict b,
                                      float of_b, float scale, float *restrict out, int count) {
    for (int i = 0; i < count; i++) out[i] = ((float)a[i] * of_a + (float)b[i] * of_b) * scale;
}

FOR_EVERY_MACHINE static void store(const float *restrict sum, float scale, float *restrict out,
                                    int count) {
    for (int i = 0; i < count; i++) out[i] = sum[i] * scale;
}

/* The sum of what n encodings hold, times scale. */
void cw_int8_sum(int8_t *const *codes, float *const *scales, int n, float scale, float *out,
                 int64_t count) {
    float sums[DEPTH][BLOCK];
    for (int64_t at = 0, block = 0; at < count; at += BLOCK, block++) {
        int length = count - at < BLOCK ? (int)(count - at) : BLOCK;
        if (n == 2 && bits_of(scales[0][block]) >= 0 && bits_of(scales[1][block]) >= 0) {
            sum_two(codes[0] + at, scales[0][block], codes[1] + at, scales[1][block], scale,
                    out + at, length);
        } else {
            tree(sums, codes, scales, 0, n, block, length);
            store(sums[0], scale, out + at, length);
        }
    }
}

/* Row i of out becomes the sum over k, in order, of left[i][k] * right[k]; `rank` terms. */
FOR_EVERY_MACHINE void cw_product(const float *restrict left, const float *restrict right,
                                  int64_t rows, int64_t cols, int rank, float *restrict out) {
    for (int64_t row = 0; row < rows; row++, left += rank, out += cols) {
        for (int64_t from = 0; from < cols; from += BLOCK) {
            int64_t to = cols - from < BLOCK ? cols : from + BLOCK;
            for (int64_t i = from; i < to; i++) out[i] = left[0] * right[i];
            for (int k = 1; k < rank; k++)
                for (int64_t i = from; i < to; i++) out[i] = out[i] + left[k] * right[k * cols + i];
        }
    }
}

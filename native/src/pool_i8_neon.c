/* Sum of int8 rows, 16 columns an instruction pair. armv8-a baseline: no extra compiler flag. */
#include <arm_neon.h>

#include "bytes.h"
#include "wh_kernels.h"

#define LANES ((size_t)16)
/* An int16 lane holds 256 rows: 256 * -128 = -32768, 256 * 127 = 32512. */
#define ROWS_PER_CHUNK ((size_t)256)

static inline void add_to_i32(unsigned char *pooled, int16x8_t sum_i16x8) {
    int32_t sum[8];
    memcpy(sum, pooled, sizeof sum);
    vst1q_s32(sum, vaddw_s16(vld1q_s32(sum), vget_low_s16(sum_i16x8)));
    vst1q_s32(sum + 4, vaddw_s16(vld1q_s32(sum + 4), vget_high_s16(sum_i16x8)));
    memcpy(pooled, sum, sizeof sum);
}

/* `table` points at the first of the sixteen columns; `stride` is the row length. saddw widens as it adds. */
static void add_lanes(const int8_t *table, size_t stride, const unsigned char *ids, size_t n_ids,
                      unsigned char *pooled) {
    int16x8_t low_i16x8 = vdupq_n_s16(0);
    int16x8_t high_i16x8 = vdupq_n_s16(0);
    for (size_t i = 0; i < n_ids; i++) {
        const int8x16_t row_i8x16 = vld1q_s8(table + (size_t)wh_load_i32(ids, i) * stride);
        low_i16x8 = vaddw_s8(low_i16x8, vget_low_s8(row_i8x16));
        high_i16x8 = vaddw_s8(high_i16x8, vget_high_s8(row_i8x16));
    }
    add_to_i32(pooled, low_i16x8);
    add_to_i32(pooled + 8 * sizeof(int32_t), high_i16x8);
}

static void add_column(const int8_t *table, size_t stride, const unsigned char *ids, size_t n_ids,
                       unsigned char *pooled) {
    int32_t sum = wh_load_i32(pooled, 0);
    for (size_t i = 0; i < n_ids; i++) {
        sum += table[(size_t)wh_load_i32(ids, i) * stride];
    }
    wh_store_i32(pooled, 0, sum);
}

enum wh_status wh_pool_i8_neon(const int8_t *restrict table, size_t vocab_size, size_t dim,
                               const unsigned char *restrict ids, size_t n_ids, unsigned char *restrict pooled) {
    for (size_t i = 0; i < n_ids; i++) {
        const int32_t id = wh_load_i32(ids, i);
        if (id < 0 || (size_t)id >= vocab_size) {
            return WH_ERR_INDEX;
        }
    }
    memset(pooled, 0, dim * sizeof(int32_t));
    for (size_t done = 0; done < n_ids; done += ROWS_PER_CHUNK) {
        const size_t count = n_ids - done < ROWS_PER_CHUNK ? n_ids - done : ROWS_PER_CHUNK;
        const unsigned char *chunk = ids + done * sizeof(int32_t);
        size_t column = 0;
        for (; dim - column >= LANES; column += LANES) {
            add_lanes(table + column, dim, chunk, count, pooled + column * sizeof(int32_t));
        }
        for (; column < dim; column++) {
            add_column(table + column, dim, chunk, count, pooled + column * sizeof(int32_t));
        }
    }
    return WH_OK;
}

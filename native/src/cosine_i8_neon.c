/* Cosine to int8 prototypes, 16 columns a step. armv8-a baseline: no extra compiler flag. */
#include <arm_neon.h>

#include "cosine_i8_narrow.h"

#define LANES ((size_t)16)

/* smlal: four 16-bit products added to four int32; two chains of accumulators hide its latency. */
static inline int64_t dot_i16_i8(const int16_t *query, const int8_t *prototype, size_t dim) {
    int32x4_t low_i32x4 = vdupq_n_s32(0);
    int32x4_t high_i32x4 = vdupq_n_s32(0);
    size_t j = 0;
    for (; dim - j >= LANES; j += LANES) {
        const int8x16_t row_i8x16 = vld1q_s8(prototype + j);
        const int16x8_t first_i16x8 = vmovl_s8(vget_low_s8(row_i8x16));
        const int16x8_t second_i16x8 = vmovl_s8(vget_high_s8(row_i8x16));
        const int16x8_t query_first_i16x8 = vld1q_s16(query + j);
        const int16x8_t query_second_i16x8 = vld1q_s16(query + j + 8);
        low_i32x4 = vmlal_s16(low_i32x4, vget_low_s16(query_first_i16x8), vget_low_s16(first_i16x8));
        high_i32x4 = vmlal_s16(high_i32x4, vget_high_s16(query_first_i16x8), vget_high_s16(first_i16x8));
        low_i32x4 = vmlal_s16(low_i32x4, vget_low_s16(query_second_i16x8), vget_low_s16(second_i16x8));
        high_i32x4 = vmlal_s16(high_i32x4, vget_high_s16(query_second_i16x8), vget_high_s16(second_i16x8));
    }
    int64_t sum = vaddlvq_s32(low_i32x4) + vaddlvq_s32(high_i32x4);
    for (; j < dim; j++) {
        sum += (int64_t)query[j] * prototype[j];
    }
    return sum;
}

enum wh_status wh_cosine_i8_neon(const unsigned char *restrict pooled, const int8_t *restrict prototypes,
                                 const unsigned char *restrict norms, size_t n, size_t dim,
                                 unsigned char *restrict cosines) {
    const struct wh_query query = wh_query_measure(pooled, dim);
    if (!query.in_range) {
        return WH_ERR_RANGE;
    }
    if (!wh_query_fits_i16(query, dim)) {
        return wh_cosine_i8_serial(pooled, prototypes, norms, n, dim, cosines);
    }
    int16_t narrow[WH_NARROW_DIM_MAX];
    wh_narrow_query(pooled, dim, narrow);
    for (size_t i = 0; i < n; i++) {
        const int64_t dot = dot_i16_i8(narrow, prototypes + i * dim, dim);
        wh_store_f64(cosines, i, wh_cosine_finish(dot, query.norm, wh_load_f64(norms, i)));
    }
    return WH_OK;
}

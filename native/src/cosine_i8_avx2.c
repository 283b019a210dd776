/* Cosine to int8 prototypes, 16 columns an instruction. Built with -mavx2; reached only through dispatch.c. */
#include <immintrin.h>

#include "cosine_i8_narrow.h"

#define LANES ((size_t)16)

/* In int64: a lane holds up to 2^29 and there are eight. */
static inline int64_t horizontal_sum(__m256i sum_i32x8) {
    const __m256i low_i64x4 = _mm256_cvtepi32_epi64(_mm256_castsi256_si128(sum_i32x8));
    const __m256i high_i64x4 = _mm256_cvtepi32_epi64(_mm256_extracti128_si256(sum_i32x8, 1));
    const __m256i sum_i64x4 = _mm256_add_epi64(low_i64x4, high_i64x4);
    const __m128i sum_i64x2 = _mm_add_epi64(_mm256_castsi256_si128(sum_i64x4), _mm256_extracti128_si256(sum_i64x4, 1));
    return _mm_cvtsi128_si64(_mm_add_epi64(sum_i64x2, _mm_unpackhi_epi64(sum_i64x2, sum_i64x2)));
}

/* vpmaddwd: sixteen 16-bit products, added in pairs to eight int32. */
static inline int64_t dot_i16_i8(const int16_t *query, const int8_t *prototype, size_t dim) {
    __m256i sum_i32x8 = _mm256_setzero_si256();
    size_t j = 0;
    for (; dim - j >= LANES; j += LANES) {
        const __m256i query_i16x16 = _mm256_loadu_si256((const __m256i *)(const void *)(query + j));
        const __m256i row_i16x16 =
            _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)(prototype + j)));
        sum_i32x8 = _mm256_add_epi32(sum_i32x8, _mm256_madd_epi16(query_i16x16, row_i16x16));
    }
    int64_t sum = horizontal_sum(sum_i32x8);
    for (; j < dim; j++) {
        sum += (int64_t)query[j] * prototype[j];
    }
    return sum;
}

enum wh_status wh_cosine_i8_avx2(const unsigned char *restrict pooled, const int8_t *restrict prototypes,
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

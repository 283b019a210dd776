/* Sums of scaled rows and dot products with rows, built with -mavx2: the same additions, eight lanes at a time. */
#include <immintrin.h>

#include "row_math_f32.h"

#include "dense_head_f32.h"

/* As dot_row, whose 16 sums the compiler keeps in memory: written there in halves and read back whole, each step waits
 * for the one before. */
static inline float dot_row_x16(const unsigned char *restrict a, const unsigned char *restrict b, size_t n) {
    __m256 low_f32x8 = _mm256_setzero_ps();
    __m256 high_f32x8 = _mm256_setzero_ps();
    size_t i = 0;
    for (; i + DOT_LANES <= n; i += DOT_LANES) {
        const float *left = (const float *)(const void *)(a + i * sizeof(float)); /* loadu: nothing is aligned */
        const float *right = (const float *)(const void *)(b + i * sizeof(float));
        low_f32x8 = _mm256_add_ps(low_f32x8, _mm256_mul_ps(_mm256_loadu_ps(left), _mm256_loadu_ps(right)));
        high_f32x8 = _mm256_add_ps(high_f32x8, _mm256_mul_ps(_mm256_loadu_ps(left + 8), _mm256_loadu_ps(right + 8)));
    }
    if (i < n) {
        float sum_x16[DOT_LANES];
        _mm256_storeu_ps(sum_x16, low_f32x8);
        _mm256_storeu_ps(sum_x16 + 8, high_f32x8);
        for (size_t lane = 0; i < n; i++, lane++) {
            sum_x16[lane] += wh_load_f32(a, i) * wh_load_f32(b, i);
        }
        low_f32x8 = _mm256_loadu_ps(sum_x16);
        high_f32x8 = _mm256_loadu_ps(sum_x16 + 8);
    }
    const __m256 sum_f32x8 = _mm256_add_ps(low_f32x8, high_f32x8);
    const __m128 sum_f32x4 = _mm_add_ps(_mm256_castps256_ps128(sum_f32x8), _mm256_extractf128_ps(sum_f32x8, 1));
    const __m128 sum_f32x2 = _mm_add_ps(sum_f32x4, _mm_movehl_ps(sum_f32x4, sum_f32x4));
    return _mm_cvtss_f32(_mm_add_ss(sum_f32x2, _mm_movehdup_ps(sum_f32x2)));
}

void wh_add_rows_f32_avx2(float *restrict out, const float *restrict x, const unsigned char *restrict rows,
                          size_t n_rows, size_t n_columns) {
    add_rows(out, x, rows, n_rows, n_columns);
}

void wh_dot_rows_f32_avx2(const unsigned char *restrict vector, const unsigned char *restrict rows, size_t n,
                          size_t dim, unsigned char *restrict dots) {
    for (size_t i = 0; i < n; i++) {
        wh_store_f64(dots, i, (double)dot_row_x16(vector, rows + i * dim * sizeof(float), dim));
    }
}

void wh_project_f32_avx2(const unsigned char *restrict vector, const unsigned char *restrict rows, size_t dim,
                         size_t n_columns, unsigned char *restrict product) {
    project_rows(vector, rows, dim, n_columns, product);
}

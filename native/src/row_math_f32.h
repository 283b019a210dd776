/* Two loops over rows of floats, compiled once per instruction set by the files that include this one.
 *
 * The order of the additions is written down here, so the compiler may use wider registers without changing a bit. */
#ifndef WH_ROW_MATH_F32_H
#define WH_ROW_MATH_F32_H

#include "bytes.h"
#include "wh_kernels.h"

/* Partial sums of a dot product that run side by side: two AVX registers' worth. */
#define DOT_LANES ((size_t)16)

static inline float dot_row(const unsigned char *restrict a, const unsigned char *restrict b, size_t n) {
    float sum_x16[DOT_LANES] = {0};
    size_t i = 0;
    for (; i + DOT_LANES <= n; i += DOT_LANES) {
        float a_x16[DOT_LANES];
        float b_x16[DOT_LANES];
        memcpy(a_x16, a + i * sizeof(float), sizeof a_x16);
        memcpy(b_x16, b + i * sizeof(float), sizeof b_x16);
        for (size_t lane = 0; lane < DOT_LANES; lane++) {
            sum_x16[lane] += a_x16[lane] * b_x16[lane];
        }
    }
    for (size_t lane = 0; i < n; i++, lane++) {
        sum_x16[lane] += wh_load_f32(a, i) * wh_load_f32(b, i);
    }
    for (size_t width = DOT_LANES / 2; width != 0; width /= 2) {
        for (size_t lane = 0; lane < width; lane++) {
            sum_x16[lane] += sum_x16[lane + width];
        }
    }
    return sum_x16[0];
}

static inline void dot_rows(const unsigned char *restrict vector, const unsigned char *restrict rows, size_t n,
                            size_t dim, unsigned char *restrict dots) {
    for (size_t i = 0; i < n; i++) {
        wh_store_f64(dots, i, (double)dot_row(vector, rows + i * dim * sizeof(float), dim));
    }
}

/* Columns whose sums stay in registers while the rows go by. */
#define PROJECT_LANES ((size_t)48)

/* product[j] = sum over i of vector[i] * rows[i][j], in the order of i. */
static inline void project_rows(const unsigned char *restrict vector, const unsigned char *restrict rows, size_t dim,
                                size_t n_columns, unsigned char *restrict product) {
    for (size_t start = 0; start < n_columns; start += PROJECT_LANES) {
        const size_t width = n_columns - start < PROJECT_LANES ? n_columns - start : PROJECT_LANES;
        float sum[PROJECT_LANES] = {0};
        for (size_t i = 0; i < dim; i++) {
            const float factor = wh_load_f32(vector, i);
            const unsigned char *row = rows + (i * n_columns + start) * sizeof(float);
            if (width == PROJECT_LANES) {
                for (size_t j = 0; j < PROJECT_LANES; j++) {
                    sum[j] += factor * wh_load_f32(row, j);
                }
            } else {
                for (size_t j = 0; j < width; j++) {
                    sum[j] += factor * wh_load_f32(row, j);
                }
            }
        }
        memcpy(product + start * sizeof(float), sum, width * sizeof(float));
    }
}

#endif

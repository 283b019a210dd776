/* The gate's dense head, one request at a time; compiled once per instruction set by the two files that include it.
 *
 * Every product of a vector and a matrix is a sum of scaled rows, added in the order of the rows: the compiler may put
 * neighbouring columns into one register without changing a single result, so serial and AVX2 agree bit for bit. Zero
 * inputs are skipped four at a time; they would add +0 or -0. */
#ifndef WH_DENSE_HEAD_F32_H
#define WH_DENSE_HEAD_F32_H

#include "bytes.h"
#include "wh_kernels.h"

/* out[j] += sum over i of x[i] * rows[i][j], in the order of i. Four rows a pass: the sum stays in a register for as
 * long, so that a row does not wait for the store of the one before it. */
static inline void add_rows(float *restrict out, const float *restrict x, const unsigned char *restrict rows,
                            size_t n_rows, size_t n_columns) {
    const size_t stride = n_columns * sizeof(float);
    size_t i = 0;
    for (; i + 4 <= n_rows; i += 4) {
        const float a = x[i];
        const float b = x[i + 1];
        const float c = x[i + 2];
        const float d = x[i + 3];
        if (a == 0.0F && b == 0.0F && c == 0.0F && d == 0.0F) {
            continue;
        }
        const unsigned char *row = rows + i * stride;
        for (size_t j = 0; j < n_columns; j++) {
            float sum = out[j];
            sum += a * wh_load_f32(row, j);
            sum += b * wh_load_f32(row + stride, j);
            sum += c * wh_load_f32(row + 2 * stride, j);
            sum += d * wh_load_f32(row + 3 * stride, j);
            out[j] = sum;
        }
    }
    for (; i < n_rows; i++) {
        const float factor = x[i];
        const unsigned char *row = rows + i * stride;
        for (size_t j = 0; j < n_columns; j++) {
            out[j] += factor * wh_load_f32(row, j);
        }
    }
}

static inline void load_all(float *restrict out, const unsigned char *restrict from, size_t n) {
    memcpy(out, from, n * sizeof(float));
}

static inline float positive(float value) { return value > 0.0F ? value : 0.0F; }

/* Projects the rows of `dense`; `row` is room for one of them. */
static inline enum wh_status project(const struct wh_dense_head *head, const unsigned char *dense, float *row,
                                     float *projected) {
    const size_t p = head->n_projected_columns;
    memset(projected, 0, head->n_projections * p * sizeof(float));
    for (size_t k = 0; k < head->n_projections; k++) {
        const int32_t source = wh_load_i32(head->projected_rows, k);
        if (source < 0 || (size_t)source >= head->n_dense_rows) {
            return WH_ERR_INDEX;
        }
        load_all(row, dense + (size_t)source * head->dim * sizeof(float), head->dim);
        add_rows(projected + k * p, row, head->projection + k * head->dim * p * sizeof(float), head->dim, p);
    }
    return WH_OK;
}

/* Scalar units, then rectified projections, then products of projections: the input of the hidden layer. */
static inline enum wh_status join(const struct wh_dense_head *head, const unsigned char *scalars, float *row,
                                  const float *projected, float *joined) {
    const size_t p = head->n_projected_columns;
    for (size_t i = 0; i < head->n_scalars; i++) {
        const float x = (wh_load_f32(scalars, i) - wh_load_f32(head->mean, i)) * wh_load_f32(head->scale, i);
        const float low = x < head->limit ? x : head->limit;
        row[i] = low > -head->limit ? low : -head->limit;
    }
    load_all(joined, head->scalar_bias, head->n_scalar_units);
    add_rows(joined, row, head->scalar_weight, head->n_scalars, head->n_scalar_units);
    for (size_t j = 0; j < head->n_scalar_units; j++) {
        joined[j] = positive(joined[j]);
    }
    float *at = joined + head->n_scalar_units;
    for (size_t k = 0; k < head->n_alone; k++, at += p) {
        const int32_t from = wh_load_i32(head->alone, k);
        if (from < 0 || (size_t)from >= head->n_projections) {
            return WH_ERR_INDEX;
        }
        for (size_t j = 0; j < p; j++) {
            at[j] = positive(projected[(size_t)from * p + j]);
        }
    }
    for (size_t k = 0; k < head->n_pairs; k++, at += p) {
        const int32_t left = wh_load_i32(head->left, k);
        const int32_t right = wh_load_i32(head->right, k);
        if (left < 0 || (size_t)left >= head->n_projections || right < 0 || (size_t)right >= head->n_projections) {
            return WH_ERR_INDEX;
        }
        for (size_t j = 0; j < p; j++) {
            at[j] = projected[(size_t)left * p + j] * projected[(size_t)right * p + j];
        }
    }
    return WH_OK;
}

static inline enum wh_status dense_head(const struct wh_dense_head *head, const unsigned char *scalars,
                                        const unsigned char *dense, float *scratch, unsigned char *logits) {
    const size_t n_joined = head->n_scalar_units + head->n_projected_columns * (head->n_alone + head->n_pairs);
    float *row = scratch;
    float *projected = row + (head->dim > head->n_scalars ? head->dim : head->n_scalars);
    float *joined = projected + head->n_projections * head->n_projected_columns;
    float *hidden = joined + n_joined;
    float *out = hidden + head->n_hidden;
    enum wh_status status = project(head, dense, row, projected);
    if (status == WH_OK) {
        status = join(head, scalars, row, projected, joined);
    }
    if (status != WH_OK) {
        return status;
    }
    load_all(hidden, head->hidden_bias, head->n_hidden);
    add_rows(hidden, joined, head->hidden_weight, n_joined, head->n_hidden);
    for (size_t j = 0; j < head->n_hidden; j++) {
        hidden[j] = positive(hidden[j]);
    }
    load_all(out, head->out_bias, head->n_classes);
    add_rows(out, hidden, head->out_weight, head->n_hidden, head->n_classes);
    for (size_t c = 0; c < head->n_classes; c++) {
        wh_store_f64(logits, c, (double)out[c]);
    }
    return WH_OK;
}

#endif

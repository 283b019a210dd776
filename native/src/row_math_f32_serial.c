/* Sums of scaled rows and dot products with rows. Read as the specification. */
#include "row_math_f32.h"

#include "dense_head_f32.h"

void wh_add_rows_f32_serial(float *restrict out, const float *restrict x, const unsigned char *restrict rows,
                            size_t n_rows, size_t n_columns) {
    add_rows(out, x, rows, n_rows, n_columns);
}

void wh_dot_rows_f32_serial(const unsigned char *restrict vector, const unsigned char *restrict rows, size_t n,
                            size_t dim, unsigned char *restrict dots) {
    dot_rows(vector, rows, n, dim, dots);
}

void wh_project_f32_serial(const unsigned char *restrict vector, const unsigned char *restrict rows, size_t dim,
                           size_t n_columns, unsigned char *restrict product) {
    project_rows(vector, rows, dim, n_columns, product);
}

/* Sum of float32 rows in double, in the order given. Read as the specification.
 *
 * No vector file: a row is 4 to 16 columns, the compiler vectorises the inner loop where it is wider, and the loads are
 * what costs. */
#include "bytes.h"
#include "wh_kernels.h"

enum wh_status wh_gather_sum_f32_serial(const unsigned char *restrict weights, size_t n_buckets, size_t n_columns,
                                        const unsigned char *restrict buckets, size_t n, unsigned char *restrict sums) {
    for (size_t i = 0; i < n; i++) {
        if (wh_load_u32(buckets, i) >= n_buckets) {
            return WH_ERR_INDEX;
        }
    }
    memset(sums, 0, n_columns * sizeof(double));
    for (size_t i = 0; i < n; i++) {
        const unsigned char *row = weights + (size_t)wh_load_u32(buckets, i) * n_columns * sizeof(float);
        for (size_t c = 0; c < n_columns; c++) {
            wh_store_f64(sums, c, wh_load_f64(sums, c) + (double)wh_load_f32(row, c));
        }
    }
    return WH_OK;
}

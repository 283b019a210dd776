/* Sum of int8 rows in int32. Read as the specification. */
#include "bytes.h"
#include "wh_kernels.h"

/* Columns held in registers or first-level cache while the rows go by; a width, not a limit. */
#define BLOCK ((size_t)64)

enum wh_status wh_pool_i8_serial(const int8_t *restrict table, size_t vocab_size, size_t dim,
                                 const unsigned char *restrict ids, size_t n_ids, unsigned char *restrict pooled) {
    for (size_t i = 0; i < n_ids; i++) {
        const int32_t id = wh_load_i32(ids, i);
        if (id < 0 || (size_t)id >= vocab_size) {
            return WH_ERR_INDEX;
        }
    }
    for (size_t start = 0; start < dim; start += BLOCK) {
        const size_t width = dim - start < BLOCK ? dim - start : BLOCK;
        int32_t sum[BLOCK] = {0};
        for (size_t i = 0; i < n_ids; i++) {
            const int8_t *row = table + (size_t)wh_load_i32(ids, i) * dim + start;
            for (size_t j = 0; j < width; j++) {
                sum[j] += row[j];
            }
        }
        memcpy(pooled + start * sizeof(int32_t), sum, width * sizeof(int32_t));
    }
    return WH_OK;
}

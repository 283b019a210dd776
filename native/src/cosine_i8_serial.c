/* Cosine of one pooled vector to int8 prototypes. Read as the specification. */
#include "cosine_i8.h"

enum wh_status wh_cosine_i8_serial(const unsigned char *restrict pooled, const int8_t *restrict prototypes,
                                   const unsigned char *restrict norms, size_t n, size_t dim,
                                   unsigned char *restrict cosines) {
    const struct wh_query query = wh_query_measure(pooled, dim);
    if (!query.in_range) {
        return WH_ERR_RANGE;
    }
    for (size_t i = 0; i < n; i++) {
        const int8_t *prototype = prototypes + i * dim;
        int64_t dot = 0;
        for (size_t j = 0; j < dim; j++) {
            dot += (int64_t)wh_load_i32(pooled, j) * prototype[j];
        }
        wh_store_f64(cosines, i, wh_cosine_finish(dot, query.norm, wh_load_f64(norms, i)));
    }
    return WH_OK;
}

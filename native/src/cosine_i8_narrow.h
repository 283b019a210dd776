/* The query as int16, for the vector files: vpmaddwd and vmlal_s16 multiply 16-bit lanes.
 *
 * A pooled text of up to 255 tokens always fits int16 and real ones far beyond that do. A query that does not fit, or
 * is longer than the buffer, takes the serial kernel: same result, only slower. */
#ifndef WH_COSINE_I8_NARROW_H
#define WH_COSINE_I8_NARROW_H

#include "cosine_i8.h"

/* 2 KiB of stack; the shipped table has 256 columns.
 * Also the overflow bound of the int32 lanes: a product is at most 32767 * 128 < 2^22, and both vector files have eight
 * lanes and so add two products a lane for every 16 columns: 1024 / 16 * 2 * 2^22 = 2^29. The lanes meet in int64. */
#define WH_NARROW_DIM_MAX ((size_t)1024)

static inline bool wh_query_fits_i16(struct wh_query query, size_t dim) {
    return query.abs_max <= INT16_MAX && dim <= WH_NARROW_DIM_MAX;
}

static inline void wh_narrow_query(const unsigned char *pooled, size_t dim, int16_t *narrow) {
    for (size_t j = 0; j < dim; j++) {
        narrow[j] = (int16_t)wh_load_i32(pooled, j);
    }
}

#endif

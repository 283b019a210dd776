/* What the serial and the vector files share: the norm of the query and the last line. */
#ifndef WH_COSINE_I8_H
#define WH_COSINE_I8_H

#include <math.h>
#include <stdbool.h>

#include "bytes.h"
#include "wh_kernels.h"

struct wh_query {
    double norm;      /* sqrt of the exact integer sum of squares */
    int32_t abs_max;  /* largest magnitude */
    bool in_range;    /* abs_max <= WH_COSINE_POOLED_MAX, so that no sum below can overflow */
};

static inline struct wh_query wh_query_measure(const unsigned char *pooled, size_t dim) {
    int64_t squares = 0;
    int32_t abs_max = 0;
    for (size_t j = 0; j < dim; j++) {
        const int32_t value = wh_load_i32(pooled, j);
        if (value < -WH_COSINE_POOLED_MAX || value > WH_COSINE_POOLED_MAX) {
            return (struct wh_query){0.0, 0, false};
        }
        const int32_t magnitude = value < 0 ? -value : value;
        abs_max = magnitude > abs_max ? magnitude : abs_max;
        squares += (int64_t)value * value;
    }
    return (struct wh_query){sqrt((double)squares), abs_max, true};
}

static inline double wh_cosine_finish(int64_t dot, double query_norm, double norm) {
    if (query_norm == 0.0 || norm == 0.0) {
        return 0.0;
    }
    return (double)dot / (query_norm * norm);
}

#endif

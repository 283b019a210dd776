/* The gate's dense head on the baseline instruction set. */
#include "dense_head_f32.h"

enum wh_status wh_dense_head_f32_serial(const struct wh_dense_head *head, const unsigned char *restrict scalars,
                                        const unsigned char *restrict dense, float *restrict scratch,
                                        unsigned char *restrict logits) {
    return dense_head(head, scalars, dense, scratch, logits);
}

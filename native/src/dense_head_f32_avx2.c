/* The gate's dense head, eight columns a register. Built with -mavx2; reached only through dispatch.c. */
#include "dense_head_f32.h"

enum wh_status wh_dense_head_f32_avx2(const struct wh_dense_head *head, const unsigned char *restrict scalars,
                                      const unsigned char *restrict dense, float *restrict scratch,
                                      unsigned char *restrict logits) {
    return dense_head(head, scalars, dense, scratch, logits);
}

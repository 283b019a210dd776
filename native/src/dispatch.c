/* Which row of kernels runs here. */
#include <string.h>

#include "wh_kernels.h"

#if defined(WH_HAVE_AVX2)
#include <cpuid.h>
#endif

static const struct wh_ops ops_serial = {
    WH_ISA_SERIAL,
    "serial",
    wh_pool_i8_serial,
    wh_cosine_i8_serial,
    wh_gather_sum_f32_serial,
    wh_dense_head_f32_serial,
    wh_add_rows_f32_serial,
    wh_dot_rows_f32_serial,
    wh_project_f32_serial,
};

#if defined(WH_HAVE_AVX2)
static const struct wh_ops ops_avx2 = {
    WH_ISA_AVX2,
    "avx2",
    wh_pool_i8_avx2,
    wh_cosine_i8_avx2,
    wh_gather_sum_f32_serial,
    wh_dense_head_f32_avx2,
    wh_add_rows_f32_avx2,
    wh_dot_rows_f32_avx2,
    wh_project_f32_avx2,
};

/* The processor has AVX2 and the operating system saves the upper register halves on a context switch.
 * Intel SDM vol. 1, 14.3 and 14.7.1: OSXSAVE and AVX in leaf 1, XCR0 bits 1 and 2, then AVX2 in leaf 7. */
static int can_run_avx2(void) {
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) {
        return 0;
    }
    const unsigned needed = bit_OSXSAVE | bit_AVX;
    if ((ecx & needed) != needed) {
        return 0;
    }
    unsigned xcr0_low = 0;
    unsigned xcr0_high = 0;
    __asm__ volatile("xgetbv" : "=a"(xcr0_low), "=d"(xcr0_high) : "c"(0));
    if ((xcr0_low & 0x6U) != 0x6U) {
        return 0;
    }
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & bit_AVX2) != 0;
}
#endif

#if defined(WH_HAVE_NEON)
/* Advanced SIMD is part of the armv8-a baseline: nothing to detect. */
static const struct wh_ops ops_neon = {
    WH_ISA_NEON,
    "neon",
    wh_pool_i8_neon,
    wh_cosine_i8_neon,
    wh_gather_sum_f32_serial,
    wh_dense_head_f32_serial,
    wh_add_rows_f32_serial,
    wh_dot_rows_f32_serial,
    wh_project_f32_serial,
};
#endif

const struct wh_ops *wh_ops_best(void) {
#if defined(WH_HAVE_AVX2)
    if (can_run_avx2()) {
        return &ops_avx2;
    }
#endif
#if defined(WH_HAVE_NEON)
    return &ops_neon;
#else
    return &ops_serial;
#endif
}

const struct wh_ops *wh_ops_named(const char *name) {
    if (strcmp(name, ops_serial.name) == 0) {
        return &ops_serial;
    }
    const struct wh_ops *best = wh_ops_best();
    return strcmp(name, best->name) == 0 ? best : NULL;
}

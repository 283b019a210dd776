/* Sum of int8 rows, 16 columns an instruction. Built with -mavx2; reached only through dispatch.c. */
#include <immintrin.h>

#include "bytes.h"
#include "wh_kernels.h"

#define LANES ((size_t)16)
/* Eight int16 accumulators leave half of the sixteen registers for loads. */
#define REGISTERS 8
#define BLOCK (LANES * REGISTERS)
/* An int16 lane holds 256 rows: 256 * -128 = -32768, 256 * 127 = 32512. */
#define ROWS_PER_CHUNK ((size_t)256)

/* vpmovsxbw: sixteen int8 to sixteen int16. */
static inline __m256i load_row_i16x16(const int8_t *row) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)row));
}

static inline void add_to_i32(unsigned char *pooled, __m256i sum_i16x16) {
    const __m256i low_i32x8 = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(sum_i16x16));
    const __m256i high_i32x8 = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(sum_i16x16, 1));
    __m256i *at = (__m256i *)(void *)pooled;
    _mm256_storeu_si256(at, _mm256_add_epi32(_mm256_loadu_si256(at), low_i32x8));
    _mm256_storeu_si256(at + 1, _mm256_add_epi32(_mm256_loadu_si256(at + 1), high_i32x8));
}

/* `table` points at the first of the 128 (or 16) columns; `stride` is the row length. */
static void add_block(const int8_t *table, size_t stride, const unsigned char *ids, size_t n_ids,
                      unsigned char *pooled) {
    __m256i sum_i16x16[REGISTERS];
    for (int r = 0; r < REGISTERS; r++) {
        sum_i16x16[r] = _mm256_setzero_si256();
    }
    for (size_t i = 0; i < n_ids; i++) {
        const int8_t *row = table + (size_t)wh_load_i32(ids, i) * stride;
        for (int r = 0; r < REGISTERS; r++) {
            sum_i16x16[r] = _mm256_add_epi16(sum_i16x16[r], load_row_i16x16(row + (size_t)r * LANES));
        }
    }
    for (size_t r = 0; r < REGISTERS; r++) {
        add_to_i32(pooled + r * LANES * sizeof(int32_t), sum_i16x16[r]);
    }
}

static void add_lanes(const int8_t *table, size_t stride, const unsigned char *ids, size_t n_ids,
                      unsigned char *pooled) {
    __m256i sum_i16x16 = _mm256_setzero_si256();
    for (size_t i = 0; i < n_ids; i++) {
        sum_i16x16 = _mm256_add_epi16(sum_i16x16, load_row_i16x16(table + (size_t)wh_load_i32(ids, i) * stride));
    }
    add_to_i32(pooled, sum_i16x16);
}

static void add_column(const int8_t *table, size_t stride, const unsigned char *ids, size_t n_ids,
                       unsigned char *pooled) {
    int32_t sum = wh_load_i32(pooled, 0);
    for (size_t i = 0; i < n_ids; i++) {
        sum += table[(size_t)wh_load_i32(ids, i) * stride];
    }
    wh_store_i32(pooled, 0, sum);
}

enum wh_status wh_pool_i8_avx2(const int8_t *restrict table, size_t vocab_size, size_t dim,
                               const unsigned char *restrict ids, size_t n_ids, unsigned char *restrict pooled) {
    for (size_t i = 0; i < n_ids; i++) {
        const int32_t id = wh_load_i32(ids, i);
        if (id < 0 || (size_t)id >= vocab_size) {
            return WH_ERR_INDEX;
        }
    }
    memset(pooled, 0, dim * sizeof(int32_t));
    for (size_t done = 0; done < n_ids; done += ROWS_PER_CHUNK) {
        const size_t count = n_ids - done < ROWS_PER_CHUNK ? n_ids - done : ROWS_PER_CHUNK;
        const unsigned char *chunk = ids + done * sizeof(int32_t);
        size_t column = 0;
        for (; dim - column >= BLOCK; column += BLOCK) {
            add_block(table + column, dim, chunk, count, pooled + column * sizeof(int32_t));
        }
        for (; dim - column >= LANES; column += LANES) {
            add_lanes(table + column, dim, chunk, count, pooled + column * sizeof(int32_t));
        }
        for (; column < dim; column++) {
            add_column(table + column, dim, chunk, count, pooled + column * sizeof(int32_t));
        }
    }
    return WH_OK;
}

/* Random arguments, valid and not, against the contract: a kernel answers with a status and touches nothing outside its
 * buffers. Run under AddressSanitizer (make sanitize). With -DWH_LIBFUZZER it has no main and is a libFuzzer target. */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "wh_kernels.h"

struct source {
    const uint8_t *at;
    size_t left;
};

static uint8_t take_u8(struct source *source) {
    if (source->left == 0) {
        return 0;
    }
    source->left--;
    return *source->at++;
}

/* A heap block of exactly n_bytes filled from the input, repeated as needed. */
static unsigned char *take_block(struct source *source, size_t n_bytes) {
    unsigned char *block = malloc(n_bytes);
    if (block == NULL && n_bytes != 0) {
        abort();
    }
    for (size_t i = 0; i < n_bytes; i++) {
        block[i] = source->left == 0 ? (unsigned char)(i * 37U) : source->at[i % source->left];
    }
    return block;
}

/* Small indices now and then, or nearly everything would be refused at the first element. */
static unsigned char *take_indices(struct source *source, size_t n, uint32_t bound) {
    unsigned char *block = take_block(source, n * sizeof(uint32_t));
    if ((take_u8(source) & 3) != 0 && bound != 0) {
        for (size_t i = 0; i < n; i++) {
            uint32_t value = 0;
            memcpy(&value, block + i * sizeof value, sizeof value);
            value %= bound;
            memcpy(block + i * sizeof value, &value, sizeof value);
        }
    }
    return block;
}

static void fail_if(bool differ) {
    if (differ) {
        fprintf(stderr, "serial and %s differ\n", wh_ops_best()->name);
        abort();
    }
}

/* Bit for bit, but for which NaN: a sum of two takes either's payload, as the compiler orders the operands. */
static void same_f64(const unsigned char *a, const unsigned char *b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        double x = 0.0;
        double y = 0.0;
        memcpy(&x, a + i * sizeof x, sizeof x);
        memcpy(&y, b + i * sizeof y, sizeof y);
        fail_if(memcmp(&x, &y, sizeof x) != 0 && !(isnan(x) && isnan(y)));
    }
}

static void fuzz_pool_and_cosine(struct source *source) {
    const size_t rows = take_u8(source) % 9U;
    const size_t dim = take_u8(source) * (size_t)(1 + take_u8(source) % 5U);
    const size_t n_ids = take_u8(source) * (size_t)(1 + take_u8(source) % 3U);
    unsigned char *ids = take_indices(source, n_ids, (uint32_t)rows);
    unsigned char *table = take_block(source, rows * dim);
    unsigned char *norms = take_block(source, rows * sizeof(double));
    unsigned char *pooled[2] = {take_block(source, dim * sizeof(int32_t)), take_block(source, dim * sizeof(int32_t))};
    unsigned char *cosines[2] = {take_block(source, rows * sizeof(double)), take_block(source, rows * sizeof(double))};
    const struct wh_ops *ops[2] = {wh_ops_named("serial"), wh_ops_best()};
    enum wh_status status[2];
    for (int i = 0; i < 2; i++) { /* first with pooled as it came, then with pooled as computed */
        status[i] = ops[i]->cosine_i8(pooled[i], (const int8_t *)table, norms, rows, dim, cosines[i]);
    }
    if (status[0] != status[1]) {
        abort();
    }
    for (int i = 0; i < 2; i++) {
        status[i] = ops[i]->pool_i8((const int8_t *)table, rows, dim, ids, n_ids, pooled[i]);
    }
    if (status[0] != status[1]) {
        abort();
    }
    if (status[0] == WH_OK) {
        fail_if(memcmp(pooled[0], pooled[1], dim * sizeof(int32_t)) != 0);
        for (int i = 0; i < 2; i++) {
            if (ops[i]->cosine_i8(pooled[i], (const int8_t *)table, norms, rows, dim, cosines[i]) != WH_OK) {
                abort();
            }
        }
        same_f64(cosines[0], cosines[1], rows);
    }
    free(ids);
    free(table);
    free(norms);
    for (int i = 0; i < 2; i++) {
        free(pooled[i]);
        free(cosines[i]);
    }
}

static void fuzz_ngrams(struct source *source) {
    const uint32_t seed = take_u8(source);
    const uint32_t modes = take_u8(source) & WH_NGRAM_ALL;
    const size_t n_buckets = (size_t)1 << (take_u8(source) % 9U);
    const size_t n_columns = take_u8(source) % 6U;
    const size_t n_bytes = take_u8(source) * (size_t)(1 + take_u8(source) % 3U);
    unsigned char *text = take_block(source, n_bytes);
    unsigned char *weights = take_block(source, n_buckets * n_columns * sizeof(float));
    unsigned char *buckets = take_block(source, WH_NGRAMS_PER_BYTE * n_bytes * sizeof(uint32_t));
    unsigned char *sums[2] = {take_block(source, n_columns * sizeof(double)),
                              take_block(source, n_columns * sizeof(double))};
    const size_t count = wh_hash_ngrams(text, n_bytes, seed, (uint32_t)(n_buckets - 1), modes, buckets);
    if (wh_ngram_sum_f32(text, n_bytes, seed, modes, weights, n_buckets, n_columns, sums[0]) != count ||
        wh_gather_sum_f32_serial(weights, n_buckets, n_columns, buckets, count, sums[1]) != WH_OK) {
        abort();
    }
    same_f64(sums[0], sums[1], n_columns);
    free(text);
    free(weights);
    free(buckets);
    free(sums[0]);
    free(sums[1]);
}

static void fuzz_gather(struct source *source) {
    const size_t n_buckets = take_u8(source);
    const size_t n_columns = take_u8(source) % 20U;
    const size_t n = take_u8(source);
    unsigned char *weights = take_block(source, n_buckets * n_columns * sizeof(float));
    unsigned char *buckets = take_indices(source, n, (uint32_t)n_buckets);
    unsigned char *sums = take_block(source, n_columns * sizeof(double));
    (void)wh_gather_sum_f32_serial(weights, n_buckets, n_columns, buckets, n, sums);
    free(weights);
    free(buckets);
    free(sums);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    struct source source = {data, n_bytes};
    static void (*const targets[])(struct source *) = {fuzz_pool_and_cosine, fuzz_ngrams, fuzz_gather};
    targets[take_u8(&source) % 3U](&source);
    return 0;
}

#if !defined(WH_LIBFUZZER)
/* usage: fuzz_kernels [RUNS [SEED]] */
int main(int n_arguments, char **arguments) {
    const unsigned long runs = n_arguments > 1 ? strtoul(arguments[1], NULL, 10) : 10000;
    uint64_t state = n_arguments > 2 ? strtoull(arguments[2], NULL, 10) | 1U : 0x9E3779B97F4A7C15U;
    uint8_t data[96];
    for (unsigned long run = 0; run < runs; run++) {
        for (size_t i = 0; i < sizeof data; i++) {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            data[i] = (uint8_t)((state * 0x2545F4914F6CDD1DU) >> 56);
        }
        LLVMFuzzerTestOneInput(data, state % (sizeof data + 1));
    }
    printf("fuzz: %lu runs, nothing found\n", runs);
    return 0;
}
#endif

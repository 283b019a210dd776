/* The kernels from C: hand-computed values, refusals, and every instruction set against the serial file on buffers of
 * exactly the size the contract names, so that AddressSanitizer sees a read one byte beyond. Exit 0, or 1 at the first
 * failure. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "wh_capture.h"
#include "wh_gate.h"
#include "wh_kernels.h"

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#define BYTES(array) ((unsigned char *)(array))

static uint64_t random_state = 0x9E3779B97F4A7C15U;

/* xorshift64*: the tests need no better. */
static uint32_t random_u32(void) {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (uint32_t)((random_state * 0x2545F4914F6CDD1DU) >> 32);
}

/* A heap block of exactly n_bytes, so that the first byte beyond it is poisoned; n_bytes 0 gives a block of none. */
static void *exact(size_t n_bytes) {
    void *block = malloc(n_bytes);
    CHECK(block != NULL || n_bytes == 0);
    return block;
}

static int8_t *random_i8(size_t n, bool extremes) {
    int8_t *values = exact(n);
    for (size_t i = 0; i < n; i++) {
        const int value = (int)(random_u32() % 255) - 127;
        values[i] = (int8_t)(extremes ? (value < 0 ? -127 : 127) : value);
    }
    return values;
}

static void test_pool_by_hand(const struct wh_ops *ops) {
    const int8_t table[3][2] = {{1, -2}, {100, 127}, {-128, 5}};
    const int32_t ids[4] = {1, 1, 2, 0};
    int32_t pooled[2] = {7, 7};
    CHECK(ops->pool_i8(table[0], 3, 2, BYTES(ids), 4, BYTES(pooled)) == WH_OK);
    CHECK(pooled[0] == 73 && pooled[1] == 257);
    CHECK(ops->pool_i8(table[0], 3, 2, BYTES(ids), 0, BYTES(pooled)) == WH_OK);
    CHECK(pooled[0] == 0 && pooled[1] == 0);
    const int32_t beyond[2] = {0, 3};
    const int32_t negative[1] = {-1};
    CHECK(ops->pool_i8(table[0], 3, 2, BYTES(beyond), 2, BYTES(pooled)) == WH_ERR_INDEX);
    CHECK(ops->pool_i8(table[0], 3, 2, BYTES(negative), 1, BYTES(pooled)) == WH_ERR_INDEX);
    CHECK(ops->pool_i8(table[0], 0, 2, BYTES(beyond), 1, BYTES(pooled)) == WH_ERR_INDEX);
}

static void test_cosine_by_hand(const struct wh_ops *ops) {
    const int32_t pooled[2] = {3, 4};
    const int8_t prototypes[4][2] = {{3, 4}, {-3, -4}, {4, -3}, {0, 0}};
    const double norms[4] = {5.0, 5.0, 5.0, 0.0};
    double cosines[4] = {9.0, 9.0, 9.0, 9.0};
    CHECK(ops->cosine_i8(BYTES(pooled), prototypes[0], BYTES(norms), 4, 2, BYTES(cosines)) == WH_OK);
    CHECK(cosines[0] == 1.0 && cosines[1] == -1.0 && cosines[2] == 0.0 && cosines[3] == 0.0);
    const int32_t zero[2] = {0, 0};
    CHECK(ops->cosine_i8(BYTES(zero), prototypes[0], BYTES(norms), 4, 2, BYTES(cosines)) == WH_OK);
    CHECK(cosines[0] == 0.0);
    const int32_t too_large[2] = {0, WH_COSINE_POOLED_MAX + 1};
    const int32_t too_small[2] = {INT32_MIN, 0};
    CHECK(ops->cosine_i8(BYTES(too_large), prototypes[0], BYTES(norms), 4, 2, BYTES(cosines)) == WH_ERR_RANGE);
    CHECK(ops->cosine_i8(BYTES(too_small), prototypes[0], BYTES(norms), 4, 2, BYTES(cosines)) == WH_ERR_RANGE);
}

static void test_gather_by_hand(const struct wh_ops *ops) {
    const float weights[4][2] = {{0.5F, 1.0F}, {0.25F, -1.0F}, {8.0F, 0.0F}, {-0.125F, 2.0F}};
    const uint32_t buckets[3] = {3, 0, 3};
    double sums[2] = {9.0, 9.0};
    CHECK(ops->gather_sum_f32(BYTES(weights), 4, 2, BYTES(buckets), 3, BYTES(sums)) == WH_OK);
    CHECK(sums[0] == 0.25 && sums[1] == 5.0);
    const uint32_t beyond[1] = {4};
    CHECK(ops->gather_sum_f32(BYTES(weights), 4, 2, BYTES(beyond), 1, BYTES(sums)) == WH_ERR_INDEX);
}

/* Equal results on exact-size, misaligned buffers; widths around every register and block width. */
static void test_against_serial(const struct wh_ops *ops) {
    static const size_t dims[] = {0,  1,  2,   3,   7,   8,   9,   15,  16,  17,  31,  32,   33,  63,
                                  64, 65, 127, 128, 129, 143, 144, 145, 255, 256, 257, 1024, 1025};
    static const size_t counts[] = {0, 1, 2, 3, 255, 256, 257, 600};
    for (size_t d = 0; d < sizeof dims / sizeof dims[0]; d++) {
        const size_t dim = dims[d];
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
            const size_t n = counts[c];
            const size_t rows = 5;
            int8_t *block = random_i8(1 + rows * dim, (c & 1) != 0);
            unsigned char *ids = exact(1 + n * sizeof(int32_t));
            for (size_t i = 0; i < n; i++) {
                /* many times the same row: int16 lanes would overflow if they were not widened in time */
                const int32_t id = (int32_t)(n > 100 && i % 8 != 0 ? 1 : random_u32() % rows);
                memcpy(ids + 1 + i * sizeof id, &id, sizeof id);
            }
            unsigned char *expected = exact(1 + dim * sizeof(int32_t));
            unsigned char *got = exact(1 + dim * sizeof(int32_t));
            CHECK(wh_pool_i8_serial(block + 1, rows, dim, ids + 1, n, expected + 1) == WH_OK);
            CHECK(ops->pool_i8(block + 1, rows, dim, ids + 1, n, got + 1) == WH_OK);
            CHECK(memcmp(expected + 1, got + 1, dim * sizeof(int32_t)) == 0);

            double norms[5] = {1.0, 2.5, 0.0, 3.0, 1e-3};
            double cosines_expected[5];
            double cosines[5];
            CHECK(wh_cosine_i8_serial(expected + 1, block + 1, BYTES(norms), rows, dim, BYTES(cosines_expected)) ==
                  WH_OK);
            CHECK(ops->cosine_i8(expected + 1, block + 1, BYTES(norms), rows, dim, BYTES(cosines)) == WH_OK);
            CHECK(memcmp(cosines_expected, cosines, sizeof cosines) == 0);
            free(block);
            free(ids);
            free(expected);
            free(got);
        }
    }
}

/* The largest query the int16 path takes, and the first one it must not. */
static void test_cosine_at_the_int16_edge(const struct wh_ops *ops) {
    enum { DIM = 1024 };
    int32_t pooled[DIM];
    int8_t prototypes[DIM];
    const double norm = 4.0;
    for (int32_t edge = 32766; edge <= 32769; edge++) {
        for (int sign = -1; sign <= 1; sign += 2) {
            for (int j = 0; j < DIM; j++) {
                pooled[j] = sign * edge;
                prototypes[j] = -128;
            }
            double expected = 0.0;
            double got = 0.0;
            CHECK(wh_cosine_i8_serial(BYTES(pooled), prototypes, BYTES(&norm), 1, DIM, BYTES(&expected)) == WH_OK);
            CHECK(ops->cosine_i8(BYTES(pooled), prototypes, BYTES(&norm), 1, DIM, BYTES(&got)) == WH_OK);
            CHECK(memcmp(&expected, &got, sizeof got) == 0);
            CHECK(sign * got < 0.0);
        }
    }
}

/* Buckets computed once with kernels/reference.py, so that the hash cannot change unnoticed in both. */
static void test_ngrams(void) {
    static const char text[] = "Ab c\xC3\xA9";
    static const uint32_t expected[] = {
#include "ngrams_expected.h"
    };
    uint32_t buckets[5 * (sizeof text - 1)];
    const size_t count =
        wh_hash_ngrams((const uint8_t *)text, sizeof text - 1, 7, (1U << 20) - 1, WH_NGRAM_ALL, BYTES(buckets));
    CHECK(count == sizeof expected / sizeof expected[0]);
    CHECK(memcmp(buckets, expected, sizeof expected) == 0);
    CHECK(wh_hash_ngrams((const uint8_t *)text, 0, 7, 0, WH_NGRAM_ALL, BYTES(buckets)) == 0);
    CHECK(wh_hash_ngrams((const uint8_t *)" -_\n", 4, 7, 0, WH_NGRAM_ALL, BYTES(buckets)) == 0);
    CHECK(wh_hash_ngrams((const uint8_t *)text, sizeof text - 1, 7, 0, 0, BYTES(buckets)) == 0);
}

/* The densest texts reach the bound on the number of n-grams without passing it. */
static void test_ngram_bound(void) {
    for (size_t n = 1; n <= 200; n++) {
        uint8_t *text = exact(n);
        unsigned char *buckets = exact(WH_NGRAMS_PER_BYTE * n * sizeof(uint32_t));
        for (int kind = 0; kind < 4; kind++) {
            for (size_t i = 0; i < n; i++) {
                const uint8_t choices[4] = {'x', (uint8_t)(i & 1 ? ' ' : 'x'), 0x80, (uint8_t)random_u32()};
                text[i] = choices[kind];
            }
            const size_t count = wh_hash_ngrams(text, n, 1, 0xFFFF, WH_NGRAM_ALL, buckets);
            CHECK(count <= WH_NGRAMS_PER_BYTE * n);
            const float weights[2] = {1.0F, 0.5F};
            double sums[1] = {9.0};
            CHECK(wh_ngram_sum_f32(text, n, 1, WH_NGRAM_ALL, BYTES(weights), 2, 1, BYTES(sums)) == count);
            uint32_t bucket = 0;
            double expected = 0.0;
            CHECK(wh_hash_ngrams(text, n, 1, 1, WH_NGRAM_ALL, buckets) == count);
            for (size_t i = 0; i < count; i++) {
                memcpy(&bucket, buckets + i * sizeof bucket, sizeof bucket);
                expected += (double)weights[bucket];
            }
            CHECK(sums[0] == expected);
        }
        free(text);
        free(buckets);
    }
}

/* One scalar unit, one projection of a two-column row, its square; then every set on random weights of odd sizes. */
static void test_dense_head(const struct wh_ops *ops) {
    const float mean[1] = {1.0F};
    const float scale[1] = {2.0F};
    const float scalar_weight[1] = {3.0F};
    const float scalar_bias[1] = {-1.0F};
    const float projection[2] = {1.0F, -2.0F};
    const int32_t zero[1] = {0};
    int32_t row[1] = {1};
    int32_t alone[1] = {0};
    int32_t right[1] = {0};
    const float hidden_weight[3] = {1.0F, 10.0F, 100.0F};
    const float hidden_bias[1] = {0.5F};
    const float out_weight[2] = {1.0F, -1.0F};
    const float out_bias[2] = {0.0F, 0.25F};
    struct wh_dense_head head = {
        .mean = BYTES(mean),
        .scale = BYTES(scale),
        .scalar_weight = BYTES(scalar_weight),
        .scalar_bias = BYTES(scalar_bias),
        .projection = BYTES(projection),
        .projected_rows = BYTES(row),
        .alone = BYTES(alone),
        .left = BYTES(zero),
        .right = BYTES(right),
        .hidden_weight = BYTES(hidden_weight),
        .hidden_bias = BYTES(hidden_bias),
        .out_weight = BYTES(out_weight),
        .out_bias = BYTES(out_bias),
        .limit = 1.5F,
        .n_scalars = 1,
        .n_scalar_units = 1,
        .dim = 2,
        .n_dense_rows = 2,
        .n_projections = 1,
        .n_projected_columns = 1,
        .n_alone = 1,
        .n_pairs = 1,
        .n_hidden = 1,
        .n_classes = 2,
    };
    const float scalars[1] = {9.0F};                       /* (9 - 1) * 2, clipped to 1.5: unit 3.5 */
    const float dense[2][2] = {{7.0F, 7.0F}, {5.0F, 1.0F}}; /* projected: 3, its square 9 */
    float scratch[2 + 1 + 3 + 1 + 2];
    double logits[2];
    CHECK(ops->dense_head_f32(&head, BYTES(scalars), BYTES(dense), scratch, BYTES(logits)) == WH_OK);
    CHECK(logits[0] == 934.0 && logits[1] == -933.75);
    row[0] = 2;
    CHECK(ops->dense_head_f32(&head, BYTES(scalars), BYTES(dense), scratch, BYTES(logits)) == WH_ERR_INDEX);
    row[0] = 0;
    alone[0] = 1;
    CHECK(ops->dense_head_f32(&head, BYTES(scalars), BYTES(dense), scratch, BYTES(logits)) == WH_ERR_INDEX);
    alone[0] = 0;
    right[0] = -1;
    CHECK(ops->dense_head_f32(&head, BYTES(scalars), BYTES(dense), scratch, BYTES(logits)) == WH_ERR_INDEX);
}

static unsigned char *random_f32(size_t n) {
    unsigned char *block = exact(1 + n * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        const float value = (float)((int)(random_u32() % 2001) - 1000) / 500.0F;
        memcpy(block + 1 + i * sizeof value, &value, sizeof value);
    }
    return block;
}

static void test_dense_head_against_serial(const struct wh_ops *ops) {
    static const size_t widths[] = {0, 1, 3, 7, 8, 9, 33};
    for (size_t w = 0; w < sizeof widths / sizeof widths[0]; w++) {
        const size_t n = widths[w];
        const int32_t picks[3] = {0, 2, 1};
        const size_t n_joined = n + n * 5;
        unsigned char *blocks[11] = {
            random_f32(n), random_f32(n),         random_f32(n * n),
            random_f32(n), random_f32(3 * n * n), random_f32(n_joined * n),
            random_f32(n), random_f32(n * 4),     random_f32(4),
            random_f32(n), random_f32(3 * n),
        };
        const struct wh_dense_head head = {
            .mean = blocks[0] + 1,
            .scale = blocks[1] + 1,
            .scalar_weight = blocks[2] + 1,
            .scalar_bias = blocks[3] + 1,
            .projection = blocks[4] + 1,
            .projected_rows = BYTES(picks),
            .alone = BYTES(picks),
            .left = BYTES(picks),
            .right = BYTES(picks + 1),
            .hidden_weight = blocks[5] + 1,
            .hidden_bias = blocks[6] + 1,
            .out_weight = blocks[7] + 1,
            .out_bias = blocks[8] + 1,
            .limit = 1.0F,
            .n_scalars = n,
            .n_scalar_units = n,
            .dim = n,
            .n_dense_rows = 3,
            .n_projections = 3,
            .n_projected_columns = n,
            .n_alone = 3,
            .n_pairs = 2,
            .n_hidden = n,
            .n_classes = 4,
        };
        float *scratch = exact((n + 3 * n + n_joined + n + 4) * sizeof(float));
        double expected[4];
        double got[4];
        CHECK(wh_dense_head_f32_serial(&head, blocks[9] + 1, blocks[10] + 1, scratch, BYTES(expected)) == WH_OK);
        CHECK(ops->dense_head_f32(&head, blocks[9] + 1, blocks[10] + 1, scratch, BYTES(got)) == WH_OK);
        CHECK(memcmp(expected, got, sizeof got) == 0);
        free(scratch);
        for (size_t i = 0; i < sizeof blocks / sizeof blocks[0]; i++) {
            free(blocks[i]);
        }
    }
}

struct fake_tensor {
    const char *name;
    void *data;
    size_t n_bytes;
};

static const char *fake_name(const void *tensor) { return ((const struct fake_tensor *)tensor)->name; }
static size_t fake_bytes(const void *tensor) { return ((const struct fake_tensor *)tensor)->n_bytes; }
static void *fake_data(const void *tensor) { return ((const struct fake_tensor *)tensor)->data; }

/* The ids of a text, in a block of exactly its size, by a vocabulary of 13 tokens. */
static enum wh_status cut(const char *text, int32_t *ids, size_t ids_max, size_t *n_ids) {
    static const char vocabulary[] =
        "[PAD]\n[UNK]\ncafe\n##s\n\xE4\xB8\xAD\n?\n\xE1\x84\x80\n##\xE1\x85\xA1\n##\xE1\x86\xA8\na\nb\n##b"
        "\n\xE2\x80\xA6";
    enum { TOKENS = 13, SLOTS = 32 };
    int32_t offsets[TOKENS + 1];
    int32_t slots[SLOTS];
    const uint8_t *bytes = (const uint8_t *)vocabulary;
    CHECK(wh_wordpiece_index(bytes, sizeof vocabulary - 1, TOKENS, BYTES(offsets), BYTES(slots), SLOTS) == WH_OK);
    const struct wh_vocabulary words = {.text = bytes,
                                        .offsets = BYTES(offsets),
                                        .slots = BYTES(slots),
                                        .n_bytes = sizeof vocabulary - 1,
                                        .n_tokens = TOKENS,
                                        .n_slots = SLOTS,
                                        .unknown = 1};
    const size_t n = strlen(text);
    uint8_t *block = exact(n);
    unsigned char *room = exact(ids_max * sizeof(int32_t));
    memcpy(block, text, n);
    const enum wh_status status = wh_wordpiece(&words, block, n, room, ids_max, n_ids);
    memcpy(ids, room, ids_max * sizeof(int32_t));
    free(block);
    free(room);
    return status;
}

static bool cuts(const char *text, size_t n, const int32_t *expected) {
    int32_t ids[16];
    size_t n_ids = 0;
    return cut(text, ids, 16, &n_ids) == WH_OK && n_ids == n && memcmp(ids, expected, n * sizeof(int32_t)) == 0;
}

static void test_wordpiece(void) {
    CHECK(cuts("CAF\xC3\x89s \xE4\xB8\xAD\xE4\xB8\xAD?", 5, (const int32_t[]){2, 3, 4, 4, 5})); /* É, two ideographs */
    CHECK(cuts("cafe\xCC\x81", 1, (const int32_t[]){2})); /* e and an accent */
    CHECK(cuts("\xEA\xB0\x81", 3, (const int32_t[]){6, 7, 8})); /* a Hangul syllable */
    CHECK(cuts("a\x01"
               "b\xC2\xAD\xC2\xA0[UNK]a\xF0\x9F\x98\x80",
               4, (const int32_t[]){9, 11, 1, 1})); /* what is dropped */
    CHECK(cuts("", 0, (const int32_t[]){0}));
    char marks[2 + 4 * 33 + 1] = "a";
    for (size_t i = 0; i < 33; i++) {
        memcpy(marks + 1 + 4 * i, "\xF0\x9D\x85\xA5", 5);
    }
    int32_t ids[16];
    size_t n_ids = 0;
    CHECK(cut(marks, ids, 16, &n_ids) == WH_ERR_RANGE);
    CHECK(cut(marks + 1 + 4, ids, 16, &n_ids) == WH_OK && n_ids == 1 && ids[0] == 1);
    CHECK(cut("a a a a a", ids, 3, &n_ids) == WH_OK && n_ids == 3);
    CHECK(cut("[MASK]", ids, 16, &n_ids) == WH_ERR_RANGE);
    const char *const broken[] = {"\x80", "a\xC3", "\xE4\xB8", "\xC0\xAF", "\xF4\x90\x80\x80", "\xFF", "\xF0\x9F\x98"};
    for (size_t i = 0; i < sizeof broken / sizeof broken[0]; i++) {
        CHECK(cut(broken[i], ids, 16, &n_ids) == WH_ERR_RANGE);
    }
    for (int run = 0; run < 20000; run++) { /* nothing outside the buffers, whatever the bytes */
        char text[24] = "";
        for (size_t i = 0; i < random_u32() % sizeof text; i++) {
            text[i] = (char)(1 + random_u32() % 255);
        }
        (void)cut(text, ids, random_u32() % 16, &n_ids);
    }
}

static void test_capture(void) {
    char out[4] = "...";
    char data[] = "abcd";
    struct wh_capture capture = {.get_name = fake_name,
                                 .get_bytes = fake_bytes,
                                 .get_data = fake_data,
                                 .out = out,
                                 .out_bytes = sizeof out,
                                 .name = "result_norm"};
    struct fake_tensor other = {"l_out-3", data, 4};
    struct fake_tensor wanted = {"result_norm", data, 4};
    CHECK(!wh_capture_on_node(&other, true, &capture)); /* not asked for */
    CHECK(wh_capture_on_node(&other, false, &capture)); /* and the graph goes on */
    CHECK(wh_capture_on_node(&wanted, true, &capture)); /* asked for */
    CHECK(!wh_capture_on_node(&wanted, false, &capture)); /* and the graph ends */
    CHECK(memcmp(out, data, 4) == 0 && capture.seen_bytes == 4 && capture.overflow == 0);
    wanted.n_bytes = 0;
    CHECK(!wh_capture_on_node(&wanted, true, &capture)); /* a micro-batch without output rows */
    wanted.n_bytes = 5;
    CHECK(!wh_capture_on_node(&wanted, false, &capture) && capture.overflow == 1);
    CHECK(!wh_capture_on_abort(&capture));
    capture.stop = 1;
    CHECK(wh_capture_on_abort(&capture));
}

int main(void) {
    const struct wh_ops *best = wh_ops_best();
    const struct wh_ops *rows[2] = {wh_ops_named("serial"), best};
    CHECK(rows[0] != NULL && wh_ops_named(best->name) == best);
    CHECK(wh_ops_named("sse9") == NULL && wh_ops_named("") == NULL);
    for (int i = 0; i < 2; i++) {
        test_pool_by_hand(rows[i]);
        test_cosine_by_hand(rows[i]);
        test_gather_by_hand(rows[i]);
        test_against_serial(rows[i]);
        test_cosine_at_the_int16_edge(rows[i]);
        test_dense_head(rows[i]);
        test_dense_head_against_serial(rows[i]);
    }
    test_ngrams();
    test_wordpiece();
    test_ngram_bound();
    test_capture();
    printf("kernels: all C tests passed, serial and %s\n", best->name);
    return 0;
}

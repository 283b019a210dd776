/* Hashed word and character n-grams. kernels/reference.py defines them; this file follows it step by step.
 *
 * One pass, no bucket list unless asked for: `emit` is a compile-time constant in each caller, so it is inlined. */
#include <stdbool.h>

#include "bytes.h"
#include "wh_kernels.h"

/* FNV-1a, 32 bit (http://www.isthe.com/chongo/tech/comp/fnv/), then the 32-bit finaliser of MurmurHash3, because the
 * low bits of FNV alone are weak for short keys and the bucket is made of the low bits. */
#define FNV_OFFSET ((uint32_t)2166136261U)
#define FNV_PRIME ((uint32_t)16777619U)

/* The first byte hashed, so that a word, a pair and a character n-gram of equal spelling differ. */
#define TAG_WORD ((uint8_t)'w')
#define TAG_PAIR ((uint8_t)'p')
#define TAG_CHAR ((uint8_t)'c')

#define CHAR_NGRAM_MAX 5
#define CHAR_MODES ((uint32_t)(WH_NGRAM_CHAR3 | WH_NGRAM_CHAR4 | WH_NGRAM_CHAR5))

static inline uint32_t fnv_step(uint32_t hash, uint8_t byte) { return (hash ^ byte) * FNV_PRIME; }

static inline uint32_t finalise(uint32_t hash) {
    hash ^= hash >> 16;
    hash *= (uint32_t)0x85EBCA6BU;
    hash ^= hash >> 13;
    hash *= (uint32_t)0xC2B2AE35U;
    hash ^= hash >> 16;
    return hash;
}

/* The byte as it is hashed (A to Z lower-cased), or 0 where it separates words. */
static inline uint8_t word_byte(uint8_t byte) {
    if (byte >= 'A' && byte <= 'Z') {
        return (uint8_t)(byte | 0x20);
    }
    const bool inside = (byte >= 'a' && byte <= 'z') || (byte >= '0' && byte <= '9') || byte >= 0x80;
    return inside ? byte : 0;
}

typedef void emit_fn(void *sink, uint32_t hash);

/* The character n-grams of "<word>"; `padded` holds them, one byte each side of the word. */
static inline void walk_characters(const uint8_t *padded, size_t n_padded, uint32_t start_hash, uint32_t modes,
                                   emit_fn *emit, void *sink) {
    uint8_t starts[WH_NGRAM_WORD_BYTES_MAX + 3]; /* offset of each character, and the end */
    size_t n_chars = 0;
    for (size_t i = 0; i < n_padded; i++) {
        if (i <= 1 || (padded[i] & 0xC0) != 0x80) {
            starts[n_chars++] = (uint8_t)i;
        }
    }
    starts[n_chars] = (uint8_t)n_padded;
    for (size_t first = 0; first + 3 <= n_chars; first++) {
        uint32_t hash = start_hash;
        const size_t length_max = n_chars - first < CHAR_NGRAM_MAX ? n_chars - first : CHAR_NGRAM_MAX;
        size_t at = starts[first];
        for (size_t length = 1; length <= length_max; length++) {
            for (const size_t end = starts[first + length]; at < end; at++) {
                hash = fnv_step(hash, padded[at]);
            }
            if (length >= 3 && (modes & ((uint32_t)WH_NGRAM_CHAR3 << (length - 3)))) {
                emit(sink, finalise(hash));
            }
        }
    }
}

static inline void walk_ngrams(const uint8_t *text, size_t n_bytes, uint32_t seed, uint32_t modes, emit_fn *emit,
                               void *sink) {
    const uint32_t origin = FNV_OFFSET ^ seed;
    const uint32_t word_start = fnv_step(origin, TAG_WORD);
    const uint32_t pair_start = fnv_step(origin, TAG_PAIR);
    const uint32_t char_start = fnv_step(origin, TAG_CHAR);
    uint8_t padded[WH_NGRAM_WORD_BYTES_MAX + 2];
    uint32_t pair_hash = 0; /* of the previous word and a space; valid once has_previous */
    bool has_previous = false;
    size_t at = 0;
    padded[0] = '<';
    for (;;) {
        while (at < n_bytes && word_byte(text[at]) == 0) {
            at++;
        }
        if (at == n_bytes) {
            return;
        }
        uint32_t word_hash = word_start;
        uint32_t next_pair_hash = pair_start;
        size_t length = 0;
        for (uint8_t byte; length < WH_NGRAM_WORD_BYTES_MAX && at < n_bytes && (byte = word_byte(text[at])) != 0;
             at++) {
            padded[++length] = byte;
            word_hash = fnv_step(word_hash, byte);
            pair_hash = fnv_step(pair_hash, byte);
            next_pair_hash = fnv_step(next_pair_hash, byte);
        }
        if (modes & WH_NGRAM_WORD1) {
            emit(sink, finalise(word_hash));
        }
        if ((modes & WH_NGRAM_WORD2) && has_previous) {
            emit(sink, finalise(pair_hash));
        }
        has_previous = true;
        pair_hash = fnv_step(next_pair_hash, ' ');
        if (modes & CHAR_MODES) {
            padded[length + 1] = '>';
            walk_characters(padded, length + 2, char_start, modes, emit, sink);
        }
    }
}

struct bucket_list {
    unsigned char *buckets;
    size_t count;
    uint32_t mask;
};

static inline void emit_bucket(void *sink, uint32_t hash) {
    struct bucket_list *list = sink;
    wh_store_u32(list->buckets, list->count++, hash & list->mask);
}

size_t wh_hash_ngrams(const uint8_t *restrict text, size_t n_bytes, uint32_t seed, uint32_t bucket_mask, uint32_t modes,
                      unsigned char *restrict buckets) {
    struct bucket_list list = {buckets, 0, bucket_mask};
    walk_ngrams(text, n_bytes, seed, modes, emit_bucket, &list);
    return list.count;
}

struct row_sum {
    const unsigned char *weights;
    unsigned char *sums;
    size_t n_columns;
    size_t count;
    uint32_t mask;
};

static inline void emit_row(void *sink, uint32_t hash) {
    struct row_sum *sum = sink;
    const unsigned char *row = sum->weights + (size_t)(hash & sum->mask) * sum->n_columns * sizeof(float);
    for (size_t c = 0; c < sum->n_columns; c++) {
        wh_store_f64(sum->sums, c, wh_load_f64(sum->sums, c) + (double)wh_load_f32(row, c));
    }
    sum->count++;
}

size_t wh_ngram_sum_f32(const uint8_t *restrict text, size_t n_bytes, uint32_t seed, uint32_t modes,
                        const unsigned char *restrict weights, size_t n_buckets, size_t n_columns,
                        unsigned char *restrict sums) {
    memset(sums, 0, n_columns * sizeof(double));
    struct row_sum sum = {weights, sums, n_columns, 0, (uint32_t)(n_buckets - 1)};
    walk_ngrams(text, n_bytes, seed, modes, emit_row, &sum);
    return sum.count;
}

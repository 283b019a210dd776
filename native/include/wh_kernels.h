/* The contract of every kernel: shape, dtype, alignment, aliasing, bounds.
 *
 * A kernel is a pure function over buffers its caller owns: no allocation, I/O, errno, globals or threads.
 *
 * Alignment: none assumed. Multi-byte elements come as `const unsigned char *` and are read with memcpy, because a
 *   NumPy view may start at any byte. Byte order is the machine's, which must be little-endian (checked below).
 * Aliasing: no two arguments overlap (restrict).
 * Indices: every index read from a buffer is checked before it is used; the kernel then returns a wh_status other than
 *   WH_OK and leaves the output unspecified.
 * Equality: integers until the last line, then + - * / sqrt in double, in a fixed order. So the NumPy reference, the
 *   serial file and every ISA agree bit for bit (which NaN comes out of NaNs aside). Needs -ffp-contract=off; never
 *   -ffast-math.
 *
 * Names: wh_<op>_<dtype>_<isa>. The serial files are the specification in C; kernels/reference.py the one in Python.
 */
#ifndef WH_KERNELS_H
#define WH_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the artifact formats are little-endian and are used without conversion"
#endif

enum wh_status {
    WH_OK = 0,
    WH_ERR_INDEX = 1, /* an index in a buffer points outside the array it indexes */
    WH_ERR_RANGE = 2, /* a value is larger than the overflow bound below */
};

/* Overflow bounds, checked by the callers (module.c, reference.py) and, for values, by the kernels.
 * pool_i8: each row adds at most 128, so int32 holds 2^31 / 128 rows.
 * cosine_i8: dim * max(pooled)^2 and dim * max(pooled) * 128 must fit int64: 2^14 * 2^48 = 2^62. */
#define WH_POOL_IDS_MAX ((size_t)16777215)
#define WH_COSINE_DIM_MAX ((size_t)16384)
#define WH_COSINE_POOLED_MAX ((int32_t)16777216)

/* pooled[j] = sum over i of table[ids[i]][j].
 * table: int8 (vocab_size, dim).  ids: int32 (n_ids,), 0 <= id < vocab_size.  pooled: int32 (dim,), out. */
typedef enum wh_status wh_pool_i8_fn(const int8_t *restrict table, size_t vocab_size, size_t dim,
                                     const unsigned char *restrict ids, size_t n_ids, unsigned char *restrict pooled);

/* cosines[i] = dot(pooled, prototypes[i]) / (|pooled| * norms[i]); 0.0 where either norm is 0.
 * pooled: int32 (dim,).  prototypes: int8 (n, dim).  norms: float64 (n,).  cosines: float64 (n,), out. */
typedef enum wh_status wh_cosine_i8_fn(const unsigned char *restrict pooled, const int8_t *restrict prototypes,
                                       const unsigned char *restrict norms, size_t n, size_t dim,
                                       unsigned char *restrict cosines);

/* sums[c] = sum over i of weights[buckets[i]][c], added in double, in the order of buckets.
 * weights: float32 (n_buckets, n_columns).  buckets: uint32 (n,).  sums: float64 (n_columns,), out. */
typedef enum wh_status wh_gather_sum_f32_fn(const unsigned char *restrict weights, size_t n_buckets, size_t n_columns,
                                            const unsigned char *restrict buckets, size_t n,
                                            unsigned char *restrict sums);

wh_pool_i8_fn wh_pool_i8_serial;
wh_cosine_i8_fn wh_cosine_i8_serial;
wh_gather_sum_f32_fn wh_gather_sum_f32_serial;
#if defined(WH_HAVE_AVX2)
wh_pool_i8_fn wh_pool_i8_avx2;
wh_cosine_i8_fn wh_cosine_i8_avx2;
#endif
#if defined(WH_HAVE_NEON)
wh_pool_i8_fn wh_pool_i8_neon;
wh_cosine_i8_fn wh_cosine_i8_neon;
#endif

/* Hashed n-grams of a text. The exact definition (words, padding, order, hash) is in kernels/reference.py.
 * A text of n bytes has at most WH_NGRAMS_PER_BYTE * n n-grams: a word of L >= 1 bytes gives 2 word and at most 3 L
 * character n-grams. */
#define WH_NGRAMS_PER_BYTE ((size_t)5)
#define WH_NGRAM_WORD_BYTES_MAX ((size_t)64)
enum wh_ngram_mode {
    WH_NGRAM_WORD1 = 1,
    WH_NGRAM_WORD2 = 2,
    WH_NGRAM_CHAR3 = 4,
    WH_NGRAM_CHAR4 = 8,
    WH_NGRAM_CHAR5 = 16,
    WH_NGRAM_ALL = 31,
};

/* Writes hash & bucket_mask of each n-gram to buckets (uint32, room for WH_NGRAMS_PER_BYTE * n_bytes); returns how
 * many. */
size_t wh_hash_ngrams(const uint8_t *restrict text, size_t n_bytes, uint32_t seed, uint32_t bucket_mask, uint32_t modes,
                      unsigned char *restrict buckets);

/* hash_ngrams and gather_sum_f32 in one pass, no bucket list in between. n_buckets is a power of two.
 * sums: float64 (n_columns,), out. Returns the number of n-grams. */
size_t wh_ngram_sum_f32(const uint8_t *restrict text, size_t n_bytes, uint32_t seed, uint32_t modes,
                        const unsigned char *restrict weights, size_t n_buckets, size_t n_columns,
                        unsigned char *restrict sums);

/* The gate's dense head: standardised scalars and projected vectors, one hidden layer, class scores.
 * With x = clip((scalars - mean) * scale, -limit, limit), P_k = dense[projected_rows[k]] @ projection[k]:
 *   joined = [relu(x @ scalar_weight + scalar_bias), relu(P_a) for a in alone, P_l * P_r for (l, r) in (left, right)]
 *   logits = relu(joined @ hidden_weight + hidden_bias) @ out_weight + out_bias, all in float32.
 * Serial and AVX2 agree bit for bit; NumPy adds in another order: |difference| <= 1e-4 at the sizes in use. */
#define WH_DENSE_AXIS_MAX ((size_t)1 << 20)
struct wh_dense_head {
    const unsigned char *mean;           /* float32 (n_scalars,) */
    const unsigned char *scale;          /* float32 (n_scalars,) */
    const unsigned char *scalar_weight;  /* float32 (n_scalars, n_scalar_units) */
    const unsigned char *scalar_bias;    /* float32 (n_scalar_units,) */
    const unsigned char *projection;     /* float32 (n_projections, dim, n_projected_columns) */
    const unsigned char *projected_rows; /* int32 (n_projections,), rows of dense */
    const unsigned char *alone;          /* int32 (n_alone,), projections */
    const unsigned char *left;           /* int32 (n_pairs,), projections */
    const unsigned char *right;          /* int32 (n_pairs,), projections */
    const unsigned char *hidden_weight;  /* float32 (n_joined, n_hidden), n_joined the length of joined */
    const unsigned char *hidden_bias;    /* float32 (n_hidden,) */
    const unsigned char *out_weight;     /* float32 (n_hidden, n_classes) */
    const unsigned char *out_bias;       /* float32 (n_classes,) */
    float limit;
    size_t n_scalars;
    size_t n_scalar_units;
    size_t dim;
    size_t n_dense_rows;
    size_t n_projections;
    size_t n_projected_columns;
    size_t n_alone;
    size_t n_pairs;
    size_t n_hidden;
    size_t n_classes;
};
/* No axis is longer than WH_DENSE_AXIS_MAX, so that no size below overflows.
 * scratch: max(dim, n_scalars) + n_projections * n_projected_columns + rows of hidden_weight + n_hidden + n_classes
 * floats, aligned; its contents are of no use to the caller. */
typedef enum wh_status wh_dense_head_f32_fn(const struct wh_dense_head *head, const unsigned char *restrict scalars,
                                            const unsigned char *restrict dense, float *restrict scratch,
                                            unsigned char *restrict logits);
wh_dense_head_f32_fn wh_dense_head_f32_serial;
#if defined(WH_HAVE_AVX2)
wh_dense_head_f32_fn wh_dense_head_f32_avx2;
#endif

/* out[j] += sum over i of x[i] * rows[i][j], in the order of i (four zero factors in a row are skipped).
 * out: (n_columns,), x: (n_rows,), both aligned.  rows: float32 (n_rows, n_columns). */
typedef void wh_add_rows_f32_fn(float *restrict out, const float *restrict x, const unsigned char *restrict rows,
                                size_t n_rows, size_t n_columns);
/* dots[i] = dot(vector, rows[i]), added in 16 partial float sums.  vector: float32 (dim,).  rows: float32 (n, dim).
 * dots: float64 (n,), out. */
typedef void wh_dot_rows_f32_fn(const unsigned char *restrict vector, const unsigned char *restrict rows, size_t n,
                                size_t dim, unsigned char *restrict dots);
/* product[j] = sum over i of vector[i] * rows[i][j], in the order of i.  vector: float32 (dim,).
 * rows: float32 (dim, n_columns).  product: float32 (n_columns,), out. */
typedef void wh_project_f32_fn(const unsigned char *restrict vector, const unsigned char *restrict rows, size_t dim,
                               size_t n_columns, unsigned char *restrict product);
wh_add_rows_f32_fn wh_add_rows_f32_serial;
wh_dot_rows_f32_fn wh_dot_rows_f32_serial;
wh_project_f32_fn wh_project_f32_serial;
#if defined(WH_HAVE_AVX2)
wh_add_rows_f32_fn wh_add_rows_f32_avx2;
wh_dot_rows_f32_fn wh_dot_rows_f32_avx2;
wh_project_f32_fn wh_project_f32_avx2;
#endif

/* One row of function pointers per instruction set; chosen once per load(), see dispatch.c. */
enum wh_isa { WH_ISA_SERIAL = 0, WH_ISA_AVX2 = 1, WH_ISA_NEON = 2 };
struct wh_ops {
    enum wh_isa isa;
    const char *name;
    wh_pool_i8_fn *pool_i8;
    wh_cosine_i8_fn *cosine_i8;
    wh_gather_sum_f32_fn *gather_sum_f32;
    wh_dense_head_f32_fn *dense_head_f32;
    wh_add_rows_f32_fn *add_rows_f32;
    wh_dot_rows_f32_fn *dot_rows_f32;
    wh_project_f32_fn *project_f32;
};

/* The best row this processor and operating system can run. */
const struct wh_ops *wh_ops_best(void);
/* The row of that name ("serial", "avx2", "neon"), or NULL when it is not built in or cannot run here. */
const struct wh_ops *wh_ops_named(const char *name);

#endif

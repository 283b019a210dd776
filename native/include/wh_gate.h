/* The gate's hot path: a text's tokens, what is kept of a text, and from kept texts to class probabilities.
 *
 * gate/features.py and gate/heads.py are the specification, in Python; gate/compiled.py packs the records read here and
 * says what stands where. As in wh_kernels.h: pure functions over buffers of the caller, nothing aligned, nothing
 * trusted. Every count in a record is bounded and the counts must add up to its very length, every index is checked.
 * Sums of float products are added in an order of their own: serial and AVX2 agree bit for bit, NumPy to 1e-6. */
#ifndef WH_GATE_H
#define WH_GATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "wh_kernels.h"

/* ---- WordPiece -------------------------------------------------------------------------------------------------------
 * A vocabulary: token bytes joined with newlines; the id is the place. `offsets` int32 (n_tokens + 1,): where each token
 * starts, and one past the last newline that would follow. `slots` int32 (n_slots,), a power of two and at least twice
 * n_tokens: open addressing by FNV-1a of the token, -1 where free. */
struct wh_vocabulary {
    const uint8_t *text;
    const unsigned char *offsets;
    const unsigned char *slots;
    size_t n_bytes;
    size_t n_tokens;
    size_t n_slots;
    int32_t unknown; /* id of [UNK] */
};
/* Fills offsets and slots; WH_ERR_RANGE when the vocabulary does not have n_tokens lines, or slots are too few. */
enum wh_status wh_wordpiece_index(const uint8_t *restrict text, size_t n_bytes, size_t n_tokens,
                                  unsigned char *restrict offsets, unsigned char *restrict slots, size_t n_slots);
/* Longer words are [UNK], as in BERT; a character is a code point of the normalised text. */
#define WH_WORD_CHARS_MAX ((size_t)100)
/* Ids of a UTF-8 text, at most ids_max, to ids (int32); how many to *n_ids.
 * WH_ERR_RANGE: the text is not UTF-8, has 33 movable marks in a row, or a special token that the vocabulary lacks.
 * WH_ERR_INDEX: the vocabulary's tables point outside it. */
enum wh_status wh_wordpiece(const struct wh_vocabulary *vocabulary, const uint8_t *restrict text, size_t n_bytes,
                            unsigned char *restrict ids, size_t ids_max, size_t *n_ids);

/* ---- A text record --------------------------------------------------------------------------------------------------
 * int32 header (WH_TEXT_HEADER), float64 weight, float64 ngrams (WH_NGRAM_SLOTS, WH_CLASSES), float32 user
 * (WH_USER_SCALARS,), float32 vector (dim,), int32 pooled (dim,), float32 projected (WH_PROJECTIONS, n_columns),
 * int32 stems (n_stems,) rising, float32 stem weights (n_stems,), int32 values (n_values, 2) start and length in the
 * value bytes, the text in lower case (n_lower bytes), the value bytes. */
enum wh_text_header {
    WH_TEXT_DIM,
    WH_TEXT_COLUMNS,
    WH_TEXT_TOKENS,
    WH_TEXT_STEMS,
    WH_TEXT_LOWER,
    WH_TEXT_VALUES,
    WH_TEXT_VALUE_BYTES,
    WH_TEXT_NUMBERS,
    WH_TEXT_CHARS,
    WH_TEXT_ENDS_QUESTION,
    WH_TEXT_HAS_QUESTION,
    WH_TEXT_FILLED, /* bit k: row k of projected holds the product */
    WH_TEXT_EMPTY,  /* the vector is all zeros */
    WH_TEXT_HEADER = 14,
};
#define WH_CLASSES 4
#define WH_PHASES 3
/* The n-gram head's share of a text, by the part it plays: the user's in each phase, then the four others. */
enum wh_ngram_slot {
    WH_SLOT_USER = 0,
    WH_SLOT_ASSISTANT = WH_PHASES,
    WH_SLOT_RESULT,
    WH_SLOT_PREVIOUS,
    WH_SLOT_SYSTEM,
    WH_NGRAM_SLOTS,
};
#define WH_USER_SCALARS 12
#define WH_PROJECTIONS 8
#define WH_TEXT_FIXED                                                                                                  \
    (WH_TEXT_HEADER * sizeof(int32_t) + (1 + WH_NGRAM_SLOTS * WH_CLASSES) * sizeof(double) +                           \
     WH_USER_SCALARS * sizeof(float))
#define WH_TEXT_NGRAMS_AT (WH_TEXT_HEADER * sizeof(int32_t) + sizeof(double))
#define WH_TEXT_BYTES_MAX ((size_t)2048) /* text_signals.clip gives 1,805 */
#define WH_TEXT_TOKENS_MAX ((size_t)384)
#define WH_TEXT_VALUES_MAX ((size_t)2048)
/* Upper bound of a record made by wh_text_record. */
#define WH_TEXT_RECORD_MAX(dim, n_columns)                                                                             \
    (WH_TEXT_FIXED + 2 * (dim) * sizeof(float) + WH_PROJECTIONS * (n_columns) * sizeof(float) +                        \
     WH_TEXT_TOKENS_MAX * 2 * sizeof(int32_t) + WH_TEXT_VALUES_MAX * 2 * sizeof(int32_t) + 3 * WH_TEXT_BYTES_MAX)

struct wh_text_tables {
    struct wh_vocabulary vocabulary;
    const int8_t *table;       /* int8 (n_tokens of the vocabulary, dim) */
    const unsigned char *stem; /* int32 (n_tokens,) */
    const unsigned char *idf;  /* float32 (n_tokens,) */
    size_t dim;
    size_t n_columns;
};
/* The record of a plain text of at most WH_TEXT_BYTES_MAX bytes, without n-grams and products. Plain: ASCII without
 * control characters (tab, newline and return are space), and U+2026 between spaces. `record` has room for
 * WH_TEXT_RECORD_MAX bytes; *n_record says how many were written. WH_ERR_RANGE: not plain, or as wh_wordpiece. */
enum wh_status wh_text_record(const struct wh_ops *ops, const struct wh_text_tables *tables,
                              const uint8_t *restrict text, size_t n_bytes, unsigned char *restrict record,
                              size_t *n_record);

/* One field of a tool: how many ids it has, of at most ids_max <= WH_TEXT_TOKENS_MAX; the stem classes of its content
 * words, in the order in which they first come, and their weights; and, unless pooled is NULL, the sum of its rows.
 * pooled: int32 (dim,).  stems: int32 (ids_max,).  weights: float32 (ids_max,). Status as wh_wordpiece. */
enum wh_status wh_token_field(const struct wh_ops *ops, const struct wh_text_tables *tables,
                              const uint8_t *restrict text, size_t n_bytes, size_t ids_max,
                              unsigned char *restrict pooled, unsigned char *restrict stems,
                              unsigned char *restrict weights, size_t *n_ids, size_t *n_stems);

/* The channels of n tools, for their pooled fields (name, description, parameters): name_share * name + description, the
 * description, the name, the parameters, each scaled so that its largest entry is 127, and rounded half to even. A tool
 * that is not described is what its name says. router/prototype.py says why; it gives the same rows.
 * fields: int32 (n, 3, dim).  described: uint8 (n,).  rows: int8 (n, WH_CHANNELS, dim), out. name_share is finite. */
void wh_tool_rows(const unsigned char *restrict fields, const uint8_t *restrict described, double name_share, size_t n,
                  size_t dim, int8_t *restrict rows);

struct wh_text {
    unsigned char *record;
    const unsigned char *vector;
    const unsigned char *pooled;
    unsigned char *projected;
    const unsigned char *stems;
    const unsigned char *stem_weights;
    const unsigned char *values;
    const uint8_t *lower;
    const uint8_t *value_bytes;
    double weight;
    size_t n_stems;
    size_t n_lower;
    size_t n_values;
    bool is_empty; /* the vector is all zeros */
};
/* Reads a record's header; false when the record is not one, or not of these sizes. */
bool wh_text_open(struct wh_text *text, unsigned char *record, size_t n_record, size_t dim, size_t n_columns);

/* ---- A tool list's record -------------------------------------------------------------------------------------------
 * int32 header (WH_TOOLS_HEADER), then the sections in the order of struct wh_toolset. */
enum wh_tools_header {
    WH_TOOLS_N,
    WH_TOOLS_DIM,
    WH_TOOLS_COLUMNS,
    WH_TOOLS_EXAMPLES,
    WH_TOOLS_KNOWN,
    WH_TOOLS_ALL_STEMS,
    WH_TOOLS_NAMES_STEMS,
    WH_TOOLS_TOOL_STEMS,
    WH_TOOLS_NAME_STEMS,
    WH_TOOLS_PLACES,
    WH_TOOLS_CELLS,
    WH_TOOLS_HAS_WORDS, /* 0: no vector but zeros, so no mean */
    WH_TOOLS_HEADER = 12,
};
#define WH_SHARES 5
#define WH_CHANNELS 4
#define WH_TOOL_FACTS 4 /* parameters, required ones, identifiers, writes */
struct wh_toolset {
    const unsigned char *bias;           /* float64 (n,) */
    const unsigned char *shares;         /* float64 (WH_SHARES,) */
    const unsigned char *name_weight;    /* float64 (n,) */
    const unsigned char *ngrams;         /* float64 (n, WH_CLASSES): of the tool as the next one */
    const unsigned char *known_strength; /* float64 (n_known,) */
    const unsigned char *cells;          /* float64 (n_cells, 2): covered, own */
    const unsigned char *vectors;        /* float32 (n, dim) */
    const unsigned char *mean;           /* float32 (dim,) */
    const unsigned char *projected;      /* float32 (n, n_columns) */
    const unsigned char *mean_projected; /* float32 (n_columns,) */
    const unsigned char *name_weights;   /* float32 (n_name_stems,) */
    const unsigned char *example_tool;   /* int32 (n_examples,) */
    const unsigned char *known_at;       /* int32 (n_known, 2): tool, known tool */
    const unsigned char *facts;          /* int32 (n, WH_TOOL_FACTS) */
    const unsigned char *all_stems;      /* int32 (n_all_stems,) rising */
    const unsigned char *names_stems;    /* int32 (n_names_stems,) rising: of all names */
    const unsigned char *tool_start;     /* int32 (n + 1,) */
    const unsigned char *tool_stems;     /* int32 (n_tool_stems,), rising within a tool */
    const unsigned char *name_start;     /* int32 (n + 1,) */
    const unsigned char *name_stems;     /* int32 (n_name_stems,), rising within a tool */
    const unsigned char *places;         /* int32 (n_places,) rising: stem classes */
    const unsigned char *place_start;    /* int32 (n_places + 1,) */
    const unsigned char *cell_tool;      /* int32 (n_cells,) */
    size_t n;
    size_t n_examples;
    size_t n_known;
    size_t n_all_stems;
    size_t n_names_stems;
    size_t n_tool_stems;
    size_t n_name_stems;
    size_t n_places;
    size_t n_cells;
    bool has_words;
};
/* Reads the header and lays the sections out; false when the record is not one. Places within are checked when used. */
bool wh_toolset_open(struct wh_toolset *tools, const unsigned char *record, size_t n_record, size_t dim,
                     size_t n_columns);

/* ---- Weights --------------------------------------------------------------------------------------------------------
 * int32 header (WH_GATE_HEADER), then the sections in the order of struct wh_gate. */
enum wh_gate_header {
    WH_GATE_DIM,
    WH_GATE_SCALARS,
    WH_GATE_UNITS,
    WH_GATE_COLUMNS,
    WH_GATE_HIDDEN,
    WH_GATE_ALONE,
    WH_GATE_PAIRS,
    WH_GATE_FUSED,
    WH_GATE_HEADER = 8,
};
struct wh_gate {
    const unsigned char *mix;           /* float64 (WH_CHANNELS,) */
    const unsigned char *calibration;   /* float64 (3,): scale, its slope in log n, its factor with known tools */
    const unsigned char *ngram_bias;    /* float64 (WH_CLASSES,) */
    const unsigned char *blend;         /* float64 (WH_PHASES, 2 WH_CLASSES, WH_CLASSES) */
    const unsigned char *blend_bias;    /* float64 (WH_PHASES, WH_CLASSES) */
    const unsigned char *mean;          /* float32 (n_scalars,) */
    const unsigned char *scale;         /* float32 (n_scalars,) */
    const unsigned char *limit;         /* float32 (1,) */
    const unsigned char *scalar_weight; /* float32 (n_scalars, n_units) */
    const unsigned char *scalar_bias;   /* float32 (n_units,) */
    const unsigned char *projection;    /* float32 (WH_PROJECTIONS, dim, n_columns) */
    const unsigned char *hidden_weight; /* float32 (n_units + n_columns (n_alone + n_pairs), n_hidden) */
    const unsigned char *hidden_bias;   /* float32 (n_hidden,) */
    const unsigned char *out_weight;    /* float32 (n_hidden, WH_CLASSES) */
    const unsigned char *out_bias;      /* float32 (WH_CLASSES,) */
    const unsigned char *alone;         /* int32 (n_alone,) */
    const unsigned char *left;          /* int32 (n_pairs,) */
    const unsigned char *right;         /* int32 (n_pairs,) */
    const unsigned char *fused;         /* int32 (n_fused,) scalars that a profile may use */
    size_t dim;
    size_t n_scalars;
    size_t n_units;
    size_t n_columns;
    size_t n_hidden;
    size_t n_alone;
    size_t n_pairs;
    size_t n_fused;
};
bool wh_gate_open(struct wh_gate *gate, const unsigned char *record, size_t n_record);

/* ---- One request ----------------------------------------------------------------------------------------------------*/
enum wh_request_number {
    WH_N_MESSAGES,
    WH_N_USER_TURNS,
    WH_LAST_ROLE, /* 0 user, 1 tool, 2 another */
    WH_N_CALLS,
    WH_N_RESULTS,
    WH_N_CALLED_NAMES,
    WH_N_DISTINCT_CALLS,
    WH_N_EARLIER_CALLS,
    WH_HAS_EARLIER_RESULTS,
    WH_N_LAST_RESULTS,
    WH_USER_AFTER_TEXT,
    WH_HAS_MEDIA,
    WH_N_FAILED_RESULTS,
    WH_PHASE,
    WH_N_NOW,
    WH_N_BEFORE,
    WH_REQUEST_NUMBERS,
};
#define WH_HISTORY_MAX 4 /* results of this turn, and of earlier ones, whose words may answer the question */
#define WH_N_CUES 7
#define WH_RESULT_STATE (5 + WH_N_CUES) /* is object, is array, log items, log characters, is blank, then the cues */
#define WH_SCALARS 122
struct wh_request {
    int32_t numbers[WH_REQUEST_NUMBERS];
    struct wh_text user;
    struct wh_text previous;
    struct wh_text assistant;
    struct wh_text system;
    struct wh_text result;
    struct wh_text called; /* the calls since the user's turn, as one text; used when WH_N_CALLS is not 0 */
    struct wh_text now[WH_HISTORY_MAX];
    struct wh_text before[WH_HISTORY_MAX];
    const unsigned char *state;     /* float32 (WH_RESULT_STATE,), NULL without a result */
    const uint8_t *hops;            /* uint8 (n, 2): required arguments, identifiers that the result names; or NULL */
    const uint8_t *is_called;       /* uint8 (n,), or NULL: none */
    const uint8_t *is_earlier;      /* uint8 (n,), or NULL: none */
    const unsigned char *known;     /* float64 (n_known_scores,): scores of the known tools */
    const unsigned char *last_call; /* float64 (WH_CLASSES,): n-grams of the last call's name, or NULL */
    size_t n_known_scores;
    struct wh_toolset tools;    /* n = 0: no tools */
    const int8_t *rows;         /* int8 (WH_CHANNELS n + n_examples, dim) */
    const unsigned char *norms; /* float64, one a row */
};
struct wh_verdict {
    double log_p[WH_CLASSES];
    double tool_probability;
    size_t tool; /* the best one; meaningless without tools */
    float scalars[WH_SCALARS];
};
/* Doubles and floats that wh_gate_forward needs beside its arguments; `scratch` must be aligned for double. */
size_t wh_gate_scratch(const struct wh_gate *gate, size_t n_tools, size_t n_examples);
/* WH_ERR_INDEX: a record points outside itself.  WH_ERR_RANGE: sizes of another version of the features. */
enum wh_status wh_gate_forward(const struct wh_ops *ops, const struct wh_gate *gate, struct wh_request *request,
                               unsigned char *restrict scratch, struct wh_verdict *verdict);

/* The n-gram head's share of one field, added to logits (float64 (WH_CLASSES,)): the sum of its n-grams' rows times
 * weight / sqrt(n-grams + smoothing). weights: float32 (n_buckets, WH_CLASSES), n_buckets a power of two. */
void wh_ngram_field(const uint8_t *restrict text, size_t n_bytes, uint32_t seed, uint32_t modes, double weight,
                    double smoothing, const unsigned char *restrict weights, size_t n_buckets,
                    unsigned char *restrict logits);

#endif

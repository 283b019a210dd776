/* What the gate keeps of one text: gate/text_signals.py says why, gate/compiled.py packs the same record in Python. */
#include <math.h>

#include "bytes.h"
#include "wh_gate.h"

static const uint8_t ellipsis[3] = {0xE2, 0x80, 0xA6};

static inline bool is_space(uint8_t byte) { return byte == ' ' || byte == '\t' || byte == '\n' || byte == '\r'; }
static inline bool is_lower(uint8_t byte) { return byte >= 'a' && byte <= 'z'; }
static inline bool is_upper(uint8_t byte) { return byte >= 'A' && byte <= 'Z'; }
static inline bool is_digit(uint8_t byte) { return byte >= '0' && byte <= '9'; }
static inline bool is_alpha(uint8_t byte) { return is_lower(byte) || is_upper(byte); }
static inline uint8_t lowered(uint8_t byte) { return is_upper(byte) ? (uint8_t)(byte | 0x20) : byte; }

/* U+2026 with a space (or an end of the text) on both sides, as text_signals.clip writes it. */
static bool is_ellipsis(const uint8_t *text, size_t n_bytes, size_t at) {
    return n_bytes - at >= 3 && memcmp(text + at, ellipsis, 3) == 0 && (at == 0 || is_space(text[at - 1])) &&
           (n_bytes - at == 3 || is_space(text[at + 3]));
}

/* What is a letter, a digit, a space here is one to Python too. */
static bool is_plain(const uint8_t *text, size_t n_bytes) {
    for (size_t at = 0; at < n_bytes; at++) {
        if (text[at] >= 0x80) {
            if (!is_ellipsis(text, n_bytes, at)) {
                return false;
            }
            at += 2;
        } else if (text[at] == 0x7F || (text[at] < ' ' && !is_space(text[at]))) {
            return false;
        }
    }
    return true;
}

/* What strips off a token before it counts as a value. */
static bool is_edge(uint8_t byte) { return byte != 0 && strchr(".,;:!?()[]{}<>\"'`*", byte) != NULL; }

/* ---- literal values: numbers, ids, paths, addresses, quoted spans, capitalised words ------------------------------- */

#define VALUE_SLOTS ((size_t)4096) /* at least twice WH_TEXT_VALUES_MAX */
#define QUOTED_CHARS_MAX ((size_t)80)

struct values {
    uint8_t bytes[2 * WH_TEXT_BYTES_MAX]; /* tokens do not overlap, nor do quoted spans */
    int32_t start[WH_TEXT_VALUES_MAX];
    int32_t length[WH_TEXT_VALUES_MAX];
    int16_t slots[VALUE_SLOTS];
    size_t n_bytes;
    size_t n_values;
    size_t n_numbers;
};

static void add_value(struct values *values, const uint8_t *text, size_t n) {
    uint8_t *at = values->bytes + values->n_bytes;
    uint32_t hash = 2166136261U;
    bool only_letters = n != 0;
    bool has_digit = false;
    for (size_t i = 0; i < n; i++) {
        at[i] = lowered(text[i]);
        hash = (hash ^ at[i]) * 16777619U;
        only_letters = only_letters && is_lower(at[i]);
        has_digit = has_digit || is_digit(at[i]);
    }
    size_t slot = (hash ^ (hash >> 12)) % VALUE_SLOTS;
    for (; values->slots[slot] >= 0; slot = (slot + 1) % VALUE_SLOTS) {
        const size_t other = (size_t)values->slots[slot];
        if ((size_t)values->length[other] == n && memcmp(values->bytes + values->start[other], at, n) == 0) {
            return;
        }
    }
    if (values->n_values == WH_TEXT_VALUES_MAX) {
        return; /* 2,048 bytes do not hold as many */
    }
    values->slots[slot] = (int16_t)values->n_values;
    values->start[values->n_values] = (int32_t)values->n_bytes;
    values->length[values->n_values++] = (int32_t)n;
    values->n_bytes += n;
    values->n_numbers += !only_letters && has_digit;
}

static void add_token(struct values *values, const uint8_t *token, size_t n, bool is_first) {
    size_t n_lower = 0;
    while (n_lower < n && is_lower(token[n_lower])) {
        n_lower++;
    }
    if (n_lower == n || memcmp(token, ellipsis, n < 3 ? n : 3) == 0) {
        return;
    }
    while (n != 0 && is_edge(token[0])) {
        token++;
        n--;
    }
    while (n != 0 && is_edge(token[n - 1])) {
        n--;
    }
    if (n == 0) {
        return;
    }
    bool wanted = !is_first && is_upper(token[0]);
    bool only_letters = true;
    for (size_t i = 0; i < n; i++) {
        only_letters = only_letters && is_alpha(token[i]);
    }
    for (size_t i = 0; i < n && !only_letters && !wanted; i++) {
        wanted = token[i] == '/' || token[i] == '@' || token[i] == '_' || is_digit(token[i]);
    }
    if (wanted) {
        add_value(values, token, n);
    }
}

/* The text between two equal quotes on one line: 1 to QUOTED_CHARS_MAX characters. */
static void add_quoted(struct values *values, const uint8_t *text, size_t n_bytes) {
    for (size_t at = 0; at < n_bytes; at++) {
        const uint8_t quote = text[at];
        if (quote != '"' && quote != '`') {
            continue;
        }
        size_t n_chars = 0;
        size_t end = at + 1;
        for (; end < n_bytes && text[end] != quote && text[end] != '\n' && n_chars <= QUOTED_CHARS_MAX; end++) {
            n_chars += (text[end] & 0xC0) != 0x80;
        }
        if (end < n_bytes && text[end] == quote && n_chars != 0 && n_chars <= QUOTED_CHARS_MAX) {
            add_value(values, text + at + 1, end - at - 1);
            at = end;
        }
    }
}

static void find_values(struct values *values, const uint8_t *text, size_t n_bytes) {
    values->n_bytes = values->n_values = values->n_numbers = 0;
    memset(values->slots, 0xFF, sizeof values->slots);
    bool is_first = true;
    for (size_t at = 0; at < n_bytes;) {
        if (is_space(text[at])) {
            at++;
            continue;
        }
        size_t end = at;
        while (end < n_bytes && !is_space(text[end])) {
            end++;
        }
        add_token(values, text + at, end - at, is_first);
        is_first = false;
        at = end;
    }
    add_quoted(values, text, n_bytes);
}

/* ---- stems --------------------------------------------------------------------------------------------------------- */

struct stems {
    int32_t stem[WH_TEXT_TOKENS_MAX];
    float weight[WH_TEXT_TOKENS_MAX];
    size_t n;
    double total;
};

/* The stem class of a token and its weight; a weight of 0 or less is that of a word without content. */
static bool stem_of(const struct wh_text_tables *tables, int32_t id, int32_t *stem, float *weight) {
    if (id < 0 || (size_t)id >= tables->vocabulary.n_tokens) {
        return false;
    }
    *stem = wh_load_i32(tables->stem, (size_t)id);
    if (*stem < 0 || (size_t)*stem >= tables->vocabulary.n_tokens) {
        return false;
    }
    *weight = wh_load_f32(tables->idf, (size_t)*stem);
    return true;
}

static enum wh_status find_stems(struct stems *stems, const struct wh_text_tables *tables, const unsigned char *ids,
                                 size_t n_ids) {
    stems->n = 0;
    stems->total = 0.0;
    for (size_t i = 0; i < n_ids; i++) {
        int32_t stem = 0;
        float weight = 0.0F;
        if (!stem_of(tables, wh_load_i32(ids, i), &stem, &weight)) {
            return WH_ERR_INDEX;
        }
        if (!(weight > 0.0F)) {
            continue;
        }
        size_t low = 0; /* of a few dozen, so they are kept in order as they come */
        for (size_t high = stems->n; low < high;) {
            const size_t middle = (low + high) / 2;
            if (stems->stem[middle] < stem) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        if (low < stems->n && stems->stem[low] == stem) {
            continue;
        }
        memmove(stems->stem + low + 1, stems->stem + low, (stems->n - low) * sizeof(int32_t));
        memmove(stems->weight + low + 1, stems->weight + low, (stems->n - low) * sizeof(float));
        stems->stem[low] = stem;
        stems->weight[low] = weight;
        stems->n++;
        stems->total += (double)weight;
    }
    return WH_OK;
}

enum wh_status wh_token_field(const struct wh_ops *ops, const struct wh_text_tables *tables,
                              const uint8_t *restrict text, size_t n_bytes, size_t ids_max,
                              unsigned char *restrict pooled, unsigned char *restrict stems,
                              unsigned char *restrict weights, size_t *n_ids, size_t *n_stems) {
    unsigned char ids[WH_TEXT_TOKENS_MAX * sizeof(int32_t)];
    if (ids_max > WH_TEXT_TOKENS_MAX) {
        return WH_ERR_RANGE;
    }
    const enum wh_status status = wh_wordpiece(&tables->vocabulary, text, n_bytes, ids, ids_max, n_ids);
    if (status != WH_OK) {
        return status;
    }
    size_t n = 0;
    for (size_t i = 0; i < *n_ids; i++) {
        int32_t stem = 0;
        float weight = 0.0F;
        if (!stem_of(tables, wh_load_i32(ids, i), &stem, &weight)) {
            return WH_ERR_INDEX;
        }
        size_t other = 0;
        while (other < n && wh_load_i32(stems, other) != stem) {
            other++;
        }
        if (other == n && weight > 0.0F) {
            wh_store_i32(stems, n, stem);
            memcpy(weights + n * sizeof weight, &weight, sizeof weight);
            n++;
        }
    }
    *n_stems = n;
    return pooled == NULL ? WH_OK
                          : ops->pool_i8(tables->table, tables->vocabulary.n_tokens, tables->dim, ids, *n_ids, pooled);
}

/* Added and taken away again, it rounds to an integer, half to even: doubles above 2**52 have no fractions. */
#define ROUNDING 6755399441055744.0

/* row = name_share * name + other, at 127 for its largest entry; name NULL: other alone. */
static void put_row(int8_t *row, const unsigned char *name, double name_share, const unsigned char *other, size_t dim) {
    double peak = 0.0;
    for (size_t j = 0; j < dim; j++) {
        const double value =
            (name == NULL ? 0.0 : name_share * (double)wh_load_i32(name, j)) + (double)wh_load_i32(other, j);
        const double size = fabs(value);
        peak = size > peak ? size : peak;
    }
    const double scale = 127.0 / (peak > 1e-9 ? peak : 1e-9);
    for (size_t j = 0; j < dim; j++) {
        const double value =
            (name == NULL ? 0.0 : name_share * (double)wh_load_i32(name, j)) + (double)wh_load_i32(other, j);
        const double rounded = value * scale + ROUNDING - ROUNDING;
        row[j] = rounded >= -127.0 && rounded <= 127.0 ? (int8_t)rounded : 0; /* else name_share is beyond all sense */
    }
}

void wh_tool_rows(const unsigned char *restrict fields, const uint8_t *restrict described, double name_share, size_t n,
                  size_t dim, int8_t *restrict rows) {
    const size_t n_bytes = dim * sizeof(int32_t);
    for (size_t t = 0; t < n; t++) {
        const unsigned char *name = fields + 3 * t * n_bytes;
        const unsigned char *description = described[t] != 0 ? name + n_bytes : name;
        int8_t *row = rows + WH_CHANNELS * t * dim;
        put_row(row, name, name_share, description, dim);
        put_row(row + dim, NULL, 0.0, description, dim);
        put_row(row + 2 * dim, NULL, 0.0, name, dim);
        put_row(row + 3 * dim, NULL, 0.0, name + 2 * n_bytes, dim);
    }
}

/* ---- the record ---------------------------------------------------------------------------------------------------- */

static unsigned char *put(unsigned char *at, const void *from, size_t n_bytes) {
    memcpy(at, from, n_bytes);
    return at + n_bytes;
}

/* The scalars of features._user, in the order of USER_NAMES; they stand for a text in the user's part. */
static void user_scalars(float *user, const int32_t *header, const uint8_t *text, size_t n_bytes, double weight) {
    size_t start = 0;
    size_t end = n_bytes;
    while (start < end && is_space(text[start])) {
        start++;
    }
    while (end > start && is_space(text[end - 1])) {
        end--;
    }
    size_t n_commas = 0;
    size_t n_foreign = 0;
    bool has_colon = false;
    for (size_t i = 0; i < n_bytes; i++) {
        n_commas += text[i] == ',';
        n_foreign += text[i] >= 0xC0;
        has_colon = has_colon || text[i] == ':';
    }
    const double n_chars = (double)header[WH_TEXT_CHARS];
    user[0] = (float)log1p(n_chars);
    user[1] = (float)log1p((double)header[WH_TEXT_TOKENS]);
    user[2] = (float)log1p(weight);
    user[3] = header[WH_TEXT_ENDS_QUESTION] ? 1.0F : 0.0F;
    user[4] = header[WH_TEXT_HAS_QUESTION] ? 1.0F : 0.0F;
    user[5] = (float)log1p((double)header[WH_TEXT_VALUES]);
    user[6] = (float)log1p((double)header[WH_TEXT_NUMBERS]);
    user[7] = n_foreign != 0 ? (float)((double)n_foreign / n_chars) : 0.0F;
    user[8] = start < end && is_lower(text[start]) ? 1.0F : 0.0F;
    user[9] = start < end && text[end - 1] == '.' ? 1.0F : 0.0F;
    user[10] = (float)log1p((double)n_commas);
    user[11] = has_colon ? 1.0F : 0.0F;
}

/* The pooled row at unit length; returns false when that is all zeros. */
static bool put_vector(unsigned char *at, const unsigned char *pooled, size_t dim) {
    int64_t square = 0;
    for (size_t j = 0; j < dim; j++) {
        const int64_t value = wh_load_i32(pooled, j);
        square += value * value;
    }
    const float factor = square != 0 ? (float)(1.0 / sqrt((double)square)) : 0.0F;
    for (size_t j = 0; j < dim; j++) {
        const float value = (float)wh_load_i32(pooled, j) * factor;
        at = put(at, &value, sizeof value);
    }
    return square != 0;
}

enum wh_status wh_text_record(const struct wh_ops *ops, const struct wh_text_tables *tables,
                              const uint8_t *restrict text, size_t n_bytes, unsigned char *restrict record,
                              size_t *n_record) {
    if (n_bytes > WH_TEXT_BYTES_MAX || tables->dim > WH_COSINE_DIM_MAX || tables->n_columns > WH_DENSE_AXIS_MAX ||
        !is_plain(text, n_bytes)) {
        return WH_ERR_RANGE;
    }
    unsigned char ids[WH_TEXT_TOKENS_MAX * sizeof(int32_t)];
    struct stems stems;
    struct values values;
    size_t n_ids = 0;
    enum wh_status status = wh_wordpiece(&tables->vocabulary, text, n_bytes, ids, WH_TEXT_TOKENS_MAX, &n_ids);
    if (status == WH_OK) {
        status = find_stems(&stems, tables, ids, n_ids);
    }
    unsigned char *vector = record + WH_TEXT_FIXED;
    unsigned char *pooled = vector + tables->dim * sizeof(float);
    if (status == WH_OK) {
        status = ops->pool_i8(tables->table, tables->vocabulary.n_tokens, tables->dim, ids, n_ids, pooled);
    }
    if (status != WH_OK) {
        return status;
    }
    find_values(&values, text, n_bytes);
    size_t end = n_bytes;
    size_t n_chars = 0;
    while (end != 0 && is_space(text[end - 1])) {
        end--;
    }
    for (size_t i = 0; i < n_bytes; i++) {
        n_chars += (text[i] & 0xC0) != 0x80;
    }
    const int32_t header[WH_TEXT_HEADER] = {
        [WH_TEXT_DIM] = (int32_t)tables->dim,
        [WH_TEXT_COLUMNS] = (int32_t)tables->n_columns,
        [WH_TEXT_TOKENS] = (int32_t)n_ids,
        [WH_TEXT_STEMS] = (int32_t)stems.n,
        [WH_TEXT_LOWER] = (int32_t)n_bytes,
        [WH_TEXT_VALUES] = (int32_t)values.n_values,
        [WH_TEXT_VALUE_BYTES] = (int32_t)values.n_bytes,
        [WH_TEXT_NUMBERS] = (int32_t)values.n_numbers,
        [WH_TEXT_CHARS] = (int32_t)n_chars,
        [WH_TEXT_ENDS_QUESTION] = end != 0 && text[end - 1] == '?',
        [WH_TEXT_HAS_QUESTION] = n_bytes != 0 && memchr(text, '?', n_bytes) != NULL,
        [WH_TEXT_EMPTY] = !put_vector(vector, pooled, tables->dim),
    };
    float user[WH_USER_SCALARS];
    user_scalars(user, header, text, n_bytes, stems.total);
    unsigned char *at = put(record, header, sizeof header);
    at = put(at, &stems.total, sizeof stems.total);
    memset(at, 0, WH_NGRAM_SLOTS * WH_CLASSES * sizeof(double));
    put(at + WH_NGRAM_SLOTS * WH_CLASSES * sizeof(double), user, sizeof user);
    at = pooled + tables->dim * sizeof(int32_t);
    memset(at, 0, WH_PROJECTIONS * tables->n_columns * sizeof(float));
    at += WH_PROJECTIONS * tables->n_columns * sizeof(float);
    at = put(at, stems.stem, stems.n * sizeof(int32_t));
    at = put(at, stems.weight, stems.n * sizeof(float));
    for (size_t i = 0; i < values.n_values; i++) {
        at = put(at, &values.start[i], sizeof(int32_t));
        at = put(at, &values.length[i], sizeof(int32_t));
    }
    for (size_t i = 0; i < n_bytes; i++) {
        *at++ = lowered(text[i]);
    }
    at = put(at, values.bytes, values.n_bytes);
    *n_record = (size_t)(at - record);
    return WH_OK;
}

bool wh_text_open(struct wh_text *text, unsigned char *record, size_t n_record, size_t dim, size_t n_columns) {
    if (n_record < WH_TEXT_FIXED) {
        return false;
    }
    size_t counts[WH_TEXT_HEADER];
    for (size_t i = 0; i < WH_TEXT_HEADER; i++) {
        const int32_t count = wh_load_i32(record, i);
        if (count < 0 || (size_t)count > WH_DENSE_AXIS_MAX) {
            return false;
        }
        counts[i] = (size_t)count;
    }
    const size_t vector_at = WH_TEXT_FIXED;
    const size_t pooled_at = vector_at + dim * sizeof(float);
    const size_t projected_at = pooled_at + dim * sizeof(int32_t);
    const size_t stems_at = projected_at + WH_PROJECTIONS * n_columns * sizeof(float);
    const size_t weights_at = stems_at + counts[WH_TEXT_STEMS] * sizeof(int32_t);
    const size_t values_at = weights_at + counts[WH_TEXT_STEMS] * sizeof(float);
    const size_t lower_at = values_at + counts[WH_TEXT_VALUES] * 2 * sizeof(int32_t);
    const size_t bytes_at = lower_at + counts[WH_TEXT_LOWER];
    if (counts[WH_TEXT_DIM] != dim || counts[WH_TEXT_COLUMNS] != n_columns || dim > WH_DENSE_AXIS_MAX ||
        counts[WH_TEXT_STEMS] > WH_TEXT_TOKENS_MAX || bytes_at + counts[WH_TEXT_VALUE_BYTES] != n_record) {
        return false;
    }
    *text = (struct wh_text){
        .record = record,
        .vector = record + vector_at,
        .pooled = record + pooled_at,
        .projected = record + projected_at,
        .stems = record + stems_at,
        .stem_weights = record + weights_at,
        .values = record + values_at,
        .lower = record + lower_at,
        .value_bytes = record + bytes_at,
        .weight = wh_load_f64(record + WH_TEXT_HEADER * sizeof(int32_t), 0),
        .n_stems = counts[WH_TEXT_STEMS],
        .n_lower = counts[WH_TEXT_LOWER],
        .n_values = counts[WH_TEXT_VALUES],
        .is_empty = counts[WH_TEXT_EMPTY] != 0,
    };
    for (size_t i = 0; i < text->n_values; i++) {
        const int32_t start = wh_load_i32(text->values, 2 * i);
        const int32_t length = wh_load_i32(text->values, 2 * i + 1);
        if (start < 0 || length < 0 || (size_t)start + (size_t)length > counts[WH_TEXT_VALUE_BYTES]) {
            return false;
        }
    }
    return true;
}

/* The gate's hot path as Python functions. Records come as bytes-like objects without a format: their headers say what is
 * in them, and wh_gate.h's readers check that against the length. Everything is checked before it is used, as in module.c.
 */
#include "module.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "wh_gate.h"

#define VIEWS_MAX 32

/* The buffers of one call, in the order in which they were acquired. */
struct views {
    Py_buffer view[VIEWS_MAX];
    int n;
};

static void release_all(struct views *views) {
    for (int i = 0; i < views->n; i++) {
        PyBuffer_Release(&views->view[i]);
    }
}

/* Acquires a contiguous buffer; NULL with ValueError set when the object has none. */
static Py_buffer *acquire(struct views *views, PyObject *object, const char *name, bool writable) {
    Py_buffer *view = &views->view[views->n];
    if (PyObject_GetBuffer(object, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s: expected a contiguous%s buffer; got an object that has none", name,
                     writable ? " writable" : "");
        return NULL;
    }
    views->n++;
    return view;
}

static bool has_bytes(const Py_buffer *view, size_t n_bytes, const char *name) {
    if ((size_t)view->len != n_bytes) {
        PyErr_Format(PyExc_ValueError, "%s: expected %zu bytes; got %zd", name, n_bytes, view->len);
        return false;
    }
    return true;
}

static bool counted(const char *function, Py_ssize_t given, Py_ssize_t expected) {
    if (given != expected) {
        PyErr_Format(PyExc_TypeError, "%s: expected %zd arguments; got %zd", function, expected, given);
        return false;
    }
    return true;
}

static bool as_count(PyObject *object, const char *name, unsigned long long max, size_t *value) {
    const unsigned long long number = PyLong_AsUnsignedLongLong(object);
    if ((number == (unsigned long long)-1 && PyErr_Occurred() != NULL) || number > max) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s: expected an integer from 0 to %llu", name, max);
        return false;
    }
    *value = (size_t)number;
    return true;
}

static PyObject *none(void) { return Py_BuildValue(""); }

static PyObject *outside(const char *function) {
    return PyErr_Format(PyExc_ValueError, "%s: a record or table points outside itself", function);
}

/* wordpiece_index_into(vocabulary, n_tokens, offsets int32 (n_tokens + 1,) out, slots int32 (2**k,) out) -> n_tokens */
PyObject *wordpiece_index_into(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct views views = {.n = 0};
    PyObject *answer = NULL;
    size_t n_tokens = 0;
    const Py_buffer *text = NULL;
    const Py_buffer *offsets = NULL;
    const Py_buffer *slots = NULL;
    (void)self;
    if (!counted("wordpiece_index_into", n_args, 4) || (text = acquire(&views, args[0], "vocabulary", false)) == NULL ||
        !as_count(args[1], "n_tokens", INT32_MAX / 8, &n_tokens) ||
        (offsets = acquire(&views, args[2], "offsets", true)) == NULL ||
        (slots = acquire(&views, args[3], "slots", true)) == NULL ||
        !has_bytes(offsets, (n_tokens + 1) * sizeof(int32_t), "offsets") ||
        !has_bytes(slots, (size_t)slots->len / sizeof(int32_t) * sizeof(int32_t), "slots")) {
        goto cleanup;
    }
    if (wh_wordpiece_index(text->buf, (size_t)text->len, n_tokens, offsets->buf, slots->buf,
                           (size_t)slots->len / sizeof(int32_t)) != WH_OK) {
        PyErr_Format(PyExc_ValueError, "vocabulary: expected %zu lines and twice as many slots, a power of two",
                     n_tokens);
        goto cleanup;
    }
    answer = PyLong_FromSsize_t((Py_ssize_t)n_tokens);
cleanup:
    release_all(&views);
    return answer;
}

/* Four arguments from `args` on: vocabulary, offsets, slots, unknown. */
static bool acquire_vocabulary(struct views *views, PyObject *const *args, struct wh_vocabulary *vocabulary) {
    const Py_buffer *text = NULL;
    const Py_buffer *offsets = NULL;
    const Py_buffer *slots = NULL;
    size_t unknown = 0;
    if ((text = acquire(views, args[0], "vocabulary", false)) == NULL ||
        (offsets = acquire(views, args[1], "offsets", false)) == NULL ||
        (slots = acquire(views, args[2], "slots", false)) == NULL ||
        !as_count(args[3], "unknown", INT32_MAX, &unknown)) {
        return false;
    }
    const size_t n_slots = (size_t)slots->len / sizeof(int32_t);
    const size_t n_starts = (size_t)offsets->len / sizeof(int32_t);
    if (n_starts == 0 || n_slots == 0 || (n_slots & (n_slots - 1)) != 0 || unknown >= n_starts - 1) {
        PyErr_Format(PyExc_ValueError, "slots: expected tables of wordpiece_index_into");
        return false;
    }
    *vocabulary = (struct wh_vocabulary){
        .text = text->buf,
        .offsets = offsets->buf,
        .slots = slots->buf,
        .n_bytes = (size_t)text->len,
        .n_tokens = n_starts - 1,
        .n_slots = n_slots,
        .unknown = (int32_t)unknown,
    };
    return true;
}

/* wordpiece_into(text, vocabulary, offsets, slots, unknown, ids int32 (n,) out) -> how many, None: see wh_wordpiece */
PyObject *wordpiece_into(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct views views = {.n = 0};
    struct wh_vocabulary vocabulary;
    PyObject *answer = NULL;
    const Py_buffer *text = NULL;
    const Py_buffer *ids = NULL;
    (void)self;
    if (!counted("wordpiece_into", n_args, 6) || (text = acquire(&views, args[0], "text", false)) == NULL ||
        !acquire_vocabulary(&views, args + 1, &vocabulary) || (ids = acquire(&views, args[5], "ids", true)) == NULL) {
        goto cleanup;
    }
    size_t n_ids = 0;
    const enum wh_status status =
        wh_wordpiece(&vocabulary, text->buf, (size_t)text->len, ids->buf, (size_t)ids->len / sizeof(int32_t), &n_ids);
    answer = status == WH_OK          ? PyLong_FromSsize_t((Py_ssize_t)n_ids)
             : status == WH_ERR_RANGE ? none()
                                      : outside("wordpiece_into");
cleanup:
    release_all(&views);
    return answer;
}

/* Eight arguments from `args` on: a vocabulary's four, table, stem, idf, dim. */
static bool acquire_tables(struct views *views, PyObject *const *args, struct wh_text_tables *tables) {
    const Py_buffer *table = NULL;
    const Py_buffer *stem = NULL;
    const Py_buffer *idf = NULL;
    if (!acquire_vocabulary(views, args, &tables->vocabulary) ||
        (table = acquire(views, args[4], "table", false)) == NULL ||
        (stem = acquire(views, args[5], "stem", false)) == NULL ||
        (idf = acquire(views, args[6], "idf", false)) == NULL ||
        !as_count(args[7], "dim", WH_COSINE_DIM_MAX, &tables->dim)) {
        return false;
    }
    const size_t n = tables->vocabulary.n_tokens;
    if (!has_bytes(table, n * tables->dim, "table") || !has_bytes(stem, n * sizeof(int32_t), "stem") ||
        !has_bytes(idf, n * sizeof(float), "idf")) {
        return false;
    }
    tables->table = table->buf;
    tables->stem = stem->buf;
    tables->idf = idf->buf;
    return true;
}

/* {stem class: weight}, in that order; takes no reference, NULL with an error set. */
static PyObject *stems_of(const unsigned char *stems, const unsigned char *weights, size_t n) {
    PyObject *found = PyDict_New();
    for (size_t i = 0; found != NULL && i < n; i++) {
        int32_t stem = 0;
        float weight = 0.0F;
        memcpy(&stem, stems + i * sizeof stem, sizeof stem);
        memcpy(&weight, weights + i * sizeof weight, sizeof weight);
        PyObject *key = PyLong_FromSsize_t(stem);
        PyObject *value = PyFloat_FromDouble((double)weight);
        const bool ok = key != NULL && value != NULL && PyDict_SetItem(found, key, value) == 0;
        Py_DecRef(key);
        Py_DecRef(value);
        if (!ok) {
            Py_DecRef(found);
            return NULL;
        }
    }
    return found;
}

/* token_fields(texts (str, ...), vocabulary, offsets, slots, unknown, table, stem, idf, dim, ids_max,
 *              pooled int32 (n, dim) out or empty)
 * -> for each text (number of tokens, {stem class: weight}); None: see wh_wordpiece */
PyObject *token_fields(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct views views = {.n = 0};
    struct wh_text_tables tables = {.n_columns = 0};
    PyObject *answer = NULL;
    const Py_buffer *pooled = NULL;
    unsigned char stems[WH_TEXT_TOKENS_MAX * sizeof(int32_t)];
    unsigned char weights[WH_TEXT_TOKENS_MAX * sizeof(float)];
    size_t ids_max = 0;
    const struct wh_ops *ops = PyCapsule_GetPointer(self, OPS_CAPSULE);
    if (ops == NULL || !counted("token_fields", n_args, 11)) {
        return NULL;
    }
    const Py_ssize_t n = PyTuple_Size(args[0]);
    if (n < 0) {
        PyErr_Clear();
        return PyErr_Format(PyExc_TypeError, "texts: expected a tuple of strings");
    }
    if (!acquire_tables(&views, args + 1, &tables) || !as_count(args[9], "ids_max", WH_TEXT_TOKENS_MAX, &ids_max) ||
        (pooled = acquire(&views, args[10], "pooled", true)) == NULL ||
        (pooled->len != 0 && !has_bytes(pooled, (size_t)n * tables.dim * sizeof(int32_t), "pooled"))) {
        goto cleanup;
    }
    answer = PyTuple_New(n);
    for (Py_ssize_t i = 0; answer != NULL && i < n; i++) {
        Py_ssize_t length = 0;
        size_t n_ids = 0;
        size_t n_stems = 0;
        PyObject *text = PyTuple_GetItem(args[0], i); /* borrowed */
        const char *utf8 = text == NULL ? NULL : PyUnicode_AsUTF8AndSize(text, &length);
        PyObject *field = NULL;
        if (utf8 != NULL) { /* else no string, or half a surrogate pair in it: the error is set */
            unsigned char *row = pooled->len == 0 ? NULL : (unsigned char *)pooled->buf + (size_t)i * tables.dim * 4;
            const enum wh_status status = wh_token_field(ops, &tables, (const uint8_t *)utf8, (size_t)length, ids_max,
                                                         row, stems, weights, &n_ids, &n_stems);
            if (status == WH_ERR_RANGE) {
                Py_DecRef(answer);
                answer = none();
                goto cleanup;
            }
            if (status != WH_OK) {
                outside("token_fields");
            } else {
                PyObject *found = stems_of(stems, weights, n_stems);
                field = found == NULL ? NULL : Py_BuildValue("(nN)", (Py_ssize_t)n_ids, found);
            }
        }
        if (field == NULL || PyTuple_SetItem(answer, i, field) != 0) {
            Py_DecRef(answer);
            answer = NULL;
        }
    }
cleanup:
    release_all(&views);
    return answer;
}

/* tool_rows_into(fields int32 (n, 3, dim), described uint8 (n,), name_share, rows int8 (n, 4, dim) out) -> n */
PyObject *tool_rows_into(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct views views = {.n = 0};
    PyObject *answer = NULL;
    const Py_buffer *fields = NULL;
    const Py_buffer *described = NULL;
    const Py_buffer *rows = NULL;
    (void)self;
    if (!counted("tool_rows_into", n_args, 4) || (fields = acquire(&views, args[0], "fields", false)) == NULL ||
        (described = acquire(&views, args[1], "described", false)) == NULL ||
        (rows = acquire(&views, args[3], "rows", true)) == NULL) {
        goto cleanup;
    }
    const double name_share = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred() != NULL) {
        goto cleanup;
    }
    const size_t n = (size_t)described->len;
    const size_t dim = n == 0 ? 0 : (size_t)rows->len / (WH_CHANNELS * n);
    if (!isfinite(name_share) || !has_bytes(rows, WH_CHANNELS * n * dim, "rows") ||
        !has_bytes(fields, 3 * n * dim * sizeof(int32_t), "fields")) {
        if (PyErr_Occurred() == NULL) {
            PyErr_Format(PyExc_ValueError, "name_share: expected a finite number");
        }
        goto cleanup;
    }
    wh_tool_rows(fields->buf, described->buf, name_share, n, dim, rows->buf);
    answer = PyLong_FromSsize_t((Py_ssize_t)n);
cleanup:
    release_all(&views);
    return answer;
}

/* text_record_into(text, vocabulary, offsets, slots, unknown, table int8 (n, dim), stem int32 (n,), idf float32 (n,), dim,
 *                  n_columns, record out) -> its length, None: not a plain text of at most 2,048 bytes */
PyObject *text_record_into(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct views views = {.n = 0};
    struct wh_text_tables tables = {.dim = 0};
    PyObject *answer = NULL;
    const Py_buffer *text = NULL;
    const Py_buffer *record = NULL;
    const struct wh_ops *ops = PyCapsule_GetPointer(self, OPS_CAPSULE);
    if (ops == NULL || !counted("text_record_into", n_args, 11) ||
        (text = acquire(&views, args[0], "text", false)) == NULL || !acquire_tables(&views, args + 1, &tables) ||
        !as_count(args[9], "n_columns", WH_DENSE_AXIS_MAX, &tables.n_columns) ||
        (record = acquire(&views, args[10], "record", true)) == NULL) {
        goto cleanup;
    }
    const size_t room = WH_TEXT_RECORD_MAX(tables.dim, tables.n_columns);
    if ((size_t)record->len < room) {
        PyErr_Format(PyExc_ValueError, "record: expected room for %zu bytes; got %zd", room, record->len);
        goto cleanup;
    }
    size_t n_record = 0;
    const enum wh_status status = wh_text_record(ops, &tables, text->buf, (size_t)text->len, record->buf, &n_record);
    answer = status == WH_OK          ? PyLong_FromSsize_t((Py_ssize_t)n_record)
             : status == WH_ERR_RANGE ? none()
                                      : outside("text_record_into");
cleanup:
    release_all(&views);
    return answer;
}

/* ngram_fields_into(weights float32 (2**k, 4), logits out, at, smoothing, then text, seed, modes, weight of each field)
 * -> number of fields. Adds the fields' shares, from zero, and writes them to bytes [at, at + 32) of `logits`. */
PyObject *ngram_fields_into(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    enum { FIXED = 4, EACH = 4, FIELDS_MAX = 8 };
    struct views views = {.n = 0};
    PyObject *answer = NULL;
    const Py_buffer *weights = NULL;
    const Py_buffer *logits = NULL;
    size_t at = 0;
    unsigned char sums[WH_CLASSES * sizeof(double)] = {0};
    (void)self;
    if (n_args < FIXED || (n_args - FIXED) % EACH != 0 || (n_args - FIXED) / EACH > FIELDS_MAX) {
        PyErr_Format(PyExc_TypeError,
                     "ngram_fields_into: expected 4 arguments and 4 for each of at most 8 fields; got %zd", n_args);
        return NULL;
    }
    if ((weights = acquire(&views, args[0], "weights", false)) == NULL ||
        (logits = acquire(&views, args[1], "logits", true)) == NULL || !as_count(args[2], "at", INT32_MAX, &at)) {
        goto cleanup;
    }
    const size_t n_buckets = (size_t)weights->len / (WH_CLASSES * sizeof(float));
    const double smoothing = PyFloat_AsDouble(args[3]);
    if (PyErr_Occurred() != NULL) {
        goto cleanup;
    }
    if (n_buckets == 0 || (n_buckets & (n_buckets - 1)) != 0 ||
        !has_bytes(weights, n_buckets * WH_CLASSES * sizeof(float), "weights") ||
        at + sizeof sums > (size_t)logits->len || !(smoothing > 0.0)) {
        if (PyErr_Occurred() == NULL) {
            PyErr_Format(PyExc_ValueError,
                         "weights: expected 2**k rows of four; logits: room for 32 bytes from `at` on");
        }
        goto cleanup;
    }
    for (Py_ssize_t i = FIXED; i < n_args; i += EACH) {
        size_t seed = 0;
        size_t modes = 0;
        const Py_buffer *text = acquire(&views, args[i], "text", false);
        if (text == NULL || !as_count(args[i + 1], "seed", UINT32_MAX, &seed) ||
            !as_count(args[i + 2], "modes", WH_NGRAM_ALL, &modes)) {
            goto cleanup;
        }
        const double weight = PyFloat_AsDouble(args[i + 3]);
        if (PyErr_Occurred() != NULL) {
            goto cleanup;
        }
        wh_ngram_field(text->buf, (size_t)text->len, (uint32_t)seed, (uint32_t)modes, weight, smoothing, weights->buf,
                       n_buckets, sums);
    }
    memcpy((unsigned char *)logits->buf + at, sums, sizeof sums);
    answer = PyLong_FromSsize_t((n_args - FIXED) / EACH);
cleanup:
    release_all(&views);
    return answer;
}

/* The arguments of gate_forward, in their order; behind them come the texts of WH_N_NOW and WH_N_BEFORE results. */
enum forward_argument {
    WEIGHTS,
    SCRATCH,
    SCALARS,
    NUMBERS,
    USER,
    PREVIOUS,
    ASSISTANT,
    SYSTEM,
    RESULT,
    CALLED,
    STATE,
    HOPS,
    IS_CALLED,
    IS_EARLIER,
    KNOWN,
    LAST_CALL,
    TOOLS,
    ROWS,
    NORMS,
    FORWARD_ARGUMENTS,
};
static const char *const forward_names[FORWARD_ARGUMENTS] = {
    "weights", "scratch", "scalars",   "numbers",    "user",  "previous",  "assistant", "system", "result", "called",
    "state",   "hops",    "is_called", "is_earlier", "known", "last_call", "tools",     "rows",   "norms",
};

/* The buffer of an argument that may be empty for "none", of that many bytes else. */
static bool optional(const Py_buffer *view, const char *name, size_t n_bytes, const void **buffer) {
    *buffer = NULL;
    if (view->len == 0) {
        return true;
    }
    *buffer = view->buf;
    return has_bytes(view, n_bytes, name);
}

static bool open_text(const Py_buffer *view, const char *name, const struct wh_gate *gate, struct wh_text *text) {
    if (!wh_text_open(text, view->buf, (size_t)view->len, gate->dim, gate->n_columns)) {
        PyErr_Format(PyExc_ValueError, "%s: expected a text record of this gate's sizes", name);
        return false;
    }
    return true;
}

/* Everything of the request but the texts of results now and before. */
static bool open_request(const Py_buffer *views, const struct wh_gate *gate, struct wh_request *request) {
    const void *state = NULL;
    const void *hops = NULL;
    const void *is_called = NULL;
    const void *is_earlier = NULL;
    const void *last_call = NULL;
    struct wh_text *const texts[] = {&request->user,   &request->previous, &request->assistant,
                                     &request->system, &request->result,   &request->called};
    for (int i = USER; i <= CALLED; i++) {
        if (!open_text(&views[i], forward_names[i], gate, texts[i - USER])) {
            return false;
        }
    }
    if (views[TOOLS].len != 0 &&
        !wh_toolset_open(&request->tools, views[TOOLS].buf, (size_t)views[TOOLS].len, gate->dim, gate->n_columns)) {
        PyErr_Format(PyExc_ValueError, "tools: expected a tool list's record of this gate's sizes");
        return false;
    }
    const size_t n = request->tools.n;
    const size_t n_rows = WH_CHANNELS * n + (n != 0 ? request->tools.n_examples : 0);
    if (!has_bytes(&views[NUMBERS], WH_REQUEST_NUMBERS * sizeof(int32_t), "numbers") ||
        !has_bytes(&views[ROWS], n_rows * gate->dim, "rows") ||
        !has_bytes(&views[NORMS], n_rows * sizeof(double), "norms") ||
        !optional(&views[STATE], "state", WH_RESULT_STATE * sizeof(float), &state) ||
        !optional(&views[HOPS], "hops", 2 * n, &hops) || !optional(&views[IS_CALLED], "is_called", n, &is_called) ||
        !optional(&views[IS_EARLIER], "is_earlier", n, &is_earlier) ||
        !optional(&views[LAST_CALL], "last_call", WH_CLASSES * sizeof(double), &last_call)) {
        return false;
    }
    memcpy(request->numbers, views[NUMBERS].buf, sizeof request->numbers);
    request->state = state;
    request->hops = hops;
    request->is_called = is_called;
    request->is_earlier = is_earlier;
    request->last_call = last_call;
    request->known = views[KNOWN].buf;
    request->n_known_scores = (size_t)views[KNOWN].len / sizeof(double);
    request->rows = views[ROWS].buf;
    request->norms = views[NORMS].buf;
    return true;
}

static PyObject *tuple_of(const double *values, size_t n) {
    PyObject *tuple = PyTuple_New((Py_ssize_t)n);
    for (size_t i = 0; tuple != NULL && i < n; i++) {
        PyObject *value = PyFloat_FromDouble(values[i]);
        if (value == NULL || PyTuple_SetItem(tuple, (Py_ssize_t)i, value) != 0) { /* takes the value in any case */
            Py_DecRef(tuple);
            return NULL;
        }
    }
    return tuple;
}

#define FUSED_MAX ((size_t)64)

static PyObject *forward_answer(const struct wh_gate *gate, const struct wh_verdict *verdict) {
    double probabilities[WH_CLASSES];
    double fused[WH_CLASSES + FUSED_MAX];
    for (size_t c = 0; c < WH_CLASSES; c++) {
        probabilities[c] = exp(verdict->log_p[c]);
        fused[c] = verdict->log_p[c];
    }
    for (size_t i = 0; i < gate->n_fused; i++) {
        int32_t scalar = 0;
        memcpy(&scalar, gate->fused + i * sizeof scalar, sizeof scalar);
        if (scalar < 0 || scalar >= WH_SCALARS) {
            return outside("gate_forward");
        }
        fused[WH_CLASSES + i] = (double)verdict->scalars[scalar];
    }
    PyObject *first = tuple_of(probabilities, WH_CLASSES);
    PyObject *second = first == NULL ? NULL : tuple_of(fused, WH_CLASSES + gate->n_fused);
    if (second == NULL) {
        if (first != NULL) {
            Py_DecRef(first);
        }
        return NULL;
    }
    return Py_BuildValue("(NNnd)", first, second, (Py_ssize_t)verdict->tool, verdict->tool_probability);
}

/* gate_forward(weights, scratch out, scalars float32 (122,) out, numbers int32 (16,), user, previous, assistant, system,
 *              result, called, state, hops, is_called, is_earlier, known, last_call, tools, rows, norms, *now, *before)
 * -> (probabilities, fused inputs of a profile, best tool, its probability). An empty buffer stands for "none". */
PyObject *gate_forward(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct views views = {.n = 0};
    struct wh_gate gate;
    struct wh_request request = {.n_known_scores = 0};
    struct wh_verdict verdict;
    PyObject *answer = NULL;
    const struct wh_ops *ops = PyCapsule_GetPointer(self, OPS_CAPSULE);
    if (ops == NULL) {
        return NULL;
    }
    if (n_args < FORWARD_ARGUMENTS || n_args > FORWARD_ARGUMENTS + 2 * WH_HISTORY_MAX) {
        return PyErr_Format(PyExc_TypeError, "gate_forward: expected 19 arguments and up to 8 texts; got %zd", n_args);
    }
    for (Py_ssize_t i = 0; i < n_args; i++) {
        const bool is_text = (i >= USER && i <= CALLED) || i >= FORWARD_ARGUMENTS;
        const char *name = i < FORWARD_ARGUMENTS ? forward_names[i] : "now and before";
        if (acquire(&views, args[i], name, i == SCRATCH || i == SCALARS || is_text) == NULL) {
            goto cleanup;
        }
    }
    if (!wh_gate_open(&gate, views.view[WEIGHTS].buf, (size_t)views.view[WEIGHTS].len) || gate.n_fused > FUSED_MAX) {
        PyErr_Format(PyExc_ValueError, "weights: expected a gate's record");
        goto cleanup;
    }
    if (!has_bytes(&views.view[SCALARS], sizeof verdict.scalars, "scalars") ||
        !open_request(views.view, &gate, &request)) {
        goto cleanup;
    }
    const int32_t n_now = request.numbers[WH_N_NOW];
    const int32_t n_before = request.numbers[WH_N_BEFORE];
    if (n_now < 0 || n_now > WH_HISTORY_MAX || n_before < 0 || n_before > WH_HISTORY_MAX ||
        n_args != FORWARD_ARGUMENTS + n_now + n_before) {
        PyErr_Format(PyExc_ValueError, "numbers: expected as many texts as they say");
        goto cleanup;
    }
    for (int32_t i = 0; i < n_now + n_before; i++) {
        struct wh_text *text = i < n_now ? &request.now[i] : &request.before[i - n_now];
        if (!open_text(&views.view[FORWARD_ARGUMENTS + i], "now and before", &gate, text)) {
            goto cleanup;
        }
    }
    const size_t room = wh_gate_scratch(&gate, request.tools.n, request.tools.n == 0 ? 0 : request.tools.n_examples);
    if ((size_t)views.view[SCRATCH].len < room || (uintptr_t)views.view[SCRATCH].buf % sizeof(double) != 0) {
        PyErr_Format(PyExc_ValueError, "scratch: expected %zu aligned bytes; got %zd", room, views.view[SCRATCH].len);
        goto cleanup;
    }
    switch (wh_gate_forward(ops, &gate, &request, views.view[SCRATCH].buf, &verdict)) {
    case WH_OK:
        memcpy(views.view[SCALARS].buf, verdict.scalars, sizeof verdict.scalars);
        answer = forward_answer(&gate, &verdict);
        break;
    case WH_ERR_RANGE:
        PyErr_Format(PyExc_ValueError, "gate_forward: sizes or values beyond what this build was made for");
        break;
    default:
        outside("gate_forward");
    }
cleanup:
    release_all(&views);
    return answer;
}

/* whetherman_edge.kernels._native: the kernels as Python functions, against the Limited API of CPython 3.11.
 *
 * bind(isa) returns a dict of functions bound to one row of kernels. Every function checks dtype, dimensions and
 * lengths of its buffers before anything is read, raises ValueError for whatever does not fit, and has one exit that
 * releases what it acquired. Outputs are buffers of the caller, so no array is made here. The GIL stays held: the
 * longest call the gate makes is tens of microseconds, less than handing the lock over can cost. */
#include "module.h"

#include <stdbool.h>
#include <string.h>

#include "wh_capture.h"
#include "wh_kernels.h"

/* The buffer formats (struct module) one dtype may come with; sizes are checked besides, since 'l' is 4 or 8 bytes. */
struct dtype {
    const char *name;
    const char *formats;
    Py_ssize_t itemsize;
};
static const struct dtype int8 = {"int8", "b", 1};
static const struct dtype int32 = {"int32", "il", 4};
static const struct dtype uint32 = {"uint32", "IL", 4};
static const struct dtype float32 = {"float32", "f", 4};
static const struct dtype float64 = {"float64", "d", 8};

static bool has_dtype(const Py_buffer *view, const struct dtype *dtype) {
    const char *format = view->format;
    if (format == NULL || view->itemsize != dtype->itemsize) {
        return false;
    }
    if (*format != '\0' && strchr("@=<^", *format) != NULL) { /* native or little-endian: the same here */
        format++;
    }
    return format[0] != '\0' && format[1] == '\0' && strchr(dtype->formats, format[0]) != NULL;
}

/* Acquires a C-contiguous array of that dtype and number of dimensions. On failure `view->obj` is NULL. */
static bool acquire(PyObject *object, const char *name, const struct dtype *dtype, int ndim, bool writable,
                    Py_buffer *view) {
    if (PyObject_GetBuffer(object, view, PyBUF_ND | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)) != 0) {
        view->obj = NULL;
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError,
                     "%s: expected a C-contiguous%s %s array of %d dimension(s); got an object that is not", name,
                     writable ? " writable" : "", dtype->name, ndim);
        return false;
    }
    if (view->ndim != ndim || !has_dtype(view, dtype)) {
        PyErr_Format(PyExc_ValueError, "%s: expected %s with %d dimension(s); got buffer format '%s' with %d", name,
                     dtype->name, ndim, view->format == NULL ? "B" : view->format, view->ndim);
        PyBuffer_Release(view);
        view->obj = NULL;
        return false;
    }
    return true;
}

static void release(Py_buffer *views, int n_views) {
    for (int i = 0; i < n_views; i++) {
        if (views[i].obj != NULL) {
            PyBuffer_Release(&views[i]);
        }
    }
}

static bool has_length(const Py_buffer *view, int axis, Py_ssize_t length, const char *name, const char *reason) {
    if (view->shape[axis] != length) {
        PyErr_Format(PyExc_ValueError, "%s: expected length %zd (%s); got %zd", name, length, reason,
                     view->shape[axis]);
        return false;
    }
    return true;
}

static bool has_arguments(const char *function, Py_ssize_t given, Py_ssize_t expected) {
    if (given != expected) {
        PyErr_Format(PyExc_TypeError, "%s: expected %zd arguments; got %zd", function, expected, given);
        return false;
    }
    return true;
}

/* An integer argument in [0, max]. */
static bool as_u64(PyObject *object, const char *name, unsigned long long max, unsigned long long *value) {
    *value = PyLong_AsUnsignedLongLong(object);
    if ((*value == (unsigned long long)-1 && PyErr_Occurred() != NULL) || *value > max) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s: expected an integer from 0 to %llu", name, max);
        return false;
    }
    return true;
}

static bool is_power_of_two(unsigned long long value) { return value != 0 && (value & (value - 1)) == 0; }

static bool as_bucket_count(unsigned long long value, const char *name) {
    if (!is_power_of_two(value) || value > 1ULL << 31) {
        PyErr_Format(PyExc_ValueError, "%s: expected a power of two from 1 to 2**31 buckets; got %llu", name, value);
        return false;
    }
    return true;
}

static PyObject *result(enum wh_status status, const char *function, Py_ssize_t count) {
    switch (status) {
    case WH_OK:
        return PyLong_FromSsize_t(count);
    case WH_ERR_INDEX:
        return PyErr_Format(PyExc_ValueError, "%s: an index points outside the array it indexes", function);
    case WH_ERR_RANGE:
        return PyErr_Format(PyExc_ValueError, "%s: a value exceeds the bound that keeps the integer sums exact",
                            function);
    }
    return NULL;
}

static const struct wh_ops *ops_of(PyObject *self) { return PyCapsule_GetPointer(self, OPS_CAPSULE); }

/* pool_i8_into(table int8 (vocab_size, dim), ids int32 (n,), pooled int32 (dim,) out) -> n */
static PyObject *pool_i8_into(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    enum { TABLE, IDS, POOLED, N_VIEWS };
    Py_buffer views[N_VIEWS] = {{0}};
    PyObject *answer = NULL;
    const struct wh_ops *ops = ops_of(self);
    if (ops == NULL || !has_arguments("pool_i8_into", n_args, 3) ||
        !acquire(args[0], "table", &int8, 2, false, &views[TABLE]) ||
        !acquire(args[1], "ids", &int32, 1, false, &views[IDS]) ||
        !acquire(args[2], "pooled", &int32, 1, true, &views[POOLED])) {
        goto cleanup;
    }
    const Py_ssize_t dim = views[TABLE].shape[1];
    if (!has_length(&views[POOLED], 0, dim, "pooled", "the columns of table")) {
        goto cleanup;
    }
    const size_t n_ids = (size_t)views[IDS].shape[0];
    const enum wh_status status = n_ids > WH_POOL_IDS_MAX
                                      ? WH_ERR_RANGE
                                      : ops->pool_i8(views[TABLE].buf, (size_t)views[TABLE].shape[0], (size_t)dim,
                                                     views[IDS].buf, n_ids, views[POOLED].buf);
    answer = result(status, "pool_i8", (Py_ssize_t)n_ids);
cleanup:
    release(views, N_VIEWS);
    return answer;
}

/* cosine_i8_into(pooled int32 (dim,), prototypes int8 (n, dim), norms float64 (n,), cosines float64 (n,) out) -> n */
static PyObject *cosine_i8_into(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    enum { POOLED, PROTOTYPES, NORMS, COSINES, N_VIEWS };
    Py_buffer views[N_VIEWS] = {{0}};
    PyObject *answer = NULL;
    const struct wh_ops *ops = ops_of(self);
    if (ops == NULL || !has_arguments("cosine_i8_into", n_args, 4) ||
        !acquire(args[0], "pooled", &int32, 1, false, &views[POOLED]) ||
        !acquire(args[1], "prototypes", &int8, 2, false, &views[PROTOTYPES]) ||
        !acquire(args[2], "norms", &float64, 1, false, &views[NORMS]) ||
        !acquire(args[3], "cosines", &float64, 1, true, &views[COSINES])) {
        goto cleanup;
    }
    const Py_ssize_t n = views[PROTOTYPES].shape[0];
    const Py_ssize_t dim = views[PROTOTYPES].shape[1];
    if (!has_length(&views[POOLED], 0, dim, "pooled", "the columns of prototypes") ||
        !has_length(&views[NORMS], 0, n, "norms", "the rows of prototypes") ||
        !has_length(&views[COSINES], 0, n, "cosines", "the rows of prototypes")) {
        goto cleanup;
    }
    const enum wh_status status = (size_t)dim > WH_COSINE_DIM_MAX
                                      ? WH_ERR_RANGE
                                      : ops->cosine_i8(views[POOLED].buf, views[PROTOTYPES].buf, views[NORMS].buf,
                                                       (size_t)n, (size_t)dim, views[COSINES].buf);
    answer = result(status, "cosine_i8", n);
cleanup:
    release(views, N_VIEWS);
    return answer;
}

/* gather_sum_f32_into(weights float32 (n_buckets, k), buckets uint32 (n,), sums float64 (k,) out) -> n */
static PyObject *gather_sum_f32_into(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    enum { WEIGHTS, BUCKETS, SUMS, N_VIEWS };
    Py_buffer views[N_VIEWS] = {{0}};
    PyObject *answer = NULL;
    const struct wh_ops *ops = ops_of(self);
    if (ops == NULL || !has_arguments("gather_sum_f32_into", n_args, 3) ||
        !acquire(args[0], "weights", &float32, 2, false, &views[WEIGHTS]) ||
        !acquire(args[1], "buckets", &uint32, 1, false, &views[BUCKETS]) ||
        !acquire(args[2], "sums", &float64, 1, true, &views[SUMS]) ||
        !has_length(&views[SUMS], 0, views[WEIGHTS].shape[1], "sums", "the columns of weights")) {
        goto cleanup;
    }
    const Py_ssize_t n = views[BUCKETS].shape[0];
    const enum wh_status status =
        ops->gather_sum_f32(views[WEIGHTS].buf, (size_t)views[WEIGHTS].shape[0], (size_t)views[WEIGHTS].shape[1],
                            views[BUCKETS].buf, (size_t)n, views[SUMS].buf);
    answer = result(status, "gather_sum_f32", n);
cleanup:
    release(views, N_VIEWS);
    return answer;
}

/* The text argument: any contiguous bytes-like object. */
static bool acquire_text(PyObject *object, Py_buffer *view) {
    if (PyObject_GetBuffer(object, view, PyBUF_SIMPLE) != 0) {
        view->obj = NULL;
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "utf8: expected a contiguous bytes-like object");
        return false;
    }
    return true;
}

/* hash_ngrams_into(utf8, seed, n_buckets, modes, buckets uint32 (>= 5 * len(utf8),) out) -> how many were written */
static PyObject *hash_ngrams_into(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    enum { TEXT, BUCKETS, N_VIEWS };
    Py_buffer views[N_VIEWS] = {{0}};
    PyObject *answer = NULL;
    unsigned long long seed = 0;
    unsigned long long n_buckets = 0;
    unsigned long long modes = 0;
    (void)self;
    if (!has_arguments("hash_ngrams_into", n_args, 5) || !acquire_text(args[0], &views[TEXT]) ||
        !as_u64(args[1], "seed", UINT32_MAX, &seed) || !as_u64(args[2], "n_buckets", 1ULL << 31, &n_buckets) ||
        !as_bucket_count(n_buckets, "n_buckets") || !as_u64(args[3], "modes", WH_NGRAM_ALL, &modes) ||
        !acquire(args[4], "buckets", &uint32, 1, true, &views[BUCKETS])) {
        goto cleanup;
    }
    const size_t n_bytes = (size_t)views[TEXT].len;
    if ((size_t)views[BUCKETS].shape[0] / WH_NGRAMS_PER_BYTE < n_bytes) {
        PyErr_Format(PyExc_ValueError, "buckets: expected room for %zu n-grams a byte of utf8; got %zd for %zu bytes",
                     WH_NGRAMS_PER_BYTE, views[BUCKETS].shape[0], n_bytes);
        goto cleanup;
    }
    const size_t count = wh_hash_ngrams(views[TEXT].buf, n_bytes, (uint32_t)seed, (uint32_t)(n_buckets - 1),
                                        (uint32_t)modes, views[BUCKETS].buf);
    answer = PyLong_FromSsize_t((Py_ssize_t)count);
cleanup:
    release(views, N_VIEWS);
    return answer;
}

/* ngram_sum_f32_into(utf8, seed, modes, weights float32 (n_buckets, k), sums float64 (k,) out) -> number of n-grams */
static PyObject *ngram_sum_f32_into(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    enum { TEXT, WEIGHTS, SUMS, N_VIEWS };
    Py_buffer views[N_VIEWS] = {{0}};
    PyObject *answer = NULL;
    unsigned long long seed = 0;
    unsigned long long modes = 0;
    (void)self;
    if (!has_arguments("ngram_sum_f32_into", n_args, 5) || !acquire_text(args[0], &views[TEXT]) ||
        !as_u64(args[1], "seed", UINT32_MAX, &seed) || !as_u64(args[2], "modes", WH_NGRAM_ALL, &modes) ||
        !acquire(args[3], "weights", &float32, 2, false, &views[WEIGHTS]) ||
        !as_bucket_count((unsigned long long)views[WEIGHTS].shape[0], "weights") ||
        !acquire(args[4], "sums", &float64, 1, true, &views[SUMS]) ||
        !has_length(&views[SUMS], 0, views[WEIGHTS].shape[1], "sums", "the columns of weights")) {
        goto cleanup;
    }
    const size_t count =
        wh_ngram_sum_f32(views[TEXT].buf, (size_t)views[TEXT].len, (uint32_t)seed, (uint32_t)modes, views[WEIGHTS].buf,
                         (size_t)views[WEIGHTS].shape[0], (size_t)views[WEIGHTS].shape[1], views[SUMS].buf);
    answer = PyLong_FromSsize_t((Py_ssize_t)count);
cleanup:
    release(views, N_VIEWS);
    return answer;
}

/* dense_head_f32_into(scalars, dense, mean, scale, scalar_weight, scalar_bias, projection, projected_rows, alone, left,
 *                     right, hidden_weight, hidden_bias, out_weight, out_bias, limit float32 (1,), scratch out, logits
 *                     float64 (n_classes,) out) -> n_classes. Shapes as in wh_kernels.h. */
static PyObject *dense_head_f32_into(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    enum {
        SCALARS,
        DENSE,
        MEAN,
        SCALE,
        SCALAR_WEIGHT,
        SCALAR_BIAS,
        PROJECTION,
        ROWS,
        ALONE,
        LEFT,
        RIGHT,
        HIDDEN_WEIGHT,
        HIDDEN_BIAS,
        OUT_WEIGHT,
        OUT_BIAS,
        LIMIT,
        SCRATCH,
        LOGITS,
        N_VIEWS
    };
    static const struct {
        const char *name;
        const struct dtype *dtype;
        int ndim;
    } parts[N_VIEWS] = {
        {"scalars", &float32, 1},     {"dense", &float32, 2},         {"mean", &float32, 1},
        {"scale", &float32, 1},       {"scalar_weight", &float32, 2}, {"scalar_bias", &float32, 1},
        {"projection", &float32, 3},  {"projected_rows", &int32, 1},  {"alone", &int32, 1},
        {"left", &int32, 1},          {"right", &int32, 1},           {"hidden_weight", &float32, 2},
        {"hidden_bias", &float32, 1}, {"out_weight", &float32, 2},    {"out_bias", &float32, 1},
        {"limit", &float32, 1},       {"scratch", &float32, 1},       {"logits", &float64, 1},
    };
    Py_buffer views[N_VIEWS] = {{0}};
    PyObject *answer = NULL;
    if (!has_arguments("dense_head_f32_into", n_args, N_VIEWS)) {
        goto cleanup;
    }
    for (int i = 0; i < N_VIEWS; i++) {
        if (!acquire(args[i], parts[i].name, parts[i].dtype, parts[i].ndim, i >= SCRATCH, &views[i])) {
            goto cleanup;
        }
        for (int axis = 0; axis < parts[i].ndim && i != SCRATCH; axis++) { /* an empty array may have any other axis */
            if ((size_t)views[i].shape[axis] > WH_DENSE_AXIS_MAX) {
                PyErr_Format(PyExc_ValueError, "%s: expected axes of at most %zu; got %zd", parts[i].name,
                             WH_DENSE_AXIS_MAX, views[i].shape[axis]);
                goto cleanup;
            }
        }
    }
    const Py_ssize_t n = views[SCALARS].shape[0];
    const Py_ssize_t dim = views[DENSE].shape[1];
    const Py_ssize_t units = views[SCALAR_BIAS].shape[0];
    const Py_ssize_t columns = views[PROJECTION].shape[2];
    const Py_ssize_t n_joined = units + columns * (views[ALONE].shape[0] + views[LEFT].shape[0]);
    const Py_ssize_t n_hidden = views[HIDDEN_BIAS].shape[0];
    const Py_ssize_t n_classes = views[OUT_BIAS].shape[0];
    const Py_ssize_t room = (dim > n ? dim : n) + views[ROWS].shape[0] * columns + n_joined + n_hidden + n_classes;
    if (!has_length(&views[MEAN], 0, n, "mean", "the scalars") ||
        !has_length(&views[SCALE], 0, n, "scale", "the scalars") ||
        !has_length(&views[SCALAR_WEIGHT], 0, n, "scalar_weight", "the scalars") ||
        !has_length(&views[SCALAR_WEIGHT], 1, units, "scalar_weight", "the units of scalar_bias") ||
        !has_length(&views[PROJECTION], 0, views[ROWS].shape[0], "projection", "projected_rows") ||
        !has_length(&views[PROJECTION], 1, dim, "projection", "the columns of dense") ||
        !has_length(&views[RIGHT], 0, views[LEFT].shape[0], "right", "left") ||
        !has_length(&views[HIDDEN_WEIGHT], 0, n_joined, "hidden_weight", "units, projections and products") ||
        !has_length(&views[HIDDEN_WEIGHT], 1, n_hidden, "hidden_weight", "hidden_bias") ||
        !has_length(&views[OUT_WEIGHT], 0, n_hidden, "out_weight", "hidden_bias") ||
        !has_length(&views[OUT_WEIGHT], 1, n_classes, "out_weight", "out_bias") ||
        !has_length(&views[LIMIT], 0, 1, "limit", "one number") ||
        !has_length(&views[LOGITS], 0, n_classes, "logits", "out_bias")) {
        goto cleanup;
    }
    if (views[SCRATCH].shape[0] < room || (uintptr_t)views[SCRATCH].buf % sizeof(float) != 0) {
        PyErr_Format(PyExc_ValueError, "scratch: expected an aligned float32 array of at least %zd; got %zd", room,
                     views[SCRATCH].shape[0]);
        goto cleanup;
    }
    struct wh_dense_head head = {
        .mean = views[MEAN].buf,
        .scale = views[SCALE].buf,
        .scalar_weight = views[SCALAR_WEIGHT].buf,
        .scalar_bias = views[SCALAR_BIAS].buf,
        .projection = views[PROJECTION].buf,
        .projected_rows = views[ROWS].buf,
        .alone = views[ALONE].buf,
        .left = views[LEFT].buf,
        .right = views[RIGHT].buf,
        .hidden_weight = views[HIDDEN_WEIGHT].buf,
        .hidden_bias = views[HIDDEN_BIAS].buf,
        .out_weight = views[OUT_WEIGHT].buf,
        .out_bias = views[OUT_BIAS].buf,
        .n_scalars = (size_t)n,
        .n_scalar_units = (size_t)units,
        .dim = (size_t)dim,
        .n_dense_rows = (size_t)views[DENSE].shape[0],
        .n_projections = (size_t)views[ROWS].shape[0],
        .n_projected_columns = (size_t)columns,
        .n_alone = (size_t)views[ALONE].shape[0],
        .n_pairs = (size_t)views[LEFT].shape[0],
        .n_hidden = (size_t)n_hidden,
        .n_classes = (size_t)n_classes,
    };
    memcpy(&head.limit, views[LIMIT].buf, sizeof head.limit);
    answer = result(ops_of(self)->dense_head_f32(&head, views[SCALARS].buf, views[DENSE].buf, views[SCRATCH].buf,
                                                 views[LOGITS].buf),
                    "dense_head_f32", n_classes);
cleanup:
    release(views, N_VIEWS);
    return answer;
}

/* Through a pointer without a prototype, as the documentation of METH_FASTCALL has it. */
#define FASTCALL(function) {#function, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL}

static PyMethodDef bound_methods[] = {
    FASTCALL(pool_i8_into),         FASTCALL(cosine_i8_into),     FASTCALL(gather_sum_f32_into),
    FASTCALL(hash_ngrams_into),     FASTCALL(ngram_sum_f32_into), FASTCALL(dense_head_f32_into),
    FASTCALL(wordpiece_index_into), FASTCALL(wordpiece_into),     FASTCALL(text_record_into),
    FASTCALL(ngram_fields_into),    FASTCALL(gate_forward),       FASTCALL(token_fields),
    FASTCALL(tool_rows_into),
};

/* bind(isa: str) -> dict of functions; "best" takes what this machine can run. */
static PyObject *bind(PyObject *module, PyObject *isa) {
    (void)module;
    const char *name = PyUnicode_AsUTF8AndSize(isa, NULL);
    if (name == NULL) {
        return NULL;
    }
    const struct wh_ops *ops = strcmp(name, "best") == 0 ? wh_ops_best() : wh_ops_named(name);
    if (ops == NULL) {
        return PyErr_Format(PyExc_ValueError, "isa: expected 'best', 'serial' or '%s' (this machine); got '%s'",
                            wh_ops_best()->name, name);
    }
    PyObject *functions = PyDict_New();
    /* The rows are static and never written to; a capsule only knows pointers to non-const. */
    PyObject *capsule = PyCapsule_New((void *)(uintptr_t)ops, OPS_CAPSULE, NULL);
    PyObject *isa_name = PyUnicode_FromString(ops->name);
    bool ok = functions != NULL && capsule != NULL && isa_name != NULL &&
              PyDict_SetItemString(functions, "isa", isa_name) == 0;
    for (size_t i = 0; ok && i < sizeof bound_methods / sizeof bound_methods[0]; i++) {
        PyObject *function = PyCMethod_New(&bound_methods[i], capsule, NULL, NULL);
        ok = function != NULL && PyDict_SetItemString(functions, bound_methods[i].ml_name, function) == 0;
        Py_DecRef(function);
    }
    Py_DecRef(isa_name);
    Py_DecRef(capsule);
    if (!ok) {
        Py_DecRef(functions);
        return NULL;
    }
    return functions;
}

/* capture_addresses() -> (eval callback, abort callback, size of struct wh_capture), for ctypes. */
static PyObject *capture_addresses(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    return Py_BuildValue("(KKn)", (unsigned long long)(uintptr_t)wh_capture_on_node,
                         (unsigned long long)(uintptr_t)wh_capture_on_abort, (Py_ssize_t)sizeof(struct wh_capture));
}

static PyMethodDef module_methods[] = {
    {"bind", bind, METH_O, "bind(isa) -> dict of kernel functions and the name of the instruction set"},
    {"capture_addresses", capture_addresses, METH_NOARGS, "-> (eval callback, abort callback, size of their state)"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "_native",
    "Compiled kernels; use whetherman_edge.kernels.load().",
    0,
    module_methods,
    slots,
    NULL,
    NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }

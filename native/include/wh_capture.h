/* Contract between the native callbacks (src/capture.c) and whetherman_edge/backbone/capture.py, class State: the same
 * fields in the same order. */
#ifndef WH_CAPTURE_H
#define WH_CAPTURE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define WH_CAPTURE_NAME_BYTES 64 /* GGML_MAX_NAME */

struct wh_capture {
    const char *(*get_name)(const void *tensor);
    size_t (*get_bytes)(const void *tensor);
    void *(*get_data)(const void *tensor);
    void *out; /* caller-owned, out_bytes long */
    size_t out_bytes;
    size_t seen_bytes;      /* bytes copied by the last hit; the caller resets it */
    _Atomic int32_t stop;   /* set by any thread */
    int32_t overflow;       /* the tensor was larger than out */
    char name[WH_CAPTURE_NAME_BYTES]; /* NUL-padded graph name */
};

/* ggml_backend_sched_eval_callback: wants the one node of that name, copies it, ends the graph. */
bool wh_capture_on_node(void *tensor, bool ask, void *user);

/* ggml_abort_callback: true once `stop` is set. */
bool wh_capture_on_abort(void *user);

#endif

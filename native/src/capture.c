/* The two callbacks llama.cpp calls while it computes: one reads a single tensor and ends the graph there, one ends a
 * decode whose caller has gone. whetherman_edge/backbone/capture.py has the same in ctypes, and says why.
 *
 * No ggml header is needed: the accessors come as function pointers, the tensor stays opaque. Called on llama.cpp's
 * threads without the interpreter lock, so nothing here may touch Python. */
#include <stdatomic.h>
#include <string.h>

#include "wh_capture.h"

bool wh_capture_on_node(void *tensor, bool ask, void *user) {
    struct wh_capture *capture = user;
    if (strncmp(capture->get_name(tensor), capture->name, sizeof capture->name) != 0) {
        return !ask;
    }
    size_t n_bytes = capture->get_bytes(tensor);
    if (ask) {
        return n_bytes != 0; /* in a micro-batch without outputs the last block has no rows */
    }
    const void *data = capture->get_data(tensor);
    if (n_bytes > capture->out_bytes || data == NULL) {
        capture->overflow = 1;
    } else {
        memcpy(capture->out, data, n_bytes);
        capture->seen_bytes = n_bytes;
    }
    return false;
}

bool wh_capture_on_abort(void *user) {
    struct wh_capture *capture = user;
    return atomic_load_explicit(&capture->stop, memory_order_relaxed) != 0;
}

/* A boosted forest over one feature vector. Every index is checked on the way: the arrays come from a mapped file. */
#include <stdbool.h>

#include "bytes.h"
#include "wh_kernels.h"

/* Follows one tree to its leaf. A child is larger than its parent, so the walk ends after at most n_nodes steps. */
static inline enum wh_status walk_tree(const struct wh_forest *forest, const unsigned char *features, size_t n_features,
                                       int32_t node, double *value) {
    if (node >= 0 && (size_t)node >= forest->n_nodes) {
        return WH_ERR_INDEX;
    }
    while (node >= 0) {
        const size_t at = (size_t)node;
        const int32_t feature = wh_load_i32(forest->feature_index, at);
        if (feature < 0 || (size_t)feature >= n_features) {
            return WH_ERR_INDEX;
        }
        const bool goes_left = (double)wh_load_f32(features, (size_t)feature) <= wh_load_f64(forest->threshold, at);
        const int32_t child = wh_load_i32(goes_left ? forest->left : forest->right, at);
        if (child >= 0 && (size_t)child >= forest->n_nodes) {
            return WH_ERR_INDEX;
        }
        if (child >= 0 && child <= node) {
            return WH_ERR_CYCLE;
        }
        node = child;
    }
    const size_t leaf = (size_t)~node;
    if (leaf >= forest->n_leaves) {
        return WH_ERR_INDEX;
    }
    *value = wh_load_f64(forest->leaf_value, leaf);
    return WH_OK;
}

enum wh_status wh_forest_f32(const struct wh_forest *forest, const unsigned char *restrict features, size_t n_features,
                             unsigned char *restrict sums) {
    memset(sums, 0, forest->n_classes * sizeof(double));
    for (size_t tree = 0; tree < forest->n_trees; tree++) {
        const int32_t class_index = wh_load_i32(forest->tree_class, tree);
        if (class_index < 0 || (size_t)class_index >= forest->n_classes) {
            return WH_ERR_INDEX;
        }
        double value = 0.0;
        const enum wh_status status =
            walk_tree(forest, features, n_features, wh_load_i32(forest->tree_root, tree), &value);
        if (status != WH_OK) {
            return status;
        }
        const size_t at = (size_t)class_index;
        wh_store_f64(sums, at, wh_load_f64(sums, at) + value);
    }
    return WH_OK;
}

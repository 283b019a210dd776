/* The records of a tool list and of the weights: one buffer each, its sections one behind the other. */
#include "bytes.h"
#include "wh_gate.h"

/* Takes sections off the front of a record; `at` is NULL once one did not fit. */
struct cursor {
    const unsigned char *at;
    size_t left;
};

/* n * each items of n_bytes. Counts are at most WH_DENSE_AXIS_MAX each and there are at most three, so none overflows. */
static const unsigned char *take(struct cursor *cursor, size_t n, size_t each, size_t n_bytes) {
    const size_t size = n * each * n_bytes;
    if (cursor->at == NULL || size > cursor->left) {
        cursor->at = NULL;
        return NULL;
    }
    const unsigned char *section = cursor->at;
    cursor->at += size;
    cursor->left -= size;
    return section;
}

static bool header_counts(const unsigned char *record, size_t n_record, size_t *counts, size_t n_counts) {
    if (n_record < n_counts * sizeof(int32_t)) {
        return false;
    }
    for (size_t i = 0; i < n_counts; i++) {
        const int32_t count = wh_load_i32(record, i);
        if (count < 0 || (size_t)count > WH_DENSE_AXIS_MAX) {
            return false;
        }
        counts[i] = (size_t)count;
    }
    return true;
}

bool wh_toolset_open(struct wh_toolset *tools, const unsigned char *record, size_t n_record, size_t dim,
                     size_t n_columns) {
    size_t counts[WH_TOOLS_HEADER];
    if (!header_counts(record, n_record, counts, WH_TOOLS_HEADER) || counts[WH_TOOLS_DIM] != dim ||
        counts[WH_TOOLS_COLUMNS] != n_columns || counts[WH_TOOLS_N] == 0) {
        return false;
    }
    struct cursor c = {record + WH_TOOLS_HEADER * sizeof(int32_t), n_record - WH_TOOLS_HEADER * sizeof(int32_t)};
    const size_t n = counts[WH_TOOLS_N];
    const size_t f64 = sizeof(double);
    const size_t f32 = sizeof(float);
    const size_t i32 = sizeof(int32_t);
    tools->bias = take(&c, n, 1, f64);
    tools->shares = take(&c, WH_SHARES, 1, f64);
    tools->name_weight = take(&c, n, 1, f64);
    tools->ngrams = take(&c, n, WH_CLASSES, f64);
    tools->known_strength = take(&c, counts[WH_TOOLS_KNOWN], 1, f64);
    tools->cells = take(&c, counts[WH_TOOLS_CELLS], 2, f64);
    tools->vectors = take(&c, n, dim, f32);
    tools->mean = take(&c, dim, 1, f32);
    tools->projected = take(&c, n, n_columns, f32);
    tools->mean_projected = take(&c, n_columns, 1, f32);
    tools->name_weights = take(&c, counts[WH_TOOLS_NAME_STEMS], 1, f32);
    tools->example_tool = take(&c, counts[WH_TOOLS_EXAMPLES], 1, i32);
    tools->known_at = take(&c, counts[WH_TOOLS_KNOWN], 2, i32);
    tools->facts = take(&c, n, WH_TOOL_FACTS, i32);
    tools->all_stems = take(&c, counts[WH_TOOLS_ALL_STEMS], 1, i32);
    tools->names_stems = take(&c, counts[WH_TOOLS_NAMES_STEMS], 1, i32);
    tools->tool_start = take(&c, n + 1, 1, i32);
    tools->tool_stems = take(&c, counts[WH_TOOLS_TOOL_STEMS], 1, i32);
    tools->name_start = take(&c, n + 1, 1, i32);
    tools->name_stems = take(&c, counts[WH_TOOLS_NAME_STEMS], 1, i32);
    tools->places = take(&c, counts[WH_TOOLS_PLACES], 1, i32);
    tools->place_start = take(&c, counts[WH_TOOLS_PLACES] + 1, 1, i32);
    tools->cell_tool = take(&c, counts[WH_TOOLS_CELLS], 1, i32);
    tools->n = n;
    tools->n_examples = counts[WH_TOOLS_EXAMPLES];
    tools->n_known = counts[WH_TOOLS_KNOWN];
    tools->n_all_stems = counts[WH_TOOLS_ALL_STEMS];
    tools->n_names_stems = counts[WH_TOOLS_NAMES_STEMS];
    tools->n_tool_stems = counts[WH_TOOLS_TOOL_STEMS];
    tools->n_name_stems = counts[WH_TOOLS_NAME_STEMS];
    tools->n_places = counts[WH_TOOLS_PLACES];
    tools->n_cells = counts[WH_TOOLS_CELLS];
    tools->has_words = counts[WH_TOOLS_HAS_WORDS] != 0;
    return c.at != NULL && c.left == 0;
}

bool wh_gate_open(struct wh_gate *gate, const unsigned char *record, size_t n_record) {
    size_t counts[WH_GATE_HEADER];
    if (!header_counts(record, n_record, counts, WH_GATE_HEADER)) {
        return false;
    }
    struct cursor c = {record + WH_GATE_HEADER * sizeof(int32_t), n_record - WH_GATE_HEADER * sizeof(int32_t)};
    gate->dim = counts[WH_GATE_DIM];
    gate->n_scalars = counts[WH_GATE_SCALARS];
    gate->n_units = counts[WH_GATE_UNITS];
    gate->n_columns = counts[WH_GATE_COLUMNS];
    gate->n_hidden = counts[WH_GATE_HIDDEN];
    gate->n_alone = counts[WH_GATE_ALONE];
    gate->n_pairs = counts[WH_GATE_PAIRS];
    gate->n_fused = counts[WH_GATE_FUSED];
    if (gate->dim > WH_COSINE_DIM_MAX || gate->n_alone > WH_PROJECTIONS || gate->n_pairs > WH_PROJECTIONS) {
        return false;
    }
    const size_t n_joined = gate->n_units + gate->n_columns * (gate->n_alone + gate->n_pairs);
    const size_t f64 = sizeof(double);
    const size_t f32 = sizeof(float);
    const size_t i32 = sizeof(int32_t);
    gate->mix = take(&c, WH_CHANNELS, 1, f64);
    gate->calibration = take(&c, 3, 1, f64);
    gate->ngram_bias = take(&c, WH_CLASSES, 1, f64);
    gate->blend = take(&c, WH_PHASES * 2 * WH_CLASSES, WH_CLASSES, f64);
    gate->blend_bias = take(&c, WH_PHASES, WH_CLASSES, f64);
    gate->mean = take(&c, gate->n_scalars, 1, f32);
    gate->scale = take(&c, gate->n_scalars, 1, f32);
    gate->limit = take(&c, 1, 1, f32);
    gate->scalar_weight = take(&c, gate->n_scalars, gate->n_units, f32);
    gate->scalar_bias = take(&c, gate->n_units, 1, f32);
    gate->projection = take(&c, WH_PROJECTIONS * gate->dim, gate->n_columns, f32);
    gate->hidden_weight = take(&c, n_joined, gate->n_hidden, f32);
    gate->hidden_bias = take(&c, gate->n_hidden, 1, f32);
    gate->out_weight = take(&c, gate->n_hidden, WH_CLASSES, f32);
    gate->out_bias = take(&c, WH_CLASSES, 1, f32);
    gate->alone = take(&c, gate->n_alone, 1, i32);
    gate->left = take(&c, gate->n_pairs, 1, i32);
    gate->right = take(&c, gate->n_pairs, 1, i32);
    gate->fused = take(&c, gate->n_fused, 1, i32);
    return c.at != NULL && c.left == 0;
}

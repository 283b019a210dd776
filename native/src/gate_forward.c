/* From kept texts and tools to class probabilities: the scalars of gate/features.py in their order, then both heads of
 * gate/heads.py and the blend of gate/static_gate.py. Read beside those three; names are theirs. */
#include <math.h>

#include "bytes.h"
#include "wh_gate.h"

#define COUNT_MAX 8.0F

/* What the request's own arrays need, laid out in scratch by `lay_out`. */
struct work {
    double *cosines;   /* (WH_CHANNELS n + n_examples,) of the user's turn with each row */
    double *lexical;   /* (2 n,): covered, own; the score ends up in the first n */
    double *logit;     /* (n,) */
    double *chance;    /* (n,) softmax */
    double *result;    /* (n,) cosines of the result with the tools' vectors, and so on */
    double *assistant; /* (n,) */
    double *system;    /* (n,) */
    double *context;   /* (n,) */
    float *floats;     /* the dense head's */
    size_t best;
    size_t next;
    size_t n_free;
    size_t n_called;
    float *scalar; /* where the next scalar goes */
};

static size_t floats_needed(const struct wh_gate *gate) {
    const size_t n_joined = gate->n_units + gate->n_columns * (gate->n_alone + gate->n_pairs);
    return gate->n_scalars + (gate->dim > n_joined ? gate->dim : n_joined) + gate->n_columns + gate->n_hidden +
           WH_CLASSES;
}

size_t wh_gate_scratch(const struct wh_gate *gate, size_t n_tools, size_t n_examples) {
    return ((WH_CHANNELS + 8) * n_tools + n_examples) * sizeof(double) + floats_needed(gate) * sizeof(float);
}

static void lay_out(struct work *work, unsigned char *scratch, size_t n, size_t n_examples) {
    double *at = (double *)(void *)scratch;
    work->cosines = at;
    work->lexical = at += WH_CHANNELS * n + n_examples;
    work->logit = at += 2 * n;
    work->chance = at += n;
    work->result = at += n;
    work->assistant = at += n;
    work->system = at += n;
    work->context = at += n;
    work->floats = (float *)(void *)(at + n);
}

static void put(struct work *work, double value) { *work->scalar++ = (float)value; }

static void put_count(struct work *work, double count) { put(work, count < (double)COUNT_MAX ? count : COUNT_MAX); }

static void put_zeros(struct work *work, size_t n) {
    for (size_t i = 0; i < n; i++) {
        put(work, 0.0);
    }
}

static int32_t header_of(const struct wh_text *text, size_t field) { return wh_load_i32(text->record, field); }

static double dot(const struct wh_ops *ops, const struct wh_gate *gate, const struct wh_text *a,
                  const struct wh_text *b) {
    if (a->is_empty || b->is_empty) {
        return 0.0;
    }
    unsigned char cosine[sizeof(double)];
    ops->dot_rows_f32(a->vector, b->vector, 1, gate->dim, cosine);
    return wh_load_f64(cosine, 0);
}

/* ---- stems: both lists rise, so one walk finds what they share ----------------------------------------------------- */

/* The share of a text's content, by weight, that stands among `stems`. */
static double covered_by(const struct wh_text *text, const unsigned char *stems, size_t n_stems) {
    if (text->weight == 0.0) {
        return 0.0;
    }
    double shared = 0.0;
    for (size_t i = 0, j = 0; i < text->n_stems && j < n_stems;) {
        const int32_t mine = wh_load_i32(text->stems, i);
        const int32_t other = wh_load_i32(stems, j);
        if (mine == other) {
            shared += (double)wh_load_f32(text->stem_weights, i);
        }
        i += mine <= other;
        j += other <= mine;
    }
    return shared / text->weight;
}

static double covered_by_text(const struct wh_text *text, const struct wh_text *other) {
    return covered_by(text, other->stems, other->n_stems);
}

/* Section [start[i], start[i + 1]) of a list of n_all; false when it lies outside. */
static bool section(const unsigned char *starts, size_t i, size_t n_all, size_t *start, size_t *n) {
    const int32_t from = wh_load_i32(starts, i);
    const int32_t to = wh_load_i32(starts, i + 1);
    if (from < 0 || to < from || (size_t)to > n_all) {
        return false;
    }
    *start = (size_t)from;
    *n = (size_t)(to - from);
    return true;
}

/* ---- the ToolRouter's score of the user's turn (router/scorer.py) --------------------------------------------------- */

static enum wh_status score_lexical(struct work *work, const struct wh_request *r) {
    const struct wh_toolset *tools = &r->tools;
    const size_t n = tools->n;
    double *covered = work->lexical;
    double *own = covered + n;
    memset(covered, 0, 2 * n * sizeof(double));
    double total = 0.0;
    for (size_t i = 0, j = 0; i < r->user.n_stems; i++) {
        const int32_t stem = wh_load_i32(r->user.stems, i);
        total += (double)wh_load_f32(r->user.stem_weights, i);
        while (j < tools->n_places && wh_load_i32(tools->places, j) < stem) {
            j++;
        }
        if (j == tools->n_places || wh_load_i32(tools->places, j) != stem) {
            continue;
        }
        size_t start = 0;
        size_t count = 0;
        if (!section(tools->place_start, j, tools->n_cells, &start, &count)) {
            return WH_ERR_INDEX;
        }
        for (size_t cell = start; cell < start + count; cell++) {
            const int32_t tool = wh_load_i32(tools->cell_tool, cell);
            if (tool < 0 || (size_t)tool >= n) {
                return WH_ERR_INDEX;
            }
            covered[tool] += wh_load_f64(tools->cells, 2 * cell);
            own[tool] += wh_load_f64(tools->cells, 2 * cell + 1);
        }
    }
    for (size_t t = 0; t < n && total > 0.0; t++) {
        covered[t] = covered[t] / total + own[t];
    }
    return WH_OK;
}

static enum wh_status score(const struct wh_ops *ops, const struct wh_gate *gate, struct work *work,
                            const struct wh_request *r) {
    const struct wh_toolset *tools = &r->tools;
    const size_t n = tools->n;
    enum wh_status status = ops->cosine_i8(r->user.pooled, r->rows, r->norms, WH_CHANNELS * n + tools->n_examples,
                                           gate->dim, (unsigned char *)work->cosines);
    for (size_t e = 0; status == WH_OK && e < tools->n_examples; e++) {
        const int32_t tool = wh_load_i32(tools->example_tool, e);
        if (tool < 0 || (size_t)tool >= n) {
            return WH_ERR_INDEX;
        }
        const double cosine = work->cosines[WH_CHANNELS * n + e];
        work->cosines[tool] = cosine > work->cosines[tool] ? cosine : work->cosines[tool];
    }
    if (status == WH_OK) {
        status = score_lexical(work, r);
    }
    if (status != WH_OK) {
        return status;
    }
    for (size_t t = 0; t < n; t++) {
        double logit = 0.0;
        for (size_t channel = 0; channel < WH_CHANNELS; channel++) {
            logit += wh_load_f64(gate->mix, channel) * work->cosines[channel * n + t];
        }
        work->logit[t] = logit + work->lexical[t] + wh_load_f64(tools->bias, t);
    }
    double scale = wh_load_f64(gate->calibration, 0) + wh_load_f64(gate->calibration, 1) * log((double)(n > 2 ? n : 2));
    for (size_t k = 0; k < tools->n_known && r->n_known_scores != 0; k++) {
        const int32_t tool = wh_load_i32(tools->known_at, 2 * k);
        const int32_t known = wh_load_i32(tools->known_at, 2 * k + 1);
        if (tool < 0 || (size_t)tool >= n || known < 0 || (size_t)known >= r->n_known_scores) {
            return WH_ERR_INDEX;
        }
        work->logit[tool] += wh_load_f64(tools->known_strength, k) * wh_load_f64(r->known, (size_t)known);
    }
    if (tools->n_known != 0 && r->n_known_scores != 0) {
        scale *= wh_load_f64(gate->calibration, 2);
    }
    work->best = 0;
    for (size_t t = 1; t < n; t++) {
        work->best = work->logit[t] > work->logit[work->best] ? t : work->best;
    }
    double sum = 0.0;
    for (size_t t = 0; t < n; t++) {
        work->chance[t] = exp(work->logit[t] * scale - work->logit[work->best] * scale);
        sum += work->chance[t];
    }
    for (size_t t = 0; t < n; t++) {
        work->chance[t] /= sum;
    }
    return WH_OK;
}

static bool is_called(const struct wh_request *r, size_t tool) {
    return r->is_called != NULL && r->is_called[tool] != 0;
}

/* The largest of values[i] over tools that are called, or are not; `otherwise` when there is none. */
static double largest(const struct wh_request *r, const double *values, bool called, double otherwise) {
    bool found = false;
    double top = otherwise;
    for (size_t t = 0; t < r->tools.n; t++) {
        if (is_called(r, t) == called && (!found || values[t] > top)) {
            top = values[t];
            found = true;
        }
    }
    return top;
}

/* The best tool among those not called since the user's turn (features.Fit.next). */
static void find_next(struct work *work, const struct wh_request *r) {
    work->next = work->best;
    work->n_free = 0;
    for (size_t t = 0; t < r->tools.n; t++) {
        work->n_free += !is_called(r, t);
    }
    work->n_called = r->tools.n - work->n_free;
    if (!is_called(r, work->best) || work->n_free == 0) {
        return;
    }
    bool found = false;
    for (size_t t = 0; t < r->tools.n; t++) {
        if (!is_called(r, t) && (!found || work->logit[t] > work->logit[work->next])) {
            work->next = t;
            found = true;
        }
    }
}

/* ---- scalars, in the order of features.SCALAR_NAMES ----------------------------------------------------------------- */

static void put_structure(struct work *work, const struct wh_request *r) {
    const int32_t *number = r->numbers;
    put(work, log1p((double)number[WH_N_MESSAGES]));
    put(work, log1p((double)number[WH_N_USER_TURNS]));
    put(work, log1p((double)r->tools.n));
    put(work, header_of(&r->system, WH_TEXT_CHARS) != 0);
    put(work, log1p((double)header_of(&r->system, WH_TEXT_CHARS)));
    put(work, number[WH_LAST_ROLE] == 0);
    put(work, number[WH_LAST_ROLE] == 1);
    put_count(work, (double)number[WH_N_CALLS]);
    put_count(work, (double)number[WH_N_RESULTS]);
    put_count(work, (double)number[WH_N_CALLED_NAMES]);
    put_count(work, (double)number[WH_N_CALLS] - (double)number[WH_N_DISTINCT_CALLS]);
    put_count(work, (double)number[WH_N_CALLS] - (double)number[WH_N_CALLED_NAMES]);
    put(work, log1p((double)number[WH_N_EARLIER_CALLS]));
    put(work, number[WH_HAS_EARLIER_RESULTS] != 0);
    put_count(work, (double)number[WH_N_LAST_RESULTS]);
    put(work, number[WH_USER_AFTER_TEXT] != 0);
    put(work, number[WH_HAS_MEDIA] != 0);
}

static void put_user_and_assistant(struct work *work, const struct wh_request *r) {
    const unsigned char *user = r->user.record + WH_TEXT_FIXED - WH_USER_SCALARS * sizeof(float);
    for (size_t i = 0; i < WH_USER_SCALARS; i++) {
        put(work, (double)wh_load_f32(user, i));
    }
    const struct wh_text *text = &r->assistant;
    const bool asks = header_of(text, WH_TEXT_ENDS_QUESTION) != 0;
    put(work, header_of(text, WH_TEXT_CHARS) != 0);
    put(work, log1p((double)header_of(text, WH_TEXT_CHARS)));
    put(work, asks);
    put(work, header_of(text, WH_TEXT_HAS_QUESTION) != 0);
    put(work, asks && r->numbers[WH_LAST_ROLE] == 0);
    put(work, log1p((double)header_of(&r->previous, WH_TEXT_CHARS)));
}

static void put_result(struct work *work, const struct wh_request *r) {
    if (r->state == NULL) {
        put_zeros(work, 9 + WH_RESULT_STATE + WH_N_CUES - 2);
        return;
    }
    put(work, 1.0);
    for (size_t i = 0; i < WH_RESULT_STATE; i++) {
        put(work, (double)wh_load_f32(r->state, i));
    }
    if (r->numbers[WH_N_RESULTS] == 0) {
        put_zeros(work, 5 + WH_N_CUES);
    } else {
        put(work, 1.0);
        for (size_t i = 2; i < WH_RESULT_STATE; i++) {
            put(work, (double)wh_load_f32(r->state, i));
        }
        put(work, (double)r->numbers[WH_N_FAILED_RESULTS]);
    }
    put(work, log1p((double)r->result.n_stems));
}

/* ROUTER_NAMES up to identifier counts and shares. */
static void put_router(struct work *work, const struct wh_request *r) {
    const struct wh_toolset *tools = &r->tools;
    const size_t n = tools->n;
    const size_t best = work->best;
    const double *logit = work->logit;
    const double top = logit[best];
    size_t second = best;
    double logit_sum = 0.0;
    double square_sum = 0.0;
    double cosine_sum = 0.0;
    double cosine_top = work->cosines[0];
    bool has_second = false;
    for (size_t t = 0; t < n; t++) {
        if (t != best && (!has_second || logit[t] > logit[second])) {
            second = t;
            has_second = true;
        }
        logit_sum += logit[t];
        square_sum += logit[t] * logit[t];
        cosine_sum += work->cosines[t];
        cosine_top = work->cosines[t] > cosine_top ? work->cosines[t] : cosine_top;
    }
    if (has_second && logit[second] == top) {
        second = best; /* equal ones count as the first of them */
    }
    const double mean = logit_sum / (double)n;
    const double variance = square_sum / (double)n - mean * mean;
    const double p_best = work->chance[best];
    const double p_second = n > 1 ? work->chance[second] : 0.0;
    const double called = work->n_called != 0 ? largest(r, logit, true, mean) : mean;
    const double uncalled = work->n_free != 0 ? logit[work->next] : mean;
    bool has_earlier = false;
    double earlier = mean;
    for (size_t t = 0; t < n && r->is_earlier != NULL; t++) {
        if (r->is_earlier[t] != 0 && (!has_earlier || logit[t] > earlier)) {
            earlier = logit[t];
            has_earlier = true;
        }
    }
    put(work, p_best);
    put(work, p_second);
    put(work, p_best - p_second);
    put(work, top);
    put(work, n > 1 ? logit[second] : top - 4.0);
    put(work, mean);
    put(work, sqrt(variance > 0.0 ? variance : 0.0));
    put(work, cosine_top);
    put(work, cosine_sum / (double)n);
    put(work, work->cosines[best]);
    put(work, work->cosines[n + best]);
    put(work, work->cosines[2 * n + best]);
    put(work, work->lexical[best]);
    put(work, called);
    put(work, uncalled);
    put(work, uncalled - called);
    put(work, earlier);
    put(work, is_called(r, best));
    put(work, r->is_earlier != NULL && r->is_earlier[best] != 0);
    put(work, (double)work->n_free / (double)n);
    for (size_t fact = 0; fact < WH_TOOL_FACTS; fact++) {
        put_count(work, (double)wh_load_i32(tools->facts, best * WH_TOOL_FACTS + fact));
    }
    for (size_t share = 0; share < WH_SHARES; share++) {
        put(work, wh_load_f64(tools->shares, share));
    }
}

/* How much of the user's words the tools name, and of the best tool's name the user. */
static enum wh_status put_tool_words(struct work *work, const struct wh_request *r) {
    const struct wh_toolset *tools = &r->tools;
    size_t start = 0;
    size_t n = 0;
    if (!section(tools->tool_start, work->best, tools->n_tool_stems, &start, &n)) {
        return WH_ERR_INDEX;
    }
    put(work, covered_by(&r->user, tools->tool_stems + start * sizeof(int32_t), n));
    put(work, covered_by(&r->user, tools->all_stems, tools->n_all_stems));
    put(work, covered_by(&r->user, tools->names_stems, tools->n_names_stems));
    if (!section(tools->name_start, work->best, tools->n_name_stems, &start, &n)) {
        return WH_ERR_INDEX;
    }
    const double weight = wh_load_f64(tools->name_weight, work->best);
    double shared = 0.0;
    for (size_t i = 0, j = 0; i < r->user.n_stems && j < n;) {
        const int32_t mine = wh_load_i32(r->user.stems, i);
        const int32_t other = wh_load_i32(tools->name_stems, start + j);
        if (mine == other) {
            shared += (double)wh_load_f32(tools->name_weights, start + j);
        }
        i += mine <= other;
        j += other <= mine;
    }
    put(work, weight != 0.0 ? shared / weight : 0.0);
    return WH_OK;
}

static void tool_cosines(const struct wh_ops *ops, const struct wh_gate *gate, const struct wh_toolset *tools,
                         const struct wh_text *text, double *cosines) {
    if (text->is_empty) {
        memset(cosines, 0, tools->n * sizeof(double));
    } else {
        ops->dot_rows_f32(text->vector, tools->vectors, tools->n, gate->dim, (unsigned char *)cosines);
    }
}

static double top_of(const double *values, size_t n) {
    double top = values[0];
    for (size_t i = 1; i < n; i++) {
        top = values[i] > top ? values[i] : top;
    }
    return top;
}

static double mean_of(const double *values, size_t n) {
    double sum = 0.0;
    for (size_t i = 0; i < n; i++) {
        sum += values[i];
    }
    return sum / (double)n;
}

static void put_context(const struct wh_ops *ops, const struct wh_gate *gate, struct work *work,
                        const struct wh_request *r) {
    const size_t n = r->tools.n;
    tool_cosines(ops, gate, &r->tools, &r->result, work->result);
    tool_cosines(ops, gate, &r->tools, &r->assistant, work->assistant);
    tool_cosines(ops, gate, &r->tools, &r->system, work->system);
    if (r->previous.is_empty) {
        memcpy(work->context, work->cosines, n * sizeof(double));
    } else {
        const double own = r->user.is_empty ? 0.0 : 1.0;
        const double square = 4.0 * own + 1.0 + 4.0 * dot(ops, gate, &r->user, &r->previous);
        const double length = square > 0.0 ? sqrt(square) : 1.0;
        tool_cosines(ops, gate, &r->tools, &r->previous, work->context);
        for (size_t t = 0; t < n; t++) {
            work->context[t] = (2.0 * work->cosines[t] + work->context[t]) / length;
        }
    }
    put(work, top_of(work->context, n));
    put(work, mean_of(work->context, n));
    put(work, top_of(work->result, n));
    put(work, top_of(work->assistant, n));
    put(work, mean_of(work->system, n));
    put(work, largest(r, work->context, false, 0.0));
    put(work, largest(r, work->result, false, 0.0));
    put(work, work->n_called != 0 ? largest(r, work->result, true, 0.0) : 0.0);
}

static void put_next_hop(struct work *work, const struct wh_request *r) {
    double hops = 0.0;
    double identifiers = 0.0;
    for (size_t t = 0; t < r->tools.n && r->hops != NULL && r->numbers[WH_N_RESULTS] != 0; t++) {
        if (!is_called(r, t)) {
            hops += (double)r->hops[2 * t];
            identifiers += (double)r->hops[2 * t + 1];
        }
    }
    const double missing =
        (double)wh_load_i32(r->tools.facts, work->best * WH_TOOL_FACTS + 1) - (double)r->user.n_values;
    const double missing_ids = (double)wh_load_i32(r->tools.facts, work->best * WH_TOOL_FACTS + 2) -
                               (double)header_of(&r->user, WH_TEXT_NUMBERS);
    put_count(work, hops);
    put_count(work, identifiers);
    put_count(work, missing > 0.0 ? missing : 0.0);
    put_count(work, missing_ids > 0.0 ? missing_ids : 0.0);
}

/* ---- what the dialogue already holds (features._cover) --------------------------------------------------------------- */

/* Whether the text, in lower case, holds a value. */
static bool holds(const struct wh_text *text, const uint8_t *value, size_t n) {
    if (n == 0) {
        return true;
    }
    const uint8_t *at = text->lower;
    size_t left = text->n_lower;
    while (left >= n) {
        const uint8_t *found = memchr(at, value[0], left - n + 1);
        if (found == NULL) {
            return false;
        }
        if (memcmp(found, value, n) == 0) {
            return true;
        }
        left -= (size_t)(found - at) + 1;
        at = found + 1;
    }
    return false;
}

static void put_cover(struct work *work, const struct wh_request *r) {
    const struct wh_text *user = &r->user;
    const size_t n_now = (size_t)r->numbers[WH_N_NOW];
    const size_t n_before = (size_t)r->numbers[WH_N_BEFORE];
    const bool has_calls = r->numbers[WH_N_CALLS] != 0;
    double in_now = 0.0;
    double in_any = 0.0;
    for (size_t i = 0; i < n_now; i++) {
        const double share = covered_by_text(user, &r->now[i]);
        in_now = share > in_now ? share : in_now;
    }
    in_any = in_now;
    for (size_t i = 0; i < n_before; i++) {
        const double share = covered_by_text(user, &r->before[i]);
        in_any = share > in_any ? share : in_any;
    }
    double n_inside = 0.0;
    double n_outside = 0.0;
    double n_new = 0.0;
    for (size_t i = 0; i < user->n_values; i++) {
        const uint8_t *value = user->value_bytes + wh_load_i32(user->values, 2 * i);
        const size_t n = (size_t)wh_load_i32(user->values, 2 * i + 1);
        n_inside += has_calls && holds(&r->called, value, n);
        bool found = false;
        for (size_t k = 0; k < n_now && !found; k++) {
            found = holds(&r->now[k], value, n);
        }
        for (size_t k = 0; k < n_before && !found; k++) {
            found = holds(&r->before[k], value, n);
        }
        n_outside += !found;
        n_new += !found && !holds(&r->assistant, value, n) && !holds(&r->system, value, n);
    }
    const double n_values = (double)user->n_values;
    put(work, in_now);
    put(work, in_any);
    put(work, has_calls ? covered_by_text(user, &r->called) : 0.0);
    put(work, covered_by_text(user, &r->assistant));
    put(work, covered_by_text(user, &r->system));
    put(work, user->n_values != 0 ? n_inside / n_values : 0.0);
    put(work, log1p(r->numbers[WH_N_RESULTS] != 0 ? n_values - n_inside : 0.0));
    put(work, user->n_values != 0 ? 1.0 - n_outside / n_values : 0.0);
    put(work, log1p(n_new));
    put(work, covered_by_text(&r->result, &r->assistant));
}

static void put_cosines(const struct wh_ops *ops, const struct wh_gate *gate, struct work *work,
                        const struct wh_request *r) {
    put(work, dot(ops, gate, &r->user, &r->result));
    put(work, dot(ops, gate, &r->user, &r->assistant));
    put(work, dot(ops, gate, &r->user, &r->previous));
    put(work, dot(ops, gate, &r->user, &r->system));
    double with_tools = 0.0;
    if (r->tools.n != 0 && r->tools.has_words && !r->user.is_empty) {
        unsigned char cosine[sizeof(double)];
        ops->dot_rows_f32(r->user.vector, r->tools.mean, 1, gate->dim, cosine);
        with_tools = wh_load_f64(cosine, 0);
    }
    put(work, with_tools);
    put(work, dot(ops, gate, &r->result, &r->assistant));
}

static enum wh_status put_scalars(const struct wh_ops *ops, const struct wh_gate *gate, struct work *work,
                                  const struct wh_request *r, float *scalars) {
    enum { ROUTER_SCALARS = 45 };
    work->scalar = scalars;
    put_structure(work, r);
    put_user_and_assistant(work, r);
    put_result(work, r);
    if (r->tools.n == 0) {
        put_zeros(work, ROUTER_SCALARS);
    } else {
        enum wh_status status = score(ops, gate, work, r);
        if (status != WH_OK) {
            return status;
        }
        find_next(work, r);
        put_router(work, r);
        status = put_tool_words(work, r);
        if (status != WH_OK) {
            return status;
        }
        put_context(ops, gate, work, r);
        put_next_hop(work, r);
    }
    put_cover(work, r);
    put_cosines(ops, gate, work, r);
    return work->scalar == scalars + WH_SCALARS ? WH_OK : WH_ERR_RANGE;
}

/* ---- heads ----------------------------------------------------------------------------------------------------------- */

/* A text's product with projection k, from its record once it was made. NULL: a text without words. */
static const unsigned char *projected(const struct wh_ops *ops, const struct wh_gate *gate, struct wh_text *text,
                                      size_t k) {
    if (text->is_empty) {
        return NULL;
    }
    unsigned char *row = text->projected + k * gate->n_columns * sizeof(float);
    const int32_t filled = header_of(text, WH_TEXT_FILLED);
    if ((filled & (int32_t)(1U << k)) == 0) {
        ops->project_f32(text->vector, gate->projection + k * gate->dim * gate->n_columns * sizeof(float), gate->dim,
                         gate->n_columns, row);
        wh_store_i32(text->record, WH_TEXT_FILLED, filled | (int32_t)(1U << k));
    }
    return row;
}

static float at_or_zero(const unsigned char *row, size_t j) { return row != NULL ? wh_load_f32(row, j) : 0.0F; }

/* The rows that heads.PROJECTED names: the user's twice, next tool, result, assistant, previous user, mean, system. */
static enum wh_status dense_logits(const struct wh_ops *ops, const struct wh_gate *gate, struct work *work,
                                   struct wh_request *r, const float *scalars, double *logits) {
    const struct wh_toolset *tools = &r->tools;
    const bool has_tools = tools->n != 0;
    const size_t p = gate->n_columns;
    const unsigned char *rows[WH_PROJECTIONS] = {
        projected(ops, gate, &r->user, 0),
        projected(ops, gate, &r->user, 1),
        has_tools ? tools->projected + work->next * p * sizeof(float) : NULL,
        r->numbers[WH_N_RESULTS] != 0 ? projected(ops, gate, &r->result, 3) : NULL,
        projected(ops, gate, &r->assistant, 4),
        projected(ops, gate, &r->previous, 5),
        has_tools ? tools->mean_projected : NULL,
        projected(ops, gate, &r->system, 7),
    };
    const size_t n_joined = gate->n_units + p * (gate->n_alone + gate->n_pairs);
    const float limit = wh_load_f32(gate->limit, 0);
    float *x = work->floats;
    float *joined = x + gate->n_scalars;
    float *hidden = joined + n_joined;
    float *out = hidden + gate->n_hidden;
    for (size_t i = 0; i < gate->n_scalars; i++) {
        const float value = (scalars[i] - wh_load_f32(gate->mean, i)) * wh_load_f32(gate->scale, i);
        const float low = value < limit ? value : limit;
        x[i] = low > -limit ? low : -limit;
    }
    memcpy(joined, gate->scalar_bias, gate->n_units * sizeof(float));
    ops->add_rows_f32(joined, x, gate->scalar_weight, gate->n_scalars, gate->n_units);
    for (size_t j = 0; j < gate->n_units; j++) {
        joined[j] = joined[j] > 0.0F ? joined[j] : 0.0F;
    }
    float *at = joined + gate->n_units;
    for (size_t k = 0; k < gate->n_alone; k++, at += p) {
        const uint32_t from = wh_load_u32(gate->alone, k);
        if (from >= WH_PROJECTIONS) {
            return WH_ERR_INDEX;
        }
        for (size_t j = 0; j < p; j++) {
            const float value = at_or_zero(rows[from], j);
            at[j] = value > 0.0F ? value : 0.0F;
        }
    }
    for (size_t k = 0; k < gate->n_pairs; k++, at += p) {
        const uint32_t left = wh_load_u32(gate->left, k);
        const uint32_t right = wh_load_u32(gate->right, k);
        if (left >= WH_PROJECTIONS || right >= WH_PROJECTIONS) {
            return WH_ERR_INDEX;
        }
        for (size_t j = 0; j < p; j++) {
            at[j] = at_or_zero(rows[left], j) * at_or_zero(rows[right], j);
        }
    }
    memcpy(hidden, gate->hidden_bias, gate->n_hidden * sizeof(float));
    ops->add_rows_f32(hidden, joined, gate->hidden_weight, n_joined, gate->n_hidden);
    for (size_t j = 0; j < gate->n_hidden; j++) {
        hidden[j] = hidden[j] > 0.0F ? hidden[j] : 0.0F;
    }
    memcpy(out, gate->out_bias, WH_CLASSES * sizeof(float));
    ops->add_rows_f32(out, hidden, gate->out_weight, gate->n_hidden, WH_CLASSES);
    for (size_t c = 0; c < WH_CLASSES; c++) {
        logits[c] = (double)out[c];
    }
    return WH_OK;
}

static void add_slot(double *logits, const struct wh_text *text, size_t slot) {
    for (size_t c = 0; c < WH_CLASSES; c++) {
        logits[c] += wh_load_f64(text->record + WH_TEXT_NGRAMS_AT, slot * WH_CLASSES + c);
    }
}

static void ngram_logits(const struct wh_gate *gate, const struct work *work, const struct wh_request *r,
                         double *logits) {
    for (size_t c = 0; c < WH_CLASSES; c++) {
        logits[c] = wh_load_f64(gate->ngram_bias, c);
    }
    add_slot(logits, &r->user, WH_SLOT_USER + (size_t)r->numbers[WH_PHASE]);
    add_slot(logits, &r->assistant, WH_SLOT_ASSISTANT);
    if (r->numbers[WH_N_RESULTS] != 0) {
        add_slot(logits, &r->result, WH_SLOT_RESULT);
    }
    add_slot(logits, &r->previous, WH_SLOT_PREVIOUS);
    add_slot(logits, &r->system, WH_SLOT_SYSTEM);
    for (size_t c = 0; c < WH_CLASSES; c++) {
        logits[c] += r->tools.n != 0 ? wh_load_f64(r->tools.ngrams, work->next * WH_CLASSES + c) : 0.0;
        logits[c] += r->last_call != NULL ? wh_load_f64(r->last_call, c) : 0.0;
    }
}

static void log_softmax(const double *logits, double *log_p) {
    double top = logits[0];
    for (size_t c = 1; c < WH_CLASSES; c++) {
        top = logits[c] > top ? logits[c] : top;
    }
    double sum = 0.0;
    for (size_t c = 0; c < WH_CLASSES; c++) {
        sum += exp(logits[c] - top);
    }
    const double total = log(sum);
    for (size_t c = 0; c < WH_CLASSES; c++) {
        log_p[c] = logits[c] - top - total;
    }
}

enum wh_status wh_gate_forward(const struct wh_ops *ops, const struct wh_gate *gate, struct wh_request *request,
                               unsigned char *restrict scratch, struct wh_verdict *verdict) {
    const int32_t *number = request->numbers;
    if (gate->n_scalars != WH_SCALARS || number[WH_PHASE] < 0 || number[WH_PHASE] >= WH_PHASES ||
        number[WH_N_NOW] < 0 || number[WH_N_NOW] > WH_HISTORY_MAX || number[WH_N_BEFORE] < 0 ||
        number[WH_N_BEFORE] > WH_HISTORY_MAX) {
        return WH_ERR_RANGE;
    }
    struct work work = {0};
    lay_out(&work, scratch, request->tools.n, request->tools.n_examples);
    enum wh_status status = put_scalars(ops, gate, &work, request, verdict->scalars);
    double dense[WH_CLASSES];
    double ngram[WH_CLASSES];
    double inputs[2 * WH_CLASSES];
    if (status == WH_OK) {
        status = dense_logits(ops, gate, &work, request, verdict->scalars, dense);
    }
    if (status != WH_OK) {
        return status;
    }
    ngram_logits(gate, &work, request, ngram);
    log_softmax(ngram, inputs);
    log_softmax(dense, inputs + WH_CLASSES);
    const size_t phase = (size_t)number[WH_PHASE];
    double blended[WH_CLASSES];
    for (size_t c = 0; c < WH_CLASSES; c++) {
        blended[c] = wh_load_f64(gate->blend_bias, phase * WH_CLASSES + c);
        for (size_t i = 0; i < 2 * WH_CLASSES; i++) {
            blended[c] += inputs[i] * wh_load_f64(gate->blend, (phase * 2 * WH_CLASSES + i) * WH_CLASSES + c);
        }
    }
    log_softmax(blended, verdict->log_p);
    verdict->tool = work.best;
    verdict->tool_probability = request->tools.n != 0 ? work.chance[work.best] : 0.0;
    return WH_OK;
}

void wh_ngram_field(const uint8_t *restrict text, size_t n_bytes, uint32_t seed, uint32_t modes, double weight,
                    double smoothing, const unsigned char *restrict weights, size_t n_buckets,
                    unsigned char *restrict logits) {
    unsigned char sums[WH_CLASSES * sizeof(double)];
    const size_t count = wh_ngram_sum_f32(text, n_bytes, seed, modes, weights, n_buckets, WH_CLASSES, sums);
    const double scale = weight / sqrt((double)count + smoothing);
    for (size_t c = 0; c < WH_CLASSES; c++) {
        wh_store_f64(logits, c, wh_load_f64(logits, c) + wh_load_f64(sums, c) * scale);
    }
}

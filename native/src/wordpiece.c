/* WordPiece ids of plain text, as the `tokenizers` library gives them: BERT's pre-tokeniser splits at white space and
 * makes each punctuation mark a word of its own, then each word is cut greedily into the longest known pieces. */
#include "bytes.h"
#include "wh_gate.h"

#define FNV_OFFSET ((uint32_t)2166136261U)
#define FNV_PRIME ((uint32_t)16777619U)

static inline uint32_t fnv_step(uint32_t hash, uint8_t byte) { return (hash ^ byte) * FNV_PRIME; }

static inline size_t slot_of(uint32_t hash, size_t n_slots) { return (hash ^ (hash >> 15)) & (n_slots - 1); }

enum wh_status wh_wordpiece_index(const uint8_t *restrict text, size_t n_bytes, size_t n_tokens,
                                  unsigned char *restrict offsets, unsigned char *restrict slots, size_t n_slots) {
    if (n_slots == 0 || (n_slots & (n_slots - 1)) != 0 || n_slots / 2 < n_tokens || n_bytes >= INT32_MAX ||
        n_tokens == 0) {
        return WH_ERR_RANGE;
    }
    memset(slots, 0xFF, n_slots * sizeof(int32_t));
    size_t at = 0;
    for (size_t token = 0; token < n_tokens; token++) {
        if (at > n_bytes) {
            return WH_ERR_RANGE; /* fewer lines than tokens */
        }
        wh_store_i32(offsets, token, (int32_t)at);
        uint32_t hash = FNV_OFFSET;
        for (; at < n_bytes && text[at] != '\n'; at++) {
            hash = fnv_step(hash, text[at]);
        }
        at++;
        size_t slot = slot_of(hash, n_slots);
        while (wh_load_i32(slots, slot) >= 0) {
            slot = (slot + 1) & (n_slots - 1);
        }
        wh_store_i32(slots, slot, (int32_t)token);
    }
    wh_store_i32(offsets, n_tokens, (int32_t)at);
    return at == n_bytes + 1 ? WH_OK : WH_ERR_RANGE; /* else: more lines than tokens */
}

/* The id of the token prefix + word, -1 for none, -2 when the tables point outside. Of equal tokens the last one counts,
 * as in a dictionary. */
static int32_t find(const struct wh_vocabulary *vocabulary, uint32_t hash, bool inside, const uint8_t *word, size_t n) {
    const size_t n_prefix = inside ? 2 : 0;
    int32_t found = -1;
    size_t slot = slot_of(hash, vocabulary->n_slots);
    for (size_t tries = 0; tries < vocabulary->n_slots; tries++, slot = (slot + 1) & (vocabulary->n_slots - 1)) {
        const int32_t token = wh_load_i32(vocabulary->slots, slot);
        if (token < 0) {
            return found;
        }
        if ((size_t)token >= vocabulary->n_tokens) {
            return -2;
        }
        const int32_t start = wh_load_i32(vocabulary->offsets, (size_t)token);
        const int32_t end = wh_load_i32(vocabulary->offsets, (size_t)token + 1);
        if (start < 0 || end <= start || (size_t)end > vocabulary->n_bytes + 1) {
            return -2;
        }
        const uint8_t *entry = vocabulary->text + start;
        if ((size_t)(end - start) - 1 == n_prefix + n && (!inside || (entry[0] == '#' && entry[1] == '#')) &&
            memcmp(entry + n_prefix, word, n) == 0 && token > found) {
            found = token;
        }
    }
    return found;
}

/* Pieces of one word in lower case. Returns how many were written (room for ids_max), or -2 as `find`. */
static int pieces(const struct wh_vocabulary *vocabulary, const uint8_t *word, size_t n, unsigned char *ids,
                  size_t ids_max) {
    size_t n_ids = 0;
    for (size_t start = 0; start < n && n <= WH_WORD_CHARS_MAX;) {
        uint32_t hashes[WH_WORD_CHARS_MAX];
        uint32_t hash = start == 0 ? FNV_OFFSET : fnv_step(fnv_step(FNV_OFFSET, '#'), '#');
        for (size_t i = start; i < n; i++) {
            hashes[i] = hash = fnv_step(hash, word[i]);
        }
        int32_t id = -1;
        size_t end = n;
        for (; end > start; end--) {
            id = find(vocabulary, hashes[end - 1], start != 0, word + start, end - start);
            if (id != -1) {
                break;
            }
        }
        if (id == -2) {
            return -2;
        }
        if (id == -1) {
            n_ids = 0;
            break;
        }
        if (n_ids < ids_max) {
            wh_store_i32(ids, n_ids, id);
        }
        n_ids++;
        start = end;
    }
    if (n_ids == 0 && n != 0) { /* too long, or a piece that the vocabulary lacks */
        if (ids_max != 0) {
            wh_store_i32(ids, 0, vocabulary->unknown);
        }
        n_ids = 1;
    }
    return (int)(n_ids < ids_max ? n_ids : ids_max);
}

static inline bool is_space(uint8_t byte) { return byte == ' ' || byte == '\t' || byte == '\n' || byte == '\r'; }

static inline bool is_word(uint8_t byte) {
    return (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z') || (byte >= '0' && byte <= '9');
}

static bool is_special(const uint8_t *text, size_t n) {
    static const char *const names[] = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const size_t length = strlen(names[i]);
        if (n >= length && memcmp(text, names[i], length) == 0) {
            return true;
        }
    }
    return false;
}

static const uint8_t ellipsis[3] = {0xE2, 0x80, 0xA6};

/* U+2026 with a space (or an end of the text) on both sides, as text_signals.clip writes it. */
static bool is_ellipsis(const uint8_t *text, size_t n_bytes, size_t at) {
    return n_bytes - at >= 3 && memcmp(text + at, ellipsis, 3) == 0 && (at == 0 || is_space(text[at - 1])) &&
           (n_bytes - at == 3 || is_space(text[at + 3]));
}

enum wh_status wh_wordpiece(const struct wh_vocabulary *vocabulary, const uint8_t *restrict text, size_t n_bytes,
                            unsigned char *restrict ids, size_t ids_max, size_t *n_ids) {
    size_t count = 0;
    for (size_t at = 0; at < n_bytes;) {
        const uint8_t byte = text[at];
        if (is_space(byte)) {
            at++;
            continue;
        }
        size_t end = at + 1;
        uint8_t word[WH_WORD_CHARS_MAX];
        size_t n = 1;
        if (byte >= 0x80) {
            if (!is_ellipsis(text, n_bytes, at)) {
                return WH_ERR_RANGE;
            }
            memcpy(word, ellipsis, sizeof ellipsis);
            n = 3;
            end = at + 3;
        } else if (byte < ' ' || byte == 0x7F || (byte == '[' && is_special(text + at, n_bytes - at))) {
            return WH_ERR_RANGE;
        } else if (is_word(byte)) {
            while (end < n_bytes && is_word(text[end])) {
                end++;
            }
            n = end - at;
            for (size_t i = 0; i < n && i < WH_WORD_CHARS_MAX; i++) {
                const uint8_t letter = text[at + i];
                word[i] = letter >= 'A' && letter <= 'Z' ? (uint8_t)(letter | 0x20) : letter;
            }
        } else {
            word[0] = byte;
        }
        const int written = pieces(vocabulary, word, n, ids + count * sizeof(int32_t), ids_max - count);
        if (written < 0) {
            return WH_ERR_INDEX;
        }
        count += (size_t)written;
        at = end;
    }
    *n_ids = count;
    return WH_OK;
}

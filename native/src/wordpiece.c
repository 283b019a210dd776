/* WordPiece ids of a text, as the `tokenizers` library gives them. BERT's normaliser drops control characters, puts spaces
 * around ideographs, takes letters apart from their accents, drops these and lowers the case; its pre-tokeniser splits at
 * white space and makes each punctuation mark a word of its own; then each word is cut greedily into the longest known
 * pieces. All but the last happens character by character, so one pass does it. */
#include "bytes.h"
#include "normaliser_tables.h"
#include "wh_gate.h"

#define FNV_OFFSET ((uint32_t)2166136261U)
#define FNV_PRIME ((uint32_t)16777619U)
#define WORD_BYTES_MAX (4 * WH_WORD_CHARS_MAX)

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

/* Pieces of one word of normalised UTF-8. Returns how many were written (room for ids_max), or -2 as `find`. */
static int pieces(const struct wh_vocabulary *vocabulary, const uint8_t *word, size_t n, unsigned char *ids,
                  size_t ids_max) {
    size_t n_ids = 0;
    for (size_t start = 0; start < n;) {
        uint32_t hashes[WORD_BYTES_MAX];
        uint32_t hash = start == 0 ? FNV_OFFSET : fnv_step(fnv_step(FNV_OFFSET, '#'), '#');
        for (size_t i = start; i < n; i++) {
            hashes[i] = hash = fnv_step(hash, word[i]);
        }
        int32_t id = -1;
        size_t end = n;
        for (; end > start; end--) {
            if (end < n && (word[end] & 0xC0) == 0x80) {
                continue; /* within a character */
            }
            id = find(vocabulary, hashes[end - 1], start != 0, word + start, end - start);
            if (id != -1) {
                break;
            }
        }
        if (id == -2) {
            return -2;
        }
        if (id == -1) { /* a piece that the vocabulary lacks makes the whole word unknown */
            id = vocabulary->unknown;
            n_ids = 0;
            end = n;
        }
        if (n_ids < ids_max) {
            wh_store_i32(ids, n_ids, id);
        }
        n_ids++;
        start = end;
    }
    return (int)(n_ids < ids_max ? n_ids : ids_max);
}

/* What a character becomes: the low 3 bits of its action in normaliser_tables.h; the other bits are the payload. */
enum wh_character {
    CHARACTER_WORD, /* stays, part of a word */
    CHARACTER_PUNCTUATION, /* stays, a word of its own */
    CHARACTER_NOTHING, /* dropped as if it had not been there */
    CHARACTER_STARTER_GONE, /* dropped, but marks do not move past it */
    CHARACTER_SPACE,
    CHARACTER_MAPPED, /* another character: payload = 2 * difference, + 1 for an ideograph, which is a word of its own */
    CHARACTER_MARK, /* stays; payload = canonical combining class, by which neighbouring marks are put in order */
    CHARACTER_SEQUENCE, /* several characters: row `payload` of character_sequence */
};

static int32_t action_of(uint32_t code) {
    const size_t group = character_group[code >> (CHARACTER_BLOCK_BITS + CHARACTER_GROUP_BITS)];
    const size_t in_group = (code >> CHARACTER_BLOCK_BITS) & ((1U << CHARACTER_GROUP_BITS) - 1U);
    const size_t block = character_block[(group << CHARACTER_GROUP_BITS) + in_group];
    const size_t in_block = code & ((1U << CHARACTER_BLOCK_BITS) - 1U);
    return character_action[character_place[(block << CHARACTER_BLOCK_BITS) + in_block]];
}

/* Marks in a row whose order may change. Real text has two or three; more are left to the library. */
#define MARKS_MAX 32

/* The ids so far, the word that is growing, and the marks behind it that have not found their order yet. */
struct cutter {
    const struct wh_vocabulary *vocabulary;
    unsigned char *ids;
    size_t ids_max;
    size_t n_ids;
    size_t n_chars; /* of the word; those past WH_WORD_CHARS_MAX are only counted */
    size_t n_bytes;
    size_t n_marks;
    enum wh_status status;
    uint32_t marks[MARKS_MAX];
    int32_t classes[MARKS_MAX];
    uint8_t word[WORD_BYTES_MAX];
};

static void put_id(struct cutter *cutter, int32_t id) {
    if (cutter->n_ids < cutter->ids_max) {
        wh_store_i32(cutter->ids, cutter->n_ids++, id);
    }
}

static void put(struct cutter *cutter, uint32_t code) {
    if (cutter->n_chars++ >= WH_WORD_CHARS_MAX) {
        return;
    }
    uint8_t *at = cutter->word + cutter->n_bytes;
    const size_t n_more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static const uint8_t lead[4] = {0x00, 0xC0, 0xE0, 0xF0};
    at[0] = (uint8_t)(lead[n_more] | (code >> (6 * n_more)));
    for (size_t i = 1; i <= n_more; i++) {
        at[i] = (uint8_t)(0x80 | ((code >> (6 * (n_more - i))) & 0x3F));
    }
    cutter->n_bytes += n_more + 1;
}

static void end_marks(struct cutter *cutter) {
    for (size_t i = 0; i < cutter->n_marks; i++) {
        put(cutter, cutter->marks[i]);
    }
    cutter->n_marks = 0;
}

static void end_word(struct cutter *cutter) {
    end_marks(cutter);
    if (cutter->n_chars > WH_WORD_CHARS_MAX) {
        put_id(cutter, cutter->vocabulary->unknown);
    } else if (cutter->n_chars != 0) {
        const int written = pieces(cutter->vocabulary, cutter->word, cutter->n_bytes,
                                   cutter->ids + cutter->n_ids * sizeof(int32_t), cutter->ids_max - cutter->n_ids);
        if (written < 0) {
            cutter->status = WH_ERR_INDEX;
        } else {
            cutter->n_ids += (size_t)written;
        }
    }
    cutter->n_chars = cutter->n_bytes = 0;
}

static void put_alone(struct cutter *cutter, uint32_t code) {
    end_word(cutter);
    put(cutter, code);
    end_word(cutter);
}

/* Keeps a mark behind those of its class and of lower ones. */
static void put_mark(struct cutter *cutter, uint32_t code, int32_t combining_class) {
    size_t at = cutter->n_marks;
    if (at == MARKS_MAX) {
        cutter->status = WH_ERR_RANGE;
        return;
    }
    for (; at != 0 && cutter->classes[at - 1] > combining_class; at--) {
        cutter->marks[at] = cutter->marks[at - 1];
        cutter->classes[at] = cutter->classes[at - 1];
    }
    cutter->marks[at] = code;
    cutter->classes[at] = combining_class;
    cutter->n_marks++;
}

/* A character that the tables leave as it is. */
static void put_normal(struct cutter *cutter, uint32_t code) {
    const int32_t action = action_of(code);
    switch (action & 7) {
    case CHARACTER_PUNCTUATION:
        put_alone(cutter, code);
        break;
    case CHARACTER_MARK:
        put_mark(cutter, code, action >> 3);
        break;
    default:
        end_marks(cutter);
        put(cutter, code);
    }
}

/* A Hangul syllable is two or three letters (chapter 3.12 of the Unicode standard). */
#define SYLLABLE_FIRST ((uint32_t)0xAC00)
#define SYLLABLES ((uint32_t)11172)
static void put_syllable(struct cutter *cutter, uint32_t index) {
    end_marks(cutter);
    put(cutter, 0x1100 + index / 588);
    put(cutter, 0x1161 + index % 588 / 28);
    if (index % 28 != 0) {
        put(cutter, 0x11A7 + index % 28);
    }
}

static void put_any(struct cutter *cutter, uint32_t code) {
    if (code - SYLLABLE_FIRST < SYLLABLES) {
        put_syllable(cutter, code - SYLLABLE_FIRST);
        return;
    }
    const int32_t action = action_of(code);
    const int32_t payload = action >> 3;
    switch (action & 7) {
    case CHARACTER_NOTHING:
        break;
    case CHARACTER_STARTER_GONE:
        end_marks(cutter);
        break;
    case CHARACTER_SPACE:
        end_word(cutter);
        break;
    case CHARACTER_MAPPED: {
        const uint32_t other = (uint32_t)((int32_t)code + (payload >> 1));
        if ((payload & 1) != 0) {
            put_alone(cutter, other);
        } else {
            put_normal(cutter, other);
        }
        break;
    }
    case CHARACTER_SEQUENCE:
        for (size_t i = 0; i < CHARACTER_SEQUENCE_MAX; i++) {
            const int32_t other = character_sequence[(size_t)payload * CHARACTER_SEQUENCE_MAX + i];
            if (other != 0) {
                put_normal(cutter, (uint32_t)other);
            }
        }
        break;
    default:
        put_normal(cutter, code);
    }
}

static inline bool is_word(uint8_t byte) {
    return (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z') || (byte >= '0' && byte <= '9');
}

/* The length of the special token that the text begins with; 0 for none. */
static size_t special(const uint8_t *text, size_t n) {
    static const char *const names[] = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const size_t length = strlen(names[i]);
        if (n >= length && memcmp(text, names[i], length) == 0) {
            return length;
        }
    }
    return 0;
}

/* A special token counts as it is spelled, before anything is normalised. */
static void put_special(struct cutter *cutter, const uint8_t *text, size_t n) {
    end_word(cutter);
    uint32_t hash = FNV_OFFSET;
    for (size_t i = 0; i < n; i++) {
        hash = fnv_step(hash, text[i]);
    }
    const int32_t id = find(cutter->vocabulary, hash, false, text, n);
    if (id < 0) { /* the library adds one to the vocabulary then */
        cutter->status = id == -1 ? WH_ERR_RANGE : WH_ERR_INDEX;
    } else {
        put_id(cutter, id);
    }
}

/* The code point at the start of UTF-8 text and its length in bytes; 0 where there is none. */
static size_t decode(const uint8_t *text, size_t n, uint32_t *code) {
    const uint8_t first = text[0];
    const size_t length = first < 0x80   ? 1
                          : first < 0xC2 ? 0
                          : first < 0xE0 ? 2
                          : first < 0xF0 ? 3
                          : first < 0xF5 ? 4
                                         : 0;
    if (length > n || length == 0) {
        return 0;
    }
    static const uint8_t payload[5] = {0, 0x7F, 0x1F, 0x0F, 0x07};
    *code = first & payload[length];
    for (size_t i = 1; i < length; i++) {
        if ((text[i] & 0xC0) != 0x80) {
            return 0;
        }
        *code = (*code << 6) | (text[i] & 0x3FU);
    }
    return *code > 0x10FFFF ? 0 : length;
}

enum wh_status wh_wordpiece(const struct wh_vocabulary *vocabulary, const uint8_t *restrict text, size_t n_bytes,
                            unsigned char *restrict ids, size_t ids_max, size_t *n_ids) {
    struct cutter cutter;
    cutter.vocabulary = vocabulary;
    cutter.ids = ids;
    cutter.ids_max = ids_max;
    cutter.n_ids = cutter.n_chars = cutter.n_bytes = cutter.n_marks = 0;
    cutter.status = WH_OK;
    for (size_t at = 0; at < n_bytes && cutter.n_ids < ids_max && cutter.status == WH_OK;) {
        const uint8_t byte = text[at];
        if (is_word(byte)) {
            end_marks(&cutter);
            for (; at < n_bytes && is_word(text[at]); at++) {
                if (cutter.n_chars++ < WH_WORD_CHARS_MAX) {
                    const uint8_t letter = text[at];
                    cutter.word[cutter.n_bytes++] = letter >= 'A' && letter <= 'Z' ? (uint8_t)(letter | 0x20) : letter;
                }
            }
            continue;
        }
        size_t length = byte == '[' ? special(text + at, n_bytes - at) : 0;
        if (length != 0) {
            put_special(&cutter, text + at, length);
        } else {
            uint32_t code = 0;
            length = decode(text + at, n_bytes - at, &code);
            if (length == 0) {
                return WH_ERR_RANGE;
            }
            put_any(&cutter, code);
        }
        at += length;
    }
    end_word(&cutter);
    *n_ids = cutter.n_ids;
    return cutter.status;
}

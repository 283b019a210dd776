/* Unaligned element access: each compiles to one load or store. */
#ifndef WH_BYTES_H
#define WH_BYTES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline int32_t wh_load_i32(const unsigned char *buffer, size_t index) {
    int32_t value;
    memcpy(&value, buffer + index * sizeof value, sizeof value);
    return value;
}

static inline uint32_t wh_load_u32(const unsigned char *buffer, size_t index) {
    uint32_t value;
    memcpy(&value, buffer + index * sizeof value, sizeof value);
    return value;
}

static inline float wh_load_f32(const unsigned char *buffer, size_t index) {
    float value;
    memcpy(&value, buffer + index * sizeof value, sizeof value);
    return value;
}

static inline double wh_load_f64(const unsigned char *buffer, size_t index) {
    double value;
    memcpy(&value, buffer + index * sizeof value, sizeof value);
    return value;
}

static inline void wh_store_i32(unsigned char *buffer, size_t index, int32_t value) {
    memcpy(buffer + index * sizeof value, &value, sizeof value);
}

static inline void wh_store_u32(unsigned char *buffer, size_t index, uint32_t value) {
    memcpy(buffer + index * sizeof value, &value, sizeof value);
}

static inline void wh_store_f64(unsigned char *buffer, size_t index, double value) {
    memcpy(buffer + index * sizeof value, &value, sizeof value);
}

#endif

// Rows to codes and back, in one pass over the data. docs/storage.md defines every byte; reference.py does the same.
//
// Compiled with the flags of torch.compile: NaN and infinity are honoured, and sums are not reordered.
// Full groups of 128 values are held in eight vectors of 16. They are written with the vector types of GCC and Clang,
// which turn them into whatever instructions the CPU has. A shorter last group is handled one value at a time.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16, VECTORS = 8, GROUP = LANES * VECTORS;
constexpr uint32_t GOLDEN = 0x9E3779B9u;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint8_t Bytes16 __attribute__((vector_size(16)));

template <class V> V load(const void* from) { V v; std::memcpy(&v, from, sizeof v); return v; }
template <class V> void store(void* to, V v) { std::memcpy(to, &v, sizeof v); }

Ints lanes() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// What the vector types do not say in one instruction: GCC would convert bytes one at a time.
#ifdef __AVX512F__
bool any(Ints mask) { return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask); }
Bytes16 to_bytes(Ints v) { return (Bytes16)_mm512_cvtepi32_epi8((__m512i)v); }
Halves to_halves(Words v) { return (Halves)_mm512_cvtepi32_epi16((__m512i)v); }
Ints widen(Bytes16 v) { return (Ints)_mm512_cvtepu8_epi32((__m128i)v); }
Words widen(Halves v) { return (Words)_mm512_cvtepu16_epi32((__m256i)v); }
Floats add_product(Floats a, Floats b, Floats c) { return (Floats)_mm512_fmadd_ps((__m512)b, (__m512)c, (__m512)a); }
#else
bool any(Ints mask) {
    uint64_t words[8], joined = 0;
    store(words, mask);
    for (uint64_t word : words) joined |= word;
    return joined;
}
Halves to_halves(Words v) { return __builtin_convertvector(v, Halves); }
Words widen(Halves v) { return __builtin_convertvector(v, Words); }
Bytes16 to_bytes(Ints v) { return __builtin_convertvector(to_halves((Words)v), Bytes16); }
Ints widen(Bytes16 v) { return (Ints)widen(__builtin_convertvector(v, Halves)); }
Floats add_product(Floats a, Floats b, Floats c) { return a + b * c; }
#endif

float float_of(uint16_t bf16) {
    uint32_t bits = uint32_t(bf16) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

uint16_t bf16_of(float x) {  // to the nearest
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7FC0;
    return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

Floats fill(float x) { return Floats{} + x; }
Floats values_at(const float* from) { return load<Floats>(from); }
Floats values_at(const uint16_t* from) { return (Floats)(widen(load<Halves>(from)) << 16); }
float value_at(const float* from) { return *from; }
float value_at(const uint16_t* from) { return float_of(*from); }

void put(float* to, Floats v) { store(to, v); }
void put(uint16_t* to, Floats v) {
    // Whatever is NaN here was computed, and its lower bits are zero: it stays NaN.
    const Words bits = (Words)v;
    store(to, to_halves((bits + 0x7FFF + (bits >> 16 & 1)) >> 16));
}
void put(float* to, float x) { *to = x; }
void put(uint16_t* to, float x) { *to = bf16_of(x); }

// ---- Rotation: signs, then Walsh–Hadamard's transform.

float sign_at(int place) { return __builtin_parity(place & place >> 1) ? -1.0f : 1.0f; }

struct Signs {
    float of[GROUP];
    Signs() { for (int i = 0; i < GROUP; ++i) of[i] = sign_at(i); }
};
const Signs SIGNS;

template <int D> Floats other_lanes(Floats v) {  // in lane i what v has in lane i ^ D
#ifdef __clang__
    return __builtin_shufflevector(v, v, 0 ^ D, 1 ^ D, 2 ^ D, 3 ^ D, 4 ^ D, 5 ^ D, 6 ^ D, 7 ^ D, 8 ^ D, 9 ^ D, 10 ^ D,
                                   11 ^ D, 12 ^ D, 13 ^ D, 14 ^ D, 15 ^ D);
#else
    return __builtin_shuffle(v, lanes() ^ D);
#endif
}

#ifdef __clang__
Floats lower_halves(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
}
Floats upper_halves(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
#else
Floats lower_halves(Floats a, Floats b) { return __builtin_shuffle(a, b, lanes() + (lanes() & 8)); }
Floats upper_halves(Floats a, Floats b) { return __builtin_shuffle(a, b, lanes() + 8 + (lanes() & 8)); }
#endif

template <int D> Floats butterfly_in(Floats v) {
    const Floats signs = (lanes() & D) != 0 ? Floats{} - 1.0f : Floats{} + 1.0f;
    return add_product(other_lanes<D>(v), v, signs);  // an exact product
}

inline __attribute__((always_inline)) void transform(Floats* v) {
    for (int q = 0; q < VECTORS; ++q)
        v[q] = butterfly_in<8>(butterfly_in<4>(butterfly_in<2>(butterfly_in<1>(v[q]))));
    for (int distance = 1; distance < VECTORS; distance *= 2)
        for (int q = 0; q < VECTORS; ++q)
            if (!(q & distance)) {
                Floats one = v[q], other = v[q + distance];
                v[q] = one + other;
                v[q + distance] = one - other;
            }
}

// The transform of a shorter group: row j of the matrix is what value j adds to each output.
void transform(float* x, int size, const float* matrix) {
    Floats sums[VECTORS] = {};
    for (int j = 0; j < size; ++j)
        for (int q = 0; q < VECTORS; ++q) sums[q] += x[j] * load<Floats>(matrix + j * GROUP + q * LANES);
    std::memcpy(x, sums, sizeof(float) * size);
}

const float SCALE = 0.08838834764831845f;  // 1 / sqrt(128)

// ---- Ranges.

float down(float x) {  // the largest bf16 number that is not above x
    if (!std::isfinite(x)) return std::numeric_limits<float>::quiet_NaN();
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = (bits + (bits >> 31 ? 0xFFFF : 0)) & 0xFFFF0000u;
    std::memcpy(&x, &bits, 4);
    return x + 0.0f;  // not -0.0: the sign of a step has a meaning
}
float up(float x) { return 0.0f - down(-x); }

struct Grid {
    float least, step, inverse;
    int32_t zeros;  // whether it keeps them; as wide as the others, so that a grid is copied in one piece

    Grid() = default;
    Grid(float smallest, float largest, int levels, bool keeps_zeros) : zeros(keeps_zeros) {
        least = down(smallest);
        step = up((largest - least) * float((1.0 + 0x1p-20) / (levels - zeros)));
        inverse = 1.0f / step;
        if (std::isinf(inverse)) inverse = 0;
    }

    void write(uint16_t* to) const {
        to[0] = bf16_of(least);
        to[1] = bf16_of(zeros ? -step : step);
    }
};

bool keeps_zeros(int others, int size, int levels) {
    if (levels >= 15) return others < size;
    return int64_t(others) * levels * levels < int64_t(size) * (levels - 1) * (levels - 1);
}

// ---- The dither: u in [0, 1) as a multiple of 2^-23.

uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x21F0AAADu;
    x = (x ^ x >> 15) * 0x735A2D97u;
    return x ^ x >> 15;
}
struct Line {
    uint64_t slope, offset;
};

Line dither_line(uint64_t seed) {  // random_words.line of the stream of dithers
    const uint32_t stream = 2, low = mix(uint32_t(seed) ^ stream), high = mix(uint32_t(seed >> 32));
    auto word = [=](uint32_t before_last) { return uint64_t(mix(mix((~before_last) ^ low) + high)); };
    return {word(0) << 32 | word(1) | 1, word(2) << 32 | word(3)};
}

// What a row adds to the words of its columns: 23 random bits above nine zeros.
uint32_t row_word(int64_t row, Line line) {
    return uint32_t((line.slope * mix(uint32_t(row)) + line.offset) >> 32) & ~511u;
}

// The words of the first values of a group; those of the next vector are LANES * GOLDEN larger. No table is read.
Words dither_words(uint32_t row, int64_t column) { return (Words)lanes() * GOLDEN + (uint32_t(column) * GOLDEN + row); }

Floats dither(Words first, int q) {
    return __builtin_convertvector((Ints)((first + LANES * GOLDEN * q) >> 9), Floats) * 0x1p-23f;
}
float dither_at(uint32_t row, int64_t column) { return float((uint32_t(column) * GOLDEN + row) >> 9) * 0x1p-23f; }

// ---- Codes in bytes.

// Vector q of a group has its values 16 q to 16 q + 15. Of the bits of q, the highest is folded first.
constexpr int place(int first, int second, int third) { return 4 * first + 2 * second + third; }

void put_bytes(uint8_t* to, Ints v) { store(to, to_bytes(v)); }
Ints bytes_at(const uint8_t* from) { return widen(load<Bytes16>(from)); }

template <int BITS> inline __attribute__((always_inline)) void join(const Ints* codes, uint8_t* to) {
    if (BITS == 8)
        for (int q = 0; q < 8; ++q) put_bytes(to + q * LANES, codes[q] & 255);  // in a register, where narrowing is fast
    if (BITS == 4)
        for (int q = 0; q < 4; ++q) put_bytes(to + q * LANES, codes[q] | codes[q + 4] << 4);
    if (BITS == 3 || BITS == 2)
        for (int q = 0; q < 2; ++q)
            put_bytes(to + q * LANES, (codes[place(0, 0, q)] & 3) | (codes[place(1, 0, q)] & 3) << 2 |
                                      (codes[place(0, 1, q)] & 3) << 4 | (codes[place(1, 1, q)] & 3) << 6);
    if (BITS == 3) {
        Ints high = {};
        for (int q = 0; q < 8; ++q) high |= codes[q] >> 2 << ((q >> 2) + (q & 2) + 4 * (q & 1));
        put_bytes(to + 2 * LANES, high);
    }
}

template <int BITS> inline __attribute__((always_inline)) void split(const uint8_t* from, Ints* codes) {
    if (BITS == 8)
        for (int q = 0; q < 8; ++q) codes[q] = bytes_at(from + q * LANES);
    if (BITS == 4)
        for (int q = 0; q < 4; ++q) {
            Ints joined = bytes_at(from + q * LANES);
            codes[q] = joined & 15;
            codes[q + 4] = joined >> 4;
        }
    if (BITS == 3 || BITS == 2)
        for (int q = 0; q < 2; ++q) {
            Ints joined = bytes_at(from + q * LANES);
            codes[place(0, 0, q)] = joined & 3;
            codes[place(1, 0, q)] = joined >> 2 & 3;
            codes[place(0, 1, q)] = joined >> 4 & 3;
            codes[place(1, 1, q)] = joined >> 6;
        }
    if (BITS == 3) {
        Ints high = bytes_at(from + 2 * LANES) << 2;
        for (int q = 0; q < 8; ++q) codes[q] |= high >> ((q >> 2) + (q & 2) + 4 * (q & 1)) & 4;
    }
}

// A group of any size: planes of 8, 4, 2 or 1 bits, each folded in halves until a byte is full.
int plane_bytes(int count, int width) { return (count * width + 7) / 8; }

void fold(uint8_t* codes, int count, int width, uint8_t* to) {
    for (; width < 8; width *= 2) {
        int half = (count + 1) / 2;
        for (int i = 0; i < count - half; ++i) codes[i] |= codes[half + i] << width;
        count = half;
    }
    std::memcpy(to, codes, count);
}

void unfold(const uint8_t* from, int count, int width, uint8_t* codes) {
    int counts[4] = {count}, folds = 0;
    for (int w = width; w < 8; w *= 2, ++folds) counts[folds + 1] = (counts[folds] + 1) / 2;
    std::memcpy(codes, from, counts[folds]);
    for (int kept = 4; folds; --folds, kept /= 2) {
        int half = counts[folds];
        for (int i = 0; i < counts[folds - 1] - half; ++i) codes[half + i] = codes[i] >> kept;
        for (int i = 0; i < half; ++i) codes[i] &= (1 << kept) - 1;
    }
}

void join_short(uint8_t* codes, int count, int bits, uint8_t* to) {
    if (bits != 3) return fold(codes, count, bits, to);
    uint8_t low[GROUP], high[GROUP];
    for (int i = 0; i < count; ++i) low[i] = codes[i] & 3, high[i] = codes[i] >> 2;
    fold(low, count, 2, to);
    fold(high, count, 1, to + plane_bytes(count, 2));
}

void split_short(const uint8_t* from, int count, int bits, uint8_t* codes) {
    if (bits != 3) return unfold(from, count, bits, codes);
    uint8_t high[GROUP];
    unfold(from, count, 2, codes);
    unfold(from + plane_bytes(count, 2), count, 1, high);
    for (int i = 0; i < count; ++i) codes[i] |= high[i] << 2;
}

// ---- Groups.

struct Format {
    int bits;
    bool rotated;
    const float* matrix;  // of a shorter last group, if it is rotated: (size, GROUP), padded with zeros
    int levels() const { return (1 << bits) - 1; }
};

// The values to round: those of the input without the mean row.
template <class Value> inline Floats centred(const Value* x, const float* mean, int q) {
    const Floats v = values_at(x + q * LANES);
    return mean ? v - load<Floats>(mean + q * LANES) : v;
}

template <bool ROTATED, class Value>
Grid grid_of(const Value* x, const float* mean, int levels, Floats* rotated) {
    Floats v[VECTORS];
    for (int q = 0; q < VECTORS; ++q) v[q] = centred(x, mean, q);
    if (ROTATED) {
        for (int q = 0; q < VECTORS; ++q) v[q] *= load<Floats>(SIGNS.of + q * LANES) * SCALE;
        transform(v);
        for (int q = 0; q < VECTORS; ++q) rotated[q] = v[q];
    }
    Floats low = v[0], high = v[0], sum = v[0];
    for (int q = 1; q < VECTORS; ++q) {
        low = smaller(low, v[q]);
        high = larger(high, v[q]);
        sum += v[q];
    }
    // From here on both in one vector: the least value, negated, comes to lane 0 and the largest one to lane 8.
    Floats ends = larger(lower_halves(-low, high), upper_halves(-low, high));
    ends = larger(ends, other_lanes<4>(ends));
    ends = larger(ends, other_lanes<2>(ends));
    ends = larger(ends, other_lanes<1>(ends));
    float smallest = -ends[0], largest = ends[8];
    if (any(sum - sum != 0)) {  // NaN or infinity, or only an overflow of the sum
        Ints nan = {};
        for (int q = 0; q < VECTORS; ++q) nan |= v[q] != v[q];
        if (any(nan)) smallest = std::numeric_limits<float>::quiet_NaN();
    }
    bool zeros = false;
    if (!ROTATED && smallest == 0) {
        Ints others = {};
        for (int q = 0; q < VECTORS; ++q) others -= v[q] != 0;
        int count = 0;
        for (int i = 0; i < LANES; ++i) count += others[i];
        zeros = keeps_zeros(count, GROUP, levels);
    }
    return Grid(smallest, largest, levels, zeros);
}

template <int BITS, bool ROTATED, class Value>
void pack_group(const Value* x, const float* mean, const Floats* rotated, const Grid& grid, uint32_t row,
                int64_t column, uint8_t* to) {
    Ints codes[VECTORS];
    const Words words = dither_words(row, column);
    for (int q = 0; q < VECTORS; ++q) {
        const Floats v = ROTATED ? rotated[q] : centred(x, mean, q);
        const Floats level = (v - grid.least) * grid.inverse + dither(words, q);
        Ints code = __builtin_convertvector(level, Ints);
        if (!ROTATED && grid.zeros) code = (code + 1) & (v != 0);
        codes[q] = code & ((1 << BITS) - 1);
    }
    join<BITS>(codes, to);
}

// Full groups of one row: first the grids of several, then their codes. A grid takes long to compute but few
// instructions, so the CPU computes several at once.
constexpr int64_t RUN = 8;

template <int BITS, bool ROTATED, class Value>
void pack_groups(const Value* x, const float* mean, int64_t groups, uint32_t row, int64_t column, uint8_t* to,
                 uint16_t* ranges) {
    Floats rotated[ROTATED ? RUN * VECTORS : 1];
    Grid grids[RUN];
    for (int64_t first = 0; first < groups; first += RUN) {
        const int64_t end = std::min(groups, first + RUN);
        for (int64_t g = first; g < end; ++g) {
            Floats* own = ROTATED ? rotated + (g - first) * VECTORS : nullptr;
            const Grid grid = grid_of<ROTATED>(x + g * GROUP, mean ? mean + g * GROUP : nullptr, (1 << BITS) - 1, own);
            grid.write(ranges + 2 * g);
            grids[g - first] = grid;
        }
        for (int64_t g = first; g < end; ++g) {
            const Floats* own = ROTATED ? rotated + (g - first) * VECTORS : nullptr;
            pack_group<BITS, ROTATED>(x + g * GROUP, mean ? mean + g * GROUP : nullptr, own, grids[g - first], row,
                                      column + g * GROUP, to + g * 16 * BITS);
        }
    }
}

template <class Value>
void pack_short(const Value* x, const float* mean, int size, const Format& format, uint32_t row, int64_t column, uint8_t* to, uint16_t* ranges) {
    float v[GROUP];
    for (int i = 0; i < size; ++i) v[i] = value_at(x + i) - (mean ? mean[i] : 0.0f);
    if (format.rotated) {
        for (int i = 0; i < size; ++i) v[i] *= sign_at(i);
        transform(v, size, format.matrix);
    }
    float smallest = v[0], largest = v[0];
    int others = 0;
    bool nan = false;
    for (int i = 0; i < size; ++i) {
        smallest = v[i] < smallest ? v[i] : smallest;
        largest = v[i] > largest ? v[i] : largest;
        others += v[i] != 0;
        nan |= v[i] != v[i];
    }
    if (nan) smallest = std::numeric_limits<float>::quiet_NaN();
    bool zeros = !format.rotated && smallest == 0 && keeps_zeros(others, size, format.levels());
    Grid grid(smallest, largest, format.levels(), zeros);
    grid.write(ranges);
    uint8_t codes[GROUP];
    for (int i = 0; i < size; ++i) {
        float level = (v[i] - grid.least) * grid.inverse + dither_at(row, column + i);
        int32_t code = level == level ? int32_t(level) : 0;
        if (zeros) code = v[i] == 0 ? 0 : code + 1;
        codes[i] = uint8_t(code & format.levels());
    }
    join_short(codes, size, format.bits, to);
}

struct Levels {  // value = step * (code - u) + base, or 0
    float step, base;
    bool zeros;

    Levels(const uint16_t* ranges, bool rotated, float scale) {
        float least = float_of(ranges[0]), signed_step = float_of(ranges[1]);
        zeros = !rotated && signed_step <= 0 && std::signbit(signed_step);  // not a NaN with a sign
        step = (rotated ? signed_step : std::fabs(signed_step)) * scale;
        base = least * scale + step * (zeros ? -0.5f : 0.5f);
    }
};

template <int BITS, bool TURN, class Value>
void unpack_group(const uint8_t* from, const uint16_t* ranges, bool rotated, float scale, uint32_t row, int64_t column, Value* to) {
    Levels levels(ranges, rotated, TURN ? scale * SCALE : scale);
    Ints codes[VECTORS];
    split<BITS>(from, codes);
    const Words words = dither_words(row, column);
    Floats v[VECTORS];
    for (int q = 0; q < VECTORS; ++q) {
        v[q] = (__builtin_convertvector(codes[q], Floats) - dither(words, q)) * levels.step + levels.base;
        if (levels.zeros) v[q] = (Floats)((Ints)v[q] & (codes[q] != 0));
    }
    if (TURN) {
        transform(v);
        for (int q = 0; q < VECTORS; ++q) v[q] *= load<Floats>(SIGNS.of + q * LANES);
    }
    for (int q = 0; q < VECTORS; ++q) put(to + q * LANES, v[q]);
}

template <class Value>
void unpack_short(const uint8_t* from, const uint16_t* ranges, int size, const Format& format, bool turn, float scale, uint32_t row, int64_t column, Value* to) {
    Levels levels(ranges, format.rotated, scale);
    uint8_t codes[GROUP];
    float v[GROUP];
    split_short(from, size, format.bits, codes);
    for (int i = 0; i < size; ++i) {
        v[i] = (float(codes[i]) - dither_at(row, column + i)) * levels.step + levels.base;
        if (levels.zeros && !codes[i]) v[i] = 0;
    }
    if (turn) {
        transform(v, size, format.matrix);
        for (int i = 0; i < size; ++i) v[i] *= sign_at(i);
    }
    for (int i = 0; i < size; ++i) put(to + i, v[i]);
}

// Rows in any order are asked for some rows ahead: the CPU cannot guess where the next one is, only how it goes on.
constexpr int64_t AHEAD = 4, MOST_BYTES = 2048;

void prefetch(const void* from, int64_t bytes) {
    for (int64_t at = 0; at < std::min(bytes, MOST_BYTES); at += 64) __builtin_prefetch((const char*)from + at);
}

template <int BITS, bool ROTATED, class Value>
void pack(const Value* x, int64_t x_stride, const int64_t* chosen, const float* mean, int64_t rows, int64_t features,
          int64_t first_column, Line line, Format format, uint8_t* codes, int64_t codes_stride, uint16_t* ranges,
          int64_t ranges_stride, int threads) {
    const int64_t full = features / GROUP;
    const int rest = int(features % GROUP);
    const int group_bytes = 16 * BITS;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const Value* values = x + (chosen ? chosen[row] : row) * x_stride;
        if (chosen && row + AHEAD < rows) prefetch(x + chosen[row + AHEAD] * x_stride, sizeof(Value) * features);
        const uint32_t word = row_word(row, line);
        uint8_t* to = codes + row * codes_stride;
        uint16_t* own = ranges + row * ranges_stride;
        pack_groups<BITS, ROTATED>(values, mean, full, word, first_column, to, own);
        if (rest)
            pack_short(values + full * GROUP, mean ? mean + full * GROUP : nullptr, rest, format, word,
                       first_column + full * GROUP, to + full * group_bytes, own + 2 * full);
    }
}

template <int BITS, bool TURN, class Value>
void unpack(const uint8_t* codes, int64_t codes_stride, const uint16_t* ranges, int64_t ranges_stride,
            const int64_t* places, int64_t first, int64_t rows, int64_t features, Line line, Format format, float scale,
            Value* out, int threads) {
    const int64_t full = features / GROUP;
    const int rest = int(features % GROUP);
    const int group_bytes = 16 * BITS;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t row = places ? places[first + i] : first + i;
        Value* to = out + i * features;
        if (places && i + AHEAD < rows && places[first + i + AHEAD] >= 0) {
            const int64_t next = places[first + i + AHEAD];
            prefetch(codes + next * codes_stride, codes_stride);
            prefetch(ranges + next * ranges_stride, sizeof(uint16_t) * ranges_stride);
        }
        if (row < 0) {
            std::memset(to, 0, sizeof(Value) * features);
            continue;
        }
        const uint32_t word = row_word(row, line);
        const uint8_t* from = codes + row * codes_stride;
        const uint16_t* own = ranges + row * ranges_stride;
        for (int64_t g = 0; g < full; ++g)
            unpack_group<BITS, TURN>(from + g * group_bytes, own + 2 * g, format.rotated, scale, word, g * GROUP,
                                     to + g * GROUP);
        if (rest)
            unpack_short(from + full * group_bytes, own + 2 * full, rest, format, TURN, scale, word, full * GROUP,
                         to + full * GROUP);
    }
}

}  // namespace

// Call a template for the number of bits, with or without a rotation, and the type of values.
#define FOR_BITS(call, turned, Value, ...)                                                         \
    switch (bits) {                                                                                \
        case 8: return turned ? call<8, true, Value>(__VA_ARGS__) : call<8, false, Value>(__VA_ARGS__); \
        case 4: return turned ? call<4, true, Value>(__VA_ARGS__) : call<4, false, Value>(__VA_ARGS__); \
        case 3: return turned ? call<3, true, Value>(__VA_ARGS__) : call<3, false, Value>(__VA_ARGS__); \
        case 2: return turned ? call<2, true, Value>(__VA_ARGS__) : call<2, false, Value>(__VA_ARGS__); \
    }

extern "C" {

void pack_rows(int is_bf16, const void* x, int64_t x_stride, const int64_t* chosen, const float* mean, int64_t rows,
               int64_t features, int64_t first_column, int64_t seed, int bits, int rotated, const float* matrix,
               uint8_t* codes, int64_t codes_stride, uint16_t* ranges, int64_t ranges_stride, int threads) {
    Format format{bits, rotated != 0, matrix};
    if (is_bf16)
        FOR_BITS(pack, rotated, uint16_t, (const uint16_t*)x, x_stride, chosen, mean, rows, features, first_column,
                 dither_line(seed), format, codes, codes_stride, ranges, ranges_stride, threads)
    else
        FOR_BITS(pack, rotated, float, (const float*)x, x_stride, chosen, mean, rows, features, first_column,
                 dither_line(seed), format, codes, codes_stride, ranges, ranges_stride, threads)
}

void unpack_rows(int is_bf16, const uint8_t* codes, int64_t codes_stride, const uint16_t* ranges,
                 int64_t ranges_stride, const int64_t* places, int64_t first, int64_t rows, int64_t features,
                 int64_t seed, int bits, int rotated, int turn, float scale, const float* matrix, void* out,
                 int threads) {
    Format format{bits, rotated != 0, matrix};
    if (is_bf16)
        FOR_BITS(unpack, turn, uint16_t, codes, codes_stride, ranges, ranges_stride, places, first, rows, features,
                 dither_line(seed), format, scale, (uint16_t*)out, threads)
    else
        FOR_BITS(unpack, turn, float, codes, codes_stride, ranges, ranges_stride, places, first, rows, features,
                 dither_line(seed), format, scale, (float*)out, threads)
}

}  // extern "C"

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

Floats fill(float x) { return Floats{} + x; }
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

// ---- Memory. The CPU guesses what comes next, but neither beyond a page nor where another row in some order begins.

constexpr int64_t AHEAD_BYTES = 4096, AHEAD_ROWS = 4, MOST_BYTES = 2048;

inline void prefetch(const void* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char*)from + at);
}
template <class Value> inline void prefetch_ahead(const Value* from) {
    prefetch((const char*)from + AHEAD_BYTES, sizeof(Value) * GROUP);
}
template <class Value> inline void prefetch_ahead_to_write(Value* to) {
    for (size_t at = 0; at < sizeof(Value) * GROUP; at += 64) __builtin_prefetch((char*)to + AHEAD_BYTES + at, 1);
}

// ---- Rotation: signs, then Walsh–Hadamard's transform.

float sign_at(int place) { return __builtin_parity(place & place >> 1) ? -1.0f : 1.0f; }

const float SCALE = 0.08838834764831845f;  // 1 / sqrt(128)

struct Signs {
    float of[GROUP], scaled[GROUP];
    Signs() { for (int i = 0; i < GROUP; ++i) scaled[i] = SCALE * (of[i] = sign_at(i)); }
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

// ---- Ranges.

const float NAN32 = std::numeric_limits<float>::quiet_NaN();

float down(float x) {  // the largest bf16 number that is not above x
    if (!std::isfinite(x)) return NAN32;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = (bits + (bits >> 31 ? 0xFFFF : 0)) & 0xFFFF0000u;
    std::memcpy(&x, &bits, 4);
    return x + 0.0f;  // not -0.0: the sign of a step has a meaning
}
Floats down(Floats x) {
    const Words bits = (Words)x, below = (bits + ((Words)((Ints)bits >> 31) & 0xFFFFu)) & 0xFFFF0000u;
    return (bits & 0x7FFFFFFFu) < 0x7F800000u ? (Floats)below + 0.0f : fill(NAN32);
}
template <class V> V up(V x) { return 0.0f - down(-x); }

float widening(int levels) { return float((1.0 + 0x1p-20) / levels); }
float no_infinity(float x) { return std::isinf(x) ? 0 : x; }
Floats no_infinity(Floats x) { return x == std::numeric_limits<float>::infinity() ? fill(0) : x; }

// The levels of a group, or of one group in each lane: values lie at least + step * [0, levels].
template <class V> struct Grid {
    V least, step, inverse;

    Grid(V smallest, V largest, V widening) {
        least = down(smallest);
        step = up((largest - least) * widening);
        inverse = no_infinity(1.0f / step);
    }
};

void write_range(uint16_t* to, float least, float step, bool zeros) {
    to[0] = bf16_of(least);
    to[1] = bf16_of(zeros ? -step : step);
}

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
Words dither_words(uint32_t first) { return (Words)lanes() * GOLDEN + first; }
uint32_t first_word(uint32_t row, int64_t column) { return uint32_t(column) * GOLDEN + row; }

// 1 + u: the bits of u behind those of 1, so that no integer has to become a float.
Floats one_and_dither(Words first, int q) { return (Floats)((first + LANES * GOLDEN * q) >> 9 | 0x3F800000u); }
Floats dither(Words first, int q) { return one_and_dither(first, q) - 1.0f; }
float dither_at(uint32_t row, int64_t column) { return float(first_word(row, column) >> 9) * 0x1p-23f; }

// ---- Codes in bytes.

// Vector q of a group has its values 16 q to 16 q + 15. Of the bits of q, the highest is folded first.
constexpr int place(int first, int second, int third) { return 4 * first + 2 * second + third; }

void put_bytes(uint8_t* to, Ints v) { store(to, to_bytes(v)); }  // the lowest byte of each
Ints bytes_at(const uint8_t* from) { return widen(load<Bytes16>(from)); }

template <int BITS> inline __attribute__((always_inline)) void join(const Ints* codes, uint8_t* to) {
    if (BITS == 8)
        for (int q = 0; q < 8; ++q) put_bytes(to + q * LANES, codes[q]);
    if (BITS == 4)
        for (int q = 0; q < 4; ++q) put_bytes(to + q * LANES, codes[q] | codes[q + 4] << 4);
    if (BITS == 2)
        for (int q = 0; q < 2; ++q)
            put_bytes(to + q * LANES, codes[place(0, 0, q)] | codes[place(1, 0, q)] << 2 | codes[place(0, 1, q)] << 4 |
                                      codes[place(1, 1, q)] << 6);
    if (BITS == 3) {
        // All eight codes in one word, a nibble each, whose lower and higher bits are then moved together.
        Words word = {};
        for (int q = 0; q < 8; ++q) word |= (Words)codes[q] << 4 * ((q >> 2) + (q & 2) + 4 * (q & 1));
        Words low = word & 0x33333333u, high = word >> 2 & 0x11111111u;
        low = (low | low >> 2) & 0x0F0F0F0Fu;
        low |= low >> 4;
        high = (high | high >> 3) & 0x03030303u;
        high = (high | high >> 6) & 0x000F000Fu;
        high |= high >> 12;
        put_bytes(to, (Ints)low);
        put_bytes(to + LANES, (Ints)(low >> 16));
        put_bytes(to + 2 * LANES, (Ints)high);
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

// Packs full groups, sixteen at a time, so that what is computed once a group takes one vector for all of them.
template <int BITS, bool ROTATED, class Value> class Packer {
  public:
    // ``next`` are values that will be needed soon; ``word`` is the word of the dither of the first value.
    inline __attribute__((always_inline)) void add(const Value* x, const Value* next, const float* mean, uint32_t word,
                                                   uint8_t* codes, uint16_t* range) {
        groups[count] = {x, mean, word, codes, range};
        Floats v[VECTORS];
        for (int q = 0; q < VECTORS; ++q) v[q] = centred(x, mean, q);
        prefetch(next, sizeof(Value) * GROUP);
        if (ROTATED) {
            for (int q = 0; q < VECTORS; ++q) v[q] *= load<Floats>(SIGNS.scaled + q * LANES);
            transform(v);
            for (int q = 0; q < VECTORS; ++q) rotated[count * VECTORS + q] = v[q];
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
        smallest[count] = -ends[0];
        largest[count] = ends[8];
        if (any(sum - sum != 0)) {  // NaN or infinity, or only an overflow of the sum
            Ints nan = {};
            for (int q = 0; q < VECTORS; ++q) nan |= v[q] != v[q];
            if (any(nan)) smallest[count] = NAN32;
        }
        if (++count == LANES) flush();
    }

    // Write the groups that were added since the last time.
    void flush() {
        Ints zeros = {};
        Floats widenings = fill(widening(LEVELS));
        if (!ROTATED)
            for (int g = 0; g < count; ++g)
                if (smallest[g] == 0 && keeps_zeros(nonzero(groups[g]), GROUP, LEVELS)) {
                    zeros[g] = 1;
                    widenings[g] = widening(LEVELS - 1);
                }
        const Grid<Floats> grids(load<Floats>(smallest), load<Floats>(largest), widenings);
        const Floats unusual = grids.step - grids.step;  // NaN where a group is not finite, else 0
        for (int g = 0; g < count; ++g) write_range(groups[g].range, grids.least[g], grids.step[g], zeros[g]);
        for (int g = 0; g < count; ++g) {
            if (!ROTATED && zeros[g])
                round<true>(g, grids.least[g], grids.inverse[g]);
            else if (unusual[g] == 0)
                round<false>(g, grids.least[g], grids.inverse[g]);
            else
                std::memset(groups[g].codes, 0, 16 * BITS);
        }
        count = 0;
    }

  private:
    static constexpr int LEVELS = (1 << BITS) - 1;

    struct Group {
        const Value* x;
        const float* mean;
        uint32_t word;
        uint8_t* codes;
        uint16_t* range;
    };

    static int nonzero(const Group& group) {
        Ints found = {};
        for (int q = 0; q < VECTORS; ++q) found -= centred(group.x, group.mean, q) != 0;
        int sum = 0;
        for (int i = 0; i < LANES; ++i) sum += found[i];
        return sum;
    }

    template <bool ZEROS> inline __attribute__((always_inline)) void round(int g, float least, float inverse) {
        const Group& group = groups[g];
        const Words words = dither_words(group.word);
        Ints codes[VECTORS];  // plus one
        for (int q = 0; q < VECTORS; ++q) {
            const Floats v = ROTATED ? rotated[g * VECTORS + q] : centred(group.x, group.mean, q);
            const Floats level = add_product(one_and_dither(words, q), v - least, fill(inverse));
            codes[q] = __builtin_convertvector(level, Ints);
            if (ZEROS) codes[q] = codes[q] & (v != 0);
            else codes[q] -= 1;
        }
        join<BITS>(codes, group.codes);
    }

    int count = 0;
    Group groups[LANES];
    alignas(64) float smallest[LANES] = {}, largest[LANES] = {};
    Floats rotated[ROTATED ? LANES * VECTORS : 1];
};

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
    if (nan) smallest = NAN32;
    bool zeros = !format.rotated && smallest == 0 && keeps_zeros(others, size, format.levels());
    const Grid<float> grid(smallest, largest, widening(format.levels() - zeros));
    write_range(ranges, grid.least, grid.step, zeros);
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
    const Words words = dither_words(first_word(row, column));
    const float above = levels.base + levels.step;
    Floats v[VECTORS];
    for (int q = 0; q < VECTORS; ++q) {
        const Floats steps = __builtin_convertvector(codes[q], Floats) - one_and_dither(words, q);
        v[q] = add_product(fill(above), steps, fill(levels.step));
        if (levels.zeros) v[q] = (Floats)((Ints)v[q] & (codes[q] != 0));
    }
    if (TURN) {
        transform(v);
        for (int q = 0; q < VECTORS; ++q) v[q] *= load<Floats>(SIGNS.of + q * LANES);
    }
    prefetch_ahead_to_write(to);
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

template <int BITS, bool ROTATED, class Value>
void pack(const Value* x, int64_t x_stride, const int64_t* chosen, const float* mean, int64_t rows, int64_t features,
          int64_t first_column, Line line, Format format, uint8_t* codes, int64_t codes_stride, uint16_t* ranges,
          int64_t ranges_stride, int threads) {
    const int64_t full = features / GROUP;
    const int rest = int(features % GROUP);
    const int group_bytes = 16 * BITS;
#pragma omp parallel num_threads(threads)
    {
        Packer<BITS, ROTATED, Value> packer;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            const Value* values = x + (chosen ? chosen[row] : row) * x_stride;
            const Value* next = chosen ? x + chosen[std::min(row + 1, rows - 1)] * x_stride : values + AHEAD_BYTES / sizeof(Value);
            const uint32_t word = row_word(row, line);
            uint8_t* to = codes + row * codes_stride;
            uint16_t* own = ranges + row * ranges_stride;
            for (int64_t g = 0; g < full; ++g)
                packer.add(values + g * GROUP, next + g * GROUP, mean ? mean + g * GROUP : nullptr,
                           first_word(word, first_column + g * GROUP), to + g * group_bytes, own + 2 * g);
            if (rest)
                pack_short(values + full * GROUP, mean ? mean + full * GROUP : nullptr, rest, format, word,
                           first_column + full * GROUP, to + full * group_bytes, own + 2 * full);
        }
        packer.flush();
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
        if (places && i + AHEAD_ROWS < rows && places[first + i + AHEAD_ROWS] >= 0) {
            const int64_t next = places[first + i + AHEAD_ROWS];
            prefetch(codes + next * codes_stride, std::min(MOST_BYTES, codes_stride));
            prefetch(ranges + next * ranges_stride, std::min<int64_t>(MOST_BYTES, sizeof(uint16_t) * ranges_stride));
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

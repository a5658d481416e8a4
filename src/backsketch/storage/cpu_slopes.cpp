// Slopes to codes, and gradients times slopes, in one pass over the data. Compiled behind cpu_kernel.cpp, whose vectors,
// dither and codes it uses. docs/storage.md defines every byte; slope_reference.py does the same.

namespace {

// ---- Gradients times slopes: the same operations as in the reference, so that all bits are the same.

template <class Value>
void product(const Value* grad, const Ints* codes, float step, float base, uint32_t row, Value* to) {
    const Words words = dither_words(row);
    prefetch_ahead(grad);
    prefetch_ahead_to_write(to);
    for (int q = 0; q < VECTORS; ++q) {
        const Floats slopes = (__builtin_convertvector(codes[q], Floats) - dither(words, q)) * step + base;
        put(to + q * LANES, values_at(grad + q * LANES) * slopes);
    }
}

template <int BITS, class Value>
void multiply(const Value* grad, const uint8_t* codes, int64_t count, int64_t first_group, uint64_t slope, uint64_t offset,
              float step, float base, Value* out, int threads) {
    const int64_t full = count / GROUP;
    const int rest = int(count % GROUP);
    const int group_bytes = 16 * BITS;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t g = 0; g < full; ++g) {
        Ints own[VECTORS];
        split<BITS>(codes + g * group_bytes, own);
        product(grad + g * GROUP, own, step, base, row_word(first_group + g, {slope, offset}), out + g * GROUP);
    }
    if (!rest) return;
    uint8_t bytes[GROUP] = {};
    split_short(codes + full * group_bytes, rest, BITS, bytes);
    Ints own[VECTORS];
    for (int q = 0; q < VECTORS; ++q) own[q] = bytes_at(bytes + q * LANES);
    Value padded[GROUP] = {};
    std::memcpy(padded, grad + full * GROUP, sizeof(Value) * rest);
    product(padded, own, step, base, row_word(first_group + full, {slope, offset}), padded);
    std::memcpy(out + full * GROUP, padded, sizeof(Value) * rest);
}

// From here on, let a product and a sum be one operation with one rounding: the functions are sums of products.
#ifdef __clang__
#pragma clang fp contract(fast)
#else
#pragma GCC optimize("fp-contract=fast")
#endif

// ---- Slopes. Each is right to 2e-6, for infinity too; NaN becomes some slope of its range. The ends of the ranges are
// further away than that.

#define INLINE inline __attribute__((always_inline))  // GCC hands vectors that are wider than the CPU's over in memory

// x, but not below low and not above high; NaN becomes low.
INLINE Floats within(Floats x, float low, float high) {
#ifdef __AVX512F__
    return (Floats)_mm512_min_ps(_mm512_max_ps((__m512)x, _mm512_set1_ps(low)), _mm512_set1_ps(high));
#else  // by halves: GCC compares wider vectors than the CPU's one value at a time
    typedef float HalfFloats __attribute__((vector_size(32)));
    const HalfFloats least = HalfFloats{} + low, largest = HalfFloats{} + high;
    HalfFloats halves[2];
    store(halves, x);
    for (HalfFloats& half : halves) {
        half = half > least ? half : least;
        half = half < largest ? half : largest;
    }
    return load<Floats>(halves);
#endif
}

// A polynomial, its lowest coefficient first, as a tree of sums: a chain of them would wait for each of its steps.
// Of the place, its powers 1, 2, 4, 8 and 16 are given.
template <int COUNT> INLINE Floats polynomial(const float* coefficients, const Floats* powers) {
    if constexpr (COUNT == 1) return fill(coefficients[0]);
    else {
        constexpr int LOG = COUNT > 16 ? 4 : COUNT > 8 ? 3 : COUNT > 4 ? 2 : COUNT > 2 ? 1 : 0, HALF = 1 << LOG;
        return polynomial<HALF>(coefficients, powers) + polynomial<COUNT - HALF>(coefficients + HALF, powers) * powers[LOG];
    }
}

// f' - 1/2 is an odd function, x P(x^2), which is constant to 1e-6 where |x| > end. P is a polynomial in
// 2 (x / end)^2 - 1: so its terms stay small, and so do their rounding errors.
template <int COUNT> INLINE Floats odd_slope(Floats x, float end, const float (&coefficients)[COUNT]) {
    x = within(x, -end, end);
    Floats powers[5] = {x * x * (2 / (end * end)) - 1};
    for (int i = 1; i < 5; ++i) powers[i] = powers[i - 1] * powers[i - 1];
    return x * polynomial<COUNT>(coefficients, powers) + 0.5f;
}

// Fitted to the least largest error; where |x| is below 4 or 3, where most values are, it counts more.
constexpr float GELU[] = {
    0.131200304f,  -0.0673119813f, 0.05573472f,    -0.0568093203f, 0.0640830283f,  -0.072130885f,
    0.0770671574f, -0.0747621395f, 0.0604850398f,  -0.0456047918f, 0.0423523891f,  -0.0296366549f,
    0.00538791235f, -0.00180043575f, 0.00892787948f, -0.00458953385f};
constexpr float GELU_TANH[] = {
    0.137699158f,   -0.0715710232f, 0.0619037819f, -0.06677832f,   0.0766408657f,  -0.0829846947f,
    0.0827342123f,  -0.0706487399f, 0.0388342976f, -0.0234303871f, 0.0559690854f,  -0.0448919749f,
    -0.0369459999f, 0.033473076f,   0.0420279253f, -0.0335612391f, -0.0113768366f, 0.00999423927f};

Floats magnitude(Floats x) { return (Floats)((Words)x & 0x7FFFFFFFu); }

Floats exp_of_minus(Floats x) {  // exp(-x) for x in [0, 80]
    const Floats halvings = x * 1.44269504f;
    const Floats whole = (halvings + 0x1.8p23f) - 0x1.8p23f;  // to the nearest
    const Floats rest = whole - halvings;
    Floats sum = fill(1.33335581e-3f);
    sum = sum * rest + 9.61812911e-3f;
    sum = sum * rest + 5.55041087e-2f;
    sum = sum * rest + 2.40226507e-1f;
    sum = sum * rest + 6.93147181e-1f;
    sum = sum * rest + 1.0f;
    return (Floats)((Ints)sum - (__builtin_convertvector(whole, Ints) << 23));
}

struct Given {  // the slopes themselves, which may leave their range
    static Floats at(Floats x) { return x; }
};
template <class Function> constexpr bool STAYS_IN_RANGE = true;
template <> constexpr bool STAYS_IN_RANGE<Given> = false;

struct Gelu {
    static Floats at(Floats x) { return odd_slope(x, 5.4f, GELU); }
};
struct GeluTanh {
    static Floats at(Floats x) { return odd_slope(x, 5.15f, GELU_TANH); }
};
struct Silu {
    static Floats at(Floats x) {
        const Floats size = within(magnitude(x), 0, 80), small = exp_of_minus(size), high = 1.0f / (1.0f + small);
        const Floats above_half = high - 0.5f + size * small * high * high;  // where x > 0; where x < 0 it is below
        return (Floats)((Words)above_half ^ ((Words)x & 0x80000000u)) + 0.5f;
    }
};
struct Sigmoid {
    static Floats at(Floats x) {
        const Floats small = exp_of_minus(within(magnitude(x), 0, 80)), high = 1.0f / (1.0f + small);
        return small * high * high;
    }
};
struct Tanh {
    static Floats at(Floats x) { return 4.0f * Sigmoid::at(2.0f * x); }
};

// ---- Groups.

struct SlopeLevels {  // level = (slope - low) * per_step + u
    float low, per_step;
    int bits;
};

template <class Function, class Value>
void slope_codes(const Value* x, const SlopeLevels& levels, uint32_t row, Ints* codes) {
    const Words words = dither_words(row);
    prefetch_ahead(x);
    for (int q = 0; q < VECTORS; ++q) {
        const Floats slopes = Function::at(values_at(x + q * LANES));
        Floats level = (slopes - levels.low) * levels.per_step + one_and_dither(words, q);  // plus one
        if (!STAYS_IN_RANGE<Function>) level = within(level, 1, float(1 << levels.bits));
        codes[q] = __builtin_convertvector(level, Ints) - 1;
    }
}

void join_codes(const Ints* codes, int bits, uint8_t* to) {
    switch (bits) {
        case 8: return join<8>(codes, to);
        case 4: return join<4>(codes, to);
        case 3: return join<3>(codes, to);
        case 2: return join<2>(codes, to);
    }
}

template <class Function, class Value>
void pack_slopes(const void* source, int64_t count, int64_t first_group, uint64_t slope, uint64_t offset, SlopeLevels levels,
                 uint8_t* codes, int threads) {
    const Value* x = (const Value*)source;
    const int64_t full = count / GROUP;
    const int rest = int(count % GROUP);
    const int group_bytes = 16 * levels.bits;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t g = 0; g < full; ++g) {
        Ints own[VECTORS];
        slope_codes<Function>(x + g * GROUP, levels, row_word(first_group + g, {slope, offset}), own);
        join_codes(own, levels.bits, codes + g * group_bytes);
    }
    if (!rest) return;
    Value padded[GROUP] = {};
    std::memcpy(padded, x + full * GROUP, sizeof(Value) * rest);
    Ints own[VECTORS];
    slope_codes<Function>(padded, levels, row_word(first_group + full, {slope, offset}), own);
    uint8_t bytes[GROUP];
    for (int q = 0; q < VECTORS; ++q) put_bytes(bytes + q * LANES, own[q]);
    join_short(bytes, rest, levels.bits, codes + full * group_bytes);
}

typedef void (*PackSlopes)(const void*, int64_t, int64_t, uint64_t, uint64_t, SlopeLevels, uint8_t*, int);
template <class Value> PackSlopes pack_slopes_of(int function) {
    const PackSlopes known[] = {pack_slopes<Given, Value>,   pack_slopes<Gelu, Value>,    pack_slopes<GeluTanh, Value>,
                                pack_slopes<Silu, Value>,    pack_slopes<Sigmoid, Value>, pack_slopes<Tanh, Value>};
    return known[function];
}

}  // namespace

// Call a template for the number of bits and the type of values.
#define FOR_NUMBER_OF_BITS(call, Value, ...)        \
    switch (bits) {                                 \
        case 8: return call<8, Value>(__VA_ARGS__); \
        case 4: return call<4, Value>(__VA_ARGS__); \
        case 3: return call<3, Value>(__VA_ARGS__); \
        case 2: return call<2, Value>(__VA_ARGS__); \
    }

extern "C" {

void write_slopes(int function, int is_bf16, const void* source, int64_t count, int64_t first_group, int64_t slope,
                  int64_t offset, float low, float per_step, int bits, uint8_t* codes, int threads) {
    const PackSlopes pack = is_bf16 ? pack_slopes_of<uint16_t>(function) : pack_slopes_of<float>(function);
    pack(source, count, first_group, slope, offset, SlopeLevels{low, per_step, bits}, codes, threads);
}

void times_slopes(int is_bf16, const void* grad, const uint8_t* codes, int64_t count, int64_t first_group, int64_t slope,
                  int64_t offset, float step, float base, int bits, void* out, int threads) {
    if (is_bf16)
        FOR_NUMBER_OF_BITS(multiply, uint16_t, (const uint16_t*)grad, codes, count, first_group, slope, offset, step,
                           base, (uint16_t*)out, threads)
    else
        FOR_NUMBER_OF_BITS(multiply, float, (const float*)grad, codes, count, first_group, slope, offset, step, base,
                           (float*)out, threads)
}

}  // extern "C"

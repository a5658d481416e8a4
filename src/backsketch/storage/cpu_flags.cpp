// Masks of two numbers, zero and another, to flags and back, in one pass. Compiled behind cpu_kernel.cpp, whose vectors
// it uses. docs/storage.md says where each flag lies; flags.py does the same.

namespace {

constexpr int64_t CHUNK = 4096;  // bytes of flags

// Numbers as integers: both zeros are 0 without their sign.
Ints numbers_at(const float* x) { return load<Ints>(x); }
Ints numbers_at(const uint16_t* x) { return (Ints)widen(load<Halves>(x)); }
int32_t number_at(const float* x) { int32_t v; std::memcpy(&v, x, sizeof v); return v; }
int32_t number_at(const uint16_t* x) { return *x; }
template <class Value> constexpr int32_t UNSIGNED = sizeof(Value) == 4 ? 0x7fffffff : 0x7fff;
void put_numbers(float* to, Ints numbers) { store(to, numbers); }
void put_numbers(uint16_t* to, Ints numbers) { store(to, to_halves((Words)numbers)); }
void put_number(float* to, int32_t number) { std::memcpy(to, &number, sizeof number); }
void put_number(uint16_t* to, int32_t number) { *to = uint16_t(number); }

template <class Value> bool pack_flags(const Value* x, int64_t count, int32_t other, uint8_t* flags, int threads) {
    const int64_t size = (count + 7) / 8;
    int strange = 0;  // whether there is a third number
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : strange)
    for (int64_t chunk = 0; chunk < size; chunk += CHUNK) {
        const int64_t end = std::min(chunk + CHUNK, size);
        Ints third = {};
        for (int64_t i = chunk; i < end;) {
            if (i + LANES <= end && 7 * size + i + LANES <= count) {
                Ints bytes = {};
                for (int bit = 0; bit < 8; ++bit) {
                    const Ints numbers = numbers_at(x + bit * size + i), set = (numbers & UNSIGNED<Value>) != 0;
                    bytes |= set & (1 << bit);
                    third |= set & (numbers != other);
                }
                store(flags + i, to_bytes(bytes));
                i += LANES;
                continue;
            }
            int byte = 0;
            for (int bit = 0; bit < 8 && bit * size + i < count; ++bit) {
                const int32_t number = number_at(x + bit * size + i);
                const bool set = (number & UNSIGNED<Value>) != 0;
                byte |= int(set) << bit;
                strange |= set && number != other;
            }
            flags[i++] = uint8_t(byte);
        }
        strange |= any(third);
    }
    return !strange;
}

template <class Value> void unpack_flags(const uint8_t* flags, int64_t count, int32_t other, Value* to, int threads) {
    const int64_t size = (count + 7) / 8;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t chunk = 0; chunk < size; chunk += CHUNK) {
        const int64_t end = std::min(chunk + CHUNK, size);
        for (int64_t i = chunk; i < end;) {
            if (i + LANES <= end && 7 * size + i + LANES <= count) {
                const Ints bytes = widen(load<Bytes16>(flags + i));
                for (int bit = 0; bit < 8; ++bit) put_numbers(to + bit * size + i, ((bytes & (1 << bit)) != 0) & other);
                i += LANES;
                continue;
            }
            for (int bit = 0; bit < 8 && bit * size + i < count; ++bit)
                put_number(to + bit * size + i, flags[i] >> bit & 1 ? other : 0);
            ++i;
        }
    }
}

int32_t as_number(int is_bf16, float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return is_bf16 ? int32_t(uint32_t(bits) >> 16) : bits;
}

}  // namespace

extern "C" {

// Returns whether all numbers are zero or ``other``, which is not negative and has the type of the mask.
int write_flags(int is_bf16, const void* mask, int64_t count, float other, uint8_t* flags, int threads) {
    const int32_t number = as_number(is_bf16, other);
    return is_bf16 ? pack_flags((const uint16_t*)mask, count, number, flags, threads)
                   : pack_flags((const float*)mask, count, number, flags, threads);
}

void read_flags(int is_bf16, const uint8_t* flags, int64_t count, float other, void* mask, int threads) {
    const int32_t number = as_number(is_bf16, other);
    if (is_bf16)
        unpack_flags(flags, count, number, (uint16_t*)mask, threads);
    else
        unpack_flags(flags, count, number, (float*)mask, threads);
}

}  // extern "C"

// The places of the smallest of many random numbers, in their order. As torch.topk, but in linear time.

#include <algorithm>
#include <cstdint>
#include <vector>

extern "C" void smallest(const int64_t* keys, int64_t keys_count, int64_t count, int64_t* places) {
    struct Entry {
        int64_t key, place;
    };
    // Numbers that are spread evenly fall into as many buckets by their highest bits, about one into each.
    int bits = 1;
    while (bits < 20 && int64_t(1) << bits < keys_count) ++bits;
    const auto bucket = [=](int64_t key) { return (uint64_t(key) ^ uint64_t(1) << 63) >> (64 - bits); };
    std::vector<int64_t> ends((size_t(1) << bits) + 1);
    for (int64_t i = 0; i < keys_count; ++i) ++ends[bucket(keys[i]) + 1];
    for (size_t b = 1; b < ends.size(); ++b) ends[b] += ends[b - 1];
    std::vector<Entry> entries(keys_count);
    for (int64_t i = 0; i < keys_count; ++i) entries[ends[bucket(keys[i])]++] = {keys[i], i};
    int64_t begin = 0;
    for (size_t b = 0; begin < count; begin = ends[b++])
        if (ends[b] - begin > 1)
            std::sort(&entries[begin], &entries[ends[b]], [](Entry one, Entry other) { return one.key < other.key; });
    for (int64_t i = 0; i < count; ++i) places[i] = entries[i].place;
}

#include <cstring>
#include <stdexcept>

#include "model.h"

namespace outpace {

Cache::Cache(const Shape& shape, int layers)
    : layers_(layers), kv_heads_(shape.kv_heads), head_pad_(shape.head_pad()) {
    head_bytes_ = static_cast<size_t>(kPage) * (2 * head_pad_ + 3 * sizeof(float));
    page_bytes_ = head_bytes_ * layers_ * kv_heads_;
}

void Cache::reserve(int slots) {
    while (static_cast<int64_t>(pages_.size()) * kPage < slots) {
        // 64 more so that the first byte can be aligned; zeros, so that free slots hold numbers
        pages_.emplace_back(new uint8_t[page_bytes_ + 64]());
    }
}

PageView Cache::page(int layer, int kv_head, int page) const {
    auto address = reinterpret_cast<uintptr_t>(pages_[page].get());
    auto* base = reinterpret_cast<uint8_t*>((address + 63) / 64 * 64);
    base += head_bytes_ * (static_cast<size_t>(layer) * kv_heads_ + kv_head);
    const size_t plane = static_cast<size_t>(kPage) * head_pad_;
    auto* numbers = reinterpret_cast<float*>(base + 2 * plane);
    return {reinterpret_cast<int8_t*>(base), reinterpret_cast<int8_t*>(base + plane), numbers,
            reinterpret_cast<int32_t*>(numbers + kPage), numbers + 2 * kPage};
}

void Cache::keep(const int* path, int count) {
    for (int i = 0; i < count; ++i)
        if (path[i] < i || path[i] >= pending_ || (i > 0 && path[i] <= path[i - 1]))
            throw std::invalid_argument("a path must name nodes of the last forward, ascending");
    for (int i = 0; i < count; ++i) {
        if (path[i] == i) continue;
        const int from = length_ + path[i], to = length_ + i;
        for (int layer = 0; layer < layers_; ++layer)
            for (int head = 0; head < kv_heads_; ++head) {
                const PageView a = page(layer, head, from / kPage), b = page(layer, head, to / kPage);
                const int f = from % kPage, t = to % kPage;
                const int8_t* source = a.keys + (f / 32) * 32 * head_pad_ + (f % 32) * 4;
                int8_t* target = b.keys + (t / 32) * 32 * head_pad_ + (t % 32) * 4;
                for (int k = 0; k < head_pad_ / 4; ++k)
                    std::memcpy(target + 128 * k, source + 128 * k, 4);
                std::memcpy(b.values + t * head_pad_, a.values + f * head_pad_, head_pad_);
                b.key_scales[t] = a.key_scales[f];
                b.key_offsets[t] = a.key_offsets[f];
                b.value_scales[t] = a.value_scales[f];
            }
    }
    length_ += count;
    pending_ = 0;
}

void Cache::truncate(int length) {
    if (length < 0 || length > length_)
        throw std::invalid_argument("a cache can only be cut to a part of its length");
    length_ = length;
    pending_ = 0;
    pages_.resize((static_cast<size_t>(length) + kPage - 1) / kPage);
}

}  // namespace outpace

#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#if defined(__linux__)
#include <sys/mman.h>
#elif defined(_WIN32)
#include <malloc.h>
#endif

#include "model.h"

namespace outpace {
namespace {

// Zeros, so that free slots hold numbers; in huge pages where the system has them.
void* allocate_page(size_t bytes) {
    constexpr size_t huge = size_t{1} << 21;
    const size_t alignment = bytes >= huge ? huge : 64;
    void* memory = nullptr;
#if defined(_WIN32)
    memory = _aligned_malloc(bytes, alignment);
#else
    if (posix_memalign(&memory, alignment, bytes) != 0) memory = nullptr;
#endif
    if (memory == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (alignment == huge) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return std::memset(memory, 0, bytes);
}

}  // namespace

void FreePage::operator()(uint8_t* page) const {
#if defined(_WIN32)
    _aligned_free(page);
#else
    std::free(page);
#endif
}

Cache::Cache(const Shape& shape, int layers)
    : layers_(layers), kv_heads_(shape.kv_heads), head_pad_(shape.head_pad()) {
    head_bytes_ = static_cast<size_t>(kPage) * (2 * head_pad_ + 3 * sizeof(float));
    page_bytes_ = head_bytes_ * layers_ * kv_heads_;
}

void Cache::reserve(int slots) {
    while (static_cast<int64_t>(pages_.size()) * kPage < slots) {
        pages_.emplace_back(static_cast<uint8_t*>(allocate_page(page_bytes_)));
    }
}

PageView Cache::page(int layer, int kv_head, int page) const {
    const size_t index = static_cast<size_t>(layer) * kv_heads_ + kv_head;
    uint8_t* base = pages_[page].get() + head_bytes_ * index;
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

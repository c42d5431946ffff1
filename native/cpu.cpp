#include "cpu.h"

#include <cstdint>

#if defined(OUTPACE_X86)
#include <cpuid.h>
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace outpace {
namespace {

#if defined(OUTPACE_X86)

struct Leaf {
    unsigned a = 0, b = 0, c = 0, d = 0;
    Leaf(unsigned leaf, unsigned part) { __get_cpuid_count(leaf, part, &a, &b, &c, &d); }
};

bool bit(unsigned word, int n) { return (word >> n & 1) != 0; }

// Register sets that the operating system saves.
uint64_t saved_state() {
    if (!bit(Leaf(1, 0).c, 27)) return 0;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
}

bool saves(uint64_t mask) { return (saved_state() & mask) == mask; }

constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;

#endif

}  // namespace

bool has_portable() { return true; }

#if defined(OUTPACE_X86)

bool has_avx2() {
    return saves(kYmm) && bit(Leaf(7, 0).b, 5) && bit(Leaf(1, 0).c, 12);
}

bool has_avxvnni() { return has_avx2() && bit(Leaf(7, 1).a, 4); }

bool has_avx512() {
    const Leaf seven(7, 0);
    return has_avx2() && saves(kZmm) && bit(seven.b, 16) && bit(seven.b, 17) &&
           bit(seven.b, 30) && bit(seven.b, 31) && bit(seven.c, 11);
}

bool has_amx() {
    const Leaf seven(7, 0);
    if (!has_avx512() || !saves(kTiles) || !bit(seven.d, 24) || !bit(seven.d, 25)) return false;
#if defined(__linux__)
    constexpr long request_permission = 0x1023, tile_data = 18;  // arch_prctl
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

#else

bool has_avx2() { return false; }
bool has_avxvnni() { return false; }
bool has_avx512() { return false; }
bool has_amx() { return false; }

#endif

}  // namespace outpace

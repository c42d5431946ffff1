// What the processor and the operating system allow.
#pragma once

namespace outpace {

bool has_amx();
bool has_avx512();
bool has_avxvnni();
bool has_avx2();
bool has_portable();

}  // namespace outpace

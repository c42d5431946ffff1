#include "cpu.h"
#include "forward.h"

namespace outpace {
const Kernels kAvx512 = {"avx512", has_avx512, forward, project, embed};
}  // namespace outpace

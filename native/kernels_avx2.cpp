#include "cpu.h"
#include "forward.h"

namespace outpace {
const Kernels kAvx2 = {"avx2", has_avx2, forward, project, embed};
}  // namespace outpace

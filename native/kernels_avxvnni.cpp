#include "cpu.h"
#include "forward.h"

namespace outpace {
const Kernels kAvxVnni = {"avxvnni", has_avxvnni, forward, project, embed};
}  // namespace outpace

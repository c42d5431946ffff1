#include "cpu.h"
#include "forward.h"

namespace outpace {
const Kernels kPortable = {"portable", has_portable, forward, project, embed};
}  // namespace outpace

#include "cpu.h"
#include "forward.h"

namespace outpace {
const Kernels kAmx = {"amx", has_amx, forward, project, embed};
}  // namespace outpace

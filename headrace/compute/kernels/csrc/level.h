// The kernels of one level, as a table. Included once by each level_*.cpp, inside namespace headrace, after LANES
// and the instruction set are set. No include guard on purpose: nothing here is shared between levels.

namespace {
#include "vectors.h"
#include "elementwise.h"
#include "matrix.h"
#if defined(HEADRACE_TILES)
#include "tiles.h"
#endif
#include "coded.h"
#include "linear.h"
#include "adapters.h"
#include "quantized.h"
#include "experts.h"
#include "attention_pages.h"
#if defined(HEADRACE_TILES)
#include "attention_tiles.h"
#endif
#include "attention.h"
#include "latent.h"
#include "choose.h"
#include "screen.h"
}  // namespace

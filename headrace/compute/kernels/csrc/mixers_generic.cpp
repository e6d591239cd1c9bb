// Mixers for every machine, and those that no other level is for.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include <type_traits>
#include <utility>

#include "mixers.h"
#include "operations.h"
#include "team.h"

#define LANES 4

namespace headrace {
namespace {
#include "vectors.h"
#include "elementwise.h"
#include "matrix.h"
#include "recurrent.h"
}  // namespace

void mix_generic(const Mix &a) { mix(a); }
}  // namespace headrace

// In the place of the device's own: no product runs here.
#pragma once

#include "tessera/ptx/math.cuh"

// In place of the one of the device: the code under test holds no fragments.
#pragma once

#include "tessera/ptx/math.cuh"

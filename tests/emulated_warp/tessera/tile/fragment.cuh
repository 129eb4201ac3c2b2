// Replaces the device's own header: the code under test uses no fragments.
#pragma once

#include "tessera/ptx/math.cuh"

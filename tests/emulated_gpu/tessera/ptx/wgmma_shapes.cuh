#pragma once

#include "tessera/ptx/wgmma.cuh"

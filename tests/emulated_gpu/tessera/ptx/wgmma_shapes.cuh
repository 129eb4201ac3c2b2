#pragma once  // no wgmma by fibers

// tessera_tiles: prints the tile tables of all kernel families as JSON.
// tessera_tiles --fits: for each line "head_dim head_dim_v block_n consumers k_stages v_stages q_stages cluster" on
// stdin, prints whether it is a tile of fwd_sm90, chunks of O, bytes of shared memory: "1 2 197632". For
// scripts/search_fwd_sm90.py.
#include <cstdio>
#include <cstring>

#include "cuda/families/fwd_sm90_tiles.hpp"
#include "cuda/kernels.hpp"
#include "cuda/registry.hpp"

namespace {

using namespace tessera::cuda;

int print_tables() {
  const char* separator = "{";
  for (const Family* family : families()) {
    if (!family->tiles_json) continue;
    std::printf("%s\"%s\": %s", separator, family->name, family->tiles_json().c_str());
    separator = ",\n";
  }
  std::printf("}\n");
  return 0;
}

int print_fits() {
  Sm90Tile tile{};
  tessera::FwdSm90Config config{};
  int head_dim = 0, head_dim_v = 0;
  while (true) {
    const int read = std::scanf("%d %d %d %d %d %d %d %d", &head_dim, &head_dim_v, &tile.block_n, &tile.consumers,
                                &tile.k_stages, &tile.v_stages, &tile.q_stages, &tile.cluster);
    if (read == EOF) return 0;
    if (read != 8) {
      std::fprintf(stderr, "tessera_tiles: a line of other than 8 numbers\n");
      return 2;
    }
    set_head_dims(config, head_dim, head_dim_v);
    tile.apply(config);
    std::printf("%d %d %lld\n", tile.in_range() ? 1 : 0, config.o_chunks, static_cast<long long>(smem_bytes(config)));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 1) return print_tables();
  if (argc == 2 && std::strcmp(argv[1], "--fits") == 0) return print_fits();
  std::fprintf(stderr, "usage: tessera_tiles [--fits]\n");
  return 2;
}

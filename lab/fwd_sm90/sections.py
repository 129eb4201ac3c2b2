"""How evenly causal work tiles are shared out in sections of so many bytes of keys and values: what the block with the most to do has, over the mean, on
132 multiprocessors, as kernels/tessera/attention/work_order.hpp has the tiles in sections (a model in Python), for shapes whose heads have less than 512 KiB.

    python lab/fwd_sm90/sections.py --csv FILE
"""

import argparse
import csv
import itertools
from statistics import geometric_mean

BLOCKS, MIB = 132, (16, 24, 32)
TILES = ((64, 256, 64), (96, 256, 64), (128, 128, 128), (128, 192, 64), (192, 128, 64), (256, 128, 64))  # head size, queries, keys
LENGTHS = (256, 384, 512, 640, 768, 1024, 1536, 2048)
HEADS = (32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 2048)
COLUMNS = ("head_dim", "block_m", "length", "heads", *(f"of_{mib}_mib" for mib in MIB), "chosen")


def largest_of_mean(heads, length, section, block_m, block_n):
    """A tile costs the keys that it sees, in whole blocks, and two blocks more."""
    tiles = -(-length // block_m)
    ascending = -(-heads // section) % 2 == 0
    loads = [0] * BLOCKS
    for index in range(heads * tiles):
        number, rest = divmod(index, section * tiles)
        rank = rest // min(section, heads - number * section)
        slot = tiles - 1 - rank if (number + ascending) % 2 else rank
        round_, place = divmod(index, BLOCKS)
        keys = min((tiles - slot) * block_m, length)
        loads[BLOCKS - 1 - place if round_ % 2 else place] += -(-keys // block_n) * block_n + 2 * block_n
    return max(loads) * BLOCKS / sum(loads)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", required=True, metavar="FILE")
    options = parser.parse_args()
    found = []
    with open(options.csv, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for (dim, block_m, block_n), length, heads in itertools.product(TILES, LENGTHS, HEADS):
            head_bytes, tiles = length * 4 * dim, -(-length // block_m)
            if head_bytes >= 512 << 10 or tiles < 2 or heads * tiles <= BLOCKS:
                continue
            loads = []
            for mib in MIB:
                sections = -(-heads // max(1, (mib << 20) // head_bytes))
                loads.append(largest_of_mean(heads, length, -(-heads // sections), block_m, block_n))
            loads.append(loads[0] if loads[0] <= 1.04 * min(loads) else min(loads))
            found.append(loads)
            writer.writerow((dim, block_m, length, heads, *(f"{x:.4f}" for x in loads)))
    for name, loads in zip(COLUMNS[4:], zip(*found)):
        print(f"{name}: {geometric_mean(loads):.4f} in the mean of {len(loads)} shapes, {max(loads):.3f} at most, {sum(x > 1.2 for x in loads)} above 1.2")


if __name__ == "__main__":
    main()

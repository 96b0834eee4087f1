#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""How long blocks wait for their turns: simulates 4 x 16 heads of 8192 on 132 SMs.

Every tile takes a block 4382 clocks, as in step 67. The arguments are times from the start of a block's additions to
the start of the next block's. Prints the clocks of each variant, those of any-order being 1. With --grouped four heads
of Q share one of K, as step 80 has it, and a window of 1024 keys to the left is simulated, too.
"""

import heapq
import sys

HEADS, QUERY_TILES, KEY_TILES, TILE, READ = 64, 103, 64, 4382, 1000


def clocks(turn, causal, window=8192, heads_at_once=4, upward=False, group=1, head_after_head=False):
    """The clocks of all blocks; nobody waits if the turn is 0."""
    sms, added, end = [0] * 132, {}, 0
    for number in range(HEADS // group * KEY_TILES):
        section, place = divmod(number, heads_at_once * KEY_TILES)
        head, key_tile = section * heads_at_once + place % heads_at_once, place // heads_at_once
        end_of_tiles = min(QUERY_TILES, (key_tile * 128 + 127 + window) // 80 + 1)
        tiles = range(key_tile * 128 // 80 if causal else 0, end_of_tiles)
        visits = [(tile, h) for tile in (tiles if upward else reversed(tiles)) for h in range(group)]
        if head_after_head:
            visits.sort(key=lambda visit: visit[1])
        before, now = added.get(head, {}), {}
        computed, start = heapq.heappop(sms), 0
        for visit in visits:
            # The place of dQ is free when the engine has read it.
            computed = max(computed + TILE, start + READ)
            start = max(computed, before.get(visit, 0), start + turn if turn else 0)
            now[visit] = start + turn if turn else 0
        added[head] = now
        heapq.heappush(sms, start + READ)
        end = max(end, start + READ)
    return end


grouped = sys.argv[1:2] == ["--grouped"]
for turn in map(int, sys.argv[1 + grouped:]):
    masks = ("no mask", False, 8192), ("causal", True, 8192), ("window", True, 1024)
    for mask, causal, window in masks[: 2 + grouped]:
        free = clocks(0, causal, window)
        if grouped:
            of_group = {"causal": causal, "window": window, "heads_at_once": 1, "group": 4}
            print(f"{turn} clocks, {mask:7}  any-order {clocks(0, **of_group) / free:.3f}"
                  f"  head-after-head {clocks(turn, **of_group, head_after_head=True) / free:.3f}"
                  f"  tile-after-tile {clocks(turn, **of_group) / free:.3f}")
            continue
        print(f"{turn} clocks, {mask:7}  step {clocks(turn, causal) / free:.3f}"
              f"  one-head {clocks(turn, causal, heads_at_once=1) / free:.3f}"
              f"  upward {clocks(turn, causal, upward=True) / free:.3f}")

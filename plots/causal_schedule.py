# SPDX-License-Identifier: MIT
"""The causal step's blocks, in their order and in the other: who works how long, and who ends last.

How much each block does is what the emulator counted. When it starts is a model: each of a few slots
takes the next block as soon as its last one has ended, as the GPU's slots do.
"""

import heapq

import style
from style import pyplot

SLOTS = 10
PANELS = [("20-causal:in-order", "in order, the longest blocks last"),
          ("20-causal", "step 20, the longest blocks first")]


def schedule(work):
    """Of each block, in the order of their start: its slot and when it begins."""
    free = [(0, slot) for slot in range(SLOTS)]
    places = []
    for amount in work:
        now, slot = heapq.heappop(free)
        places.append((slot, now))
        heapq.heappush(free, (now + amount, slot))
    return places, max(end for end, _ in free)


def head(block, rows):
    """A section of heads is side by side in x; z counts the sections."""
    return int(block["z"]) * (1 + max(int(r["x"]) for r in rows)) + int(block["x"])


def main():
    arguments = style.results_parser(__doc__).parse_args()
    rows = style.read_measured(arguments.results / "blocks-20.csv", "counters")
    figure, axes = pyplot.subplots(len(PANELS), 1, figsize=(12, 6.4), sharex=True)
    heads = sorted({head(r, rows) for r in rows})
    colours = ["#CFE6F6", style.ORANGE, "#4FA58A", style.PINK][:len(heads)]
    last = 0
    for one, (name, title) in zip(axes, PANELS):
        blocks = sorted((r for r in rows if r["step"] == name), key=lambda r: int(r["block"]))
        work = [int(r["mma"]) for r in blocks]
        unit = min(work)  # of the first rows' block
        places, end = schedule(work)
        last = max(last, end / unit)
        for block, amount, (slot, begin) in zip(blocks, work, places):
            one.add_patch(pyplot.Rectangle((begin / unit, slot - 0.4), amount / unit, 0.8,
                                           facecolor=colours[heads.index(head(block, rows))],
                                           edgecolor="white", linewidth=1.5))
            if amount >= 2 * unit:
                one.text((begin + amount / 2) / unit, slot, f"{amount // unit}", ha="center",
                         va="center", fontsize=10)
        even = sum(work) / SLOTS / unit
        one.axvline(even, color=style.INK, linewidth=1.6, linestyle=(0, (4, 2)))
        one.axvline(end / unit, color=style.RED, linewidth=1.8)
        one.set_title(f"{title}: {100 * (end / unit / even - 1):.0f}% longer than evenly shared work",
                      fontsize=13)
        one.set_ylim(SLOTS - 0.4, -0.6)
        one.set_yticks(range(SLOTS), [f"slot {i}" for i in range(SLOTS)])
        one.tick_params(axis="y", length=0)
    axes[-1].set_xlim(0, 1.02 * last)
    axes[-1].set_xlabel("time, in units of the shortest block; a number is the work of its block")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=c) for c in colours]
    handles += [pyplot.Line2D([], [], color=style.INK, linewidth=1.6, linestyle=(0, (4, 2))),
                pyplot.Line2D([], [], color=style.RED, linewidth=1.8)]
    labels = [*(f"head {h}" for h in heads), "if work were shared evenly", "the last block ends"]
    axes[0].legend(handles, labels, ncols=len(labels), loc="lower right",
                   bbox_to_anchor=(1, 1.1), borderpad=0)
    figure.suptitle("Which block does how much, and when", x=0.02, ha="left", fontsize=16,
                    fontweight="bold")
    figure.tight_layout()
    style.save(figure, arguments.out, "causal_schedule")


main()

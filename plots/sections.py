# SPDX-License-Identifier: MIT
"""In which order step 20 starts a head's blocks, and of how many heads K and V are read together.

Drawn from the definitions: 6 heads of 4 tiles of Q, an L2 that holds K and V of 2 heads, 4 blocks at a time.
"""

import style
from style import pyplot

HEADS, TILES, FIT, AT_A_TIME = 6, 4, 2, 4
SHADES = ["#DCEBF7", "#A9CFEA", "#5FA3D3", "#0F5C94"]  # of the work, from light to heavy


def order(side):
    """(head, tile) in the order in which blocks start, if `side` heads are a section."""
    sections = -(-HEADS // side)
    return [(section * side + x, tile) for section in reversed(range(sections))
            for tile in reversed(range(TILES)) for x in range(side)]


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, axes = pyplot.subplots(3, 1, figsize=(12, 8.6), sharex=True)
    panels = [(1, "one head at a time", "fits L2, but long blocks start until the end"),
              (HEADS, "all heads together", "short blocks are last, but too much for L2"),
              (FIT, "step 20: sections of 2 heads", "fits L2, and each section ends with short blocks")]
    for one, (side, title, remark) in zip(axes, panels):
        blocks = order(side)
        at_once = [len({head for head, _ in blocks[i:i + AT_A_TIME]})
                   for i in range(0, len(blocks), AT_A_TIME)]
        for i, (head, tile) in enumerate(blocks):
            one.add_patch(pyplot.Rectangle((i, head), 1, 1, facecolor=SHADES[tile],
                                           edgecolor="white", linewidth=2))
            one.text(i + 0.5, head + 0.5, tile + 1, ha="center", va="center", fontsize=12,
                     color="white" if tile > 1 else style.INK)
        for i, heads in enumerate(at_once):
            one.text((i + 0.5) * AT_A_TIME, HEADS + 0.62, f"K, V of {heads}", ha="center",
                     va="center", fontsize=11.5, fontweight="bold",
                     color=style.RED if heads > FIT else style.INK)
            one.plot([i * AT_A_TIME + 0.15, (i + 1) * AT_A_TIME - 0.15], [HEADS + 0.12] * 2,
                     color=style.RED if heads > FIT else style.INK, linewidth=2)
        one.set_title(f"{title}: {remark}", fontsize=13.5)
        one.set_ylim(HEADS + 1.1, -0.1)
        one.set_xlim(0, len(blocks))
        one.set_yticks([h + 0.5 for h in range(HEADS)], [f"head {h}" for h in range(HEADS)])
        one.tick_params(length=0)
        one.set_xticks([])
        for side_of in one.spines.values():
            side_of.set_visible(False)
    axes[-1].set_xlabel(f"blocks in the order of their start; a number is a block's work, dark is long; "
                        f"a bracket: {AT_A_TIME} blocks that run together")
    figure.suptitle(f"Sections of heads, where L2 holds K and V of {FIT} heads", x=0.02, ha="left",
                    fontsize=17, fontweight="bold")
    figure.tight_layout()
    style.save(figure, arguments.out, "sections")


main()

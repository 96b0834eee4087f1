# SPDX-License-Identifier: MIT
"""A block of step 25: whose queries its rows are, which warp has which keys, and how parts merge.

A schematic, drawn from no results.
"""

import style
from style import pyplot

WARPS, HEADS, STAGES = 8, 8, 3
TILES = 24  # of keys that are drawn: three for each warp
TINTS = ["#9CCBEA", "#F6D08A"]  # of neighbouring warps: their numbers tell them apart in print
QUERY, PART, OUT = "#8CD3BB", "#F4B6A0", style.GREEN


def box(axes, x, y, width, height, colour, label="", **text):
    axes.add_patch(pyplot.Rectangle((x, y), width, height, facecolor=colour, edgecolor="white",
                                    linewidth=1.4, zorder=2))
    if label:
        axes.text(x + width / 2, y + height / 2, label, ha="center", va="center", zorder=4,
                  **{"fontsize": 11, **text})


def arrow(axes, begin, end, colour=style.INK):
    axes.annotate("", end, begin, zorder=5,
                  arrowprops={"arrowstyle": "-|>,head_width=0.25,head_length=0.5", "color": colour,
                              "linewidth": 1.5, "shrinkA": 0, "shrinkB": 0})


def rows(axes):
    """The tile of Q: a row for each head of the group, and as many that are empty."""
    axes.text(0, 11.6, "16 rows of Q", fontsize=13, fontweight="bold")
    for row in range(16):
        box(axes, 0, 10.6 - row * 0.62, 6.2, 0.62, QUERY if row < HEADS else style.PALE,
            f"head {row}" if row < HEADS else "", fontsize=9.5)
    axes.text(3.1, 10.6 - 11.6 * 0.62, "empty", ha="center", va="center", color=style.GREY)
    axes.text(0, 0.55, "one query of each head\nof the group", va="top", fontsize=11)


def warps(axes):
    """The cache in tiles of 16 keys, dealt to the warps; and each warp's stages."""
    left, width = 9.2, 0.9
    axes.text(left, 11.6, "keys and values of the sequence, in tiles of 16: the number is the warp that has it", fontsize=13,
              fontweight="bold")
    for tile in range(TILES):
        box(axes, left + tile * width, 9.7, width, 1.5, TINTS[tile % WARPS % 2], str(tile % WARPS))
    axes.text(left + TILES * width + 0.15, 10.45, "…", va="center", fontsize=15)
    step = TILES * width / WARPS
    for warp in range(WARPS):
        x = left + warp * step
        # From the warp's first tile.
        arrow(axes, (left + (warp + 0.5) * width, 9.6), (x + step / 2 - 0.15, 7.95),
              style.GREY)
        box(axes, x + 0.1, 7.0, step - 0.3, 0.85, TINTS[warp % 2], f"warp {warp}", fontsize=10.5)
        for stage in range(STAGES):
            box(axes, x + 0.1 + stage * (step - 0.3) / STAGES, 5.7, (step - 0.3) / STAGES, 1.2,
                ["#5B8FB0", "#C79A3E"][warp % 2] if stage == 0 else TINTS[warp % 2])
        box(axes, x + 0.1, 3.2, step - 0.3, 1.3, PART, "m, l, O")
        arrow(axes, (x + step / 2 - 0.05, 5.6), (x + step / 2 - 0.05, 4.6))
        arrow(axes, (x + step / 2 - 0.05, 3.1), (left + TILES * width / 2 + (warp - 3.5) * 0.5, 1.8),
              style.GREY)
    right = left + TILES * width + 0.15
    for y, text in ((7.4, "its own keys"), (6.3, "three stages: it computes\nwith one, two are in flight"),
                    (3.85, "its part of the answer"), (1.15, "merged after one barrier")):
        axes.text(right, y, text, va="center", fontsize=11)
    box(axes, left + TILES * width / 2 - 3.6, 0.5, 7.2, 1.3, OUT, "O of the eight queries", color="white",
        fontweight="bold", fontsize=12)
    # All warps multiply the same rows.
    axes.annotate("", (left - 0.1, 6.3), (6.4, 6.3),
                  arrowprops={"arrowstyle": "-|>,head_width=0.25,head_length=0.5", "color": style.INK,
                              "linewidth": 1.5})
    axes.text(7.7, 6.6, "to all\nwarps", ha="center", va="bottom", fontsize=11)


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, axes = pyplot.subplots(figsize=(15, 5.6))
    rows(axes)
    warps(axes)
    axes.set_xlim(-0.3, 38.2)
    axes.set_ylim(-0.7, 12.5)
    axes.axis("off")
    figure.tight_layout()
    style.save(figure, arguments.out, "cache")


main()

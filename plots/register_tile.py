# SPDX-License-Identifier: MIT
"""The register tile of step 04: which lane owns which scores and outputs, and who shares a load.

Drawn from the kernel's formulas: row, key and col.
"""

import style
from style import pyplot

ROWS, KEYS, COLUMNS = 8, 32, 64  # drawn, of a warp's 16 rows, 64 keys and 128 columns: the rest repeats them
LANE = 5
SHADES = ["#A9CDE8", "#E4EFF8"]  # of neighbouring addresses
COLOURS = {LANE: style.BLUE, LANE ^ 1: style.SKY, LANE ^ 2: style.ORANGE}


def patch(lane):
    """The first row, key and column of a lane."""
    return lane % 2, lane // 2, lane // 2 * 4


def owner_of_score(row, key):
    return key % 16 * 2 + row % 2


def owner_of_output(row, column):
    return column % 64 // 4 * 2 + row % 2


def grid(axes, columns, owner, label_width, title, across):
    """A warp's rows, each element in the colour of the lane that owns it."""
    for row in range(ROWS):
        for first in range(0, columns, label_width):
            lane = owner(row, first)
            colour = COLOURS.get(lane, "#F2F2F2" if (first // label_width + row) % 2 else "#E6E6E6")
            axes.add_patch(pyplot.Rectangle((first, row), label_width, 1, facecolor=colour,
                                            edgecolor="white", linewidth=0.5))
            axes.text(first + label_width / 2, row + 0.53, lane, ha="center", va="center",
                      fontsize=12.5, color="white" if lane in COLOURS else style.INK,
                      fontweight="bold" if lane in COLOURS else "normal")
    axes.set_xlim(-0.2, columns + 0.2)
    axes.set_ylim(ROWS + 0.1, -0.1)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    ticks = range(0, columns, 4 * label_width)
    axes.set_xticks([n + label_width / 2 for n in ticks], ticks)
    axes.set_yticks([n + 0.5 for n in range(ROWS)], range(ROWS))
    axes.tick_params(length=0, labelsize=12)
    axes.set_xlabel(across, fontsize=13)
    axes.set_ylabel("row of the warp (8 of 16)", fontsize=13)
    axes.set_title(title, fontsize=16, pad=12)
    for spine in axes.spines.values():
        spine.set_visible(False)


def sharing(axes, y, address, label):
    """The 32 lanes of a load, in boxes of those that request the same 16 bytes."""
    for lane in range(32):
        axes.add_patch(pyplot.Rectangle((lane, y), 1, 1, edgecolor="white", linewidth=1,
                                        facecolor=SHADES[address(lane) % 2]))
        axes.text(lane + 0.5, y + 0.52, lane, ha="center", va="center", fontsize=12)
    axes.text(32.5, y + 0.5, label, va="center", fontsize=13, linespacing=1.35)


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, (scores, outputs, loads) = pyplot.subplots(3, 1, figsize=(15, 10.6),
                                                       height_ratios=[8, 8, 6])
    row, key, col = patch(LANE)
    grid(scores, KEYS, owner_of_score, 1,
         f"S: lane {LANE} has 8 × 4 scores, rows {row} + 2 r, keys {key} + 16 c", "key of the tile: the first 32 of 64 (the others are alike)")
    grid(outputs, COLUMNS, owner_of_output, 4,
         f"O: lane {LANE} has 8 × 8 elements, the same rows, columns {col} + 64 n + e",
         "column of O: the first half of head dim 128 (the other half is alike)")
    loads.set_title("Which lanes of a load request the same 16 bytes",
                    fontsize=16, pad=12)
    sharing(loads, 0, lambda lane: patch(lane)[1],
            "a load of K (or V): pairs of lanes share;\n16 addresses, 256 bytes: 2 wavefronts")
    sharing(loads, 1.7, lambda lane: patch(lane)[0],
            "a load of Q (or P): even lanes share, odd lanes\nshare; 2 addresses: 2 wavefronts")
    loads.set_xlim(-0.2, 48.5)
    loads.set_ylim(3.1, -0.3)
    loads.axis("off")
    figure.suptitle("The register tile: in a cell, the lane that computes it", x=0.03, y=1.045,
                    ha="left", fontsize=19, fontweight="bold")
    figure.text(0.03, 0.98, f"Blue: lane {LANE}. Light blue: lane {LANE ^ 1}, its keys, other "
                f"rows. Orange: lane {LANE ^ 2}, its rows, other keys.", fontsize=13)
    figure.tight_layout(rect=(0, 0, 1, 0.975), h_pad=2)
    style.save(figure, arguments.out, "register_tile")


main()

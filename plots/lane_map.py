# SPDX-License-Identifier: MIT
"""The lane map: which lane supplies which row of K in ldmatrix.x4, before step 13 and in it.

Drawn from the formulas of the two kernels.
"""

import style
from style import pyplot

LANE = 5  # whose elements are marked
REGISTERS = ["#A9D5F2", "#F7D78D", "#8CD3BB", "#E8B4D0"]  # a colour for each register of K


def before(lane):
    """Key and column of the 16 x 16 block that the lane supplies, until step 12: row, col."""
    return lane % 16, lane // 16 * 8


def after(lane):
    """The same in step 13: key, key_col."""
    return lane % 8 + lane // 16 * 8, lane // 8 % 2 * 8


def block(axes, title, lane_map):
    """K's 16 x 16 block: in a cell the lane that supplies it, coloured by the register it fills."""
    register_of = {}
    for lane in range(32):
        key, col = lane_map(lane)
        register = lane // 8  # lanes 8 i to 8 i + 7 name the rows of matrix i, which fills k[i]
        register_of[key // 8, col // 8] = register
        axes.add_patch(pyplot.Rectangle((col, key), 8, 1, facecolor=REGISTERS[register],
                                        edgecolor="white", linewidth=1.5))
        axes.text(col + 6, key + 0.53, f"lane {lane}", ha="center", va="center", fontsize=10)
    for (half, side), register in register_of.items():  # what LANE receives of each matrix
        axes.add_patch(pyplot.Rectangle((side * 8 + LANE % 4 * 2, half * 8 + LANE // 4), 2, 1,
                                        facecolor="none", edgecolor=style.INK, linewidth=2.2))
        axes.text(side * 8 + 0.25, half * 8 + 7.5, f"k[{register}]", va="center", fontsize=12,
                  fontweight="bold")
    for half in range(2):
        pair = [register_of[half, side] for side in range(2)]
        neighbours = pair[1] == pair[0] + 1
        colour = style.GREEN if neighbours else style.RED
        y = half * 8 + 4
        axes.plot([16.4, 16.4], [half * 8 + 0.2, half * 8 + 7.8], color=colour, linewidth=2,
                  clip_on=False)
        axes.text(16.8, y, f"keys {half * 8} to {half * 8 + 7}: B is\nk[{pair[0]}] and "
                  f"k[{pair[1]}]:\n{'neighbours' if neighbours else 'two MOV first'}",
                  va="center", color=colour, fontsize=12.5, fontweight="bold", linespacing=1.4)
    axes.set_title(title, fontsize=14.5, pad=26)
    for n in range(0, 16, 8):
        axes.text(n + 4, -0.3, f"columns {n} to {n + 7}", ha="center", va="bottom", fontsize=11,
                  color=style.GREY)
        axes.text(-0.3, n + 0.5, f"key {n}", ha="right", va="center", fontsize=11,
                  color=style.GREY)
    axes.set_xlim(-2, 23)
    axes.set_ylim(16.2, -1.2)
    axes.axis("off")


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(15, 6.4))
    block(left, "11-batched: lanes go down, then right", before)
    block(right, "13-lane-map: lanes go right, then down", after)
    figure.suptitle("ldmatrix.x4 of K: the lane that supplies each row, and the register it "
                    "arrives in", x=0.02, y=1.06, ha="left", fontsize=18, fontweight="bold")
    figure.text(0.02, 0.945, "A cell is 16 bytes: one row of an 8 × 8 matrix. Matrix i arrives in "
                f"register k[i] of every lane. Framed: what lane {LANE} receives.", fontsize=12.5)
    figure.tight_layout(rect=(0, 0, 1, 0.93), w_pad=1)
    style.save(figure, arguments.out, "lane_map")


main()

# SPDX-License-Identifier: MIT
"""The register layouts of mma.m16n8k16, and why S becomes P without shared memory.

The layouts are those of common/kernel/ptx.h: PTX ISA, 'Matrix Fragments for mma.m16n8k16 with
floating point type'. The names in the lower half are those of step 05. No results are read.
"""

import style
from style import pyplot

LANE = 5  # the lane to follow
ROWS = 16  # of each matrix
WIDTH, HEIGHT = 45, 43.6  # of the figure, in elements of a matrix
# One colour for each register of A: an 8 x 8 block of the matrix.
BLOCKS = ["#CFE8F7", "#FBE3B3", "#C5E8DC", "#F3D9E7"]
B_BLOCKS = ["#DADADA", "#ECECEC"]


def cell(axes, x, y, width, height, colour, lane, lane_at, registers):
    """Two elements that one lane holds. `lane_at` is where its number stands in the cell;
    `registers` are names and where they stand."""
    followed = lane == LANE
    ink = "white" if followed else style.INK
    axes.add_patch(pyplot.Rectangle((x, y), width, height, linewidth=1, edgecolor="white",
                                    facecolor=style.INK if followed else colour))
    look = {"ha": "center", "va": "center_baseline", "color": ink}
    axes.text(x + lane_at[0], y + lane_at[1], lane, fontsize=10, fontweight="bold", **look)
    for name, register_x, register_y in registers:
        axes.text(x + register_x, y + register_y, name, fontsize=8, **look)


def title(axes, x, y, text):
    axes.text(x, y - 0.9, text, fontsize=13, fontweight="bold", va="bottom")


def ticks(axes, x, y, columns, first_column=0):
    """The number of the first row and column of each block of 8."""
    for n in range(0, ROWS, 8):
        axes.text(x - 0.2, y + n + 0.5, n, ha="right", va="center_baseline", fontsize=9,
                  color=style.GREY)
    for n in range(0, columns, 8):
        axes.text(x + n + 0.5, y - 0.2, first_column + n, ha="center", va="bottom", fontsize=9,
                  color=style.GREY)


def draw_a(axes, x, y, name="a"):
    """A, 16 x 16: a register holds two neighbours of a row."""
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for r in range(4):
            cell(axes, x + 2 * t + 8 * (r // 2), y + g + 8 * (r % 2), 2, 1, BLOCKS[r], lane,
                 (0.62, 0.5), [(f"{name}{r}", 1.4, 0.5)])
    ticks(axes, x, y, 16)


def draw_b(axes, x, y):
    """B, 16 x 8: a register holds two neighbours of a column."""
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for r in range(2):
            cell(axes, x + g, y + 2 * t + 8 * r, 1, 2, B_BLOCKS[r], lane,
                 (0.5, 0.65), [(f"b{r}", 0.5, 1.4)])
    ticks(axes, x, y, 8)


def draw_c(axes, x, y, colours, first_column=0):
    """C, 16 x 8: a register holds one element; a lane has two neighbours of a row."""
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for half in range(2):
            cell(axes, x + 2 * t, y + g + 8 * half, 2, 1, colours[half], lane, (1, 0.5),
                 [(f"c{2 * half}", 0.36, 0.5), (f"c{2 * half + 1}", 1.64, 0.5)])
    ticks(axes, x, y, 8, first_column)


def arrow(axes, start, end):
    axes.annotate("", end, start, arrowprops={
        "arrowstyle": "-|>,head_width=0.4,head_length=0.7", "color": style.INK, "linewidth": 2.5,
        "shrinkA": 0, "shrinkB": 0})


def conversion(axes, x, y, width):
    """Which registers of S a lane rounds to fp16 for each register of P."""
    for r, colour in enumerate(BLOCKS):
        tile, first = ("left", "right")[r // 2], r % 2 * 2
        at = y + 4.2 * r
        axes.add_patch(pyplot.Rectangle((x, at), width, 3.4, facecolor=colour))
        axes.text(x + 0.4, at + 1.7, f"p[{r}]", va="center_baseline", fontsize=12.5,
                  fontweight="bold")
        for half, name in enumerate(["low", "high"]):
            axes.text(x + 2.6, at + 1 + 1.4 * half, f"{name}: {tile}[{first + half}]",
                      va="center_baseline", fontsize=11)


def main():
    arguments = style.parser(__doc__).parse_args()
    figure = pyplot.figure(figsize=(13, 13 * HEIGHT / WIDTH))
    axes = figure.add_axes((0, 0, 1, 1))

    axes.text(0, -3.2, "Which lane holds what: the registers of mma.m16n8k16, C += A B",
              fontsize=17, fontweight="bold")
    title(axes, 0, 0, "A, 16 × 16, fp16")
    draw_a(axes, 0, 0)
    title(axes, 17.6, 0, "B, 16 × 8, fp16")
    draw_b(axes, 17.6, 0)
    title(axes, 27.2, 0, "C, 16 × 8, fp32")
    draw_c(axes, 27.2, 0, BLOCKS[:2])
    axes.text(36.2, 0, "In a cell: the lane, bold,\nand its registers.\n\n"
              f"Black: lane {LANE}.\n\n"
              "A and B: two fp16\nper register.\nC: one fp32\nper register.\n\n"
              "In a block of 8 × 8,\nlane 4 g + t has\npair t of row g;\nin B, of column g.",
              fontsize=12, va="top", linespacing=1.35)

    top = 22.8
    axes.text(0, top - 3.2, "Two C tiles of S are an A operand of P: same lane, same place",
              fontsize=17, fontweight="bold")
    title(axes, 0, top, "S, left tile, fp32")
    draw_c(axes, 0, top, BLOCKS[:2])
    title(axes, 8.9, top, "S, right tile, fp32")
    draw_c(axes, 8.9, top, BLOCKS[2:], first_column=8)
    title(axes, 18.4, top, "each lane, by itself")
    conversion(axes, 18.4, top, 7.4)
    title(axes, 27.6, top, "P, the A operand of P V, fp16")
    draw_a(axes, 27.6, top, "p")
    arrow(axes, (17.1, top + 8), (18.2, top + 8))
    arrow(axes, (26, top + 8), (27.1, top + 8))

    axes.set_xlim(-1, WIDTH - 1)
    axes.set_ylim(HEIGHT - 4, -4)
    axes.axis("off")
    style.save(figure, arguments.out, "fragments")


main()

# SPDX-License-Identifier: MIT
"""The order of the loops: how Algorithm 1 and the inverted loop visit the tiles, and what moves."""

import style
from style import pyplot

TILES = 4  # rows of Q tiles and columns of K/V tiles, as drawn
KEPT, MOVED = style.GREEN, style.RED


def arrow(axes, start, end, colour, width):
    axes.annotate("", end, start, annotation_clip=False,
                  arrowprops={"arrowstyle": "-|>,head_width=0.35,head_length=0.6", "color": colour,
                              "linewidth": width, "shrinkA": 0, "shrinkB": 0})


def grid(axes, title, subtitle, order):
    """The tiles of S, each with its place in `order`, a function of (i, j)."""
    for i in range(TILES):
        for j in range(TILES):
            axes.add_patch(pyplot.Rectangle((j, i), 1, 1, facecolor="#F5F5F5", edgecolor="white",
                                            linewidth=3))
            axes.text(j + 0.12, i + 0.13, order(i, j), ha="left", va="top", fontsize=12,
                      color=style.GREY)
    for n in range(TILES):
        axes.text(n + 0.5, -0.14, f"$K_{n}, V_{n}$", ha="center", va="bottom", fontsize=13)
        axes.text(-0.14, n + 0.5, f"$Q_{n}$", ha="right", va="center", fontsize=13)
    axes.set_title(title, fontsize=16, pad=50)
    axes.text(0, 1, subtitle, transform=axes.transAxes, fontsize=12.5, va="bottom", ha="left",
              linespacing=1.3)
    axes.set_xlim(-0.75, TILES + 0.1)
    axes.set_ylim(TILES + 0.1, -0.75)
    axes.set_aspect("equal")
    axes.axis("off")


def traffic(axes, flows, kept):
    """HBM above, the SM below, and between them what moves.

    A flow is its x, its name, how often it moves, its directions ("down", "up" or both), its
    colour and its width.
    """
    places = [(2.55, "HBM, through L2", "#FFF1D6"), (0, f"SM: keeps {kept}", "#E1F3EC")]
    for y, label, colour in places:
        axes.add_patch(pyplot.Rectangle((0, y), 10, 0.8, facecolor=colour, edgecolor="none"))
        axes.text(0.25, y + 0.4, label, va="center", fontsize=13, fontweight="bold")
    for x, name, often, directions, colour, width in flows:
        for k, direction in enumerate(directions):
            at = x + 0.28 * (k - (len(directions) - 1) / 2)
            ends = [(at, 2.5), (at, 0.85)]
            arrow(axes, *(ends if direction == "down" else ends[::-1]), colour, width)
        axes.text(x + 0.2 + 0.14 * len(directions), 1.68, f"{name}\n{often}", va="center",
                  color=colour, fontsize=12.5, linespacing=1.4,
                  fontweight="bold" if width > 2 else "normal")
    axes.set_xlim(0, 10)
    axes.set_ylim(-0.05, 3.4)
    axes.axis("off")


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, ((left, right), (left_below, right_below)) = pyplot.subplots(
        2, 2, figsize=(13, 10), height_ratios=[2.1, 1])

    grid(left, "Algorithm 1: K/V outside, Q inside",
         "One block per head walks down each column in turn.\n"
         "Every cell of a row is a separate visit to the row's O.",
         lambda i, j: j * TILES + i + 1)
    for j in range(TILES):
        arrow(left, (j + 0.5, 0), (j + 0.5, TILES - 0.12), MOVED, 3)
        if j + 1 < TILES:  # and back up, between the columns
            left.plot([j + 0.5, j + 1, j + 1, j + 1.5], [TILES, TILES, 0, 0], color=MOVED,
                      linewidth=1.3, linestyle=(0, (3, 2)))
    grid(right, "The loop inverted: Q outside, K/V inside",
         "A block for each row, all rows at once.\n"
         "A row's O stays with its block until it is finished.", lambda i, j: j + 1)
    for i in range(TILES):
        arrow(right, (0, i + 0.5), (TILES - 0.12, i + 0.5), KEPT, 3)

    traffic(left_below, [
        (0.7, "$K_j, V_j$", "once per\ncolumn", ["down"], style.INK, 1.5),
        (3.5, "$Q_i$", "every cell", ["down"], style.INK, 3.5),
        (6.2, r"$\mathbf{O_i, l_i, m_i}$", "read and written\nat every cell", ["down", "up"], MOVED,
         3.5)], "$K_j, V_j$")
    traffic(right_below, [
        (0.7, "$K_j, V_j$", "every cell", ["down"], style.INK, 3.5),
        (3.5, "$Q_i$", "once per row", ["down"], style.INK, 1.5),
        (6.2, r"$O_i$", "written once per row,\nand $l_i$, $m_i$ never", ["up"], KEPT, 1.5)],
        "$Q_i$, and $O_i, l_i, m_i$ in registers")
    figure.suptitle("Swap the loops, and O stops travelling", x=0.023, y=1.01, ha="left",
                    fontsize=20, fontweight="bold")
    figure.tight_layout(w_pad=4, h_pad=1)
    style.save(figure, arguments.out, "loop_order")


main()

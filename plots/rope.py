# SPDX-License-Identifier: MIT
"""Rotary embedding: which elements are a pair, and which tile is rotated when.

Drawn from the definitions: a row of 16 elements; 4 tiles of Q and 8 of K.
"""

import math

import style
from style import pyplot

D = 16  # elements of the row that is drawn
POSITION = 3
Q_TILES, K_TILES = 4, 8
PAIRS = ["#A9D5F2", "#F7D78D", "#8CD3BB", "#E8B4D0", "#C9C3E6", "#F3B49F", "#CFE3A1", "#D9D9D9"]


def halves(c):
    return c, c + D // 2


def neighbours(c):
    return 2 * c, 2 * c + 1


def row(axes, title, elements_of):
    """A row of D elements, coloured by pair, and how far each pair turns."""
    axes.set_title(title, fontsize=14.5, pad=12)
    for c, colour in enumerate(PAIRS):
        first, second = elements_of(c)
        for element in (first, second):
            axes.add_patch(pyplot.Rectangle((element, 0), 1, 1, facecolor=colour, edgecolor="white",
                                            linewidth=2))
            axes.text(element + 0.5, 0.5, element, ha="center", va="center", fontsize=11.5)
        x = (first + second + 1) / 2
        # The pair as an ellipse's upper half from the one element's centre to the other's.
        width, height = second - first, 0.5 + (second - first) / 8
        points = [math.pi * i / 30 for i in range(31)]
        axes.plot([x + width / 2 * math.cos(p) for p in points],
                  [1.05 + height * math.sin(p) for p in points], color=style.GREY, linewidth=1)
        # How far it turns: a dial with the angle of position 0 (pale) and of POSITION.
        angle = POSITION * 10000 ** (-2 * c / D)
        x = 2 * c + 1
        axes.add_patch(pyplot.Circle((x, -1.45), 0.62, facecolor=colour, edgecolor="white"))
        axes.plot([x, x + 0.55], [-1.45, -1.45], color="white", linewidth=2.5)
        axes.plot([x, x + 0.55 * math.cos(angle)], [-1.45, -1.45 + 0.55 * math.sin(angle)],
                  color=style.INK, linewidth=2)
        axes.text(x, -2.4, f"pair {c}", ha="center", va="center", fontsize=10.5)
    for begin, label in [(0, "8 elements: 16 bytes"), (D // 2, "and the 8 that are d / 2 further")]:
        axes.plot([begin + 0.1, begin + 7.9], [-0.25, -0.25], color=style.BLUE, linewidth=2.5)
        axes.text(begin + 4, -0.55, label, ha="center", va="center", fontsize=10.5,
                  color=style.BLUE)
    axes.set_xlim(-0.3, D + 0.3)
    axes.set_ylim(-2.7, 2.7)
    axes.set_aspect("equal")
    axes.axis("off")


def visits(axes, title, q_on_load, k_on_load):
    """Which tile is rotated when: a cell is a visit of a block, the tile of Q, to a tile of K."""
    axes.set_title(title, fontsize=14.5, pad=12)
    for q in range(Q_TILES):
        for k in range(K_TILES):
            axes.add_patch(pyplot.Rectangle((k, q), 1, 1, facecolor=style.PALE, edgecolor="white",
                                            linewidth=2))
            if k_on_load:
                rotated(axes, k + 0.5, q + 0.5, "K")
        axes.text(-1.75, q + 0.5, f"block {q}: $Q_{q}$", ha="right", va="center", fontsize=12)
        if q_on_load:
            rotated(axes, -1.15, q + 0.5, "Q")
    for k in range(K_TILES):
        axes.text(k + 0.5, -0.35, f"$K_{k}$", ha="center", va="center", fontsize=12)
    # The kernel that runs before.
    before = (0 if q_on_load else Q_TILES) + (0 if k_on_load else K_TILES)
    within = (Q_TILES if q_on_load else 0) + (Q_TILES * K_TILES if k_on_load else 0)
    for i in range(before):
        rotated(axes, i * 0.88 - 1.9, -2.2, "K" if i < K_TILES else "Q")
    if before:
        axes.plot([-4.4, K_TILES], [-1.35] * 2, color=style.GREY, linewidth=1.2, linestyle=(0, (4, 2)))
        axes.text(-4.4, -2.2, "before:", ha="left", va="center", fontsize=12, color=style.GREY)
    axes.text(2, Q_TILES + 0.5, f"{before} tiles before + {within} in the blocks = {before + within}",
              ha="center", va="top", fontsize=13, fontweight="bold")
    axes.set_xlim(-4.5, K_TILES + 0.2)
    axes.set_ylim(Q_TILES + 1.4, -2.8)
    axes.set_aspect("equal")
    axes.axis("off")


def rotated(axes, x, y, tensor):
    """A mark: here a tile is rotated."""
    axes.plot(x, y, marker="o" if tensor == "Q" else "s", markersize=11, linestyle="none",
              color=style.BLUE if tensor == "Q" else style.ORANGE)


def main():
    arguments = style.parser(__doc__).parse_args()
    figure = pyplot.figure(figsize=(15, 8))
    grid = figure.add_gridspec(2, 6, height_ratios=[1, 1.35], hspace=0.24, wspace=0.15)
    row(figure.add_subplot(grid[0, :3]), "halves: c and c + d / 2", halves)
    row(figure.add_subplot(grid[0, 3:]), "neighbours: 2 c and 2 c + 1", neighbours)
    visits(figure.add_subplot(grid[1, :2]), "fused: all in the blocks", True, True)
    visits(figure.add_subplot(grid[1, 2:4]), "step 24: Q in the blocks, K before", True, False)
    visits(figure.add_subplot(grid[1, 4:]), "beforehand: all before", False, False)
    figure.text(0.125, 0.915, f"Which elements are a pair? Each turns by its own angle; a dial shows it at position {POSITION}",
                fontsize=16.5, fontweight="bold")
    figure.text(0.125, 0.52, "How often is a tile rotated? A cell is a block's visit to a tile of K",
                fontsize=16.5, fontweight="bold")
    handles = [pyplot.Line2D([], [], marker=marker, markersize=11, linestyle="none", color=colour, label=label)
               for marker, colour, label in [("o", style.BLUE, "a tile of Q is rotated"),
                                             ("s", style.ORANGE, "a tile of K is rotated")]]
    figure.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.515, 0.075), ncols=2, fontsize=12.5)
    style.save(figure, arguments.out, "rope")


main()

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
                axes.plot(k + 0.5, q + 0.5, marker="o", markersize=10, color=style.RED)
    for q in range(Q_TILES):
        axes.text(-1.75, q + 0.5, f"$Q_{q}$", ha="right", va="center", fontsize=13)
        axes.plot(-1.25 if q_on_load else -3.6, q + 0.5, marker="o", markersize=10,
                  color=style.BLUE)
    for k in range(K_TILES):
        axes.text(k + 0.5, -0.35, f"$K_{k}$", ha="center", va="center", fontsize=13)
        if not k_on_load:
            axes.plot(k + 0.5, -1.2, marker="o", markersize=10, color=style.RED)
    before = (0 if q_on_load else Q_TILES) + (0 if k_on_load else K_TILES)
    within = (Q_TILES if q_on_load else 0) + (Q_TILES * K_TILES if k_on_load else 0)
    axes.text(2.2, Q_TILES + 0.65, f"tiles rotated beforehand: {before}\nin the blocks: {within}",
              ha="center", va="top", fontsize=12, linespacing=1.5)
    axes.set_xlim(-4.2, K_TILES + 0.2)
    axes.set_ylim(Q_TILES + 2.2, -1.7)
    axes.set_aspect("equal")
    axes.axis("off")


def main():
    arguments = style.parser(__doc__).parse_args()
    figure = pyplot.figure(figsize=(15, 7.4))
    grid = figure.add_gridspec(2, 6, height_ratios=[1, 1.15], hspace=0.02, wspace=0.15)
    row(figure.add_subplot(grid[0, :3]), "halves: c and c + d / 2", halves)
    row(figure.add_subplot(grid[0, 3:]), "neighbours: 2 c and 2 c + 1", neighbours)
    visits(figure.add_subplot(grid[1, :2]), "24-rope:fused: all in the blocks", True, True)
    visits(figure.add_subplot(grid[1, 2:4]), "24-rope: Q in the blocks", True, False)
    visits(figure.add_subplot(grid[1, 4:]), "24-rope:beforehand: none in them", False, False)
    figure.suptitle("Rotary embedding: what is a pair, and which tile is rotated when", x=0.125,
                    y=1.08, ha="left", fontsize=18, fontweight="bold")
    figure.text(0.125, 0.955, f"Above: a row of {D} elements. The dials: by how much each pair turns "
                f"at position {POSITION}. A thread takes two pieces of\n8 elements, in which the "
                "pairs are complete, whichever they are. Below: a row is a block and its tile of "
                "Q, a cell its visit to\na tile of K. A dot: the tile is rotated, at a visit, "
                "before the block's first, or, outside, by another kernel beforehand.",
                fontsize=12, linespacing=1.5, va="center")
    style.save(figure, arguments.out, "rope")


main()

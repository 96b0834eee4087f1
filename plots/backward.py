# SPDX-License-Identifier: MIT
"""The backward pass: which sums a block keeps while it walks over the tiles of P and dS, and which it adds to."""

import style
from style import pyplot

TILES = 4  # rows of Q tiles and columns of K/V tiles, as drawn
BLOCK = 1  # the block that is shown
KEPT, MOVED = style.GREEN, style.RED


def arrow(axes, start, end, colour, width=3):
    axes.annotate("", end, start, annotation_clip=False,
                  arrowprops={"arrowstyle": "-|>,head_width=0.35,head_length=0.6", "color": colour,
                              "linewidth": width, "shrinkA": 0, "shrinkB": 0})


def grid(axes, title, subtitle, tiles_of_block):
    for i in range(TILES):
        for j in range(TILES):
            colour = "#D3EBE2" if tiles_of_block(i, j) else "#F5F5F5"
            axes.add_patch(pyplot.Rectangle((j, i), 1, 1, facecolor=colour, edgecolor="white",
                                            linewidth=3))
    for n in range(TILES):
        axes.text(n + 0.5, -0.14, f"$K_{n}, V_{n}$", ha="center", va="bottom", fontsize=12)
        axes.text(-0.14, n + 0.5, f"$Q_{n}, dO_{n}$", ha="right", va="center", fontsize=12)
    axes.set_title(title, fontsize=15, pad=52)
    axes.text(0, 1, subtitle, transform=axes.transAxes, fontsize=12, va="bottom", ha="left",
              linespacing=1.3)
    axes.set_xlim(-1.2, TILES + 1.5)
    axes.set_ylim(TILES + 0.9, -0.6)
    axes.set_aspect("equal")
    axes.axis("off")


def keys(axes):
    """A block walks down a column: dK and dV stay."""
    arrow(axes, (BLOCK + 0.5, 0.05), (BLOCK + 0.5, TILES - 0.05), KEPT)
    axes.text(BLOCK + 0.5, TILES + 0.12, f"$dK_{BLOCK}, dV_{BLOCK}$\nin registers, written once",
              ha="center", va="top", color=KEPT, fontsize=12, fontweight="bold")


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(17, 6.4))
    column, row = (lambda i, j: j == BLOCK), (lambda i, j: i == BLOCK)
    grid(left, "Step 61: one kernel", "A block keeps its keys.\nIts part of every dQ leaves it.",
         column)
    keys(left)
    for i in range(TILES):
        arrow(left, (BLOCK + 1.05, i + 0.5), (TILES + 0.1, i + 0.5), MOVED, 1.8)
        left.text(TILES + 0.18, i + 0.5, f"added to $dQ_{i}$", va="center", color=MOVED, fontsize=13)
    grid(middle, "Step 62: key_gradients", "The same block, without dQ:\nS, dP, dV and dK.", column)
    keys(middle)
    grid(right, "and query_gradients", "A block keeps its queries,\nand computes S and dP again.", row)
    arrow(right, (0.05, BLOCK + 0.5), (TILES - 0.05, BLOCK + 0.5), KEPT)
    right.text(TILES + 0.12, BLOCK + 0.5, f"$dQ_{BLOCK}$ in\nregisters,\nwritten\nonce", va="center",
               color=KEPT, fontsize=12, fontweight="bold")
    figure.tight_layout(w_pad=1)
    style.save(figure, arguments.out, "backward")


main()

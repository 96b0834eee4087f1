# SPDX-License-Identifier: MIT
"""Who holds what of a tile of S: block, warp, m tile, fragment, lane (steps 11 to 16)."""

import style
from style import pyplot

BR, BC, WARPS = 128, 64, 4  # rows and keys of a tile, and warps of a block
M_TILES = BR // WARPS // 16  # of mma's 16 rows, for each warp
LANE = 13  # the lane to follow
TOP, HEIGHT = 0, 8  # of every panel
FOLLOWED = style.BLUE
SHADES = ["#EAF3FA", "#D9E9F5"]  # neighbours


def panel(axes, x, width, rows, columns, labels, followed, title, note):
    """A grid of rows x columns from x on. Returns where the next panel's zoom begins."""
    h, w = HEIGHT / rows, width / columns
    for i in range(rows):
        for j in range(columns):
            chosen = (i, j) in followed
            axes.add_patch(pyplot.Rectangle(
                (x + j * w, TOP + i * h), w, h, edgecolor="white", linewidth=1.2,
                facecolor=FOLLOWED if chosen else SHADES[(i + j) % 2]))
            axes.text(x + (j + 0.5) * w, TOP + (i + 0.5) * h, labels(i, j), ha="center",
                      va="center", fontsize=10 if rows > 8 else 11.5,
                      color="white" if chosen else style.INK)
    axes.text(x + width / 2, TOP - 0.25, title, ha="center", va="bottom", fontsize=13.5,
              fontweight="bold", linespacing=1.3)
    axes.text(x + width / 2, TOP + HEIGHT + 0.25, note, ha="center", va="top", fontsize=11.5,
              linespacing=1.4)
    first = followed[0][0]
    return (x + width, TOP + first * h), (x + width, TOP + (first + 1) * h)


def zoom(axes, corners, x):
    """From a cell to the panel that shows it larger."""
    for (from_x, from_y), y in zip(corners, (TOP, TOP + HEIGHT)):
        axes.plot([from_x, x], [from_y, y], color=FOLLOWED, linewidth=1, linestyle=(0, (3, 2)))


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, axes = pyplot.subplots(figsize=(15, 7.2))
    g, t = LANE // 4, LANE % 4
    panels = [  # x, width, rows, columns, labels, the cell to follow, title, note
        (0, 3.2, WARPS, 1, lambda i, j: f"warp {i}", [(1, 0)], f"block\n{BR} × {BC}",
         f"{WARPS} warps,\n{BR // WARPS} rows each"),
        (4.6, 3.2, M_TILES, 1, lambda i, j: f"m tile {i}", [(0, 0)], f"warp\n{BR // WARPS} × {BC}",
         f"{M_TILES} m tiles of 16 rows:\nboth use each\nfragment of K"),
        (9.2, 5.6, 1, BC // 8, lambda i, j: f"{j}", [(0, 2)], f"m tile\n16 × {BC}",
         f"s[mt][0] to s[mt][{BC // 8 - 1}]: C fragments\nof 8 keys each; an mma\n"
         "adds to one of them"),
        (16.2, 4, 16, 4, lambda i, j: f"{i % 8 * 4 + j}", [(g, t), (g + 8, t)],
         "fragment\n16 × 8",
         "a cell is 2 keys of a row:\nlane 4 g + t has those of\nrow g and of row g + 8"),
        (21.6, 3.2, 2, 2, lambda i, j: f"x[{2 * i + j}]", [(0, 0), (0, 1), (1, 0), (1, 1)],
         f"lane {LANE}\n2 × 2",
         f"rows {g} and {g + 8} (r = 0, 1),\nkeys {2 * t} and {2 * t + 1}:\n4 floats, 4 registers"),
    ]
    corners = None
    for x, *rest in panels:
        if corners:
            zoom(axes, corners, x)
        corners = panel(axes, x, *rest)
    lanes = WARPS * 32
    axes.text(0, TOP + HEIGHT + 2.5, f"{WARPS} warps × {M_TILES} m tiles × {BC // 8} fragments × "
              f"32 lanes × 4 floats = {BR} × {BC} scores: {BR * BC // lanes} registers of each lane.\n"
              f"O is dealt out the same way, 128 columns wide: {BR * 128 // lanes} registers.",
              fontsize=12.5, va="top", linespacing=1.5)
    axes.text(0, TOP - 2.3, "A tile of S in steps 11 to 16, from the block down to a lane's "
              "registers", fontsize=18, fontweight="bold")
    axes.set_xlim(-0.1, 25)
    axes.set_ylim(TOP + HEIGHT + 3.6, TOP - 3)
    axes.axis("off")
    style.save(figure, arguments.out, "hierarchy")


main()

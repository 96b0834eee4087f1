# SPDX-License-Identifier: MIT
"""The 128-byte swizzle: one atom, the atoms of a tile as TMA lays them out, and what a wgmma's descriptor says.

Drawn from the layout's formula, as in common/kernel/tma.h.
"""

import style
from style import pyplot

ROWS, COLUMNS = 64, 128  # of a tile of K or V
SLAB = 64  # columns: 128 bytes
ATOM_ROWS, CHUNK = 8, 8  # a chunk: 16 bytes, 8 elements
SHADES = ["#FFFFFF", "#EEF4F8"]
DARK_GREEN = "#00694C"


def atom(axes):
    """Which of a row's chunks lies in which 16 bytes; one column of the matrix is marked."""
    marked = 2
    for row in range(ATOM_ROWS):
        for place in range(SLAB // CHUNK):
            chunk = place ^ row
            colour = style.ORANGE if chunk == marked else SHADES[(row + place) % 2]
            axes.add_patch(pyplot.Rectangle((place, row), 1, 1, facecolor=colour, edgecolor=style.GREY,
                                            linewidth=0.8))
            axes.text(place + 0.5, row + 0.5, str(chunk), ha="center", va="center", fontsize=12,
                      fontweight="bold" if chunk == marked else "normal")
        axes.text(-0.25, row + 0.5, f"row {row}", ha="right", va="center", fontsize=11.5)
    for place in range(SLAB // CHUNK):
        axes.text(place + 0.5, -0.15, f"{4 * place}–{4 * place + 3}", ha="center", va="bottom",
                  fontsize=8, color=style.GREY)
    axes.text(4, -0.75, "banks", ha="center", va="bottom", fontsize=10.5, color=style.GREY)
    axes.text(0, 8.35, "A number: which 16 bytes of the row lie there, place XOR\nrow % 8. Eight rows of one "
              "column (orange), what ldmatrix\nreads at a time, meet each bank once.", va="top", fontsize=11.5,
              linespacing=1.45)
    axes.set_title("The atom: 8 rows of 128 bytes", fontsize=14, pad=26)
    axes.set_xlim(-1.9, 8.2)
    axes.set_ylim(10.6, -1.2)


def tile(axes, title, text, marked, colour):
    """A tile's atoms, numbered as they lie; `marked` has (row, column, rows, columns) of operands."""
    for slab in range(COLUMNS // SLAB):
        for block in range(ROWS // ATOM_ROWS):
            axes.add_patch(pyplot.Rectangle(
                (slab * SLAB, block * ATOM_ROWS), SLAB, ATOM_ROWS, facecolor=SHADES[(slab + block) % 2],
                edgecolor=style.GREY, linewidth=1))
            number = slab * (ROWS // ATOM_ROWS) + block
            axes.text(slab * SLAB + SLAB - 3, block * ATOM_ROWS + ATOM_ROWS / 2, f"{number * 1024:,}",
                      ha="right", va="center", fontsize=10, color=style.GREY, zorder=4)
    for row, column, rows, columns in marked:
        axes.add_patch(pyplot.Rectangle((column, row), columns, rows, facecolor=colour, alpha=0.35,
                                        edgecolor="none", zorder=3))
        axes.add_patch(pyplot.Rectangle((column, row), columns, rows, fill=False, edgecolor=colour,
                                        linewidth=2.5, zorder=5))
    axes.text(0, ROWS + 3, text, va="top", fontsize=11.5, linespacing=1.45)
    axes.set_title(title, fontsize=14, pad=26)
    for column in range(0, COLUMNS + 1, SLAB):
        axes.text(column, -1, str(column), ha="center", va="bottom", fontsize=10.5)
    for row in range(0, ROWS + 1, 16):
        axes.text(-2, row, str(row), ha="right", va="center", fontsize=10.5)
    axes.set_xlim(-22, COLUMNS + 22)
    axes.set_ylim(ROWS + 21, -5)


def arrow(axes, begin, end, label, colour, at, **text):
    axes.annotate("", end, begin, zorder=6, arrowprops={
        "arrowstyle": "-|>,head_width=0.3,head_length=0.5", "color": colour, "linewidth": 2.4,
        "shrinkA": 0, "shrinkB": 0})
    axes.text(*at, label, color=colour, fontsize=11, fontweight="bold", zorder=6, **text)


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, (left, middle, right) = pyplot.subplots(
        1, 3, figsize=(17, 7.2), gridspec_kw={"width_ratios": [1, 1.05, 1.05]})
    atom(left)
    tile(middle, "K, as B of $Q\\,K^T$: K-major",
         "16 columns of one slab, of all 64 keys. From\n8 keys to the next 8: 'stride', 1,024 bytes. The\n"
         "next 16 columns: the start, 32 bytes further.", [(0, 16, ROWS, 16)], style.BLUE)
    arrow(middle, (-8, 4), (-8, 12), "stride\n1,024", style.BLUE, (-10, 7), ha="right", va="center")
    tile(right, "V, as B of $P\\,V$: MN-major",
         "16 keys, of all 128 columns. From 8 keys to the\nnext 8: 'stride', 1,024 bytes. From a slab to the\n"
         "next: 'leading', 8,192. The next 16 keys: 2,048.", [(16, 0, 16, COLUMNS)], DARK_GREEN)
    arrow(right, (-8, 20), (-8, 28), "stride\n1,024", DARK_GREEN, (-10, 24), ha="right", va="center")
    arrow(right, (SLAB / 2, 24), (SLAB * 3 / 2, 24), "leading", DARK_GREEN, (4, 20),
          ha="left", va="center")
    for axes in (left, middle, right):
        axes.axis("off")
    figure.suptitle("The 128-byte swizzle, and how a wgmma is told of it", x=0.02, y=1.06, ha="left",
                    fontsize=18, fontweight="bold")
    figure.text(0.02, 0.955, "A tile of 64 keys, 128 columns of fp16, as one request to TMA lays it out: two slabs "
                "of 64 columns, each row by row, in atoms of 1,024 bytes.\nGrey numbers: where an atom begins in the "
                "tile. Coloured: the operand of one wgmma, and what its descriptor says beside its start.",
                fontsize=12.5, linespacing=1.5)
    figure.tight_layout(rect=(0, 0, 1, 0.95), w_pad=1)
    style.save(figure, arguments.out, "swizzle_atom")


main()

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
            axes.text(place + 0.5, row + 0.5, str(chunk), ha="center", va="center", fontsize=15,
                      fontweight="bold" if chunk == marked else "normal")
        axes.text(-0.25, row + 0.5, f"row {row}", ha="right", va="center", fontsize=13)
    for place in range(SLAB // CHUNK):
        axes.text(place + 0.5, -0.15, f"{4 * place}–{4 * place + 3}", ha="center", va="bottom",
                  fontsize=11.5, rotation=45)
    axes.text(-0.25, -0.2, "banks", ha="right", va="bottom", fontsize=13)
    axes.text(-1.7, 8.35, "A number: which 16 bytes of the row lie\nthere, place XOR row % 8. Orange: 8 rows of\n"
              "one column, which ldmatrix reads at a time.\nThey meet each bank once.", va="top", fontsize=14,
              linespacing=1.45)
    axes.set_title("The atom: 8 rows of 128 bytes", fontsize=17, pad=34)
    axes.set_xlim(-1.9, 8.2)
    axes.set_ylim(11.1, -1.2)


def tile(axes, title, text, marked, colour):
    """A tile's atoms, numbered as they lie; `marked` has (row, column, rows, columns) of operands."""
    for slab in range(COLUMNS // SLAB):
        for block in range(ROWS // ATOM_ROWS):
            axes.add_patch(pyplot.Rectangle(
                (slab * SLAB, block * ATOM_ROWS), SLAB, ATOM_ROWS, facecolor=SHADES[(slab + block) % 2],
                edgecolor=style.GREY, linewidth=1))
            number = slab * (ROWS // ATOM_ROWS) + block
            axes.text(slab * SLAB + SLAB - 3, block * ATOM_ROWS + ATOM_ROWS / 2, f"{number * 1024:,}",
                      ha="right", va="center", fontsize=13.5, color=style.INK, zorder=6)
    for row, column, rows, columns in marked:
        axes.add_patch(pyplot.Rectangle((column, row), columns, rows, facecolor=colour, alpha=0.35,
                                        edgecolor="none", zorder=3))
        axes.add_patch(pyplot.Rectangle((column, row), columns, rows, fill=False, edgecolor=colour,
                                        linewidth=2.5, zorder=5))
    axes.text(-20, ROWS + 3, text, va="top", fontsize=14, linespacing=1.45)
    axes.set_title(title, fontsize=17, pad=34)
    for column in range(0, COLUMNS + 1, SLAB):
        axes.text(column, -1, str(column), ha="center", va="bottom", fontsize=13)
    for row in range(0, ROWS + 1, 16):
        axes.text(-2, row, str(row), ha="right", va="center", fontsize=13)
    axes.set_xlim(-27, COLUMNS + 3)
    axes.set_ylim(ROWS + 25, -6)


def arrow(axes, begin, end, label, colour, at, **text):
    axes.annotate("", end, begin, zorder=6, arrowprops={
        "arrowstyle": "-|>,head_width=0.3,head_length=0.5", "color": colour, "linewidth": 2.4,
        "shrinkA": 0, "shrinkB": 0})
    axes.text(*at, label, color=colour, fontsize=13.5, fontweight="bold", zorder=6, **text)


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, (left, middle, right) = pyplot.subplots(
        1, 3, figsize=(17, 8), gridspec_kw={"width_ratios": [1, 1.12, 1.12]})
    atom(left)
    tile(middle, "K, as B of $Q\\,K^T$: K-major",
         "One wgmma: 16 columns of all 64 keys.\nFrom 8 keys to the next 8: 'stride',\n1,024 bytes. "
         "The next 16 columns\nbegin 32 bytes later.", [(0, 16, ROWS, 16)], style.BLUE)
    arrow(middle, (-8, 4), (-8, 12), "stride\n1,024", style.BLUE, (-10, 7), ha="right", va="center")
    tile(right, "V, as B of $P\\,V$: MN-major",
         "One wgmma: all 128 columns of 16 keys.\nFrom 8 keys to the next 8: 'stride', 1,024\nbytes. From a slab "
         "to the next: 'leading',\n8,192. The next 16 keys: 2,048 later.", [(16, 0, 16, COLUMNS)], DARK_GREEN)
    arrow(right, (-8, 20), (-8, 28), "stride\n1,024", DARK_GREEN, (-10, 24), ha="right", va="center")
    arrow(right, (8, 24), (SLAB + 8, 24), "leading", DARK_GREEN, (6, 19.5),
          ha="left", va="center")
    for axes in (left, middle, right):
        axes.axis("off")
    figure.suptitle("The 128-byte swizzle, and how a wgmma's descriptor sees it", x=0.02, y=1.06, ha="left",
                    fontsize=20, fontweight="bold")
    figure.text(0.02, 0.955, "A tile of 64 keys and 128 columns of fp16, as TMA writes it: two slabs of 64 columns, "
                "each row by row, in atoms of 1,024 bytes.\nNumbers in the tiles: the byte where an atom begins. "
                "Coloured: what one wgmma reads. Arrows: the offsets in its descriptor.",
                fontsize=15, linespacing=1.5)
    figure.tight_layout(rect=(0, 0, 1, 0.95), w_pad=1)
    style.save(figure, arguments.out, "swizzle_atom")


main()

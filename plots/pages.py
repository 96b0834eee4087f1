# SPDX-License-Identifier: MIT
"""Pages of a cache: keys in a sequence's order, its page table, and the memory where the pages lie.

A schematic, drawn from no results.
"""

import style
from style import pyplot

SIZE, TILE, KEYS = 24, 16, 88  # keys of a page and of a tile, and of the sequence before the new one
TABLE = (5, 2, 7, 0)
SLOTS = 9  # pages of memory
TINTS = ["#9CCBEA", "#F6D08A", "#8CD3BB", "#E3B3CF"]  # of the sequence's pages, with their numbers
KEPT = ("0 to 23", "24 to 47", "48 to 71", "72 on")
NEW = style.RED
WIDTH = 0.25  # of a key


def box(axes, x, y, width, height, colour, label="", **text):
    axes.add_patch(pyplot.Rectangle((x, y), width, height, facecolor=colour, edgecolor="white",
                                    linewidth=1.4, zorder=2))
    if label:
        axes.text(x + width / 2, y + height / 2, label, ha="center", va="center", zorder=4,
                  **{"fontsize": 11, **text})


def arrow(axes, begin, end, colour=style.INK, **how):
    axes.annotate("", end, begin, zorder=5,
                  arrowprops={"arrowstyle": "-|>,head_width=0.25,head_length=0.5", "color": colour,
                              "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0, **how})


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, axes = pyplot.subplots(figsize=(13, 5.8))
    left = 4.4
    for y, text in ((8.6, "keys of a sequence"), (5.65, "its page table"), (2.0, "pages in memory")):
        axes.text(-1.6, y, text, va="center", fontsize=12.5, fontweight="bold")

    # The sequence, in order; the tile of keys 16 to 31 lies in two pages.
    for page in range(len(TABLE)):
        there = min(SIZE, KEYS - page * SIZE)
        first = page * SIZE
        box(axes, left + first * WIDTH, 8.0, there * WIDTH, 1.2, TINTS[page],
            f"{first} to {first + there - 1}")
    begin, end = left + TILE * WIDTH, left + 2 * TILE * WIDTH
    axes.plot([begin, begin, end, end], [9.35, 9.65, 9.65, 9.35], color=style.INK, linewidth=1.8)
    axes.text((begin + end) / 2, 9.85, "a tile of 16 keys in two pages", ha="center", va="bottom",
              fontsize=11)

    # The table, and where each entry leads.
    slot = 6.4 * WIDTH * 1.6
    for page, where in enumerate(TABLE):
        x = left + (page + 0.5) * SIZE * WIDTH - (0.25 * SIZE * WIDTH if page == 3 else 0)
        arrow(axes, (x, 7.9), (x, 6.35), style.GREY)
        box(axes, x - 0.6, 5.0, 1.2, 1.3, TINTS[page], str(where), fontsize=13, fontweight="bold")
        arrow(axes, (x, 4.9), (left + (where + 0.5) * slot, 2.75))
    for where in range(SLOTS):
        ours = where in TABLE
        box(axes, left + where * slot, 1.3, slot - 0.08, 1.35,
            TINTS[TABLE.index(where)] if ours else style.PALE, KEPT[TABLE.index(where)] if ours else "",
            fontsize=10.5)
        axes.text(left + (where + 0.5) * slot, 1.0, str(where), ha="center", va="top")
    axes.text(left + 1.5 * slot, 1.97, "other\nsequences", ha="center", va="center", fontsize=10.5,
              color="#666666")
    axes.text(left + 3.5 * slot, 1.97, "free", ha="center", va="center", fontsize=10.5, color="#666666")

    # The new key: read where it is, stored in the last page.
    x = left + KEYS * WIDTH + 1.5
    box(axes, x, 8.0, 1.1, 1.2, NEW, str(KEYS), color="white", fontweight="bold")
    axes.text(x + 1.35, 8.6, "the new key, beside the cache:\nqueries read it here", va="center",
              fontsize=11)
    page_end = left + (KEYS % SIZE) / SIZE * slot
    axes.add_patch(pyplot.Rectangle((page_end, 1.3), slot / SIZE * 1.6, 1.35, facecolor=NEW,
                                    edgecolor="none", zorder=3))
    # Down the right side, below the pages, and up into the last page.
    axes.plot([x + 0.55, x + 0.55, page_end + 0.13, page_end + 0.13], [7.9, 0.1, 0.1, 0.5],
              color=NEW, linewidth=1.6, linestyle=(0, (4, 2)))
    arrow(axes, (page_end + 0.13, 0.4), (page_end + 0.13, 1.22), NEW)
    axes.text(x + 0.8, 2.0, "and stored in\nthe last page", va="center", fontsize=11, color=NEW)

    axes.set_xlim(-1.8, x + 9.2)
    axes.set_ylim(-0.3, 10.8)
    axes.axis("off")
    figure.tight_layout()
    style.save(figure, arguments.out, "pages")


main()

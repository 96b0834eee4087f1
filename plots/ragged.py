# SPDX-License-Identifier: MIT
"""Where the diagonal lies in step 21, which rows are missing, and in which order a block visits its tiles."""

import style
from style import pyplot

BR, BC = 128, 64  # rows of a Q tile, keys of a K/V tile
PANELS = [(300, 300, "as many queries as keys:\nquery i stands at key i"),
          (200, 420, "fewer queries: the last one\nstands at the last key"),
          (300, 150, "fewer keys: the first 150\nqueries see nothing, O = 0")]
SKIPPED, WHOLE, MASKED = "#F2F2F2", "#4C9FC4", "#F7D78D"


def up(n, tile):
    return -(-n // tile) * tile


def main():
    arguments = style.parser(__doc__).parse_args()
    widths = [up(keys, BC) for _, keys, _ in PANELS]
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 6.6), width_ratios=widths)
    for one, (queries, keys, title) in zip(axes, PANELS):
        query_0_sees = keys - queries + 1
        for first in range(0, queries, BR):
            end = min(keys, first + BR - 1 + query_0_sees)
            visited = list(range(up(end, BC) - BC, -1, -BC)) if end > 0 else []
            colours = {}
            for j in range(0, keys, BC):
                masked = j + BC > min(keys, first + query_0_sees)
                colours[j] = colour = SKIPPED if j not in visited else MASKED if masked else WHOLE
                one.add_patch(pyplot.Rectangle((j, first), BC, BR, facecolor=colour,
                                               edgecolor="white", linewidth=3))
            for i, j in enumerate(visited):
                one.text(j + BC / 2, first + BR / 4, i + 1, ha="center", va="center", fontsize=15,
                         fontweight="bold", zorder=5,
                         bbox={"facecolor": colours[j], "edgecolor": "none", "pad": 1.5})
        # What the tiles have and the tensors have not.
        right, bottom = up(keys, BC), up(queries, BR)
        for corner, width, height in [((keys, 0), right - keys, bottom),
                                      ((0, queries), keys, bottom - queries)]:
            one.add_patch(pyplot.Rectangle(corner, width, height, facecolor="none",
                                           edgecolor=style.GREY, hatch="////", linewidth=0))
        # The last key that each query sees.
        first = max(0, -query_0_sees + 1)
        one.plot([first + query_0_sees - 1, keys], [first, queries], color=style.INK, linewidth=2.4)
        one.plot([0, keys, keys], [queries, queries, 0], color=style.INK, linewidth=1.2)
        one.set_title(title, fontsize=13.5, loc="left", linespacing=1.4)
        one.set_xlim(-2, right + 2)
        one.set_ylim(bottom + 2, -2)
        one.set_xticks([0, keys], ["key 0", str(keys)])
        one.set_yticks([0, queries], ["query 0", str(queries)])
        one.set_aspect("equal", anchor="N")
        for side in one.spines.values():
            side.set_visible(False)
        one.tick_params(length=0)
    handles = [pyplot.Rectangle((0, 0), 1, 1, facecolor=WHOLE, label="computed, no mask"),
               pyplot.Rectangle((0, 0), 1, 1, facecolor=MASKED, label="computed and masked"),
               pyplot.Rectangle((0, 0), 1, 1, facecolor=SKIPPED, label="skipped"),
               pyplot.Rectangle((0, 0), 1, 1, facecolor="none", edgecolor=style.GREY, hatch="////",
                                linewidth=0, label="missing rows, filled with zeros"),
               pyplot.Line2D([], [], color=style.INK, linewidth=2.4, label="the last key that a query sees")]
    figure.legend(handles=handles, loc="lower center", ncols=5, fontsize=12, bbox_to_anchor=(0.5, -0.03))
    figure.suptitle("Step 21, causal: each row of tiles is a block, a number the order of its visits",
                    x=0.02, ha="left", fontsize=17, fontweight="bold")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    style.save(figure, arguments.out, "ragged")


main()

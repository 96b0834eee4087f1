# SPDX-License-Identifier: MIT
"""Which tiles step 28 visits with a window and sinks, and which warps mask them."""

import style
from style import pyplot

N, WINDOW, SINKS = 1024, 200, 20
BR, BC, WARP = 128, 64, 32  # rows of a Q tile, keys of a K/V tile, rows of a warp
NUMBERED = 6  # the Q tile whose visits are numbered
SKIPPED, WHOLE, MASKED = "#F2F2F2", "#4C9FC4", "#F7D78D"  # also told apart in grey


def visits(first_row):
    """The first keys of the tiles that a block visits, in the kernel's order."""
    last = first_row + BR - BC
    window_first = max(0, first_row + 1 - WINDOW) // BC * BC
    sinks_last = (SINKS + BC - 1) // BC * BC - BC
    return [*range(last, window_first - 1, -BC),
            *range(min(window_first - BC, sinks_last), -1, -BC)]


def masks(warp_row, key):
    """Whether a warp masks a tile: not all of its rows see all of the tile's keys."""
    after = key + BC > warp_row + 1
    before = key < warp_row + WARP - WINDOW and key + BC > SINKS
    return after or before


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, axes = pyplot.subplots(figsize=(11, 11.6))
    for first_row in range(0, N, BR):
        visited = visits(first_row)
        for key in range(0, N, BC):
            for row in range(first_row, first_row + BR, WARP):
                colour = SKIPPED if key not in visited else MASKED if masks(row, key) else WHOLE
                axes.add_patch(pyplot.Rectangle((key, row), BC, WARP, facecolor=colour,
                                                edgecolor="white", linewidth=0.7))
            axes.add_patch(pyplot.Rectangle((key, first_row), BC, BR, fill=False,
                                            edgecolor="white", linewidth=3))
        if first_row == NUMBERED * BR:
            for i, key in enumerate(visited):
                axes.text(key + BC / 2, first_row + BR / 2, i + 1, ha="center", va="center",
                          fontsize=17, fontweight="bold")
            axes.annotate("", (visited[-1] + 0.85 * BC, first_row + BR / 2),
                          (visited[-2] + 0.15 * BC, first_row + BR / 2),
                          arrowprops={"arrowstyle": "-|>,head_width=0.35,head_length=0.6",
                                      "color": style.INK, "linewidth": 2,
                                      "shrinkA": 0, "shrinkB": 0})
    # What is visible: the band from the first key of a row's window to the row's own, and the sinks.
    band = [(0, 0), (N, N), (N - WINDOW, N), (0, WINDOW)]
    axes.add_patch(pyplot.Polygon(band, fill=False, edgecolor=style.INK, linewidth=2.2,
                                  joinstyle="round"))
    axes.add_patch(pyplot.Polygon([(0, 0), (SINKS, SINKS), (SINKS, N), (0, N)], fill=False,
                                  edgecolor=style.INK, linewidth=2.2, joinstyle="round"))
    axes.set_xticks(range(0, N + 1, BR))
    axes.set_yticks(range(0, N + 1, BR))
    axes.set_xlabel(f"key: tiles of {BC}", fontsize=13.5)
    axes.set_ylabel(f"query: Q tiles of {BR}, a block each; a warp has {WARP} rows", fontsize=13.5)
    axes.set_xlim(-3, N + 3)
    axes.set_ylim(N + 3, -3)
    axes.set_aspect("equal")
    for side in axes.spines.values():
        side.set_visible(False)
    labels = [(WHOLE, "computed, no mask"), (MASKED, "computed and masked"), (SKIPPED, "skipped")]
    handles = [pyplot.Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor=style.GREY, linewidth=0.5,
                                label=label) for colour, label in labels]
    handles.append(pyplot.Line2D([], [], color=style.INK, linewidth=2.2, label="between the lines: visible"))
    axes.legend(handles=handles, loc="upper right", fontsize=13.5)
    figure.suptitle(f"Step 28: a window of {WINDOW} keys and {SINKS} sinks", x=0.1, y=0.975, ha="left",
                    fontsize=18, fontweight="bold")
    figure.text(0.1, 0.915, f"{N} queries and keys. The numbers are the order in which one block visits its tiles.",
                fontsize=13)
    style.save(figure, arguments.out, "window")


main()

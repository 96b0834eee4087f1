# SPDX-License-Identifier: MIT
"""What each copy may hide behind: the schedule of step 14, and of step 15, which copies K earlier.

A schematic. The order is that of the two kernels; the lengths are chosen to be readable.
"""

import style
from style import pyplot

TILES = 2
PARTS = [("$Q\\,K^T$", 3.4, "#8CD3BB"), ("softmax", 2.4, "#F7D78D"), ("$P\\,V$", 3.4, "#8CD3BB")]
ITERATION = sum(length for _, length, _ in PARTS)
HEIGHT = 0.7  # of a box; rows are 1 apart
RIGHT = TILES * ITERATION + PARTS[0][1]


def window(axes, y, name, begin, end, colour):
    """From where a copy starts to where it is waited for."""
    axes.annotate("", (end, y), (begin, y), arrowprops={
        "arrowstyle": "-|>,head_width=0.35,head_length=0.6", "color": colour, "linewidth": 3,
        "shrinkA": 0, "shrinkB": 0})
    axes.plot(begin, y, marker="o", markersize=8, color=colour, zorder=4)
    axes.text((begin + end) / 2, y + 0.13, name, ha="center", va="top", color=colour,
              fontsize=12.5, fontweight="bold")


def panel(axes, title, second_barrier):
    """`second_barrier` is when an iteration waits for V and starts the copy of the next K."""
    for tile in range(TILES + 1):
        now = tile * ITERATION
        for name, length, colour in PARTS:
            if now >= RIGHT:
                break
            axes.add_patch(pyplot.Rectangle((now, -HEIGHT / 2), length, HEIGHT, facecolor=colour,
                                            edgecolor="white", linewidth=2))
            axes.text(now + length / 2, 0, name.replace("K", f"K_{tile}").replace("V", f"V_{tile}"),
                      ha="center", va="center", fontsize=12.5)
            now += length
        start = tile * ITERATION
        for at, label in [(start, "wait for $K$"), (start + second_barrier, "wait for $V$")]:
            if at <= RIGHT:
                axes.plot([at, at], [-0.5, 3.2], color=style.INK, linewidth=1.6, zorder=5)
                axes.text(at, -0.58, label, ha="center", va="bottom", fontsize=11.5,
                          fontweight="bold")
        if tile < TILES:
            window(axes, 1.1, f"copy of $V_{tile}$", start, start + second_barrier, style.BLUE)
            window(axes, 2.2, f"copy of $K_{tile + 1}$", start + second_barrier, start + ITERATION,
                   style.RED)
    axes.set_title(title, fontsize=14.5, pad=34)
    axes.set_xlim(-0.8, RIGHT + 0.3)
    axes.set_ylim(3.3, -0.7)
    axes.axis("off")


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(13, 7.6))
    scores, softmax = PARTS[0][1], PARTS[1][1]
    panel(above, "14-lazy-rescale: K is copied behind one product", scores + softmax)
    panel(below, "15-early-k: K is copied behind the softmax and a product", scores)
    figure.suptitle("What a copy may hide behind", x=0.02, y=1.05, ha="left", fontsize=18,
                    fontweight="bold")
    figure.text(0.02, 0.945, "A schematic, not to scale, in the order of the two kernels. A dot: "
                "the copy starts. An arrowhead: it is waited for.\nEach wait is a barrier, too: all "
                "warps have read the buffer that the next copy overwrites.", fontsize=12.5, linespacing=1.5)
    figure.tight_layout(rect=(0, 0, 1, 0.94), h_pad=2)
    style.save(figure, arguments.out, "early_k")


main()

# SPDX-License-Identifier: MIT
"""What a call of step 50 runs: which kernels, and what decides."""

import style
from style import pyplot

KERNEL, QUESTION = style.BLUE, "#F2F2F2"


def box(axes, x, y, width, height, text, colour, where=""):
    """A box around (x, y): a kernel in blue with white text, a question in grey."""
    axes.add_patch(pyplot.Rectangle((x - width / 2, y - height / 2), width, height, facecolor=colour,
                                    edgecolor=style.GREY if colour == QUESTION else colour))
    ink = style.INK if colour == QUESTION else "white"
    axes.text(x, y + (0.2 if where else 0), text, ha="center", va="center", color=ink, fontsize=13,
              fontweight="normal" if colour == QUESTION else "bold", linespacing=1.3)
    if where:
        axes.text(x, y - height / 2 + 0.16, where, ha="center", va="bottom", color=ink, fontsize=10.5)


def arrow(axes, start, end, label="", side="left"):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": style.INK, "lw": 1.6,
                                              "shrinkA": 0, "shrinkB": 0})
    if label:
        axes.text((start[0] + end[0]) / 2 + (0.12 if side == "left" else -0.12),
                  (start[1] + end[1]) / 2, label, ha=side, va="center", fontsize=12, style="italic")


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, axes = pyplot.subplots(figsize=(12, 8.2))
    box(axes, 6, 11.2, 5.4, 1.1, "a call", QUESTION)
    box(axes, 6, 9.0, 5.4, 1.2, "new keys for the cache,\nor keys to rotate?", QUESTION)
    box(axes, 1.7, 6.9, 3.2, 1.3, "store_keys", KERNEL, "rows.h")
    box(axes, 6, 4.9, 5.4, 1.2, "at most 16 queries per sequence,\nor few beside the keys?", QUESTION)
    box(axes, 2.4, 1.9, 4.4, 1.9, "decode", KERNEL, "decode.h: reads K and V once per 16 rows;\n"
        "the last of a tile's blocks adds up the parts")
    box(axes, 9.6, 1.9, 4.4, 1.9, "prefill", KERNEL, "prefill.h: 128 rows a block; pages\n"
        "and 'plain' are compiled separately")
    arrow(axes, (6, 10.65), (6, 9.6))
    arrow(axes, (3.3, 8.75), (1.7, 7.55), "yes", "right")
    arrow(axes, (6, 8.4), (6, 5.5), "no")
    arrow(axes, (1.7, 6.25), (3.5, 5.5))
    arrow(axes, (4.6, 4.3), (3.0, 2.85), "yes", "right")
    arrow(axes, (7.4, 4.3), (9.0, 2.85), "no")
    axes.text(-0.4, 12.35, "What a call of step 50 runs", fontsize=17, fontweight="bold")
    axes.text(-0.4, 0.35, "Blue: kernels, one after the other in the caller's stream. Grey: questions that "
              "the host answers before it launches.", fontsize=12)
    axes.set_xlim(-0.5, 12.2)
    axes.set_ylim(0.1, 12.8)
    axes.axis("off")
    style.save(figure, arguments.out, "library_paths")


main()

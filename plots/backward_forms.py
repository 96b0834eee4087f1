# SPDX-License-Identifier: MIT
"""The backward pass at head dim 128: what a warp has in registers, a block in shared memory, and what goes to L2."""

import style
from style import pyplot

KEPT, MOVED, INPUT = style.GREEN, style.RED, style.SKY

# What a form has in each place: (text, KB, colour). Registers are those of one warp, shared memory is a block's.
FORMS = [
    ("Step 61", "64 keys, 4 warps of 16 queries,\nthen of 16 keys",
     [("dK of 16 keys", 8, KEPT), ("dV of 16 keys", 8, KEPT), ("S, then dP", 4, style.GREY)],
     [("K", 16, INPUT), ("V", 16, INPUT), ("Q", 16, INPUT), ("dO", 16, INPUT), ("P", 8, MOVED),
      ("dS", 8, MOVED)],
     "each reduction: 8 half sectors"),
    ("Step 63", "64 keys, 4 warps of 16 keys\n",
     [("dK of 16 keys", 8, KEPT), ("dV of 16 keys", 8, KEPT), ("$P^T$", 4, style.ORANGE),
      ("$dP^T$, then $dS^T$", 4, style.GREY)],
     [("K", 16, INPUT), ("V", 16, INPUT), ("Q", 16, INPUT), ("dO", 16, INPUT), ("$dS^T$", 8, MOVED)],
     "each reduction: 4 full sectors"),
    ("Step 64", "128 keys, 8 warps:\nfour keep dV, four keep dK, of 32 keys",
     [("dV (or dK) of 32 keys", 16, KEPT), ("$S^T$, then $P^T$\n(or $dP^T$, then $dS^T$)", 8,
                                            style.GREY)],
     [("K", 32, INPUT), ("V", 32, INPUT), ("Q, two stages", 32, INPUT), ("dO, two stages", 32, INPUT),
      ("$P^T$, then $dS^T$,\ntwo stages", 32, MOVED)],
     "each reduction: 4 full sectors,\nhalf as many for each score"),
]
REGISTERS, SHARED = 32, 164  # KB of a warp with 255 registers a thread, and of the tallest bar


def bar(axes, left, items, scale, unit):
    """Boxes upon each other, as tall as they have KB; the text of a thin one stands beside it."""
    bottom = 0
    for text, size, colour in items:
        height = size / scale
        axes.add_patch(pyplot.Rectangle((left, bottom), 1.7, height, facecolor=colour, alpha=0.35,
                                        edgecolor="white", linewidth=2))
        axes.text(left + 0.85, bottom + height / 2, text, ha="center", va="center", fontsize=11)
        bottom += height
    axes.text(left + 0.85, bottom + 0.02, unit, ha="center", va="bottom", fontsize=11,
              color=style.GREY)


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, all_axes = pyplot.subplots(1, len(FORMS), figsize=(5.4 * len(FORMS), 6))
    for axes, (title, subtitle, registers, shared, reductions) in zip(all_axes, FORMS):
        bar(axes, 0, registers, REGISTERS, f"{sum(kb for _, kb, _ in registers)} of 32 KB")
        bar(axes, 2.1, shared, SHARED, f"{sum(kb for _, kb, _ in shared)} KB")
        axes.text(0.85, -0.03, "registers\nof a warp", ha="center", va="top", fontsize=12)
        axes.text(2.95, -0.03, "shared memory\nof a block", ha="center", va="top", fontsize=12)
        axes.text(1.9, -0.18, f"dQ to L2, {reductions}", ha="center", va="top", fontsize=12,
                  color=MOVED)
        axes.set_title(title, pad=48)
        axes.text(0, 1.13, subtitle, fontsize=12, va="bottom", linespacing=1.3)
        axes.set_xlim(-0.1, 4)
        axes.set_ylim(-0.32, 1.1)
        axes.axis("off")
    figure.tight_layout(w_pad=1)
    style.save(figure, arguments.out, "backward_forms")


main()

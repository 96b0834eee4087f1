# SPDX-License-Identifier: MIT
"""Four GPUs in a ring: whose keys each has in each hop, what it computes of the scores, and what a causal mask skips."""

import style
from style import pyplot

GPUS = 4
COLOURS = ["#CFE6F6", "#FBE3B0", "#BFE3D6", "#F0D3E3"]  # of a GPU's keys


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, axes = pyplot.subplots(figsize=(12, 4.6))
    for hop in range(GPUS):
        for gpu in range(GPUS):
            keys = (gpu - hop) % GPUS
            skipped = keys > gpu
            axes.add_patch(pyplot.Rectangle((hop * 1.5, gpu), 1.1, 0.8, facecolor=COLOURS[keys],
                                            edgecolor=style.GREY, linewidth=1,
                                            hatch="//" if skipped else None))
            text = f"Q {gpu} × K {keys}"
            axes.text(hop * 1.5 + 0.55, gpu + 0.4, text, ha="center", va="center", fontsize=12,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5} if skipped else None)
            if hop + 1 < GPUS and gpu + 1 < GPUS:
                axes.annotate("", (hop * 1.5 + 1.48, gpu + 1.3), (hop * 1.5 + 1.12, gpu + 0.5),
                              arrowprops={"arrowstyle": "->", "color": style.INK, "linewidth": 1.2})
        axes.text(hop * 1.5 + 0.55, -0.25, f"hop {hop}", ha="center", fontsize=13, weight="bold")
    for gpu in range(GPUS):
        axes.text(-0.15, gpu + 0.4, f"GPU {gpu}", ha="right", va="center", fontsize=13)
    axes.text(GPUS * 1.5 / 2 - 0.2, GPUS + 0.25, "arrows: K and V on their way, also from GPU 3 to GPU 0; "
              "hatched: skipped with a causal mask", ha="center", fontsize=12)
    axes.set_xlim(-0.8, GPUS * 1.5 - 0.2)
    axes.set_ylim(GPUS + 0.5, -0.5)
    axes.axis("off")
    figure.tight_layout()
    style.save(figure, arguments.out, "gpu_ring")


main()

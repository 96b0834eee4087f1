# SPDX-License-Identifier: MIT
"""Four GPUs with two ends of the sequence each: which GPU computes which scores of a causal mask, and in which hop."""

import style
from style import pyplot

GPUS = 4
COLOURS = ["#CFE6F6", "#FBE3B0", "#BFE3D6", "#F0D3E3"]  # of a GPU's queries


def gpu_of(chunk):
    return min(chunk, 2 * GPUS - 1 - chunk)


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, axes = pyplot.subplots(figsize=(8, 7.4))
    chunks = 2 * GPUS
    for row in range(chunks):
        gpu = gpu_of(row)
        for column in range(row + 1):
            hop = (gpu - gpu_of(column)) % GPUS
            corners = [(column, row), (column, row + 1), (column + 1, row + 1)]
            if column < row:
                corners.append((column + 1, row))
            axes.add_patch(pyplot.Polygon(corners, facecolor=COLOURS[gpu], edgecolor=style.GREY, linewidth=1))
            axes.text(column + (0.5 if column < row else 0.3), row + (0.5 if column < row else 0.68),
                      str(hop), ha="center", va="center", fontsize=13, weight="bold")
        axes.text(-0.15, row + 0.5, f"chunk {row}, GPU {gpu}", ha="right", va="center", fontsize=12)
        axes.text(row + 0.5, chunks + 0.15, f"chunk {row}\nGPU {gpu}", ha="center", va="top", fontsize=11)
    axes.text(chunks / 2, chunks + 1.15, "keys", ha="center", fontsize=13, weight="bold")
    axes.text(-0.15, -0.25, "queries", ha="right", fontsize=13, weight="bold")
    axes.text(chunks, 0.6, "number: the hop in which\nthe GPU of the queries\ncomputes these scores",
              ha="right", va="center", fontsize=12)
    axes.set_xlim(-2.2, chunks + 0.1)
    axes.set_ylim(chunks + 1.3, -0.5)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.tight_layout()
    style.save(figure, arguments.out, "gpu_zigzag")


main()

# SPDX-License-Identifier: MIT
"""The 65,536 registers of an SM in step 33 and its variants: the producer's, and of a consumer thread's
what S, P and O take at head dim 128.
"""

import style
from style import pyplot

FILE = 65536
WARPGROUP = 128  # threads
# Name, consumers, keys in a tile, registers of a consumer's and of a producer's thread.
KERNELS = [("64 keys", 2, 64, 232, 40), ("128 keys: step 33", 2, 128, 232, 40),
           ("160 keys", 2, 160, 232, 40), ("176 keys", 2, 176, 232, 40),
           ("3 consumers, 96 keys", 3, 96, 160, 32)]
HEAD_DIM = 128
PARTS = [("O, fp32", style.BLUE), ("S, fp32", style.SKY), ("P, fp16", style.ORANGE),
         ("the rest: m, l, addresses, temporaries", style.PALE), ("producer", style.PINK)]


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, axes = pyplot.subplots(figsize=(12, 4.6))
    for y, (_, consumers, keys, registers, producer) in enumerate(KERNELS):
        o, s, p = HEAD_DIM // 2, keys // 2, keys // 4  # of a thread: 64 rows for 128 threads
        begin = 0
        for _ in range(consumers):
            for amount, (_, colour) in zip((o, s, p, registers - o - s - p), PARTS):
                width = amount * WARPGROUP
                axes.add_patch(pyplot.Rectangle((begin, y - 0.36), width, 0.72, facecolor=colour,
                                                edgecolor="white", linewidth=1))
                dark = colour == style.BLUE
                axes.text(begin + width / 2, y, str(amount), ha="center", va="center", fontsize=10.5,
                          color="white" if dark else style.INK)
                begin += width
        width = producer * WARPGROUP
        axes.add_patch(pyplot.Rectangle((begin, y - 0.36), width, 0.72, facecolor=PARTS[-1][1],
                                        edgecolor="white", linewidth=1))
        axes.text(begin + width / 2, y, str(producer), ha="center", va="center", fontsize=10.5)
    axes.axvline(FILE, color=style.RED, linewidth=1.8)
    axes.text(FILE, -0.55, "65,536", color=style.RED, ha="right", va="bottom", fontsize=11)
    axes.set_xlim(0, FILE * 1.005)
    axes.set_ylim(len(KERNELS) - 0.5, -0.55)
    axes.set_yticks(range(len(KERNELS)), [name for name, *_ in KERNELS])
    axes.tick_params(axis="y", length=0)
    axes.set_xticks(range(0, FILE + 1, 16384), [f"{n:,}" for n in range(0, FILE + 1, 16384)])
    axes.set_xlabel("registers of an SM; the numbers are those of a thread")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for _, colour in PARTS]
    axes.legend(handles, [name for name, _ in PARTS], ncols=len(PARTS), loc="lower left",
                bbox_to_anchor=(-0.01, 1.04), borderpad=0, columnspacing=1.2, handlelength=1.2)
    figure.suptitle("One block has all registers of its SM", x=0.02, ha="left", fontsize=16,
                    fontweight="bold")
    figure.tight_layout()
    style.save(figure, arguments.out, "register_budget")


main()

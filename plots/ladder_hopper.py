# SPDX-License-Identifier: MIT
"""The ladder of Part IV: TFLOP/s of each step in each of its types, beside the peers and the ceilings."""

from statistics import median

import style
from style import pyplot

BF16 = "type=bf16"
FP8 = "type=fp8"
TYPES = [("", "fp16", style.SKY), (BF16, "bf16", style.BLUE), (FP8, "fp8", style.GREEN)]

# What is drawn as a line: its name in the CSV of the steps, its type, its label, its colour.
PEERS = [
    ("flash-attention-3-bf16", BF16, "FlashAttention-3, bf16", style.ORANGE),
    ("flash-attention-3-fp8", FP8, "FlashAttention-3, fp8", style.RED),
    ("cudnn", BF16, "cuDNN, bf16", style.PINK),
]


def lines(arguments, rows):
    """Label, TFLOP/s and colour of each, from the slowest to the fastest."""
    found = [(label, speed[0], colour) for name, options, label, colour in PEERS
             if (speed := style.speed(rows, name, options=options))]
    matmul = [float(r["tflops"]) for r in rows if r["step"] == "matmul-bf16"]
    if matmul:
        found.append(("matmul, bf16", median(matmul), style.BLACK))
    if wgmma := style.named(arguments, "wgmma-ex2"):
        found.append(("wgmma with softmax's ex2", wgmma, style.GREEN))
    return sorted(found, key=lambda line: line[1])


def main():
    arguments = style.gpu_parser(__doc__).parse_args()
    rows = style.read_measured(arguments.results / f"{arguments.gpu}-hopper.csv", "bench-hopper")
    steps = [step for step in sorted({r["step"] for r in rows if style.is_step(r["step"])})
             if any(style.speed(rows, step, options=options) for options, *_ in TYPES)]
    if not steps:
        style.skip(f"no step was measured at seqlen {style.SEQLEN}, head dim {style.HEAD_DIM}")
    marks = lines(arguments, rows)
    bars = [[(found[0], name, colour) for options, name, colour in TYPES
             if (found := style.speed(rows, step, options=options))] for step in steps]

    figure, axes = pyplot.subplots(figsize=(12, 1.4 + 0.62 * len(steps) + 0.3 * len(marks)))
    right = 1.06 * max([value for of_step in bars for value, *_ in of_step] + [v for _, v, _ in marks])
    axes.set_xlim(0, right)
    axes.set_ylim(len(steps) - 0.5, -0.6)
    for y, of_step in enumerate(bars):
        height = 0.8 / len(TYPES)
        for i, (value, name, colour) in enumerate(of_step):
            at = y + (i - (len(of_step) - 1) / 2) * height
            axes.barh(at, value, height=0.92 * height, color=colour)
            axes.annotate(f"{name} {style.three_digits(value)}", (0, at), xytext=(8, 0),
                          textcoords="offset points", va="center", fontweight="bold", fontsize=10.5,
                          color="white" if colour == style.BLUE else style.INK)
    axes.set_yticks(range(len(steps)), steps)

    # Each line's label has a row of its own above the bars.
    height = figure.get_figheight() * 0.8
    for i, (label, value, colour) in enumerate(marks):
        row = 1 + (0.1 + 0.27 * i) / height
        axes.plot([value, value], [0, row + 0.1 / height], clip_on=False, color=colour, linewidth=1.8,
                  linestyle=(0, (4, 2)), zorder=3, transform=axes.get_xaxis_transform())
        axes.annotate(f"{label} {style.three_digits(value)}", (value, row),
                      xycoords=axes.get_xaxis_transform(), xytext=(-6, 0), textcoords="offset points",
                      ha="right", va="center", color=colour, fontweight="bold",
                      annotation_clip=False)
    axes.set_title(f"Hopper's own instructions: TFLOP/s on {arguments.gpu.upper()}",
                   pad=12 + 19 * len(marks))
    axes.set_xlabel(f"TFLOP/s  (batch {style.BATCH}, {style.HEADS} heads, seqlen {style.SEQLEN}, "
                    f"head dim {style.HEAD_DIM})")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    figure.tight_layout()
    style.save(figure, arguments.out, "ladder_hopper")


main()

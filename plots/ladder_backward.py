# SPDX-License-Identifier: MIT
"""The ladder of Part VI: TFLOP/s of each step's backward pass, without a mask and with one, beside the peers."""

import style
from style import pyplot

MASKS = [("type=bf16", "no mask", style.BLUE, "white"), ("causal type=bf16", "causal", style.SKY, style.INK)]
PEERS = [
    ("flash-attention-2", "FlashAttention-2", style.RED),
    ("cudnn", "cuDNN", style.PINK),
    ("flash-attn-4", "FlashAttention's CuTe kernel", style.ORANGE),
]


def main():
    arguments = style.gpu_parser(__doc__).parse_args()
    rows = style.read_measured(arguments.results / f"{arguments.gpu}-backward.csv", "bench-backward")
    bars = {}
    for step in sorted({row["step"] for row in rows if style.is_step(row["step"])}):
        found = [(speed[0], *look) for options, *look in MASKS if (speed := style.speed(rows, step, options=options))]
        if found:
            bars[step] = found
    if not bars:
        style.skip(f"no step was measured at seqlen {style.SEQLEN}, head dim {style.HEAD_DIM}")
    figure, axes = pyplot.subplots(figsize=(12, 2.4 + 0.55 * len(bars)))
    for y, found in enumerate(bars.values()):
        for i, (value, name, colour, ink) in enumerate(found):
            at = y + (i - (len(found) - 1) / 2) * 0.4
            axes.barh(at, value, height=0.37, color=colour)
            axes.annotate(f"{name} {style.three_digits(value)}", (0, at), xytext=(8, 0), textcoords="offset points",
                          va="center", fontweight="bold", fontsize=10.5, color=ink)
    axes.set_yticks(range(len(bars)), bars)
    axes.set_ylim(len(bars) - 0.5, -0.6)
    marks = [(speed[0], label, colour) for name, label, colour in PEERS
             if (speed := style.speed(rows, name, options=MASKS[0][0]))]
    axes.set_xlim(0, 1.06 * max([value for found in bars.values() for value, *_ in found] + [v for v, *_ in marks]))
    for i, (value, label, colour) in enumerate(marks):  # each label in a row of its own above the bars
        row = 1.03 + 0.055 * i
        axes.plot([value, value], [0, row + 0.02], clip_on=False, color=colour, linewidth=1.8, linestyle=(0, (4, 2)),
                  zorder=3, transform=axes.get_xaxis_transform())
        axes.annotate(f"{label}, no mask {style.three_digits(value)}", (value, row),
                      xycoords=axes.get_xaxis_transform(), xytext=(-6, 0), textcoords="offset points", ha="right",
                      va="center", color=colour, fontweight="bold", annotation_clip=False)
    axes.set_title(f"The backward pass: TFLOP/s on {arguments.gpu.upper()}", pad=12 + 19 * len(marks))
    axes.set_xlabel(f"TFLOP/s  (batch 8, step 60 batch 1; {style.HEADS} heads, seqlen {style.SEQLEN}, head dim {style.HEAD_DIM}, bf16)")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    figure.tight_layout()
    style.save(figure, arguments.out, "ladder_backward")


main()

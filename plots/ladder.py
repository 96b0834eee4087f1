# SPDX-License-Identifier: MIT
"""The ladder: TFLOP/s of every step at the default shape, beside the peers and the ceilings."""

import style
from style import pyplot

# What is drawn as a line: its name in the CSV of the steps, its label, its colour.
PEERS = [
    ("flash-attention-2", "FlashAttention-2", style.RED),
    ("cudnn", "cuDNN", style.PINK),
]


def ceilings(arguments, rows):
    """The lines to draw: label, TFLOP/s and colour, from the slowest to the fastest."""
    lines = [(label, found[0], colour) for name, label, colour in PEERS
             if (found := style.speed(rows, name))]
    if matmul := style.matmul_speed(rows):
        lines.append(("fp16 matmul", matmul, style.BLACK))
    if mma := style.named(arguments, "mma-ex2"):
        lines.append(("mma.sync with softmax's ex2", mma, style.GREEN))
    return sorted(lines, key=lambda line: line[1])


def number(axes, y, at, text, colour, inside):
    """A bar's TFLOP/s: inside of a long bar, or it would stand among the lines. The text's own
    background keeps a line from crossing it."""
    axes.annotate(text, (at, y), va="center", zorder=4, xytext=(-6 if inside else 6, 0),
                  textcoords="offset points", ha="right" if inside else "left",
                  color="white" if inside else style.INK, fontweight="bold" if inside else "normal",
                  bbox={"facecolor": colour if inside else "white", "edgecolor": "none",
                        "pad": 1.5})


def main():
    arguments = style.gpu_parser(__doc__).parse_args()
    rows = style.read(arguments.results / f"{arguments.gpu}.csv")
    steps = sorted({r["step"] for r in rows if style.is_step(r["step"])})
    bars = [(s, *found) for s in steps if (found := style.speed(rows, s))]
    if not bars:
        raise SystemExit(f"no step was measured at seqlen {style.SEQLEN}, head dim "
                         f"{style.HEAD_DIM}")
    lines = ceilings(arguments, rows)
    fp32 = style.named(arguments, "fp32-peak")

    figure, (axes, log) = pyplot.subplots(
        1, 2, figsize=(12, 1.6 + 0.44 * len(bars) + 0.3 * len(lines)), width_ratios=[3, 1.5],
        sharey=True)
    highest = max([v for _, v, _ in bars] + [v for _, v, _ in lines])
    right = 1.06 * highest
    axes.set_xlim(0, right)
    log.set_xscale("log")
    log.set_xlim(0.5 * min(v for _, v, _ in bars), 1.6 * highest)
    for y, (step, value, batch) in enumerate(bars):
        tensor_cores = style.on_tensor_cores(step)
        colour = style.BLUE if tensor_cores else style.SKY
        for panel in (axes, log):
            panel.barh(y, value, height=0.72, color=colour)
        note = "" if batch == style.BATCH else f"  (batch {batch})"
        beyond = max(value, fp32 or 0) if not tensor_cores else value  # the line drawn below
        number(axes, y, value if value > 0.15 * right else beyond, style.three_digits(value) + note,
               colour, value > 0.15 * right)
    axes.set_yticks(range(len(bars)), [step for step, _, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.6)

    # Each line's label has a row of its own above the bars, on the side that has room for it.
    height = figure.get_figheight() * 0.77
    for i, (label, value, colour) in enumerate(lines):
        row = 1 + (0.1 + 0.27 * i) / height
        look = {"color": colour, "linewidth": 1.8, "linestyle": (0, (4, 2)), "zorder": 3}
        axes.plot([value, value], [0, row + 0.1 / height], clip_on=False,
                  transform=axes.get_xaxis_transform(), **look)
        log.axvline(value, **look)
        at_left = value > 0.4 * right
        axes.annotate(f"{label} {style.three_digits(value)}", (value, row),
                      xycoords=axes.get_xaxis_transform(), xytext=(-6 if at_left else 6, 0),
                      textcoords="offset points", ha="right" if at_left else "left", va="center",
                      color=colour, fontweight="bold", annotation_clip=False)
    cuda_cores = sum(not style.on_tensor_cores(step) for step, _, _ in bars)
    if fp32 and cuda_cores:  # the ceiling of these bars only
        for panel in (axes, log):
            panel.plot([fp32, fp32], [-0.6, cuda_cores - 0.5], color=style.GREY, linewidth=1.8,
                       linestyle=(0, (4, 2)), zorder=3)
        axes.annotate(f"plain fp32 peak {style.three_digits(fp32)}", (fp32, cuda_cores - 0.52),
                      xytext=(6, 0), textcoords="offset points", va="center", color=style.GREY,
                      fontsize=10.5, fontweight="bold")
    axes.set_title(f"One idea per step: TFLOP/s on {arguments.gpu.upper()}",
                   pad=14 + 20 * len(lines))
    axes.set_xlabel(f"TFLOP/s  (batch {style.BATCH}, {style.HEADS} heads, seqlen {style.SEQLEN}, "
                    f"head dim {style.HEAD_DIM})")
    log.set_xlabel("the same, log scale")
    log.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for panel in (axes, log):
        panel.tick_params(axis="y", length=0)
        panel.grid(axis="x")
    if 0 < cuda_cores < len(bars):
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=c) for c in (style.SKY, style.BLUE)]
        axes.legend(handles, ["CUDA cores", "tensor cores"], loc="upper left",
                    bbox_to_anchor=(0.47, 0.99), frameon=True, framealpha=1, edgecolor="none")
    figure.tight_layout(w_pad=1.5)
    style.save(figure, arguments.out, "ladder")


main()

"""The ladder: TFLOP/s of every step at the default shape, beside the peers and the ceilings."""

import math

import style
from style import pyplot

SEQLEN, HEAD_DIM, BATCH = 8192, 128, 16  # the default shape

# What is drawn as a line: its name in the CSV, its label, its colour.
LINES = [
    ("flash-attention-2", "FlashAttention-2", style.RED),
    ("cudnn", "cuDNN", style.PINK),
    ("matmul-fp16", "fp16 matmul", style.BLACK),
]


def ceiling(rows, name):
    """The TFLOP/s of a peer at the default shape; of a matmul, which has no such shape, any."""
    found = style.speed(rows, name, SEQLEN, HEAD_DIM)
    if found is None and name.startswith("matmul"):
        speeds = [float(r["tflops"]) for r in rows if r["step"] == name]
        return style.statistics.median(speeds) if speeds else None
    return found and found[0]


def main():
    arguments = style.gpu_parser(__doc__).parse_args()
    rows = style.read(arguments.results / f"{arguments.gpu}.csv")
    steps = sorted({r["step"] for r in rows if style.is_step(r["step"])})
    bars = [(s, *found) for s in steps if (found := style.speed(rows, s, SEQLEN, HEAD_DIM))]
    if not bars:
        raise SystemExit(f"no step was measured at seqlen {SEQLEN}, head dim {HEAD_DIM}")

    lines = [(label, value, colour) for name, label, colour in LINES
             if (value := ceiling(rows, name))]
    if any("H200" in r["device"] for r in rows):
        lines.append(("plain fp32 peak", style.H200_FP32_PEAK, style.GREY))
    lines.sort(key=lambda line: line[1])

    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.44 * len(bars) + 0.3 * len(lines)))
    axes.set_xscale("log")
    left = min(value for _, value, _ in bars) / 1.8
    right = 1.25 * max([v for _, v, _ in bars] + [v for _, v, _ in lines])
    axes.set_xlim(left, right)
    for y, (step, value, batch) in enumerate(bars):
        colour = style.SKY if step < style.FIRST_TENSOR_CORE_STEP else style.BLUE
        axes.barh(y, value, height=0.72, color=colour)
        note = "" if batch == BATCH else f"  (batch {batch})"
        # A long bar has its number inside, or it would stand among the lines. The text's own
        # background keeps a line from crossing it.
        inside = math.log(value / left) > 0.6 * math.log(right / left)
        axes.annotate(style.three_digits(value) + note, (value, y), va="center", zorder=4,
                      xytext=(-6 if inside else 6, 0), textcoords="offset points",
                      ha="right" if inside else "left", color="white" if inside else style.INK,
                      fontweight="bold" if inside else "normal",
                      bbox={"facecolor": colour if inside else "white", "edgecolor": "none",
                            "pad": 1.5})
    axes.set_yticks(range(len(bars)), [step for step, _, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.6)
    axes.tick_params(axis="y", length=0)

    # Each line's label has a row of its own above the bars.
    height = figure.get_figheight() * 0.77
    for i, (label, value, colour) in enumerate(lines):
        row = 1 + (0.1 + 0.27 * i) / height
        axes.plot([value, value], [0, row + 0.1 / height], color=colour, linewidth=1.8,
                  linestyle=(0, (4, 2)), transform=axes.get_xaxis_transform(), clip_on=False,
                  zorder=3)
        axes.annotate(f"{label} {style.three_digits(value)}", (value, row),
                      xycoords=axes.get_xaxis_transform(), xytext=(-6, 0),
                      textcoords="offset points", ha="right", va="center", color=colour,
                      fontweight="bold", annotation_clip=False)
    axes.set_title(f"One idea a step: TFLOP/s on {arguments.gpu.upper()}",
                   pad=14 + 20 * len(lines))
    axes.set_xlabel(f"TFLOP/s, log scale  (batch {BATCH}, 16 heads, seqlen {SEQLEN}, "
                    f"head dim {HEAD_DIM})")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(axis="x")
    if bars[-1][0] >= style.FIRST_TENSOR_CORE_STEP:
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=c) for c in (style.SKY, style.BLUE)]
        axes.legend(handles, ["CUDA cores", "tensor cores"], loc="lower left",
                    bbox_to_anchor=(0, 1.0))
    style.save(figure, arguments.out, "ladder")


main()

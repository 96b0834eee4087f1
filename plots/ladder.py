"""The ladder: TFLOP/s of every step at the default shape, beside the peers and the ceilings."""

import style
from style import pyplot

SEQLEN, HEAD_DIM, BATCH = 8192, 128, 16  # the default shape

# What is drawn as a line: its name in the CSV of the steps, its label, its colour.
PEERS = [
    ("flash-attention-2", "FlashAttention-2", style.RED),
    ("cudnn", "cuDNN", style.PINK),
    ("matmul-fp16", "fp16 matmul", style.BLACK),
]


def peer_speed(rows, name):
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

    lines = [(label, value, colour) for name, label, colour in PEERS
             if (value := peer_speed(rows, name))]
    measured = arguments.results / f"{arguments.gpu}-ceilings.csv"  # of `make ceilings`
    if measured.is_file():
        lines += [("mma.sync with softmax's ex2", float(r["value"]), style.GREEN)
                  for r in style.read(measured) if r["name"] == "mma-ex2"]
    lines.sort(key=lambda line: line[1])
    fp32 = style.H200_FP32_PEAK if any("H200" in r["device"] for r in rows) else 0

    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.44 * len(bars) + 0.3 * len(lines)))
    right = 1.06 * max([v for _, v, _ in bars] + [v for _, v, _ in lines])
    axes.set_xlim(0, right)
    for y, (step, value, batch) in enumerate(bars):
        on_cuda_cores = step < style.FIRST_TENSOR_CORE_STEP
        colour = style.SKY if on_cuda_cores else style.BLUE
        axes.barh(y, value, height=0.72, color=colour)
        note = "" if batch == BATCH else f"  (batch {batch})"
        # A long bar has its number inside, or it would stand among the lines. The text's own
        # background keeps a line from crossing it.
        inside = value > 0.15 * right
        at = max(value, fp32) if on_cuda_cores else value  # beyond the line that is drawn below
        axes.annotate(style.three_digits(value) + note, (at, y), va="center", zorder=4,
                      xytext=(-6 if inside else 6, 0), textcoords="offset points",
                      ha="right" if inside else "left", color="white" if inside else style.INK,
                      fontweight="bold" if inside else "normal",
                      bbox={"facecolor": colour if inside else "white", "edgecolor": "none",
                            "pad": 1.5})
    axes.set_yticks(range(len(bars)), [step for step, _, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.6)
    axes.tick_params(axis="y", length=0)

    # Each line's label has a row of its own above the bars, on the side that has room for it.
    height = figure.get_figheight() * 0.77
    for i, (label, value, colour) in enumerate(lines):
        row = 1 + (0.1 + 0.27 * i) / height
        axes.plot([value, value], [0, row + 0.1 / height], color=colour, linewidth=1.8,
                  linestyle=(0, (4, 2)), transform=axes.get_xaxis_transform(), clip_on=False,
                  zorder=3)
        at_left = value > 0.4 * right
        axes.annotate(f"{label} {style.three_digits(value)}", (value, row),
                      xycoords=axes.get_xaxis_transform(), xytext=(-6 if at_left else 6, 0),
                      textcoords="offset points", ha="right" if at_left else "left", va="center",
                      color=colour, fontweight="bold", annotation_clip=False)
    cuda_cores = sum(step < style.FIRST_TENSOR_CORE_STEP for step, _, _ in bars)
    if fp32 and cuda_cores:  # the ceiling of these bars only
        axes.plot([fp32, fp32], [-0.6, cuda_cores - 0.5], color=style.GREY, linewidth=1.8,
                  linestyle=(0, (4, 2)), zorder=3)
        axes.annotate(f"plain fp32 peak {style.three_digits(fp32)}", (fp32, cuda_cores - 0.52),
                      xytext=(6, 0), textcoords="offset points", va="center", color=style.GREY,
                      fontsize=10.5, fontweight="bold")
    axes.set_title(f"One idea a step: TFLOP/s on {arguments.gpu.upper()}",
                   pad=14 + 20 * len(lines))
    axes.set_xlabel(f"TFLOP/s  (batch {BATCH}, 16 heads, seqlen {SEQLEN}, head dim {HEAD_DIM})")
    axes.grid(axis="x")
    if 0 < cuda_cores < len(bars):
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=c) for c in (style.SKY, style.BLUE)]
        axes.legend(handles, ["CUDA cores", "tensor cores"], loc="upper left",
                    bbox_to_anchor=(0.47, 0.99), frameon=True, framealpha=1, edgecolor="none")
    style.save(figure, arguments.out, "ladder")


main()

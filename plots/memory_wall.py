"""The memory wall: a roofline of the H200, with standard attention and flash attention on it."""

import math

import style
from style import pyplot

RESULTS = style.pathlib.Path("plots/results")

# Two ceilings as measured on an H200.
CEILINGS = RESULTS / "h200-ceilings.csv"  # of `make ceilings`
COPY = 4.28  # TB/s, bytes read plus bytes written: a copy from device memory to device memory
if CEILINGS.is_file():
    COPY = next(float(row["value"]) for row in style.read(CEILINGS) if row["name"] == "copy")
MATMUL = style.statistics.median(  # TFLOP/s: cuBLAS, 8192 x 8192 x 8192, fp16
    float(row["tflops"]) for row in style.read(RESULTS / "h200.csv")
    if row["step"] == "matmul-fp16")

SEQLEN = 8192
LEFT, RIGHT, BOTTOM, TOP = 1, 16384, 3, 2000  # FLOP/byte and TFLOP/s


def standard(head_dim):
    """FLOP per byte where S and P live in HBM, in fp32 and in one buffer.

    A score takes 4 d operations (2 d in Q K^T, 2 d in P V) and 16 bytes: S is written and read,
    then P is written and read, 4 bytes each.
    """
    return 4 * head_dim / 16


def flash(seqlen):
    """FLOP per byte where only Q, K, V and O move, once each, in fp16; the head dim cancels."""
    head_dim = 128
    return 4 * seqlen * seqlen * head_dim / (4 * seqlen * head_dim * 2)


def roof(axes, height, label, colour, **text):
    """A ceiling of arithmetic, from where the memory's slope meets it."""
    axes.plot([height / COPY, RIGHT], [height, height], color=colour, linewidth=3.5,
              solid_capstyle="butt")
    axes.annotate(f"{label}: {style.three_digits(height)} TFLOP/s", (RIGHT, height),
                  textcoords="offset points", ha="right", color=colour, fontweight="bold", **text)


def point(axes, intensity, label, colour, **text):
    """What an algorithm can reach at most; `label` is given the intensity and that speed."""
    reached = min(MATMUL, intensity * COPY)
    axes.plot([intensity, intensity], [BOTTOM, reached], color=colour, linewidth=1.3,
              linestyle=(0, (2, 2)))
    axes.plot(intensity, reached, marker="o", markersize=13, color=colour,
              markeredgecolor="white", markeredgewidth=1.5, zorder=5)
    axes.annotate(label.format(f"{intensity:,.0f}", style.three_digits(reached)),
                  (intensity, reached), textcoords="offset points", color=colour,
                  fontweight="bold", linespacing=1.35, **text)


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, axes = pyplot.subplots(figsize=(10, 6.6))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(LEFT, RIGHT)
    axes.set_ylim(BOTTOM, TOP)
    axes.fill_between([LEFT, MATMUL / COPY, RIGHT], [LEFT * COPY, MATMUL, MATMUL], BOTTOM,
                      color="#F5F5F5", zorder=0)
    axes.plot([LEFT, MATMUL / COPY], [LEFT * COPY, MATMUL], color=style.INK, linewidth=3.5)
    ends = axes.transData.transform([(LEFT, LEFT * COPY), (MATMUL / COPY, MATMUL)])
    angle = math.degrees(math.atan2(ends[1][1] - ends[0][1], ends[1][0] - ends[0][0]))
    axes.text(1.25, 1.25 * COPY * 1.2, f"HBM: {style.three_digits(COPY)} TB/s, a copy", rotation=angle,
              rotation_mode="anchor", fontweight="bold")
    roof(axes, MATMUL, "fp16 matmul", style.BLUE, xytext=(-8, 9), va="bottom")
    roof(axes, style.H200_FP32_PEAK, "plain fp32 peak", "#2E8BC0", xytext=(-96, -8),
         va="top")

    point(axes, standard(64), "standard attention\nd = 64: {} FLOP/byte\n{} TFLOP/s at most",
          style.RED, xytext=(-12, 14), ha="right", va="bottom")
    point(axes, standard(128), "standard attention\nd = 128: {} FLOP/byte\n{} TFLOP/s at most",
          style.RED, xytext=(30, 0), ha="left", va="center")
    point(axes, flash(SEQLEN), f"flash attention\nN = {SEQLEN}, any d:\n{{}} FLOP/byte",
          style.GREEN, xytext=(-12, -14), ha="right", va="top")

    ticks = [1, 4, 16, 64, 256, 1024, 4096, 16384]
    axes.set_xticks(ticks, [f"{t:,}" for t in ticks])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_xlabel("arithmetic intensity: FLOP per byte of HBM traffic, log scale")
    axes.set_ylabel("TFLOP/s, log scale")
    axes.set_title("The memory wall: what HBM lets an H200 compute", pad=14)
    style.save(figure, arguments.out, "memory_wall")


main()

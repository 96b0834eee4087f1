# SPDX-License-Identifier: MIT
"""The memory wall: a roofline of a GPU, with standard attention and flash attention on it."""

import math

import style
from style import pyplot

LEFT, RIGHT, BOTTOM, TOP = 0.5, 16384, 3, 2000  # FLOP/byte and TFLOP/s
FP32, FP16 = style.RED, style.ORANGE  # what the scores are stored as

# Bytes of HBM traffic per score. S is written and read, then P is written and read: four crossings.
FP32_SCORES, FP16_SCORES = 4 * 4, 4 * 2


def standard(head_dim, bytes_per_score):
    """FLOP per byte where S and P live in HBM: 2 d operations in Q K^T and 2 d in P V a score."""
    return 4 * head_dim / bytes_per_score


def flash(seqlen):
    """FLOP per byte where only Q, K, V and O move, once each, in fp16: 4 N^2 d over 8 N d."""
    return seqlen / 2


def roof(axes, copy, height, label, colour, **text):
    """A ceiling of arithmetic, from where the memory's slope meets it."""
    axes.plot([height / copy, RIGHT], [height, height], color=colour, linewidth=3.5,
              solid_capstyle="butt")
    axes.annotate(f"{label}: {style.three_digits(height)} TFLOP/s", (RIGHT, height),
                  textcoords="offset points", ha="right", color=colour, fontweight="bold", **text)


def point(axes, intensity, reached, label, colour, marker="o", **text):
    axes.plot([intensity, intensity], [BOTTOM, reached], color=colour, linewidth=1.3,
              linestyle=(0, (2, 2)))
    axes.plot(intensity, reached, marker=marker, markersize=13, color=colour,
              markeredgecolor="white", markeredgewidth=1.5, zorder=5)
    axes.annotate(label, (intensity, reached), textcoords="offset points", color=colour,
                  fontweight="bold", linespacing=1.3, fontsize=11, zorder=4, **text)


def main():
    arguments = style.gpu_parser(__doc__).parse_args()
    rows = style.read(arguments.results / f"{arguments.gpu}.csv")
    copy, fp32 = style.named(arguments, "copy"), style.named(arguments, "fp32-peak")
    matmul = style.matmul_speed(rows)
    if not copy or not matmul:
        style.skip(f"{arguments.gpu} has no copy (make ceilings) or no matmul (make bench)")

    figure, axes = pyplot.subplots(figsize=(11, 7))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(LEFT, RIGHT)
    axes.set_ylim(BOTTOM, TOP)
    ridge = matmul / copy
    axes.fill_between([LEFT, ridge, RIGHT], [LEFT * copy, matmul, matmul], BOTTOM,
                      color="#F5F5F5", zorder=0)
    axes.plot([LEFT, ridge], [LEFT * copy, matmul], color=style.INK, linewidth=3.5)
    ends = axes.transData.transform([(LEFT, LEFT * copy), (ridge, matmul)])
    angle = math.degrees(math.atan2(ends[1][1] - ends[0][1], ends[1][0] - ends[0][0]))
    axes.text(1, copy * 1.2, f"HBM: {style.three_digits(copy)} TB/s, a copy",
              rotation=angle, rotation_mode="anchor", fontweight="bold")
    roof(axes, copy, matmul, "fp16 matmul", style.BLUE, xytext=(-8, 9), va="bottom")
    if fp32:
        roof(axes, copy, fp32, "plain fp32 peak", "#2E8BC0", xytext=(-8, -8), va="top", zorder=4,
             bbox={"facecolor": "#F5F5F5", "edgecolor": "none", "pad": 1})

    def wall(head_dim, bytes_per_score, kind, colour, **text):
        """What standard attention can reach at most."""
        intensity = standard(head_dim, bytes_per_score)
        point(axes, intensity, min(matmul, intensity * copy),
              f"{kind}, d = {head_dim}:\n{intensity:g} FLOP/byte, "
              f"{style.three_digits(min(matmul, intensity * copy))} at most", colour, **text)

    above = {"xytext": (-12, 8), "ha": "right", "va": "bottom"}
    inside = {"ha": "left", "va": "center",  # and no line crosses the text
              "bbox": {"facecolor": "#F5F5F5", "edgecolor": "none", "pad": 1}}
    wall(64, FP32_SCORES, "S, P in fp32", FP32, **above)
    wall(128, FP32_SCORES, "S, P in fp32", FP32, **above)
    wall(128, FP16_SCORES, "S, P in fp16", FP16, **above)
    wall_at_64 = standard(64, FP16_SCORES)
    axes.annotate(f"S, P in fp16, d = 64: {wall_at_64:g} as well", (wall_at_64, wall_at_64 * copy),
                  xytext=(14, 0), textcoords="offset points", color=FP16, fontweight="bold",
                  fontsize=11, zorder=4, **inside)
    if measured := style.speed(rows, "pytorch-materialised"):
        intensity = standard(style.HEAD_DIM, FP16_SCORES)
        point(axes, intensity, measured[0],
              f"PyTorch, a kernel per line, S, P in fp16, d = {style.HEAD_DIM}:\nmeasured "
              f"{style.three_digits(measured[0])} of "
              f"{style.three_digits(min(matmul, intensity * copy))} at most",
              style.BLACK, marker="X", xytext=(14, -8), **inside)
    point(axes, flash(style.SEQLEN), matmul,
          f"flash attention,\nN = {style.SEQLEN}, any d:\n4 N² d FLOP for 8 N d bytes,\n"
          f"N / 2 = {flash(style.SEQLEN):,.0f} FLOP/byte", style.GREEN, xytext=(-12, -14),
          ha="right", va="top")

    ticks = [1, 4, 16, 64, 256, 1024, 4096, 16384]
    axes.set_xticks(ticks, [f"{t:,}" for t in ticks])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_xlabel("arithmetic intensity: FLOP per byte of HBM traffic, log scale")
    axes.set_ylabel("TFLOP/s, log scale")
    axes.set_title(f"The memory wall: what HBM lets an {arguments.gpu.upper()} compute", pad=14)
    style.save(figure, arguments.out, "memory_wall")


main()

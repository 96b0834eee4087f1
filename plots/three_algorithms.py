# SPDX-License-Identifier: MIT
"""Three algorithms on the same arithmetic: standard attention, FlashAttention-1, the inverted loop.

Each runs with the arithmetic of four steps, as variants of steps 00, 01 and 02. The faster it is,
the nearer an algorithm comes to the time that its HBM traffic takes at least.
"""

import style
from style import pyplot

# The arithmetic, from the slowest: its variant's name, and the step that has it in the ladder's own
# order of loops.
ARITHMETIC = [
    (None, "02-loop-inverted", "CUDA cores,\nas steps 00 to 02"),
    ("layout", "03-bank-conflicts", "K's layout\nof step 03"),
    ("register-tile", "04-register-tiling", "register tile\nof step 04"),
    ("tensor-cores", "07-larger-tile", "tensor cores\nof step 07"),
]
FP16_SCORES = "tensor-cores-fp16"

# Bytes of HBM traffic per score at head dim 128 (see chapters 00 and 01), and the step's variants.
STANDARD, STANDARD_FP16, FLASH_1 = 16, 8, 10
INVERTED = 8 * style.HEAD_DIM / style.SEQLEN  # Q, K, V and O once

SCORES = style.HEADS * style.SEQLEN**2  # of one element of the batch
FLOP = 4 * style.HEAD_DIM * SCORES


def milliseconds(tflops):
    """For one element of the batch, at the batch that was measured."""
    return FLOP / tflops * 1e-9


def main():
    arguments = style.gpu_parser(__doc__).parse_args()
    copy = style.named(arguments, "copy")
    names = [f"{arguments.gpu}{part}" for part in ("", "-variants-00", "-variants-01")]
    missing = [n for n in names if not (arguments.results / f"{n}.csv").is_file()]
    if missing or not copy:
        style.skip(f"no {missing[0] + '.csv' if missing else 'copy in the ceilings'}; "
                   "make bench, make variants-00, make variants-01 and make ceilings write them")
    rows, standard, flash_1 = [style.read(arguments.results / f"{n}.csv") for n in names]

    def time(table, label):
        found = style.speed(table, label)
        if found is None:
            style.skip(f"{label} was not measured")
        return milliseconds(found[0])

    inverted = [time(rows, step) for _, step, _ in ARITHMETIC]
    speeds = [FLOP / ms * 1e-9 for ms in inverted]  # of the arithmetic: no memory slows it down
    curves = [
        ("standard attention", standard, "00-standard-attention", style.RED, "s"),
        ("FlashAttention-1", flash_1, "01-flash-attention-1", style.ORANGE, "^"),
    ]

    figure, axes = pyplot.subplots(figsize=(11, 7.6))
    axes.set_xscale("log")
    axes.set_yscale("log")
    left, right = speeds[0] / 2.2, 2.6 * max([speeds[-1], style.matmul_speed(rows) or 0])
    axes.set_xlim(left, right)
    axes.plot([left, right], [milliseconds(left), milliseconds(right)], color=style.GREY,
              linewidth=1.2)
    axes.annotate("arithmetic alone", (left * 1.15, milliseconds(left * 1.15)), xytext=(8, 2),
                  textcoords="offset points", color=style.GREY)

    def floor(bytes_per_score, label, colour, above=True):
        """What the traffic takes at least; the ridge is where the arithmetic takes as long."""
        ms = bytes_per_score * SCORES / copy * 1e-9
        ridge = 4 * style.HEAD_DIM * copy / bytes_per_score
        axes.plot([left, right], [ms, ms], color=colour, linewidth=1.6, linestyle=(0, (5, 3)))
        axes.annotate(f"{label}: {style.three_digits(ms)} ms of HBM",
                      (left * 1.1, ms), xytext=(0, 2 if above else -2), fontsize=11, color=colour,
                      textcoords="offset points", va="bottom" if above else "top")
        if ridge < right:
            axes.plot(ridge, ms, marker="D", markersize=9, color="white", markeredgecolor=colour,
                      markeredgewidth=2, zorder=6)

    floor(STANDARD, "standard attention, S and P in fp32", style.RED)
    floor(FLASH_1, "FlashAttention-1", style.ORANGE)
    floor(STANDARD_FP16, "standard attention, S and P in fp16", style.PINK, above=False)
    floor(INVERTED, "Q, K, V and O once", style.GREEN)

    for label, table, step, colour, marker in curves:
        times = [time(table, step if name is None else f"{step}:{name}")
                 for name, _, _ in ARITHMETIC]
        axes.plot(speeds, times, marker=marker, markersize=12, markerfacecolor="none",
                  markeredgewidth=2.2, color=colour, linewidth=2, label=label, zorder=5)
    axes.plot(speeds, inverted, marker="o", markersize=6, color=style.GREEN, linewidth=2,
              label="the loop inverted", zorder=5)
    fp16 = time(standard, f"00-standard-attention:{FP16_SCORES}")
    axes.plot(speeds[-1], fp16, marker="P", markersize=10, color=style.PINK, linestyle="none",
              label="standard attention, S and P in fp16", zorder=5)

    axes.set_ylim(INVERTED * SCORES / copy * 1e-9 / 6, 2.2 * milliseconds(left))
    for x, (_, _, label) in zip(speeds, ARITHMETIC):
        axes.axvline(x, color=style.PALE, linewidth=1, zorder=0)
        axes.text(x, axes.get_ylim()[0] * 1.12, label, ha="center", va="bottom", fontsize=10,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    for value, label in [(style.named(arguments, "fp32-peak"), "fp32 peak"),
                         (style.matmul_speed(rows), "fp16 matmul")]:
        if value:
            axes.axvline(value, color=style.GREY, linestyle=":", linewidth=1.5, zorder=1)
            axes.text(value, 1.6 * milliseconds(left), f"{label} ", rotation=90, ha="right",
                      va="top", color=style.GREY, fontsize=10)
    above = axes.secondary_xaxis("top", functions=(lambda x: x / copy, lambda r: r * copy))
    above.set_xlabel("ridge point of a chip with such arithmetic and this memory: FLOP per byte",
                     labelpad=8)
    for axis in (above.xaxis, axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("speed of the arithmetic: TFLOP/s of the inverted loop, log scale")
    axes.set_ylabel(f"ms per {style.HEADS} heads of seqlen {style.SEQLEN}, head dim {style.HEAD_DIM}, "
                    "log scale")
    axes.legend(loc="upper left", bbox_to_anchor=(0.02, 0.405), frameon=True, framealpha=1,
                edgecolor="none")
    axes.set_title(f"Fast arithmetic makes the algorithm matter, on {arguments.gpu.upper()}",
                   pad=16)
    axes.text(0, -0.155, "Diamonds: the traffic takes as long as the arithmetic. On arithmetic "
              "that is faster, the algorithm waits for HBM.", transform=axes.transAxes, fontsize=11)
    style.save(figure, arguments.out, "three_algorithms")


main()

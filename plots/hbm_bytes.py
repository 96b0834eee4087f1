"""Bytes per step: what the kernel asks of L2, what reaches DRAM, and what no kernel can avoid."""

import collections
import math

import style
from style import pyplot

SHAPE = ["batch", "heads", "seqlen", "head_dim"]
ASKED = ["global bytes read", "global bytes written"]

# A bar: the counters that it adds up, who counted them, its label, its colour.
BARS = [
    (ASKED, "emulator", "asked of L2: counted by the emulator", style.SKY),
    (ASKED, "ncu", "asked of L2: measured by ncu", style.BLUE),
    (["dram bytes"], "ncu", "moved to and from DRAM: measured by ncu", style.ORANGE),
    (["unique global bytes read", "unique global bytes written"], "emulator",
     "compulsory: each byte that it touches, once", style.GREY),
]


def human(value, number=style.three_digits):
    """1.05 MB"""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if value >= size:
            return f"{number(value / size)} {unit}"
    return f"{value:.0f} B"


def main():
    p = style.gpu_parser(__doc__)
    for column in SHAPE:
        p.add_argument("--" + column.replace("_", "-"), help="default: that of the most rows")
    arguments = p.parse_args()
    rows = [r for r in style.read(arguments.results / f"{arguments.gpu}-counters.csv")
            if r["kernel"] == "total" and r["line"] == "0" and style.is_step(r["step"])]
    for column in SHAPE:
        wanted = getattr(arguments, column)
        rows = [r for r in rows if wanted in (None, r[column])]
    if not rows:
        raise SystemExit("no row has this shape")
    shapes = collections.Counter(tuple(r[c] for c in SHAPE) for r in rows)
    shape = shapes.most_common(1)[0][0]
    values = {(r["step"], r["source"], r["counter"]): float(r["value"]) for r in rows
              if tuple(r[c] for c in SHAPE) == shape}
    steps = sorted({step for step, _, _ in values})

    def total(step, counters, source):
        """The sum of the counters, or None if one of them was not counted."""
        found = [values.get((step, source, counter)) for counter in counters]
        return None if None in found else sum(found)

    bars = [bar for bar in BARS if any(total(step, *bar[:2]) for step in steps)]
    sizes = [size for bar in bars for step in steps if (size := total(step, *bar[:2]))]
    if not bars:
        raise SystemExit("no step of this shape has counters of bytes")

    figure, axes = pyplot.subplots(figsize=(9, 1.9 + (0.2 + 0.165 * len(bars)) * len(steps)))
    axes.set_xscale("log")
    axes.set_xlim(min(sizes) / 3, max(sizes) * 3)
    thickness = 0.84 / len(bars)
    for i, (counters, source, label, colour) in enumerate(bars):
        at = [y + (i - (len(bars) - 1) / 2) * thickness for y in range(len(steps))]
        lengths = [total(step, counters, source) or 0 for step in steps]
        axes.barh(at, lengths, height=thickness * 0.94, color=colour, label=label)
        for y, length in zip(at, lengths):
            if length:
                axes.annotate(human(length), (length, y), xytext=(4, 0), va="center",
                              textcoords="offset points", fontsize=9.5)
    axes.set_yticks(range(len(steps)), steps)
    axes.set_ylim(len(steps) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(lambda value, _: human(value, "{:g}".format))
    axes.set_xlabel("bytes, log scale  (batch {}, heads {}, seqlen {}, head dim {})".format(*shape))
    axes.grid(axis="x")
    axes.set_title("The bytes each step asks for, and the few it needs",
                   pad=22 + 18 * math.ceil(len(bars) / 2))
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, fontsize=10.5,
                columnspacing=1.2, handlelength=1.2)
    style.save(figure, arguments.out, "hbm_bytes")


main()

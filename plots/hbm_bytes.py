"""Bytes per step: what the kernel asks of L2, what reaches DRAM, and what no kernel can avoid."""

import collections

import style
from style import pyplot

SHAPE = ["batch", "heads", "seqlen", "head_dim"]
ASKED = ["global bytes read", "global bytes written"]

# A bar: the counters that it adds up, who counted them, its label, its colour.
BARS = [
    (ASKED, "emulator", "asked of L2: counted by the emulator", style.SKY),
    (ASKED, "ncu", "asked of L2: measured by ncu", style.BLUE),
    (["dram bytes"], "ncu", "moved to and from DRAM: measured by ncu", style.ORANGE),
    (["unique global bytes"], "emulator", "compulsory: each byte once", style.GREY),
]


def human(value):
    """1.05 MB"""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if value >= size:
            return f"{style.three_digits(value / size)} {unit}"
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

    figure, axes = pyplot.subplots(figsize=(9, 1.9 + 0.86 * len(steps)))
    axes.set_xscale("log")
    thickness = 0.84 / len(BARS)
    drawn = []
    for i, (counters, source, label, colour) in enumerate(BARS):
        for y, step in enumerate(steps):
            found = [values.get((step, source, counter)) for counter in counters]
            if None in found or sum(found) == 0:
                continue
            at = y + (i - (len(BARS) - 1) / 2) * thickness
            axes.barh(at, sum(found), height=thickness * 0.94, color=colour,
                      label=label if label not in drawn else None)
            axes.text(sum(found) * 1.05, at, human(sum(found)), va="center", fontsize=9.5)
            drawn.append((label, sum(found)))
            drawn.append(label)
    sizes = [d[1] for d in drawn if isinstance(d, tuple)]
    axes.set_xlim(min(sizes) / 3, max(sizes) * 3)
    axes.set_yticks(range(len(steps)), steps)
    axes.set_ylim(len(steps) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(lambda value, _: human(value).replace(".00", ""))
    axes.set_xlabel("bytes, log scale  (batch {}, heads {}, seqlen {}, head dim {})".format(*shape))
    axes.grid(axis="x")
    axes.set_title("The bytes each step asks for, and the few it needs", pad=58)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, fontsize=10.5,
                columnspacing=1.2, handlelength=1.2)
    style.save(figure, arguments.out, "hbm_bytes")


main()

# SPDX-License-Identifier: MIT
"""Bytes per score: what each step requests, and what HBM moves."""

import style
from style import pyplot

SHAPE = ["batch", "heads", "seqlen", "head_dim", "options"]
# The counters that are added up, the label, the colour, where the number stands.
DOTS = [
    (["global bytes read", "global bytes written"], "requested", style.BLUE, (9, "left")),
    (["dram bytes read", "dram bytes written"], "moved by HBM", style.ORANGE, (-9, "right")),
]


def main():
    arguments = style.gpu_parser(__doc__).parse_args()
    path = arguments.results / f"{arguments.gpu}-hbm-counters.csv"
    if not path.is_file():
        style.skip(f"no {path}; make counters writes it")
    rows, sums = style.read(path), {}
    seqlen = int(rows[0]["seqlen"])
    for r in rows:  # of the shape that the file has first
        if any(r[c] != rows[0][c] for c in SHAPE):
            continue
        scores = int(r["batch"]) * int(r["heads"]) * seqlen**2
        for counters, label, *_ in DOTS:
            if all(r[c] for c in counters):
                sums[label, r["step"]] = sum(float(r[c]) for c in counters) / scores
    steps = []  # of Parts I and II (Part IV requests by TMA) those that request more or less than the last one
    for step in sorted({step for _, step in sums if step < "20"}):
        requested = f"{sums['requested', step]:.3g}"
        if not steps or requested != f"{sums['requested', steps[-1]]:.3g}":
            steps.append(step)
    if not steps:
        raise SystemExit("no step has counters of bytes")

    figure, axes = pyplot.subplots(figsize=(9.5, 1.9 + 0.48 * len(steps)))
    axes.set_xscale("log")
    axes.set_xlim(0.06, 150)
    for y, step in enumerate(steps):
        ends = [sums[dot[1], step] for dot in DOTS if (dot[1], step) in sums]
        axes.plot(ends, [y] * len(ends), color=style.PALE, linewidth=5, zorder=1)
        for (_, _, colour, (shift, align)), value in zip(DOTS, ends):
            axes.plot(value, y, marker="o" if shift > 0 else "D", markersize=9, color=colour, zorder=3)
            axes.annotate(style.three_digits(value), (value, y), xytext=(shift, 0), ha=align,
                          va="center", textcoords="offset points", fontsize=11)
    for _, label, colour, (shift, align) in DOTS:
        axes.annotate(label, (sums[label, steps[0]], 0), xytext=(-shift, 16),
                      textcoords="offset points", ha=align, color=colour, fontweight="bold",
                      fontsize=11)
    least = 8 * style.HEAD_DIM / seqlen
    axes.axvline(least, color=style.GREEN, linewidth=1.8, linestyle=(0, (4, 2)), zorder=2)
    axes.annotate(f"Q, K, V and O once: {least:g}", (least, len(steps) - 0.45), xytext=(6, 0),
                  textcoords="offset points", color=style.GREEN, fontsize=11, va="bottom")
    axes.set_yticks(range(len(steps)), steps)
    axes.set_ylim(len(steps) - 0.4, -1.1)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel(f"bytes per score (one query, one key) at seqlen {seqlen}, log scale; measured by ncu")
    axes.grid(axis="x")
    axes.set_title("What a step requests, and what HBM moves", pad=14)
    style.save(figure, arguments.out, "hbm_bytes")


main()

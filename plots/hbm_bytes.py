# SPDX-License-Identifier: MIT
"""Bytes per score: what each step asks for, and what HBM moves."""

import style
from style import pyplot

SHAPE = ["batch", "heads", "seqlen", "head_dim", "options"]
# The file, the counters that are added up, the label, the colour, where the number stands.
DOTS = [
    ("counters", ["global bytes read", "global bytes written"], "asked for", style.BLUE, (9, "left")),
    ("hbm-counters", ["dram bytes read", "dram bytes written"], "moved by HBM", style.ORANGE,
     (-9, "right")),
]


def main():
    arguments = style.gpu_parser(__doc__).parse_args()
    per_score, seqlens = {}, {}
    for file, counters, *_ in DOTS:
        path = arguments.results / f"{arguments.gpu}-{file}.csv"
        if not path.is_file():
            style.skip(f"no {path}; make counters writes it")
        rows = style.read(path)
        for r in rows:  # of the shape that the file has first
            if r["line"] != "0" or any(r[c] != rows[0][c] for c in SHAPE):
                continue
            if r["source"] == "ncu" and r["counter"] in counters:
                scores = int(r["batch"]) * int(r["heads"]) * int(r["seqlen"]) ** 2
                per_score.setdefault((file, r["step"]), []).append(float(r["value"]) / scores)
        seqlens[file] = int(rows[0]["seqlen"])
    sums = {key: sum(found) for key, found in per_score.items() if len(found) == 2}
    steps = []  # of Parts I and II (Part IV asks by TMA) those that ask for more or less than the last one
    for step in sorted({step for _, step in sums if step < "20"}):
        asked = f"{sums[DOTS[0][0], step]:.3g}"
        if not steps or asked != f"{sums[DOTS[0][0], steps[-1]]:.3g}":
            steps.append(step)
    if not steps:
        raise SystemExit("no step has counters of bytes")

    figure, axes = pyplot.subplots(figsize=(9.5, 1.9 + 0.48 * len(steps)))
    axes.set_xscale("log")
    axes.set_xlim(0.06, 150)
    for y, step in enumerate(steps):
        ends = [sums[dot[0], step] for dot in DOTS if (dot[0], step) in sums]
        axes.plot(ends, [y] * len(ends), color=style.PALE, linewidth=5, zorder=1)
        for (file, _, _, colour, (shift, align)), value in zip(DOTS, ends):
            axes.plot(value, y, marker="o" if shift > 0 else "D", markersize=9, color=colour, zorder=3)
            axes.annotate(style.three_digits(value), (value, y), xytext=(shift, 0), ha=align,
                          va="center", textcoords="offset points", fontsize=11)
    for file, _, label, colour, (shift, align) in DOTS:
        axes.annotate(f"{label}\n(seqlen {seqlens[file]})", (sums[file, steps[0]], 0), xytext=(-shift, 16),
                      textcoords="offset points", ha=align, color=colour, fontweight="bold",
                      fontsize=11)
    least = 8 * style.HEAD_DIM / seqlens["hbm-counters"]
    axes.axvline(least, color=style.GREEN, linewidth=1.8, linestyle=(0, (4, 2)), zorder=2)
    axes.annotate(f"Q, K, V and O once: {least:g}", (least, len(steps) - 0.45), xytext=(6, 0),
                  textcoords="offset points", color=style.GREEN, fontsize=11, va="bottom")
    axes.set_yticks(range(len(steps)), steps)
    axes.set_ylim(len(steps) - 0.4, -1.1)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("bytes per score (one query, one key), log scale; measured by ncu")
    axes.grid(axis="x")
    axes.set_title("What a step asks for, and what reaches HBM", pad=14)
    style.save(figure, arguments.out, "hbm_bytes")


main()

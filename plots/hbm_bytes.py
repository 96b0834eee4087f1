# SPDX-License-Identifier: MIT
"""Bytes per score: what each step asks for, counted and measured, and what HBM moves."""

import style
from style import pyplot

SHAPE = ["batch", "heads", "seqlen", "head_dim", "options"]
ASKED = ["global bytes read", "global bytes written"]
# A bar: the file, the counters that it adds up, who counted them, its label, its colour.
BARS = [
    ("counters", ASKED, "emulator", "asked for: counted by the emulator", style.SKY),
    ("counters", ASKED, "ncu", "asked for: measured by ncu", style.BLUE),
    ("hbm-counters", ["dram bytes read", "dram bytes written"], "ncu",
     "moved by HBM: measured by ncu", style.ORANGE),
]


def main():
    arguments = style.gpu_parser(__doc__).parse_args()
    per_score, shapes = {}, {}
    for file in {bar[0] for bar in BARS}:
        path = arguments.results / f"{arguments.gpu}-{file}.csv"
        if not path.is_file():
            style.skip(f"no {path}; make counters writes it")
        rows = style.read(path)
        for r in rows:  # of the shape that the file has first
            if r["line"] != "0" or any(r[c] != rows[0][c] for c in SHAPE):
                continue
            scores = int(r["batch"]) * int(r["heads"]) * int(r["seqlen"]) ** 2
            key = file, r["step"], r["source"], r["counter"]
            per_score[key] = float(r["value"]) / scores
            shapes[file] = "seqlen {}, head dim {}".format(r["seqlen"], r["head_dim"])
    # Parts I and II; Part IV asks by TMA, which is no load of a thread.
    steps = sorted({step for _, step, _, _ in per_score if step < "20"})

    def total(step, file, counters, source):
        """The sum of the counters, or None if one of them was not counted."""
        found = [per_score.get((file, step, source, counter)) for counter in counters]
        return None if None in found else sum(found)

    bars = [bar for bar in BARS if any(total(step, *bar[:3]) for step in steps)]
    sizes = [size for bar in bars for step in steps if (size := total(step, *bar[:3]))]
    if not bars:
        raise SystemExit("no step has counters of bytes")

    figure, axes = pyplot.subplots(figsize=(9, 1.9 + (0.2 + 0.165 * len(bars)) * len(steps)))
    axes.set_xscale("log")
    axes.set_xlim(min(sizes) / 3, max(sizes) * 3)
    thickness = 0.84 / len(bars)
    for i, (file, counters, source, label, colour) in enumerate(bars):
        at = [y + (i - (len(bars) - 1) / 2) * thickness for y in range(len(steps))]
        lengths = [total(step, file, counters, source) or 0 for step in steps]
        axes.barh(at, lengths, height=thickness * 0.94, color=colour,
                  label=f"{label}, {shapes[file]}")
        for y, length in zip(at, lengths):
            if length:
                axes.annotate(style.three_digits(length), (length, y), xytext=(4, 0), va="center",
                              textcoords="offset points", fontsize=9.5)
    axes.set_yticks(range(len(steps)), steps)
    axes.set_ylim(len(steps) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("bytes per score (one query, one key), log scale")
    axes.grid(axis="x")
    axes.set_title("What each step asks for, and what reaches HBM",
                   pad=22 + 18 * len(bars))
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), fontsize=10.5,
                columnspacing=1.2, handlelength=1.2)
    style.save(figure, arguments.out, "hbm_bytes")


main()

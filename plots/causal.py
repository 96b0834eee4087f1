# SPDX-License-Identifier: MIT
"""TFLOP/s of the causal problem against the sequence length, for steps and peers.

A line joins the lengths that were measured at one batch; a length that was not is a point of its own.
"""

from statistics import median

import style
from style import pyplot

BATCH = 16  # of the lines
NAMES = {
    "flash-attention-3-bf16": (style.ORANGE, "^", "FlashAttention-3 (bf16)"),
    "cudnn": (style.PINK, "D", "cuDNN"),
    "20-causal": (style.BLUE, "o", "step 20"),
    "flash-attention-2": (style.RED, "s", "FlashAttention-2"),
}


def main():
    arguments = style.gpu_parser(__doc__).parse_args()
    rows = style.read_measured(arguments.results / f"{arguments.gpu}-models.csv", "bench-models")
    measured = {}  # name -> batch -> seqlen -> [TFLOP/s]
    for r in rows:
        n = int(r["seqlen"])
        if (r["step"] not in NAMES or n & (n - 1)  # a ragged length is no point here
                or (r["options"], r["head_dim"], r["heads"]) != ("causal", "128", "16")):
            continue
        of_batch = measured.setdefault(r["step"], {}).setdefault(int(r["batch"]), {})
        of_batch.setdefault(n, []).append(float(r["tflops"]))
    if not any(len(of_batch.get(BATCH, {})) >= 2 for of_batch in measured.values()):
        style.skip("no causal step was measured at two lengths")
    figure, axes = pyplot.subplots(figsize=(9.6, 5.6))
    axes.set_xscale("log", base=2)
    lengths, others, ends = set(), {}, []
    for name, (colour, marker, label) in NAMES.items():
        of_batch = measured.get(name, {})
        line = sorted((n, median(speeds)) for n, speeds in of_batch.get(BATCH, {}).items())
        beyond = {n: (median(speeds), batch) for batch, of_n in sorted(of_batch.items())
                  for n, speeds in of_n.items() if n not in dict(line)}
        if not line:
            continue
        axes.plot(*zip(*line), color=colour, marker=marker, markersize=7, linewidth=2,
                  linestyle="-" if style.is_step(name) else (0, (4, 2)))
        for n, (speed, batch) in beyond.items():
            axes.plot(n, speed, color=colour, marker=marker, markersize=7, markerfacecolor="white",
                      markeredgewidth=2, linestyle="none")
            others[n] = batch
        lengths |= {n for n, _ in line} | set(beyond)
        ends.append((max([*line, *((n, s) for n, (s, _) in beyond.items())])[1], label, colour))
    ends.sort()
    for height, (_, label, colour) in zip(style.spread([e[0] for e in ends], 28, 1000), ends):
        axes.text(max(lengths) * 1.14, height, label, color=colour, va="center", fontweight="bold")
    axes.set_ylim(0)
    axes.set_xlim(min(lengths) * 0.85, max(lengths) * 1.1)
    axes.set_xticks(sorted(lengths), [f"{n}\n(batch {others[n]})" if n in others else str(n)
                                      for n in sorted(lengths)])
    axes.minorticks_off()
    axes.grid()
    axes.set_xlabel(f"sequence length; 16 heads, head dim 128, batch {BATCH}"
                    + (", hollow: a smaller batch" if others else ""))
    axes.set_ylabel("TFLOP/s of the visible pairs")
    axes.set_title(f"Causal attention on {arguments.gpu.upper()}", pad=14)
    style.save(figure, arguments.out, "causal")


main()

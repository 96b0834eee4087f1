# SPDX-License-Identifier: MIT
"""TFLOP/s of the causal problem against the sequence length, for steps and peers."""

from statistics import median

import style
from style import pyplot

NAMES = {
    "20-causal": style.BLUE,
    "50-in-a-model": style.SKY,
    "flash-attention-2": style.RED,
    "flash-attention-3-bf16": style.ORANGE,
    "cudnn": style.PINK,
}


def main():
    arguments = style.gpu_parser(__doc__).parse_args()
    rows = style.read_measured(arguments.results / f"{arguments.gpu}-models.csv", "bench-models")
    curves, batches = {}, {}
    for r in rows:
        if r["step"] not in NAMES or (r["options"], r["head_dim"], r["heads"]) != ("causal", "128", "16"):
            continue
        n, batch = int(r["seqlen"]), int(r["batch"])
        batches[n] = max(batch, batches.get(n, 0))
        curves.setdefault(r["step"], {}).setdefault((n, batch), []).append(float(r["tflops"]))
    # Where a length was measured at several batches, the largest; a ragged length is no point here.
    batches = {n: batch for n, batch in batches.items() if n & (n - 1) == 0}
    curves = {name: points for name in NAMES if name in curves and len(points := [
        (n, median(curves[name][n, batch])) for n, batch in sorted(batches.items())
        if (n, batch) in curves[name]]) >= 2}
    if not curves:
        style.skip("no causal step was measured at two lengths")
    figure, axes = pyplot.subplots(figsize=(9, 5.6))
    axes.set_xscale("log", base=2)
    for name, points in curves.items():
        axes.plot(*zip(*points), color=NAMES[name], marker="o", markersize=5, linewidth=2,
                  linestyle="-" if style.is_step(name) else (0, (4, 2)), label=name)
    axes.set_ylim(0)
    axes.set_xticks(sorted(batches), [str(n) for n in sorted(batches)])
    axes.minorticks_off()
    axes.grid()
    axes.legend()
    axes.set_xlabel(f"sequence length  (16 heads, head dim 128, batch {max(batches.values())}; "
                    f"{batches[max(batches)]} at {max(batches)})")
    axes.set_ylabel("TFLOP/s of the pairs that are seen")
    axes.set_title(f"Causal attention on {arguments.gpu.upper()}", pad=14)
    style.save(figure, arguments.out, "causal")


main()

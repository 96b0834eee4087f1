# SPDX-License-Identifier: MIT
"""TFLOP/s against the sequence length, for the steps and peers that were measured at most lengths."""

import math

import style
from style import pyplot

PEERS = {
    "flash-attention-2": style.RED,
    "cudnn": style.PINK,
    "pytorch-materialised": style.ORANGE,
}


def main():
    p = style.gpu_parser(__doc__)
    p.add_argument("--head-dim", default="128", help="default: %(default)s")
    arguments = p.parse_args()
    rows = style.read(arguments.results / f"{arguments.gpu}.csv")
    lengths = sorted({int(r["seqlen"]) for r in rows if style.is_step(r["step"])})
    curves = {}
    for name in sorted({r["step"] for r in rows}):
        if not style.is_step(name) and name not in PEERS:
            continue
        points = [(n, found[0]) for n in lengths
                  if (found := style.speed(rows, name, n, arguments.head_dim))]
        if len(points) >= max(2, len(lengths) - 1):
            curves[name] = points
    if not curves:
        raise SystemExit("nothing was measured at two sequence lengths or more")

    # What lies on the axis says nothing.
    highest = max(value for points in curves.values() for _, value in points)
    curves = {name: points for name, points in curves.items()
              if max(value for _, value in points) > 0.05 * highest}
    steps = [name for name in curves if style.is_step(name)]
    figure, axes = pyplot.subplots(figsize=(10, 6.5))
    axes.set_xscale("log", base=2)
    colours = dict(PEERS)
    markers = dict(zip(PEERS, "DsP")) | dict(zip(reversed(steps), "o^v<>*"))
    colours |= dict(zip(reversed(steps), [style.BLUE, style.SKY, style.GREEN, style.BLACK] * 4))
    for name, points in curves.items():
        axes.plot(*zip(*points), color=colours[name], marker=markers[name], markersize=7, linewidth=2,
                  linestyle="-" if name in steps else (0, (4, 2)), zorder=3)

    # The labels stand at the right end of their curves, moved apart where they would overlap.
    speeds = [value for points in curves.values() for _, value in points]
    high = max(speeds) * 1.05
    axes.set_ylim(0, high)
    last = max(n for points in curves.values() for n, _ in points)
    axes.set_xlim(min(n for points in curves.values() for n, _ in points) / 1.15, last * 1.15)

    # Their heights go from 0 at the bottom of the axes to 1 at the top.
    ends = sorted((points[-1][1] / high, name) for name, points in curves.items())
    for (wanted, name), y in zip(ends, style.spread([end for end, _ in ends], 0.042, 0.99)):
        n = curves[name][-1][0]
        x = math.log(n / axes.get_xlim()[0]) / math.log(axes.get_xlim()[1] / axes.get_xlim()[0])
        axes.plot([x + 0.008, 1.0, 1.025], [wanted, wanted, y], transform=axes.transAxes,
                  color=colours[name], linewidth=0.8, alpha=0.7, clip_on=False)
        axes.text(1.032, y, name, transform=axes.transAxes, va="center", color=colours[name],
                  fontweight="normal" if name in steps else "bold", fontsize=11)
    lengths = sorted({n for points in curves.values() for n, _ in points})
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel(f"sequence length  (16 heads, head dim {arguments.head_dim}, "
                    "the largest batch measured)")
    axes.set_ylabel("TFLOP/s")
    axes.grid()
    axes.set_title(f"TFLOP/s against sequence length on {arguments.gpu.upper()}", pad=14)
    style.save(figure, arguments.out,
               "seqlen" if arguments.head_dim == "128" else f"seqlen-{arguments.head_dim}")


main()

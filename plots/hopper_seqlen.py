# SPDX-License-Identifier: MIT
"""TFLOP/s in bf16 and fp8 against the sequence length: Part IV's last steps beside their peers."""

import style
from style import pyplot

PEERS = {
    "flash-attention-3-bf16": ("FlashAttention-3", style.ORANGE),
    "flash-attention-3-fp8": ("FlashAttention-3", style.ORANGE),
    "cudnn": ("cuDNN", style.PINK),
    "flash-attention-2": ("FlashAttention-2", style.RED),
}
STEP_COLOURS = [style.BLUE, style.GREEN, style.SKY, style.BLACK]  # the last first
PROBLEMS = [(head_dim, causal, of_type) for head_dim, of_type in ((128, "bf16"), (64, "bf16"), (128, "fp8"))
            for causal in (False, True)]


def curves(rows, head_dim, causal, of_type):
    """Of each step and peer measured at two lengths or more: its name, and (length, TFLOP/s)."""
    options = ("causal " if causal else "") + f"type={of_type}"
    found = {}
    for name in sorted({r["step"] for r in rows}, reverse=True):
        if not style.is_step(name) and name not in PEERS:
            continue
        points = [(n, speed[0]) for n in sorted({int(r["seqlen"]) for r in rows})
                  if (speed := style.speed(rows, name, n, head_dim, options))]
        found[name] = points
    # A line joins only lengths that were measured: those of the curve that has most of them.
    most = max(len(points) for points in found.values())
    found = {name: points for name, points in found.items() if len(points) == most > 1}
    return found if any(style.is_step(name) for name in found) else {}


def main():
    arguments = style.gpu_parser(__doc__).parse_args()
    rows = style.read_measured(arguments.results / f"{arguments.gpu}-hopper.csv", "bench-hopper")
    panels = [(problem, found) for problem in PROBLEMS if (found := curves(rows, *problem))]
    if not panels:
        style.skip("no step was measured at two sequence lengths or more")
    steps = sorted({name for _, found in panels for name in found if style.is_step(name)},
                   reverse=True)
    looks = {name: (name, STEP_COLOURS[i % len(STEP_COLOURS)]) for i, name in enumerate(steps)}
    looks.update(PEERS)

    high = 1.06 * max(value for _, found in panels for points in found.values() for _, value in points)
    down = (len(panels) + 1) // 2
    figure, axes = pyplot.subplots(down, min(len(panels), 2), squeeze=False, sharey=True,
                                   figsize=(6.2 * min(len(panels), 2), 0.9 + 4.2 * down))
    for one in axes.flat[len(panels):]:
        one.remove()
    for one, ((head_dim, causal, of_type), found) in zip(axes.flat, panels):
        for name in [name for name in looks if name in found]:  # the legend's order
            label, colour = looks[name]
            one.plot(*zip(*found[name]), color=colour, marker="o", markersize=5, linewidth=2.2, label=label,
                     linestyle="-" if name in steps else (0, (4, 2)),
                     zorder=4 if name in steps else 3)
        lengths = sorted({n for points in found.values() for n, _ in points})
        one.set_xscale("log", base=2)
        one.set_xticks(lengths, [str(n) for n in lengths])
        one.minorticks_off()
        one.set_ylim(0, high)
        one.grid()
        one.set_title(f"{of_type}, head dim {head_dim}, {'causal' if causal else 'full'}", fontsize=12.5)
        one.set_xlabel("sequence length")
    for one in axes[:, 0]:
        one.set_ylabel("TFLOP/s")
    for one in axes.flat[:len(panels)]:
        one.legend(loc="upper left")
    figure.suptitle(f"On {arguments.gpu.upper()}: 16 heads, batch 16 (8 at 16384)", x=0.02,
                    ha="left", fontsize=15, fontweight="bold")
    figure.tight_layout()
    style.save(figure, arguments.out, "hopper_seqlen")


main()

# SPDX-License-Identifier: MIT
"""The ladder of Part III: each step at its own problem (plots/models.csv), with its peers as marks."""

from statistics import median

import style
from style import pyplot

PEERS = [
    ("flash-attention-2", "FlashAttention-2", style.RED, "D"),
    ("flash-attention-3", "FlashAttention-3 (bf16)", style.ORANGE, "s"),
    ("cudnn", "cuDNN", style.PINK, "o"),
]


def speed(rows, problem, name):
    """The median of a name's rows at a problem, or None: TFLOP/s, or TB/s of the cache that is read.

    `name` is how a step's or a peer's begins: 20-, cudnn.
    """
    found = [r for r in rows if r["step"].startswith(name) and ":" not in r["step"]
             and all(r[column] == text for column, text in problem.items() if column != "step")]
    if not found:
        return None
    if problem["seqlen"] == "1":
        return median(style.cache_speed(r) for r in found)
    return median(float(r["tflops"]) for r in found)


def described(problem):
    """What is behind a bar's name: the options, and what of the shape is not 16 x 16 x 8192 x 128."""
    usual = {"batch": "16", "heads": "16", "seqlen": "8192", "head_dim": "128"}
    shape = [f"{column.replace('_', ' ')} {problem[column]}" for column, text in usual.items()
             if problem[column] != text]
    return ", ".join([o.replace("=", " ") for o in problem["options"].split()] + shape)


def panel(axes, rows, problems, unit, lines):
    bars = [(name, problem, value) for name, problem in problems
            if (value := speed(rows, problem, name[:3])) is not None]
    marks = [(y, speed(rows, problem, peer), colour, marker) for y, (_, problem, _) in enumerate(bars)
             for peer, _, colour, marker in PEERS]
    marks = [mark for mark in marks if mark[1] is not None]
    right = 1.08 * max([v for *_, v in bars] + [m[1] for m in marks] + [v for _, v in lines])
    for y, (_, problem, value) in enumerate(bars):
        axes.barh(y, value, height=0.72, color=style.BLUE)
        axes.text(0.008 * right, y, style.three_digits(value), va="center", color="white",
                  fontweight="bold")
        axes.text(0.055 * right, y, described(problem), va="center", color="white", fontsize=9.5)
    for y, value, colour, marker in marks:
        axes.plot(value, y, marker=marker, color=colour, markersize=9, markeredgecolor="white",
                  markeredgewidth=1.2, linestyle="none", zorder=4)
    for label, value in lines:
        for y, (_, problem, _) in enumerate(bars):  # the ceilings were measured for head dim 128
            if problem["head_dim"] == "128":
                axes.plot([value, value], [y - 0.5, y + 0.5], color=style.GREEN, linewidth=1.8,
                          linestyle=(0, (4, 2)), zorder=3)
        axes.text(value, -0.66, f"{label} {style.three_digits(value)}", ha="right", va="bottom",
                  color=style.GREEN, fontweight="bold")
    axes.set_xlim(0, right)
    axes.set_ylim(len(bars) - 0.5, -0.6)
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.set_xlabel(unit)


def main():
    arguments = style.gpu_parser(__doc__).parse_args()
    rows = style.read_measured(arguments.results / f"{arguments.gpu}-models.csv", "bench-models")
    steps = sorted({r["step"] for r in rows if style.is_step(r["step"])})
    problems = [(name, p) for p in style.read(style.ROOT / "plots/models.csv")
                for name in steps if name.startswith(p["step"] + "-")
                and speed(rows, p, name) is not None]
    prefill = [p for p in problems if p[1]["seqlen"] != "1"]
    decode = [p for p in problems if p[1]["seqlen"] == "1"]
    panels = [(chosen, unit, [(label, value)] if (value := style.named(arguments, ceiling)) else [])
              for chosen, unit, label, ceiling in
              [(prefill, "TFLOP/s of the pairs that are seen", "mma.sync with softmax's ex2", "mma-ex2"),
               (decode, "TB/s of the cache that is read", "HBM, read", "read")] if chosen]
    if not panels:
        style.skip(f"no step of plots/models.csv is in {arguments.gpu}-models.csv")
    figure, axes = pyplot.subplots(
        len(panels), 1, squeeze=False, figsize=(12, 1.6 * len(panels) + 0.46 * len(problems)),
        height_ratios=[len(chosen) + 0.8 for chosen, *_ in panels])
    for one, (chosen, unit, lines) in zip(axes[:, 0], panels):
        panel(one, rows, chosen, unit, lines)
    there = [peer for peer in PEERS if any(r["step"].startswith(peer[0]) for r in rows)]
    handles = [pyplot.Line2D([], [], color=colour, marker=marker, markersize=9, linestyle="none",
                             label=label) for _, label, colour, marker in there]
    axes[0, 0].set_title(f"Attention as models use it, on {arguments.gpu.upper()}: each step at its "
                         "own problem", pad=56)
    if handles:
        axes[0, 0].legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.05),
                          ncols=len(handles), borderpad=0)
    figure.tight_layout(h_pad=1.5)
    style.save(figure, arguments.out, "ladder_models")


main()

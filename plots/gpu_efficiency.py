# SPDX-License-Identifier: MIT
"""Several GPUs: the efficiency over the length of the sequence, measured and by chapter 72's model; and what the model
says of 8 GPUs and of 64, on paper."""

from math import log2

import style
from style import pyplot

HEADS, HEAD_DIM = 16, 128
# Chapter 72's numbers: what one GPU computes a second, what a link between two H200s carries by copy engines, what the
# partial results move. And a network, of which nothing here was measured.
FLOPS, LINK, MEMORY, NETWORK = 700e12, 336e9, 2.5e12, 50e9
PEERS = {"ring-flash-attention-3": (style.ORANGE, "s", "a ring by hand over FlashAttention-3"),
         "context-parallel-cudnn": (style.PINK, "P", "PyTorch's context_parallel, cuDNN")}
STEPS = {"70-all-gather": (style.SKY, "v"), "71-ring": (style.BLUE, "o"), "72-zigzag": (style.GREEN, "^"),
         "75-merge-in-place": (style.RED, "D"), "76-two-chains": (style.GREY, "X")}


def efficiency(tokens, gpus, link, causal, kv_heads=HEADS, flops=FLOPS):
    """t_1 / (N t_N): a hop takes the longer of its operations and its bytes, and the partial results come on top.

    With a mask it is zigzag: half of the pairs in every hop, and as many bytes for the GPU that receives most.
    """
    n = tokens / gpus
    computing = 4 * HEAD_DIM * HEADS * n * n / flops / (2 if causal else 1)
    travelling = 4 * HEAD_DIM * kv_heads * n / link
    # Each hop stores O in fp32. Each but the first reads two and stores one; the last one stores 16 bits.
    O = 4 * HEAD_DIM * HEADS * n
    merging = (O + (gpus - 1) * 4 * O - O / 2) / MEMORY
    return gpus * computing / (computing + (gpus - 1) * max(computing, travelling) + merging)


def one_gpu(rows, causal):
    """Operations per second of step 71 on one GPU, over the length: as measured, by interpolation between that, and
    outside the nearest."""
    options = f"{'causal ' if causal else ''}type=bf16 gpus=1 link=copies"
    known = sorted((log2(int(r["seqlen"])), float(r["operations"]) / float(r["median_ms"]) * 1e3) for r in rows
                   if r["step"] == "71-ring" and r["options"] == options)
    if not known:
        style.skip(f"step 71 was not measured on one GPU with {options}")

    def at(tokens):
        x = log2(tokens)
        for (left, low), (right, high) in zip(known, known[1:]):
            if left <= x <= right:
                return low + (high - low) * (x - left) / (right - left)
        return known[0][1] if x < known[0][0] else known[-1][1]
    return at


def measured(rows, name, causal):
    """Points of a step, in clocks, or of a peer, in time, on two GPUs beside one. Step 70 copies for nothing on one, and 72 and 76 are
    beside 75, as in their chapters."""
    link = " link=copies" if name[0].isdigit() and name != "70-all-gather" else ""
    mask = "causal " if causal else ""
    costs = {(r["step"], int(r["seqlen"]), r["options"]): float(r["sm_clocks"] or r["median_ms"]) for r in rows}
    points = []
    for (step, tokens, options), cost in costs.items():
        alone = {"70-all-gather": "71-ring", "72-zigzag": "75-merge-in-place", "76-two-chains": "75-merge-in-place"}.get(name, name)
        one = costs.get((alone, tokens, f"{mask}type=bf16 gpus=1{' link=copies' if name[0].isdigit() else ''}"))
        if step == name and options == f"{mask}type=bf16 gpus=2{link}" and one:
            points.append((tokens, one / 2 / cost))
    return sorted(points)


def draw_two(arguments, rows):
    figure, both = pyplot.subplots(1, 2, figsize=(13, 5.2), sharey=True)
    lengths = [1 << k for k in range(13, 18)]
    fine = [2 ** (k / 8) for k in range(8 * 13 - 2, 8 * 17 + 3)]
    for axes, causal in zip(both, (False, True)):
        flops = one_gpu(rows, causal)
        model = [efficiency(t, 2, LINK, causal, flops=flops(t)) for t in fine]
        axes.plot(fine, model, color=style.BLACK, linestyle=(0, (2, 2)), label="chapter 72's model of step 71, with a mask of 72")
        for step, (colour, marker) in STEPS.items():
            if points := measured(rows, step, causal):
                axes.plot(*zip(*points), color=colour, marker=marker, markersize=8, linewidth=2, label=f"step {step.replace('-', ', ', 1).replace('-', ' ')}")
        for name, (colour, marker, label) in PEERS.items():
            if of := measured(rows, name, causal):
                axes.plot(*zip(*of), color=colour, marker=marker, markersize=8, linewidth=2, linestyle=(0, (4, 2)),
                          label=label)
        if causal:
            axes.axhline(2 / 3, color=style.GREY, linewidth=1)
            axes.text(fine[-1], 2 / 3 - 0.01, "at most for steps 70 and 71", ha="right", va="top",
                      color=style.GREY)
        look(axes, lengths, "with a causal mask" if causal else "without a mask", 0.1)
    handles = {}
    for axes in both:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels())))
    figure.legend(handles.values(), handles, loc="upper center", bbox_to_anchor=(0.5, 0.01), ncols=3)
    both[0].set_ylabel("efficiency, t₁ / (2 t₂); of the steps in clocks")
    figure.suptitle(f"Two {arguments.gpu.upper()}s share a sequence: batch 1, 16 heads of 128, bf16", x=0.02, ha="left",
                    fontsize=15, fontweight="bold")
    figure.tight_layout()
    style.save(figure, arguments.out, "gpu_efficiency")


def draw_paper(arguments):
    figure, axes = pyplot.subplots(figsize=(11, 5.2))
    fine = [2 ** (k / 8) for k in range(8 * 14, 8 * 23 + 1)]
    for gpus, link, colour, name in ((8, LINK, style.BLUE, "8 GPUs, 336 GB/s each"),
                                     (64, NETWORK, style.RED, "64 GPUs, a network of 50 GB/s each")):
        for kv_heads, dashes, heads in ((HEADS, "-", "16"), (HEADS // 8, (0, (4, 2)), "2")):
            axes.plot(fine, [efficiency(t, gpus, link, True, kv_heads) for t in fine], color=colour, linestyle=dashes,
                      linewidth=2, label=f"{name}, {heads} key heads")
            level = gpus * 2 * FLOPS / link * kv_heads / HEADS
            if level > fine[0]:
                axes.plot(level, efficiency(level, gpus, link, True, kv_heads), "o", color=colour, markersize=8)
    look(axes, [1 << k for k in range(14, 24)], "On paper: zigzag by chapter 72's model; nobody has measured it")
    axes.plot([], [], "o", color=style.GREY, label="a hop's bytes take as long as its operations")
    axes.set_ylabel("efficiency, t₁ / (N t_N)")
    figure.legend(loc="upper center", bbox_to_anchor=(0.5, 0.01), ncols=2)
    figure.tight_layout()
    style.save(figure, arguments.out, "gpu_paper")


def look(axes, lengths, title, lowest=0):
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n < 1 << 20 else f"{n >> 20}M" for n in lengths])
    axes.minorticks_off()
    axes.set_yticks([k / 10 for k in range(11)], [f"{10 * k}%" for k in range(11)])
    axes.set_ylim(lowest, 1.02)
    axes.grid()
    axes.set_title(title, fontsize=13)
    axes.set_xlabel("tokens of the sequence")


def main():
    arguments = style.gpu_parser(__doc__).parse_args()
    rows = style.read_measured(arguments.results / f"{arguments.gpu}-gpus.csv", "bench-gpus")
    draw_two(arguments, rows)
    draw_paper(arguments)


main()

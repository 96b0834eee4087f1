# SPDX-License-Identifier: MIT
"""Decoding: how fast a KV cache is read against its length, the steps beside their peers, two batches."""

from statistics import median

import style
from style import pyplot

BATCHES = (1, 16)
L2 = 50e6  # bytes: what an H100's or H200's L2 cache holds
PEERS = {"flash-attention-2": style.RED, "flash-attention-3-bf16": style.ORANGE, "cudnn": style.PINK}
# Step 25 has step 26's loop, and its line would lie on that one.
STEPS = ("50-in-a-model", "27-split-kv", "26-pages", "23-grouped-heads")
COLOURS = [style.BLUE, style.SKY, style.GREEN, style.BLACK]
MARKERS = dict(zip(PEERS, "DsP"))


def lines_of(rows, batch):
    """Of each name its points: the length of the cache and the median speed."""
    speeds = {}
    for r in rows:
        options = style.options(r)
        if (r["seqlen"], r["batch"], options.get("kv-heads")) != ("1", str(batch), "8"):
            continue
        if set(options) == {"kv-heads", "seqlen-k"} and ":" not in r["step"]:
            keys = int(options["seqlen-k"])
            speeds.setdefault(r["step"], {}).setdefault(keys, []).append(style.cache_speed(r))
    return {name: sorted((n, median(values)) for n, values in points.items())
            for name, points in speeds.items()}


def main():
    arguments = style.gpu_parser(__doc__).parse_args()
    rows = style.read_measured(arguments.results / f"{arguments.gpu}-models.csv", "bench-models")
    panels = [(batch, lines) for batch in BATCHES if (lines := lines_of(rows, batch))]
    if not panels:
        style.skip("no decoding step was measured")
    names = sorted({name for _, lines in panels for name in lines})
    steps = [n for n in STEPS if n in names]
    look = dict(zip(steps, COLOURS)) | PEERS
    markers = dict(zip(steps, "o^v<")) | MARKERS
    read = style.named(arguments, "read")
    highest = max(v for _, lines in panels for points in lines.values() for _, v in points)
    top = 1.08 * max(highest, read or 0)

    figure, axes = pyplot.subplots(1, len(panels), figsize=(6.2 * len(panels) + 1.5, 5.6),
                                   sharey=True, squeeze=False)
    for one, (batch, lines) in zip(axes[0], panels):
        one.set_xscale("log", base=2)
        lengths = sorted({n for points in lines.values() for n, _ in points})
        # A key and its value of 8 heads: 4 KB.
        fits = L2 / (batch * 8 * 128 * 2 * 2)
        if fits > lengths[0] / 1.3:
            one.axvspan(lengths[0] / 1.3, fits, color=style.PALE, zorder=0)
            one.text(fits / 1.05, 0.02 * top, "fits in L2", ha="right", color=style.GREY)
        if read:
            one.axhline(read, color=style.BLACK, linewidth=1.5, linestyle=(0, (4, 2)))
            one.text(lengths[0] / 1.22, read, f"reading HBM, nothing else: {style.three_digits(read)} TB/s",
                     va="bottom", fontsize=10.5)
        for name in steps + list(PEERS):
            if points := lines.get(name):
                one.plot(*zip(*points), marker=markers[name], markersize=7, linewidth=2,
                         color=look[name], linestyle=(0, (4, 2)) if name in PEERS else "-", label=name,
                         zorder=3)
        one.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
        one.set_ylim(0, top)
        one.set_xticks(lengths, [f"{n // 1024}k" for n in lengths])
        one.minorticks_off()
        one.grid()
        one.set_title(f"batch {batch}")
        one.set_xlabel("keys in the cache of a sequence")
    axes[0, 0].set_ylabel("TB/s of K and V")
    handles = {}
    for one in axes[0]:
        handles |= dict(zip(*reversed(one.get_legend_handles_labels())))
    figure.legend(handles.values(), handles, loc="upper center", bbox_to_anchor=(0.5, 0.01),
                  ncols=min(5, len(handles)))
    figure.suptitle("One query of 64 heads on 8 key/value heads, head dim 128, on "
                    f"{arguments.gpu.upper()}", x=0.02, ha="left", fontsize=15, fontweight="bold")
    figure.tight_layout()
    style.save(figure, arguments.out, "decode")


main()

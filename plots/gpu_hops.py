# SPDX-License-Identifier: MIT
"""Four GPUs that share a sequence: when each computes, receives keys and values, and waits.

The emulator's trace (`--streams-csv`) says what waits for what. Its axis is no time of a GPU: see 'Several GPUs as a
picture' in common/emulator/README.md.
"""

from collections import defaultdict

import style
from style import pyplot

GPUS = 4


class Run:
    """What each GPU did in a run: (begin, end, whose keys), by what it is."""

    def __init__(self, arguments, step, options):
        rows = [r for r in style.read(arguments.results / f"trace-{step}.csv") if r["options"] == options]
        assert rows, f"no run of {step} with {options}"
        self.computing, self.merging, self.receiving = (defaultdict(list) for _ in range(3))
        for row in rows:
            gpu, span = int(row["gpu"]), [int(row["begin"]), int(row["end"])]
            if row["what"] == "kernel" and row["line"].startswith("merge"):
                self.merging[gpu].append(span)
            elif row["what"] == "kernel":
                self.computing[gpu].append(span)
            elif row["what"] == "ncclRecv":
                self.receiving[gpu].append(span)
        for gpu, spans in self.receiving.items():  # K and V of a hop come one after the other
            self.receiving[gpu] = [[k[0], v[1]] for k, v in zip(spans[::2], spans[1::2])]
        self.end = max(span[1] for of in (self.computing, self.merging) for spans in of.values() for span in spans)

    def draw(self, axes, end, title):
        for gpu in range(GPUS):
            busy = self.computing[gpu] + self.merging[gpu]
            axes.barh(gpu, self.end, height=0.5, color="white", edgecolor=style.GREY, hatch="////", linewidth=0)
            for begin, over in busy:
                axes.barh(gpu, over - begin, left=begin, height=0.5, color="white", edgecolor="none")
            for begin, over in self.merging[gpu]:
                axes.barh(gpu, over - begin, left=begin, height=0.5, color=style.BLACK, edgecolor="none")
            for hop, (begin, over) in enumerate(self.computing[gpu]):
                axes.barh(gpu, over - begin, left=begin, height=0.5, color="#BBD9EE", edgecolor=style.BLUE)
                axes.text((begin + over) / 2, gpu, f"{(gpu - hop) % GPUS}", ha="center", va="center", fontsize=13)
            for hop, (begin, over) in enumerate(self.receiving[gpu], 1):
                axes.barh(gpu + 0.39, over - begin, left=begin, height=0.24, color=style.ORANGE, edgecolor="white")
                axes.text((begin + over) / 2, gpu + 0.395, f"{(gpu - hop) % GPUS}", ha="center", va="center",
                          fontsize=10)
        axes.set_title(title, fontsize=13)
        axes.set_xlim(0, end)
        axes.set_ylim(GPUS - 0.35, -0.4)
        axes.set_yticks(range(GPUS), [f"GPU {gpu}" for gpu in range(GPUS)])
        axes.set_xticks([])
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.tick_params(left=False)


def figure_of(arguments, name, runs):
    end = max(run.end for run, _ in runs)
    figure, all_axes = pyplot.subplots(len(runs), figsize=(11, 0.9 + 2.7 * len(runs)))
    for axes, (run, title) in zip(all_axes, runs):
        run.draw(axes, end, title)
    all_axes[-1].annotate("", (1, -0.02), (0, -0.02), xycoords="axes fraction",
                          arrowprops={"arrowstyle": "->", "color": style.INK})
    all_axes[-1].text(1, -0.05, "time, by a model: not measured", transform=all_axes[-1].transAxes, ha="right", va="top")
    patch = pyplot.Rectangle
    figure.legend([patch((0, 0), 1, 1, facecolor="#BBD9EE", edgecolor=style.BLUE),
                   patch((0, 0), 1, 1, facecolor=style.ORANGE), patch((0, 0), 1, 1, facecolor=style.BLACK),
                   patch((0, 0), 1, 1, facecolor="white", edgecolor=style.GREY, hatch="////", linewidth=0)],
                  ["computes with the keys of GPU …", "receives K and V of GPU …", "merges", "waits, or is done"],
                  ncols=4, loc="lower left", bbox_to_anchor=(0.05, -0.02), fontsize=12, handlelength=1.4,
                  columnspacing=1.5)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    style.save(figure, arguments.out, name)


def main():
    arguments = style.results_parser(__doc__).parse_args()
    ring = Run(arguments, "71-ring", "causal gpus=4")
    figure_of(arguments, "gpu_hops", [(Run(arguments, "71-ring", "gpus=4"), "a ring, without a mask"),
                                      (ring, "a ring, with a causal mask")])
    figure_of(arguments, "gpu_hops_zigzag", [(ring, "step 71: a ring, with a causal mask"),
                                             (Run(arguments, "72-zigzag", "causal gpus=4"),
                                              "step 72: zigzag, with a causal mask")])


main()

# SPDX-License-Identifier: MIT
"""Two GPUs that share a sequence, measured: when the kernels run, and when keys and values travel.

The rows are those of `--device gpu --streams-csv`: both streams of both GPUs, from one launch each.
"""

import style
from style import pyplot

SHORTEST = 12000  # ns: what is shorter is the time between two marks, in which the host queues more
MERGE = 50  # µs: a kernel that takes less merges, for a hop has products
OPTIONS = {"71-ring": [("type=bf16 gpus=2", "step 71, NCCL"),
                       ("type=bf16 gpus=2 leave-sms=16", "step 71, NCCL, 16 multiprocessors left to it"),
                       ("type=bf16 gpus=2 leave-sms=32", "step 71, NCCL, 32 multiprocessors left to it"),
                       ("type=bf16 gpus=2 link=copies", "step 71, copy engines")],
           "72-zigzag": [("causal type=bf16 gpus=2 link=copies", "step 72")],
           "75-merge-in-place": [("causal type=bf16 gpus=2 link=copies", "step 75")]}


def spans(rows, gpu, stream, what):
    return [(int(r["begin"]) / 1000, int(r["end"]) / 1000) for r in rows
            if (int(r["gpu"]), int(r["stream"]), r["what"]) == (gpu, stream, what)
            and int(r["end"]) - int(r["begin"]) >= SHORTEST]


def draw(axes, rows, title):
    for gpu in range(2):
        hop = 0
        for begin, end in spans(rows, gpu, 0, "kernel"):
            axes.barh(gpu, end - begin, left=begin, height=0.5, color="#BBD9EE", edgecolor=style.BLUE)
            if end - begin > MERGE:
                axes.text((begin + end) / 2, gpu, f"hop {hop}", ha="center", va="center")
                hop += 1
            else:
                axes.text((begin + end) / 2, gpu, "merge", ha="center", va="center", fontsize=8, rotation=90)
        # The mark behind a message may come after hop 1 has stopped waiting for it.
        waits = [end for begin, end in spans(rows, gpu, 0, "cudaStreamWaitEvent")]
        for begin, end in spans(rows, gpu, 1, "message"):
            end = min([end, *(over for over in waits if over > begin)])
            axes.barh(gpu + 0.39, end - begin, left=begin, height=0.24, color=style.ORANGE, edgecolor="white")
    axes.set_title(title, fontsize=13)
    axes.set_ylim(1.65, -0.4)
    axes.set_yticks(range(2), [f"GPU {gpu}" for gpu in range(2)])
    axes.grid(axis="x")
    axes.tick_params(left=False)


def figure_of(arguments, all_rows, name, steps):
    runs = [(step, options, title) for step in steps for options, title in OPTIONS[step]]
    figure, all_axes = pyplot.subplots(len(runs), figsize=(11, 1.1 + 1.75 * len(runs)), sharex=True)
    for axes, (step, options, title) in zip(all_axes, runs):
        draw(axes, [r for r in all_rows if r["step"] == step and r["options"] == options], title)
    all_axes[-1].set_xlim(0, all_axes[-1].get_xlim()[1])
    all_axes[-1].set_xlabel("µs since the beginning of a launch, at 8,192 tokens")
    patch = pyplot.Rectangle
    figure.legend([patch((0, 0), 1, 1, facecolor="#BBD9EE", edgecolor=style.BLUE),
                   patch((0, 0), 1, 1, facecolor=style.ORANGE)],
                  ["a kernel", "K and V of the other GPU travel, or wait for their turn"], ncols=2, loc="lower left",
                  bbox_to_anchor=(0.05, -0.03), fontsize=12)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    style.save(figure, arguments.out, name)


def main():
    arguments = style.gpu_parser(__doc__).parse_args()
    rows = style.read(arguments.results / f"{arguments.gpu}-trace-gpus.csv")
    figure_of(arguments, rows, "gpu_timeline", ["71-ring"])
    figure_of(arguments, rows, "gpu_timeline_zigzag", ["72-zigzag", "75-merge-in-place"])


main()

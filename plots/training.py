# SPDX-License-Identifier: MIT
"""The loss of chapter 69's small GPT on the emulator and of its larger one on a GPU, and how far runs are apart."""

import style
from style import pyplot


def main():
    arguments = style.results_parser(__doc__).parse_args()
    figure, panels = pyplot.subplots(2, 2, figsize=(15, 7.5), sharex="col", height_ratios=(3, 2))
    (above, gpu_above), (below, gpu_below) = panels
    for name, colour in (("bf16", style.BLUE), ("fp16", style.RED)):
        rows = style.read(arguments.results / f"emulator-training-{name}.csv")
        steps, ours, exact = zip(*((int(row["step"]), float(row["library"]), float(row["double"])) for row in rows))
        if name == "bf16":
            above.plot(steps, exact, color=style.GREY, linewidth=5, alpha=0.5, label="all in double")
        above.plot(steps, ours, color=colour, linewidth=1.5, linestyle="-" if name == "bf16" else ":",
                   label=f"attention by the library, in {name}")
        below.plot(steps, [abs(a - b) for a, b in zip(ours, exact)], color=colour, label=name)
    above.set_ylabel("loss")
    above.legend(frameon=False)
    below.set_yscale("log")
    below.set_ylabel("distance from double")
    below.set_xlabel("step")
    below.legend(frameon=False)
    above.set_title("The small GPT, on the emulator")

    rows = style.read(arguments.results / "h200-training.csv")
    losses = {run: [float(row[run]) for row in rows] for run in ("sdpa", "sdpa-again", "libattention")}
    gpu_above.plot(losses["sdpa"], color=style.GREY, linewidth=5, alpha=0.5, label="sdpa")
    gpu_above.plot(losses["libattention"], color=style.BLUE, linewidth=1.5, label="attention by the library")
    for run, name, colour in (("sdpa-again", "sdpa again", style.GREY), ("libattention", "the library", style.BLUE)):
        gpu_below.plot([abs(a - b) for a, b in zip(losses[run], losses["sdpa"])], color=colour, label=name)
    gpu_above.set_title("The larger GPT, on an H200")
    gpu_above.legend(frameon=False)
    gpu_below.set_yscale("log")
    gpu_below.set_ylabel("distance from sdpa")
    gpu_below.set_xlabel("step")
    gpu_below.legend(frameon=False)
    style.save(figure, arguments.out, "training")


main()

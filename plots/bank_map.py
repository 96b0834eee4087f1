# SPDX-License-Identifier: MIT
"""The bank map: one warp's read of K from shared memory, before and after the swizzle.

A trace has a row for each lane of each request, from `./step-02 --trace-csv FILE`.
"""

import style
from style import pyplot

BANKS = 32  # of 4 bytes each; a wavefront serves one 4-byte word of every bank


def worst_request(rows, op, line):
    """The request to draw: the `op` that takes the most wavefronts, of `line` if there is one.

    Among equals, the one that uses the most banks: a map of a broadcast would show nothing. Then
    the one that comes last in the source: the read of K comes after the like of Q.
    """
    requests = {}
    for row in rows:
        if row["op"] == op and line in (None, row["line"]):
            requests.setdefault((row["line"], row["request"]), []).append(row)
    if not requests:
        raise SystemExit(f"the trace has no {op} at line {line or 'any'}")

    def cost(request):
        return (len({row["wavefront"] for row in request}), len({row["bank"] for row in request}),
                int(request[0]["line"]))

    return max(requests.values(), key=cost)


def lanes_of(rows):
    """The lanes of a cell, in few letters: 7, 6 7, 0-31"""
    lanes = sorted(int(row["lane"]) for row in rows)
    return " ".join(map(str, lanes)) if len(lanes) < 3 else f"{lanes[0]}-{lanes[-1]}"


def draw(axes, request, step, when, colour, label, verdict):
    """One panel: banks across, wavefronts down, in each cell the lane that is served there."""
    wavefronts = 1 + max(int(row["wavefront"]) for row in request)
    for y in range(wavefronts):  # what a wavefront could serve
        for x in range(BANKS):
            axes.add_patch(pyplot.Rectangle((x, y), 1, 1, facecolor="#F6F6F6", edgecolor="#DDDDDD",
                                            linewidth=0.4))
    cells = {}
    for row in request:
        words = max(1, int(row["bytes"]) // 4)
        cells.setdefault((int(row["wavefront"]), int(row["bank"]), words), []).append(row)
    for (y, x, words), rows in cells.items():
        axes.add_patch(pyplot.Rectangle((x, y), words, 1, facecolor=colour, edgecolor="white",
                                        linewidth=0.5, zorder=2))
        axes.text(x + words / 2, y + 0.53, label(rows), ha="center", va="center", color="white",
                  fontsize=7.5, fontweight="bold", zorder=3)
    plural = "" if wavefronts == 1 else "s"
    x, y = verdict
    axes.text(x, y, f"{wavefronts} wavefront{plural}", ha="center", va="center",
              fontsize=30, fontweight="bold", color=colour, zorder=4)
    banks = len({x + word for _, x, words in cells for word in range(words)})
    axes.text(x, y + 2.5, f"{len(request)} lanes in {banks} bank{'' if banks == 1 else 's'}",
              ha="center", va="center", fontsize=15, color=style.INK, zorder=4)
    axes.set_title(f"{when}: {step}, line {request[0]['line']}", fontsize=14, pad=14)
    axes.set_xlim(-0.1, BANKS + 0.1)
    axes.set_ylim(BANKS + 0.1, -0.1)
    axes.set_aspect("equal")
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    ticks = [0, 4, 8, 12, 16, 20, 24, 28, 31]
    axes.set_xticks([t + 0.5 for t in ticks], ticks)
    axes.set_yticks([t + 0.5 for t in ticks], ticks)
    axes.tick_params(length=0, labelsize=10)
    axes.set_xlabel("bank of shared memory")
    axes.set_ylabel("wavefront: one pass through shared memory")
    for spine in axes.spines.values():
        spine.set_visible(False)


def compare(name, description, title, op, before, after, label=lanes_of,
            verdict=(BANKS / 2, 16.5), annotate=None):
    """The figure `name`: the costliest `op` of the step `before` beside that of the step `after`.

    `label` makes a cell's text of the trace's rows that it serves; `verdict` is where the number
    of wavefronts stands; `annotate(axes, request)` adds to a panel.
    """
    panels = [(before, "before", style.RED), (after, "after", style.GREEN)]
    p = style.results_parser(description)
    for step, when, _ in panels:
        p.add_argument(f"--line-{when}", metavar="N",
                       help=f"the line of {step} to draw; default: its costliest read")
    arguments = p.parse_args()
    figure, both = pyplot.subplots(1, 2, figsize=(14, 7.9))
    for axes, (step, when, colour) in zip(both, panels):
        rows = style.read(arguments.results / f"trace-{step}.csv")
        request = worst_request(rows, op, getattr(arguments, f"line_{when}"))
        draw(axes, request, step, when, colour, label, verdict)
        if annotate:
            annotate(axes, request)
    both[1].set_ylabel("")
    figure.suptitle(title, x=0.02, y=1.02, ha="left", fontsize=18, fontweight="bold")
    figure.tight_layout(w_pad=2.5)
    style.save(figure, arguments.out, name)


if __name__ == "__main__":
    compare("bank_map", "The bank map: one warp's read of K, before and after the swizzle.",
            "A warp reads 32 rows of K: the number in a cell is the lane it serves",
            "load", "02-loop-inverted", "03-bank-conflicts")

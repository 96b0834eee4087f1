# SPDX-License-Identifier: MIT
"""The rings of step 32 in time: who fills a stage, who reads it, and who waits for whom.

A schematic. The order is the kernel's, played by its rules; the lengths are chosen to be readable.
"""

import style
from style import pyplot

PRODUCTS, SOFTMAX, COPY = 3.4, 2.4, 3.0
TILES, STAGES = 5, 2
HEIGHT = 0.62  # of a box; rows are 1 apart
FILLED, READ, FULL, WAITS = "#F4B6A0", "#8CD3BB", "#FBE3DA", "#FFFFFF"
ROWS = {"producer": 0, ("K", 0): 1.15, ("K", 1): 2.15, ("V", 0): 3.15, ("V", 1): 4.15, "consumer": 5.3}
RIGHT = 34.5


def play():
    """When each copy is asked for and lands, and when each part of the consumer's work begins and ends."""
    copies, parts, waits = {}, [], []
    emptied = {}  # when tile i of K or V has been read
    consumer = producer = 0.0
    asked = []
    for i in range(TILES):
        for name in "KV":
            asked.append((name, i))

    def ask(name, i):
        nonlocal producer
        free = emptied[name, i - STAGES] if i >= STAGES else 0.0
        if free > producer + 0.01:
            waits.append(("producer", producer, free, f"empty {name}"))
        producer = max(producer, free) + 0.25
        copies[name, i] = producer, producer + COPY

    def work(name, i, kind, length):
        nonlocal consumer
        landed = copies[name, i][1]
        if landed > consumer + 0.01:
            waits.append(("consumer", consumer, landed, f"full {name}"))
        begin = max(consumer, landed)
        consumer = begin + length
        parts.append((kind, i, begin, consumer))
        emptied[name, i] = consumer

    for i in range(TILES):
        while asked and asked[0][1] < i + STAGES and (
                asked[0][1] < STAGES or (asked[0][0], asked[0][1] - STAGES) in emptied):
            ask(*asked.pop(0))
        work("K", i, "QK", PRODUCTS)
        parts.append(("softmax", i, consumer, consumer + SOFTMAX))
        consumer += SOFTMAX
        if asked and (asked[0][0], asked[0][1] - STAGES) in emptied:
            ask(*asked.pop(0))
        work("V", i, "PV", PRODUCTS)
    return copies, parts, waits


def box(axes, row, begin, end, colour, label="", hatch=None, **text):
    end = min(end, RIGHT)
    if begin >= end:
        return
    y = ROWS[row] - HEIGHT / 2
    axes.add_patch(pyplot.Rectangle((begin, y), end - begin, HEIGHT, facecolor=colour, hatch=hatch,
                                    edgecolor=style.GREY if hatch else "white", linewidth=0.6 if hatch else 1.5,
                                    zorder=2))
    if label and end - begin > 0.9:
        at, crossings = (begin + end) / 2, sorted(x for x in CROSSED.get(row, []) if begin < x < end)
        if crossings:  # the word stands in the widest part that no arrow crosses
            parts = list(zip([begin] + crossings, crossings + [end]))
            at = sum(max(parts, key=lambda part: part[1] - part[0])) / 2
        axes.text(at, ROWS[row], label, ha="center", va="center", zorder=6, **{"fontsize": 12, **text})


CROSSED = {}  # by row: where arrows cross it


def cross(at, begin, end):
    """Notes the rows between two that an arrow crosses."""
    low, high = sorted((ROWS[begin], ROWS[end]))
    for row, y in ROWS.items():
        if low < y < high:
            CROSSED.setdefault(row, []).append(at)


def signal(axes, at, begin, end, colour):
    """A barrier's phase ends: from the stage to the one that waited."""
    if at > RIGHT:
        return
    down = 1 if ROWS[end] > ROWS[begin] else -1
    axes.annotate("", (at, ROWS[end] - down * HEIGHT / 2), (at, ROWS[begin] + down * HEIGHT / 2), zorder=5,
                  arrowprops={"arrowstyle": "-|>,head_width=0.22,head_length=0.4", "color": colour,
                              "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0})


def main():
    arguments = style.parser(__doc__).parse_args()
    copies, parts, waits = play()
    figure, axes = pyplot.subplots(figsize=(15, 6.4))
    reads = {({"QK": "K", "PV": "V"}[kind], i): (begin, end) for kind, i, begin, end in parts
             if kind != "softmax"}
    for (name, i), (begin, end) in reads.items():  # first of all: the words make way
        cross(begin, (name, i % STAGES), "consumer")
        if (name, i + STAGES) in copies:
            cross(end, (name, i % STAGES), "producer")
    for (name, i), (asked, landed) in copies.items():
        stage = (name, i % STAGES)
        box(axes, "producer", asked - 0.25, asked, style.INK)
        begin, end = reads[name, i]
        box(axes, stage, asked, landed, FILLED, f"copy ${name}_{i}$")
        box(axes, stage, landed, begin, FULL, "full")
        box(axes, stage, begin, end, READ, f"${name}_{i}$ is read")
        signal(axes, begin, stage, "consumer", style.RED)
        if (name, i + STAGES) in copies:
            signal(axes, end, stage, "producer", style.BLUE)
    names = {"QK": "$S_{0}=Q\\,K_{0}^T$", "softmax": "softmax {0}", "PV": "$O{{+}}{{=}}P_{0}V_{0}$"}
    for kind, i, begin, end in parts:
        box(axes, "consumer", begin, end, READ if kind != "softmax" else "#F7D78D",
            names[kind].replace("{{", "{").replace("}}", "}").replace("_{0}", f"_{i}").replace("{0}", str(i)))
    for who, begin, end, what in waits:
        box(axes, who, begin, end, WAITS, f"waits: {what}" if end - begin > 1.8 else "", hatch="////",
            fontsize=10, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    for row, y in ROWS.items():
        label = row if isinstance(row, str) else f"{row[0]}, stage {row[1]}"
        axes.text(-0.4, y, label, ha="right", va="center", fontsize=12.5,
                  fontweight="bold" if isinstance(row, str) else "normal")
    axes.set_xlim(-3.6, RIGHT + 0.2)
    axes.set_ylim(5.9, -0.6)
    axes.axis("off")
    figure.suptitle("Two rings in time", x=0.02, y=1.07, ha="left", fontsize=18, fontweight="bold")
    figure.text(0.02, 0.925, "The order is the kernel's; lengths are not to scale. Red arrows: 'full', the copy is "
                "complete, and the consumer reads the tile. Blue arrows: 'empty',\nthe tile has been read, and the "
                "producer requests the tile after next (black). Hatched: waits. After the first tile only the producer waits.",
                fontsize=13, linespacing=1.5)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    style.save(figure, arguments.out, "ring")


main()

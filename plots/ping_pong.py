# SPDX-License-Identifier: MIT
"""Who does what in steps 33, 34 and 35: two warpgroups, the tensor cores and the producer's copies.

The emulator's trace (`--events-csv`) says what each warpgroup does in which order, and which events of the others
come before (the column `after`). It knows no time: the lengths are arithmetic. An event is drawn as early as the
events before it allow.
"""

import style
from style import pyplot

PRODUCT, SOFTMAX, HAND_OVER = 512, 750, 330  # clocks, as chapter 34 counts them
COPY = 900  # of 32 KB, at the rate of tma-l2 in `make ceilings`: 35 bytes per clock and SM
BOTH = 1250  # two softmaxes that begin at once: 2 x 512 clocks of exponentials are among them
COLOURS = ["#8CD3BB", "#A9D5F2"]  # of the two warpgroups
SOFT = "#F7D78D"
ROWS = {"warpgroup 0": 0, "warpgroup 1": 1, "tensor cores": 2, "copies": 3}
PRODUCER = 2  # the third warpgroup
RIGHT = 8200  # clocks
HEIGHT = 0.74  # of a box; rows are 1 apart
PANELS = [("33-two-consumers", "33-two-consumers: nothing orders the two, here they are in step"),
          ("34-ping-pong", "34-ping-pong: P V and the next Q K$^T$ in turns"),
          ("35-overlap", "35-overlap: a warpgroup starts its products and goes on")]


class Event:
    """A row of the trace."""

    def __init__(self, row):
        self.group, self.number, self.what = int(row["warpgroup"]), int(row["event"]), row["what"]
        self.of = int(row["of"] or -1)
        self.after = [tuple(map(int, other.split(":"))) for other in row["after"].split()]
        self.product = {"wgmma with A in shared memory": "QK",
                        "wgmma with A in registers": "PV"}.get(self.what)


class Product:
    """One of a warpgroup, from its start to the wait for it; `begin` and `end` at the tensor cores."""

    def __init__(self, event, tile, start):
        self.group, self.name, self.tile = event.group, event.product, tile
        self.first, self.last = event, None
        self.start, self.begin, self.end = start, None, None

    def text(self):
        return (f"$Q\\,K_{{{self.tile}}}^T$" if self.name == "QK" else f"$P\\,V_{{{self.tile}}}$")


def order(events):
    """By warpgroup and event: of each warpgroup, how many events come before it or are it."""
    known = {}

    def of(group, number):
        if (group, number) not in known:
            clock = list(of(group, number - 1)) if number else [0] * len(events)
            for other in events[group][number].after:
                clock = [max(pair) for pair in zip(clock, of(*other))]
            clock[group] = number + 1
            known[group, number] = clock
        return known[group, number]

    for group in events:
        for event in group:
            of(event.group, event.number)
    return known


class Replay:
    """Gives each event of a trace the earliest time that its order allows."""

    def __init__(self, events):
        self.events = events
        self.over = [[] for _ in events]  # by warpgroup: when each event is over
        self.products, self.softmaxes = [], []
        self.stalls = []  # at a wgmma_wait: the warpgroup, when it begins and ends
        self.copies = {}  # by mbarrier: when each of its copies begins and ends
        self.waits = {}  # by warpgroup and mbarrier: how many so far
        while ready := [(time, group) for group in range(len(events))
                        if (time := self.ready(group)) is not None]:
            self.do(*min(ready))
        assert all(len(over) == len(own) for over, own in zip(self.over, events)), "a circle"

    def ready(self, group):
        """When the warpgroup's next event can be; None: there is none, or one before it is still to be."""
        number = len(self.over[group])
        if number == len(self.events[group]):
            return None
        event = self.events[group][number]
        if any(len(self.over[g]) <= n for g, n in event.after):
            return None
        turn = HAND_OVER if event.what == "named_barrier_sync" else 0
        times = [0] + self.over[group][-1:] + [self.over[g][n] + turn for g, n in event.after]
        if event.what == "mbarrier_wait" and group != PRODUCER:  # a tile, which has landed
            copies, wait = self.copies.get(event.of, []), self.waits.get((group, event.of), 0)
            if wait == len(copies):
                return None
            times.append(copies[wait][1])
        if event.what == "wgmma_wait":
            times += [product.end for product in self.awaited(event)]
        return max(times)

    def awaited(self, event):
        """The warpgroup's products but for those that the wait leaves under way."""
        own = [p for p in self.products if p.group == event.group]
        return own[:len(own) - event.of]

    def do(self, time, group):
        """The warpgroup's next event, at this time."""
        number = len(self.over[group])
        event, before = self.events[group][number], self.events[group][max(number - 1, 0)]
        if event.product and (event.product != before.product or number == 0):
            tile = sum((p.group, p.name) == (group, event.product) for p in self.products)
            self.products.append(Product(event, tile, time))
            self.schedule()
        elif event.what == "wgmma_wait":
            self.stalls.append((group, self.over[group][-1], time))
            for product in self.awaited(event):
                product.last = product.last or event
        elif event.what == "exp2" and before.what != "exp2":
            at_once = [s for s in self.softmaxes if s[1] == time]
            self.softmaxes.append((group, time, number))
            time += BOTH if at_once else SOFTMAX
            for other, _, theirs in at_once:
                self.over[other][theirs] = time
        elif event.what == "tma_load":
            begin = max([time] + [end for copies in self.copies.values() for _, end in copies])
            self.copies.setdefault(event.of, []).append((begin, begin + COPY))
        elif event.what == "mbarrier_wait":
            self.waits[group, event.of] = self.waits.get((group, event.of), 0) + 1
        self.over[group].append(time)

    def schedule(self):
        """The tensor cores take products as they are started; of two that are started at once each has half."""
        free = 0
        for start in sorted({p.start for p in self.products}):
            together = [p for p in self.products if p.start == start]
            for product in together:
                product.begin = max(free, start)
                free = product.end = product.begin + PRODUCT
            if len({p.group for p in together}) > 1:
                for product in together:
                    product.end = free


def side_by_side(replay):
    """How many pairs of a product of each warpgroup nothing in the trace keeps apart, and of how many."""
    known = order(replay.events)

    def before(a, b):
        return known[b.group, b.first.number][a.group] > a.last.number

    pairs = [(a, b) for a in replay.products for b in replay.products if a.group < b.group]
    return sum(not before(a, b) and not before(b, a) for a, b in pairs), len(pairs)


class Panel:
    """One step's panel, which begins with the first product."""

    def __init__(self, axes, replay):
        self.axes, self.zero = axes, min(p.begin for p in replay.products)
        for name, y in ROWS.items():
            axes.text(-120, y, name, ha="right", va="center", fontsize=11.5)
        for product in replay.products:
            colour = COLOURS[product.group]
            self.box("tensor cores", product.begin, product.begin + PRODUCT, product.text(), colour)
            if product.last.number == product.first.number + 2:  # commit and wait: it does nothing else
                self.box(f"warpgroup {product.group}", product.start, product.end, product.text(), colour)
        for group, begin, end in replay.stalls:
            if all(p.group != group or p.end != end or p.last.number != p.first.number + 2 for p in replay.products):
                self.box(f"warpgroup {group}", begin, end, "waits", "#F4F4F4")
        tiles = [0, 0]
        for group, begin, number in replay.softmaxes:
            self.box(f"warpgroup {group}", begin, replay.over[group][number],
                     f"softmax$_{{{tiles[group]}}}$", SOFT)
            tiles[group] += 1
        self.copies(replay.copies)
        self.idle(sorted((p.begin - self.zero, p.begin + PRODUCT - self.zero) for p in replay.products))

    def box(self, row, begin, end, text, colour):
        begin, end, y = max(begin - self.zero, 0), min(end - self.zero, RIGHT), ROWS[row]
        if end - begin < 80:  # a sliver at the edge
            return
        self.axes.add_patch(pyplot.Rectangle((begin, y - HEIGHT / 2), end - begin, HEIGHT, zorder=3,
                                             facecolor=colour, edgecolor="white", linewidth=1.2))
        if end - begin > 300:
            self.axes.text((begin + end) / 2, y, text, ha="center", va="center", fontsize=10, zorder=4)

    def copies(self, by_mbarrier):
        """Q first, then K and V by turns, as the producer asks for them."""
        for i, (begin, end) in enumerate(sorted(c for copies in by_mbarrier.values() for c in copies)):
            name = f"${'VK'[i % 2]}_{{{(i - 1) // 2}}}$" if i else "Q"
            self.box("copies", begin, end, name, "#E3D3EA")

    def idle(self, busy):
        """Hatches what is left of the tensor cores' row."""
        busy = [pair for pair in busy if pair[0] < RIGHT - 80] + [(RIGHT, RIGHT)]
        now, y = 0, ROWS["tensor cores"]
        for begin, end in busy:
            if now < min(begin, RIGHT):
                self.axes.add_patch(pyplot.Rectangle(
                    (now, y - HEIGHT / 2), min(begin, RIGHT) - now, HEIGHT, facecolor="none",
                    edgecolor=style.RED, hatch="///", linewidth=0, alpha=0.5, zorder=1))
            now = max(now, end)


def main():
    arguments = style.results_parser(__doc__).parse_args()
    rows = style.read_measured(arguments.results / "events-34.csv", "counters")
    figure, panels = pyplot.subplots(len(PANELS), 1, figsize=(14, 10), sharex=True)
    for (step, title), axes in zip(PANELS, panels):
        events = [[], [], []]  # by warpgroup
        for row in rows:
            if row["step"] == step:
                events[int(row["warpgroup"])].append(Event(row))
        replay = Replay(events)
        Panel(axes, replay)
        free, pairs = side_by_side(replay)
        axes.set_title(f"{title}  ({free} of {pairs} pairs of products may overlap)", fontsize=13.5, pad=8)
        axes.set_xlim(-1250, RIGHT)
        axes.set_ylim(3.5, -0.5)
        axes.set_yticks([])
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.tick_params(axis="x", length=0, labelbottom=False)
    panels[-1].set_xticks(range(0, RIGHT, 1024))
    panels[-1].tick_params(axis="x", length=3, labelbottom=True)
    panels[-1].set_xlabel("clocks, as counted")
    figure.suptitle("Who does what: two warpgroups and a producer", x=0.02, y=1.0, ha="left", fontsize=17,
                    fontweight="bold")
    figure.text(0.02, 0.905, "The emulator's trace says what each does in which order, and what must come before what. The "
                "lengths are counted, not measured: a product of 64 x 128 x 128\nis 512 clocks, a softmax 750 (two at "
                "once 1,250), a change of turn 330, a copy 900. Each box begins as early as the trace allows.\nGreen "
                "and blue: products of warpgroup 0 and 1. Hatched: the tensor cores are idle. Grey: a warpgroup waits "
                "for a product.", fontsize=11.5, linespacing=1.4)
    figure.tight_layout(rect=(0, 0, 1, 0.925), h_pad=1.2)
    style.save(figure, arguments.out, "ping_pong")


main()

# SPDX-License-Identifier: MIT
"""Who does what in step 66: two warpgroups, the tensor cores and the copy engine, over two tiles of queries.

The order is the kernel's: what each warpgroup starts and waits for. The tensor cores do products in the order in
which they are started. The lengths are arithmetic, as the chapter counts them.
"""

import style
from style import pyplot

PRODUCT = 320  # clocks of one of a tile's five products, for 64 keys, at head dim 128
EXPONENTIALS, SCORE_GRADIENTS, HAND_OVER = 400, 250, 150  # of a warpgroup
ADD = 160  # the engine reads 20 KB of shared memory
TILES = 2
COLOURS = ["#8CD3BB", "#A9D5F2"]  # of the two warpgroups
SOFT = "#F7D78D"
ROWS = ["warpgroup 0", "warpgroup 1", "tensor cores", "copy engine"]
HEIGHT = 0.74  # of a box; rows are 1 apart


def box(axes, row, begin, end, text, colour):
    axes.add_patch(pyplot.Rectangle((begin, row - HEIGHT / 2), end - begin, HEIGHT,
                                    facecolor=colour, edgecolor="white", linewidth=1.5))
    axes.text((begin + end) / 2, row, text, ha="center", va="center", fontsize=9)


class Schedule:
    """Two warpgroups that run the kernel's loop."""

    def __init__(self):
        self.boxes = []  # row, begin, end, text, colour
        self.queue = []  # products that are started: when, by whom, which
        self.arrived = [[], []]  # at the barrier that dS is complete, by warpgroup

    def product(self, time, group, name):
        entry = {"time": time, "group": group, "name": name, "end": None}
        self.queue.append(entry)
        return entry

    def run_tensor_cores(self):
        """Gives an end to each product whose turn has come. True if there was one."""
        waiting = [p for p in self.queue if p["end"] is None]
        if not waiting:
            return False
        free = max([p["end"] for p in self.queue if p["end"] is not None], default=0)
        first = min(waiting, key=lambda p: p["time"])
        begin = max(free, first["time"])
        first["end"] = begin + PRODUCT
        self.boxes.append((2, begin, first["end"], first["name"], COLOURS[first["group"]]))
        return True

    def warpgroup(self, group):
        """A generator: yields what it waits for, is sent when that is over."""
        time = 15 * group
        for tile in range(TILES):
            s = self.product(time, group, f"$S_{tile}$")
            dp = self.product(time + 1, group, f"$dP_{tile}$")
            time = max(time, (yield s))
            self.boxes.append((group, time, time + EXPONENTIALS, f"$P_{tile}$", SOFT))
            time += EXPONENTIALS
            self.product(time, group, f"$dV_{tile}$")
            time = max(time, (yield dp))
            self.boxes.append((group, time, time + SCORE_GRADIENTS, f"$dS_{tile}$", SOFT))
            time += SCORE_GRADIENTS
            self.arrived[group].append(time)
            time = max(time, (yield tile)) + 15 * group
            dq = self.product(time, group, f"$dQ_{tile}$")
            dk = self.product(time + 1, group, f"$dK_{tile}$")
            time = max(time, (yield dq))
            self.boxes.append((group, time, time + HAND_OVER, "store\n$dQ_%d$" % tile, SOFT))
            time += HAND_OVER
            self.boxes.append((3, time, time + ADD, f"$dQ_{tile}$", COLOURS[group]))
            time = max(time, (yield dk))

    def run(self):
        groups = [self.warpgroup(group) for group in range(2)]
        wants = [next(group) for group in groups]
        while any(want is not None for want in wants):
            moved = False
            for group, want in enumerate(wants):
                over = None
                if isinstance(want, dict):
                    over = want["end"]
                elif want is not None and all(len(a) > want for a in self.arrived):
                    over = max(a[want] for a in self.arrived)
                if over is None:
                    continue
                moved = True
                try:
                    wants[group] = groups[group].send(over)
                except StopIteration:
                    wants[group] = None
            if not moved:
                assert self.run_tensor_cores(), "a circle"
        while self.run_tensor_cores():
            pass
        return self.boxes


def main():
    arguments = style.parser(__doc__).parse_args()
    boxes = Schedule().run()
    figure, axes = pyplot.subplots(figsize=(14, 3.6))
    for what in boxes:
        box(axes, *what)
    axes.set_xlim(-20, max(end for _, _, end, _, _ in boxes) + 60)
    axes.set_ylim(3.6, -0.6)
    axes.set_yticks(range(len(ROWS)), ROWS)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("clocks, by arithmetic: the order is the kernel's")
    axes.spines["left"].set_visible(False)
    axes.set_title("66-hopper: two tiles of 80 queries against 128 keys. "
                   "Products of warpgroup 0 green, of warpgroup 1 blue", fontsize=13)
    figure.tight_layout()
    style.save(figure, arguments.out, "hopper_backward")


main()

# SPDX-License-Identifier: MIT
"""Measures programs against each other in rounds: what make variants-NN, make cycles and make sustained share.

Standard input has a line for each comparison: OPTIONS|PROGRAM...|PEER... The programs draw their inputs and check
their answers once, and wait with them in the GPU's memory. Then they alternate: each round times every one of them
for --seconds, in an order that is drawn for it. A row of OUT.csv is a program at a problem, with medians over the rounds; _least
and _most are over the rounds, too: of seven, they hold the true median in 98 of 100 cases. sm_clocks are elapsed
clocks of an SM a launch, mhz is what follows from them and the time, watts and smi_mhz are medians of nvidia-smi's
samples.

  cycles     each program of a line; a new row replaces the row of the same problem, others stay.
  variants   the same, and the first program that ends in -NN beside all others: speed_ratio is its time over the
             other's, clocks_ratio its clocks over the other's, round by round. Where that program comes twice, the
             second is the control. A ratio that no round tells from the control's is empty, and 'level' in in_time
             or in_clocks, which are texts for tables.
  sustained  each program, and each peer by peers.py, alone: two seconds idle, then launches for a second that are
             not recorded and for two that are. Twice.
"""

import argparse
import csv
import os
import random
import statistics
import subprocess
import sys
import threading
import time

ROUNDS_CSV = "build/rounds.csv"
PROBLEM = ["step", "batch", "heads", "seqlen", "head_dim", "options"]
COLUMNS = ["step", "device", *PROBLEM[1:], "operations", "kv_bytes", "rounds", "median_ms", "min_ms", "tflops",
           "sm_clocks", "sm_clocks_least", "sm_clocks_most", "mhz", "smi_mhz", "watts", "rms_error"]
RATIOS = [f"{kind}_ratio{end}" for kind in ("speed", "clocks") for end in ("", "_least", "_most")]
VARIANTS_COLUMNS = [*COLUMNS, *RATIOS, "in_time", "in_clocks"]
REST, WARM_UP, RECORDED = (float(s) for s in os.environ.get("SUSTAINED", "2 1 2").split())


class Failed(RuntimeError):
    """A program gave a wrong answer, or ended before it was asked to."""


class Sampler:
    """What the GPU draws, as nvidia-smi says it, 50 times a second."""

    def __init__(self):
        self.samples = []  # when, watts, MHz
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        for query in ("power.draw.instant", "power.draw"):  # drivers before 530 have only the mean of a second
            ask = ["nvidia-smi", "-i", gpu, f"--query-gpu={query},clocks.sm", "--format=csv,noheader,nounits"]
            if subprocess.run(ask, capture_output=True, check=False).returncode == 0:
                break
        self.process = subprocess.Popen([*ask, "-lms", "20"], stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            try:
                self.samples.append((time.monotonic(), *map(float, line.split(","))))
            except ValueError:  # [N/A]
                pass

    def between(self, begin, end):
        """The columns of a row: medians between two moments, without the first and last tenth of a second if there is
        so much."""
        margin = 0.1 if end - begin > 0.5 else 0
        within = [sample[1:] for sample in self.samples if begin + margin <= sample[0] <= end - margin]
        return dict(zip(("watts", "smi_mhz"), map(statistics.median, zip(*within))))


def last_row():
    with open(ROUNDS_CSV, newline="", encoding="utf-8") as file:
        *_, last = csv.DictReader(file)
    return last


def rows_so_far():
    try:
        with open(ROUNDS_CSV, encoding="utf-8") as file:
            return sum(1 for _ in file)
    except FileNotFoundError:
        return 0


class Program:
    """A step's program that waits with its problem in the GPU's memory."""

    def __init__(self, command, options):
        self.command, self.options = command, options
        self.process = subprocess.Popen([command, "--device", "gpu", *options.split(), "--again", "--csv", ROUNDS_CSV],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read_to(self, word):
        for line in self.process.stdout:
            if line.startswith(word):
                return True
        return False

    def is_ready(self):
        """Waits for the answer's check. False: it does not take the problem, or the GPU has no room for it."""
        if self.read_to("check "):
            return True
        if self.process.wait() not in (2, 3):
            raise Failed(f"{self.command} {self.options}: exit status {self.process.returncode}")
        return False

    def measure(self, launches):
        """Times so many launches: its row."""
        self.process.stdin.write(f"{launches}\n")
        self.process.stdin.flush()
        if not self.read_to("speed "):
            raise Failed(f"{self.command} {self.options}: exit status {self.process.wait()}")
        row = last_row()
        if "--inputs" in self.options:  # which the program does not say in its row
            row["options"] = f"{row['options']} inputs={self.options.split('--inputs ')[1].split()[0]}".strip()
        return row

    def end(self):
        self.process.stdin.close()
        self.process.stdout.read()
        if self.process.wait() != 0:
            raise Failed(f"{self.command} {self.options}: after its launches the answer is wrong")


class Peers:
    """peers.py, which measures the problem of the last row."""

    def __init__(self):
        command = [sys.executable, "common/measure/peers.py", "--csv", ROUNDS_CSV]
        clocks = os.path.join(os.environ.get("BUILD", "build"), "sm_clock.so")
        self.process = subprocess.Popen([*command, "--clocks", clocks], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def measure(self, name):
        """Its row, or None: it is not installed or does not take the problem."""
        before = rows_so_far()
        try:
            self.process.stdin.write(f"alone {name} {REST} {WARM_UP} {RECORDED}\n")
            self.process.stdin.flush()
            self.process.stdout.readline()
        except BrokenPipeError:  # no PyTorch
            pass
        return last_row() if rows_so_far() > before else None


class Progress:
    def __init__(self, total):
        self.total, self.done, self.begin = total, 0, time.monotonic()

    def say(self, text):
        self.done += 1
        spent = time.monotonic() - self.begin
        print(f"[{self.done} of {self.total}, {spent:.0f} s, {spent / self.done * (self.total - self.done):.0f} s to "
              f"go] {text}", file=sys.stderr, flush=True)


def clean(number):
    return f"{number:.6g}" if number is not None and number < 1e6 else f"{number:.0f}" if number is not None else ""


def summary(rows):
    """The row of a program from the rows of its rounds."""
    def of(column, how):
        values = [float(row[column]) for row in rows if row.get(column)]
        return how(values) if values else None

    ms, clocks = of("median_ms", statistics.median), of("sm_clocks", statistics.median)
    new = {column: rows[0].get(column, "") for column in COLUMNS}
    new |= {"rounds": len(rows), "median_ms": clean(ms), "min_ms": clean(of("min_ms", min)),
            "tflops": clean(float(rows[0]["operations"]) / ms / 1e9), "sm_clocks": clean(clocks),
            "sm_clocks_least": clean(of("sm_clocks", min)), "sm_clocks_most": clean(of("sm_clocks", max)),
            "mhz": clean(clocks / ms / 1000) if clocks else "", "smi_mhz": clean(of("smi_mhz", statistics.median)),
            "watts": clean(of("watts", statistics.median))}
    return new


def said(row):
    return f"{row['median_ms']} ms, {row['sm_clocks']} clocks, {row['mhz']} MHz, {row['watts']} W, " \
           f"{row['tflops']} TFLOP/s"


def ratios(of, to, control):
    """A program's columns beside the step's rows `to`: the ratio's median, least and most, and the text of a table.
    The control's rows show what the ratio of two equal programs is."""
    columns = {}
    for kind, text, column in (("speed", "in_time", "median_ms"), ("clocks", "in_clocks", "sm_clocks")):
        def cost(row):  # of an operation: by default a step may have another batch than the step before
            return float(row[column]) / float(row["operations"])

        def by_round(rows):
            return [cost(a) / cost(b) for a, b in zip(to, rows)]
        values = by_round(of)
        median, least, most = statistics.median(values), min(values), max(values)
        noise = max(abs(ratio - 1) for ratio in by_round(control))
        level = least <= 1 <= most or abs(median - 1) <= noise
        columns |= {f"{kind}_ratio": "" if level else clean(median), f"{kind}_ratio_least": clean(least),
                    f"{kind}_ratio_most": clean(most),
                    text: "level" if level else f"{median:.4g}× ({least:.4g} to {most:.4g})"}
        if of is control:
            columns[text] = f"level, to {100 * noise:.2g}%"
        if of is to:
            columns[text] = "1×"
    return columns


def alternate(line, rounds, seconds, sampler, progress):
    """Measures the programs of a line: of each its command and its rows."""
    options, commands = line[0], line[1]
    programs = []
    for i in range(0, len(commands), 8):  # each draws inputs on all cores, and takes gigabytes of the host's memory
        begun = [Program(command, options) for command in commands[i:i + 8]]
        programs += [program for program in begun if program.is_ready()]
    launches = {}
    for program in programs:
        ms = float(program.measure(1)["median_ms"])
        launches[program] = max(1, min(100, int(1000 * seconds / ms)))
    rows = {program: [] for program in programs}
    for i in range(rounds):
        for program in random.Random(i).sample(programs, len(programs)):  # so that none always follows the same one
            begin = time.monotonic()
            row = program.measure(launches[program])
            row |= sampler.between(begin, time.monotonic())
            rows[program].append(row)
    for program in programs:
        program.end()
        progress.say(f"{program.command} {options}: {said(summary(rows[program]))}")
    for _ in range(len(commands) - len(programs)):
        progress.say("left out, as it said")
    return [(program.command, rows[program]) for program in programs]


def compare(measured, number):
    """The rows of a line of make variants-NN."""
    own = [rows for command, rows in measured if command.endswith(f"-{number}")]
    for_control = own[1] if len(own) > 1 else None
    result = []
    for _, rows in measured:
        row = summary(rows)
        if rows is for_control:
            row["step"] += ":control"
        if for_control:
            row |= ratios(rows, own[0], for_control)
        result.append(row)
    return result


def print_table(rows):
    table = [["", "ms", "× the step", "clocks", "× the step"]]
    table += [[r["step"], r["median_ms"], r.get("in_time", ""), r["sm_clocks"], r.get("in_clocks", "")] for r in rows]
    widths = [max(len(row[i]) for row in table) for i in range(5)]
    print("batch {batch}, heads {heads}, seqlen {seqlen}, head dim {head_dim} {options}".format(**rows[0]).rstrip())
    for row in table:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip(), flush=True)


def alone(line, rounds, sampler, progress, peers):
    """Measures each program and peer of a line for seconds."""
    options, commands, names = line[0], line[1], line[2]
    programs = [Program(command, options) for command in commands]
    programs = [program for program in programs if program.is_ready()]
    rows = {}
    for i in range(rounds):
        for program in programs:
            ms = float(program.measure(1)["median_ms"]) if i == 0 else float(rows[program.command][0]["median_ms"])
            time.sleep(REST)
            program.measure(max(1, int(1000 * WARM_UP / ms)))
            begin = time.monotonic()
            row = program.measure(max(1, int(1000 * RECORDED / ms)))
            row |= sampler.between(begin, time.monotonic())
            rows.setdefault(program.command, []).append(row)
            progress.say(f"{program.command} {options}: {said(summary([row]))}")
        for name in names:
            if row := peers.measure(name) if programs else None:
                now = time.monotonic()
                row |= sampler.between(now - RECORDED, now)
                rows.setdefault(name, []).append(row)
            progress.say(f"{name} {options}: {said(summary([row])) if row else 'left out'}")
    for program in programs:
        program.end()
    return [summary(of) for of in rows.values()]


def loop(name, rounds, sampler, progress):
    """Measures a bare loop of mma, by ceilings.cu, as the kernels are."""
    rows = []
    for _ in range(rounds):
        time.sleep(REST)
        file = "build/rounds-ceiling.csv"
        subprocess.run([os.path.join(os.environ["BUILD"], "bin/ceilings"), "--only", name, "--seconds",
                        str(WARM_UP + RECORDED), "--csv", file], check=True, stdout=subprocess.DEVNULL)
        end = time.monotonic()
        with open(file, newline="", encoding="utf-8") as read:
            value = {row["name"]: row["value"] for row in csv.DictReader(read)}
        rows.append({"tflops": float(value[name]), "mhz": 1000 * float(value[f"{name}-clock"]),
                     **sampler.between(end - RECORDED, end)})
        progress.say(f"{name}: {rows[-1]}")
    return dict.fromkeys(COLUMNS, "") | {"step": name, "rounds": rounds} | {
        column: clean(statistics.median(row[column] for row in rows)) for column in rows[0]}


def write(path, columns, rows, keep):
    """Writes the rows, and those of the file that are of other problems if these are to be kept."""
    def key(row):
        return tuple(row[column] for column in PROBLEM)

    old = []
    if keep and os.path.exists(path):
        with open(path, newline="", encoding="utf-8") as file:
            old = list(csv.DictReader(file))
    new = {key(row) for row in rows}
    rows = sorted([row for row in old if key(row) not in new] + rows, key=lambda row: row["step"].split("-")[0])
    with open(path + ".new", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(path + ".new", path)  # an interrupt leaves the old file or the new one


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("mode", choices=["cycles", "variants", "sustained"])
    p.add_argument("out", metavar="OUT.csv")
    p.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    p.add_argument("--seconds", type=float, default=0.2, help="of a program in a round; default: %(default)s")
    p.add_argument("--step", default="", help="of variants: NN, the number of the step")
    a = p.parse_args()
    lines = [line.rstrip("\n").split("|") for line in sys.stdin]
    lines = [(options.strip(), programs.split(), (peers or [""])[0].split()) for options, programs, *peers in lines]
    sampler = Sampler()
    count = sum(len(programs) + len(peers) for _, programs, peers in lines)
    progress = Progress(count * (a.rounds if a.mode == "sustained" else 1))
    peers = Peers() if any(line[2] for line in lines) else None
    try:
        if os.path.exists(ROUNDS_CSV):
            os.remove(ROUNDS_CSV)
        rows = []
        for line in lines:
            if a.mode == "variants":
                compared = compare(alternate(line, a.rounds, a.seconds, sampler, progress), a.step)
                print_table(compared)
                rows += compared
                write(a.out, VARIANTS_COLUMNS, rows, keep=True)  # an interrupt keeps what has been measured
                continue
            if a.mode == "cycles":
                rows = [summary(of) for _, of in alternate(line, a.rounds, a.seconds, sampler, progress)]
            elif line[0] == "loop":
                rows = [loop(name, a.rounds, sampler, progress) for name in line[1]]
            else:
                rows = alone(line, a.rounds, sampler, progress, peers)
            write(a.out, COLUMNS, rows, keep=True)
        if a.mode == "variants":
            write(a.out, VARIANTS_COLUMNS, rows, keep=False)
    except Failed as failure:
        sys.exit(f"FAILED: {failure}")
    finally:
        sampler.process.terminate()
    print(f"written: {a.out}")


main()

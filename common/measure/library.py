# SPDX-License-Identifier: MIT
"""make bench-library: times libattention.so with Hopper's kernels ('hopper'), with those of mma.sync alone ('mma'), and
FlashAttention-3 where the wheel fa3-fwd is installed and takes the problem, in bf16. How many operations a problem has
says ./step-57 --describe.

At each problem they take turns, in an order that is drawn anew for each round, and rest before each turn, so that none
begins on a GPU that another one has heated. A row of the file is a kernel at a problem: the median of its rounds' times
and SM clocks. `ratio` is its time over that of 'hopper', round by round: the median, the least and the most.

make bench-library-backward: with --backward the same for attention_backward: 'hopper', 'deterministic', 'mma', and
PyTorch's backward passes, which are 'flash-attention-2' and 'cudnn', and FlashAttention's CuTe kernel, 'flash-attn-4', where
it is installed."""

import argparse
import csv
import ctypes
import functools
import math
import random
import statistics
import subprocess
import sys
import time

import peers
from peers import NotMade, between_events, fa3  # says so where PyTorch is not installed

import torch

sys.path.insert(0, "steps/57-library")
import attention_torch as lib  # noqa: E402  the library's own client

REST, RECORDED = 0.1, 0.05  # seconds before a turn, and of it
MIXED = [512] * 8 + [8192] + [2048] * 6 + [100]  # packed sequences
COLUMNS = ["step", "device", "batch", "heads", "seqlen", "head_dim", "options", "operations", "kv_bytes", "rounds",
           "median_ms", "min_ms", "sm_clocks", "tflops", "ratio", "ratio_least", "ratio_most"]


def tensor(x):
    return lib.Tensor(x.data_ptr(), x.stride(0) if x.dim() == 4 else 0, x.stride(-2), x.stride(-3))


class Call:
    """A call that is made once and launched often, of tensors [batch, rows, heads, d], or packed [rows, heads, d]."""

    def __init__(self, q, k, v, **fields):
        self.tensors, self.fields, self.o = (q, k, v), fields, q.new_empty(*q.shape[:-1], v.shape[-1])
        p = self.problem = lib.Problem(
            struct_bytes=ctypes.sizeof(lib.Problem), type=1, head_dim=q.shape[-1], batch=q.shape[0], heads=q.shape[-2],
            kv_heads=k.shape[-2], seqlen_q=q.shape[-3], seqlen_k=k.shape[-3], head_dim_v=v.shape[-1], Q=tensor(q), K=tensor(k), V=tensor(v),
            O=tensor(self.o))
        for name, value in fields.items():
            setattr(p, name, lib.Array(value.data_ptr(), None) if torch.is_tensor(value) else value)
        self.make_workspace("attention_workspace_bytes", p)

    def make_workspace(self, function, *structs):
        needed = ctypes.c_size_t()
        lib.call(function, *map(ctypes.byref, structs), ctypes.byref(needed))
        self.workspace = torch.zeros(max(1, needed.value), dtype=torch.uint8, device="cuda")
        self.problem.workspace, self.problem.workspace_bytes = self.workspace.data_ptr(), needed.value

    def kernel(self):
        name = ctypes.create_string_buffer(32)
        lib.call("attention_kernel", ctypes.byref(self.problem), name, ctypes.c_size_t(32))
        return name.value.decode()

    def __call__(self):
        lib.call("attention_forward", ctypes.byref(self.problem))


class Backward(Call):
    """The backward pass of a call, whose forward pass has run."""

    def __init__(self, q, k, v, deterministic=0, **fields):
        self.lse = torch.empty(q.shape[:-1].numel(), device="cuda")
        super().__init__(q, k, v, lse=self.lse.data_ptr(), **fields)
        super().__call__()
        self.made = [torch.randn_like(q), *map(torch.empty_like, (q, k, v))]
        self.gradients = lib.Gradients(ctypes.sizeof(lib.Gradients), *map(tensor, self.made), deterministic)
        self.make_workspace("attention_backward_workspace_bytes", self.problem, self.gradients)

    def kernel(self):
        name = ctypes.create_string_buffer(32)
        lib.call("attention_backward_kernel", ctypes.byref(self.problem), ctypes.byref(self.gradients), name,
                 ctypes.c_size_t(32))
        return name.value.decode()

    def __call__(self):
        lib.call("attention_backward", ctypes.byref(self.problem), ctypes.byref(self.gradients))


def random_bf16(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def work_of(batch, heads, seqlen, d, options, lengths):
    """The operations of a problem and the bytes of its keys and values, as the program of the library's step has them."""
    sizes = [f"batch={batch}", f"heads={heads}", f"seqlen={seqlen}", f"head-dim={d}"]
    sizes += [f"lengths={','.join(map(str, lengths))}"] if lengths else []
    words = [word for option in (*sizes, *options) for word in f"--{option}".split("=")]
    said = subprocess.run(["./step-57", "--describe", *words], check=True, text=True, stdout=subprocess.PIPE).stdout
    said = dict(line.partition(" ")[::2] for line in said.splitlines())
    return {"operations": int(said["operations"]), "kv_bytes": int(said["kv-bytes"])}


def problem(batch, heads, seqlen, d, dv=None, seqlen_k=None, kv_heads=None, causal=False, window=0, page_size=0,
            softcap=0, packed=False, backward=False):
    """The columns that say a problem, and the calls: kernel -> what launches it."""
    kv_heads, seqlen_k, dv = kv_heads or heads, seqlen_k or seqlen, dv or d
    options = ["causal"] * causal + ["layout=packed"] * packed + ["type=bf16"] + [f"head-dim-v={dv}"] * (dv != d)
    options += [f"seqlen-k={seqlen_k}"] * (seqlen_k != seqlen) + [f"kv-heads={kv_heads}"] * (kv_heads != heads)
    options += [f"window={window}"] * (window > 0) + [f"page-size={page_size}"] * (page_size > 0)
    options += [f"softcap={softcap}"] * (softcap > 0)
    fields, peer = {"causal": int(causal), "softcap": softcap}, None
    as_peer = {"causal": causal, **({"softcap": softcap} if softcap else {})}
    if packed:
        total, starts = sum(MIXED), int32([sum(MIXED[:i]) for i in range(len(MIXED) + 1)])
        q, k, v = (random_bf16(total, heads, d) for _ in range(3))
        fields.update(batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, cu_seqlens_q=starts, cu_seqlens_k=starts,
                      total_q=total, total_k=total)
        if fa3:
            peer = functools.partial(fa3.flash_attn_varlen_func, q, k, v, starts, starts, seqlen, seqlen, **as_peer)
    else:
        q = random_bf16(batch, seqlen, heads, d)
        k, v = (random_bf16(batch, seqlen_k, kv_heads, columns) for columns in (d, dv))
        if fa3 and not page_size and not window:  # the wheel has no windows
            peer = functools.partial(fa3.flash_attn_func, q, k, v, **as_peer)
    if window:
        fields.update(window=1, window_left=window - 1)
    if page_size:
        pages = batch * seqlen_k // page_size
        table = torch.randperm(pages, device="cuda").int().reshape(batch, -1)
        k, v = (x.reshape(pages, page_size, kv_heads, -1) for x in (k, v))
        fields.update(page_table=table, page_size=page_size, pages=pages, seqlen_k=seqlen_k)
    said = {"batch": batch, "heads": heads, "seqlen": seqlen, "head_dim": d, "options": " ".join(options),
            **work_of(batch, heads, seqlen, d, options, MIXED if packed else None)}
    if backward:
        said["operations"] = said["operations"] * 10 // 4
        return said, backward_calls(said, q, k, v, fields)
    calls = {"hopper": Call(q, k, v, **fields), "mma": Call(q, k, v, mma_only=1, **fields)}
    for name, call in calls.items():
        if (call.kernel() == "hopper") != (name == "hopper"):
            raise NotMade(f"the library gives {said} to '{call.kernel()}'")
    if peer:
        try:
            peer()
            return said, {**calls, "flash-attention-3-bf16": peer}
        except (RuntimeError, TypeError) as error:
            print(f"flash-attention-3-bf16 at {said}: left out: {(str(error).splitlines() or ['?'])[0]}", file=sys.stderr)
    return said, calls


def backward_calls(said, q, k, v, fields):
    """The backward passes: kernel -> what launches it. PyTorch's have tensors of their own."""
    calls = {"hopper": Backward(q, k, v, **fields), "deterministic": Backward(q, k, v, deterministic=1, **fields),
             "mma": Backward(q, k, v, mma_only=1, **fields)}
    for name, call in calls.items():
        if (call.kernel() == "mma") != (name == "mma"):
            raise NotMade(f"the library gives {said} to '{call.kernel()}'")
    # In the layout of the calls above, [batch, rows, heads, d].
    shape = peers.Problem(*(said[name] for name in ("batch", "heads", "seqlen", "head_dim")),
                          f"layout=bnhd {said['options']}", said["operations"], "")
    for name, of in {**peers.PEERS, "flash-attn-4": peers.flash_attn_4}.items():
        try:
            run = peers.backward(of)(shape)
            run()
        except (NotMade, RuntimeError) as error:
            print(f"{name} at {said}: left out: {(str(error).splitlines() or ['?'])[0]}", file=sys.stderr)
        else:
            calls[name] = run
    return calls


BACKWARD = [*(dict(batch=n, heads=16, seqlen=8192, d=d, causal=causal) for n, d in ((16, 64), (8, 128))
              for causal in (False, True)),
            *(dict(batch=16, heads=16, seqlen=1024, d=d, causal=True) for d in (64, 128)),
            dict(batch=16, heads=16, seqlen=4096, d=128, causal=True),
            dict(batch=3, heads=13, seqlen=5000, d=128, causal=True),
            dict(batch=16, heads=16, seqlen=4096, d=96, causal=True),
            dict(batch=4, heads=32, kv_heads=8, seqlen=8192, d=128, causal=True),
            dict(batch=4, heads=32, kv_heads=8, seqlen=4096, seqlen_k=8192, d=128, causal=True),
            dict(batch=4, heads=16, seqlen=16384, d=128, causal=True, window=1024),
            dict(batch=len(MIXED), heads=16, seqlen=max(MIXED), d=128, causal=True, packed=True)]
PROBLEMS = [*(dict(batch=16, heads=16, seqlen=8192, d=d, causal=causal) for d in (64, 128) for causal in (False, True)),
            *(dict(batch=16, heads=16, seqlen=1024, d=d, causal=True) for d in (64, 128)),
            dict(batch=3, heads=13, seqlen=5000, d=128, causal=True),
            *(dict(batch=1, heads=32, kv_heads=8, seqlen=32768, d=128, causal=causal) for causal in (False, True)),
            dict(batch=4, heads=16, seqlen=16384, d=128, causal=True, window=1024),
            dict(batch=len(MIXED), heads=16, seqlen=max(MIXED), d=128, causal=True, packed=True),
            dict(batch=8, heads=32, kv_heads=8, seqlen=512, seqlen_k=32768, d=128, causal=True),
            *(dict(batch=4, heads=32, kv_heads=8, seqlen=4096, seqlen_k=8192, d=128, causal=True, page_size=size)
              for size in (0, 256, 16, 8)),
            *(dict(batch=8, heads=16, seqlen=8192, causal=causal, **columns)
              for columns in (dict(d=96), dict(d=192, dv=128), dict(d=256)) for causal in (False, True)),
            *(dict(batch=8, heads=16, kv_heads=8, seqlen=8192, d=256, causal=True, softcap=cap) for cap in (0, 50)),
            *(dict(batch=8, heads=16, seqlen=8192, d=d, causal=True) for d in (48, 80, 160))]


NAMED = sorted({asked["d"] for asked in PROBLEMS})


def measure(writer, rounds, read, **asked):
    said, runs = problem(**asked)
    times, clocks = ({name: [] for name in runs} for _ in range(2))
    for run in runs.values():
        run()
    alone = {name: statistics.median(between_events(run, 3, 1)[0]) for name, run in runs.items()}
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            torch.cuda.synchronize()
            time.sleep(REST)
            if alone[name] < 1:
                torch.cuda._sleep(20_000_000)  # 10 ms, in which Python queues all launches
            count = min(30, max(1, math.ceil(RECORDED * 1000 / alone[name])))
            of_round, sm_clocks = between_events(runs[name], count, 1, read)
            times[name].append(statistics.median(of_round))
            clocks[name] += [statistics.median(sm_clocks)] if sm_clocks else []
    for name in runs:
        median, ratios = statistics.median(times[name]), [a / b for a, b in zip(times[name], times["hopper"])]
        writer.writerow({
            "step": name, "device": torch.cuda.get_device_name(), **said, "rounds": rounds, "median_ms": f"{median:.6g}",
            "min_ms": f"{min(times[name]):.6g}", "tflops": f"{said['operations'] / median / 1e9:.6g}",
            "sm_clocks": f"{statistics.median(clocks[name]):.6g}" if clocks[name] else "",
            **{f"ratio{end}": f"{of(ratios):.4g}" for end, of in
               (("", statistics.median), ("_least", min), ("_most", max))}})
        print(f"{name} at {said['batch']} x {said['heads']} x {said['seqlen']} x {said['head_dim']} {said['options']}: "
              f"{median:.4g} ms, {said['operations'] / median / 1e9:.4g} TFLOP/s", file=sys.stderr, flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", help="the CSV file that is written")
    p.add_argument("--head-dims", type=lambda text: [int(d) for d in text.split(",")], default=NAMED,
                   help="the problems of these alone; their rows are appended to the file")
    p.add_argument("--clocks", help="the shared library of sm_clock.cu; without it sm_clocks is empty")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--backward", action="store_true", help="the backward passes")
    a = p.parse_args()
    read = ctypes.CDLL(a.clocks).read_sm_clocks if a.clocks else None
    with open(a.out, "w" if a.head_dims == NAMED else "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        for asked in BACKWARD if a.backward else (asked for asked in PROBLEMS if asked["d"] in a.head_dims):
            measure(writer, a.rounds, read, backward=a.backward, **asked)
            file.flush()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

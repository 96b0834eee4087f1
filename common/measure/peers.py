"""Measures what PyTorch carries, as rows of the same CSV as the steps.

FlashAttention-2 and cuDNN are backends of scaled_dot_product_attention. 'pytorch-materialised' is the
textbook's two products with a softmax between them, each a kernel: the fp16 scores cross HBM four
times, written by the first product, read and written by the softmax, read by the second. (The scale
is the first product's alpha. As a division of its own it would make six crossings.)
'matmul-fp16' is an 8192 x 8192 x 8192 product: the ceiling.
"""

import argparse
import csv
import os
import statistics
import sys

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    sys.exit("peers.py: SKIP: PyTorch is not installed here")


def materialised(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # [batch * heads, seqlen, head_dim]
    none = q.new_empty(()).expand(q.shape[0], q.shape[1], k.shape[1])  # beta = 0: is not read
    scores = torch.baddbmm(none, q, k.transpose(1, 2), beta=0, alpha=q.shape[-1] ** -0.5)
    return torch.bmm(torch.softmax(scores, dim=-1), v)


def backend(which):
    def run(q, k, v):
        with sdpa_kernel(which):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return run


PEERS = {
    "flash-attention-2": backend(SDPBackend.FLASH_ATTENTION),
    "cudnn": backend(SDPBackend.CUDNN_ATTENTION),
    "pytorch-materialised": materialised,
}


def milliseconds(run, iters):
    """Each of `iters` launches, between two events, after three that are not timed."""
    for _ in range(3):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(iters)]
    for begin, end in events:  # no waiting in between: Python stays ahead of the GPU
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--csv", required=True, help="the file to append to")
    p.add_argument("--header", required=True, help="the file's columns: a step's --describe has them")
    p.add_argument("--batch", type=int, required=True)
    p.add_argument("--heads", type=int, required=True)
    p.add_argument("--seqlen", type=int, nargs="+", required=True)
    p.add_argument("--head-dim", type=int, required=True)
    p.add_argument("--iters", type=int, default=20, help="default: %(default)s")
    p.add_argument("--matmul", action="store_true", help="measure the matmul ceiling, too")
    a = p.parse_args()
    if not torch.cuda.is_available():
        sys.exit("peers.py: SKIP: no GPU")

    rows = []

    def add(name, shape, operations, run):
        try:
            times = milliseconds(run, a.iters)
        except RuntimeError as error:
            print(f"{name} at {shape}: left out: {str(error).splitlines()[0]}", file=sys.stderr)
            torch.cuda.empty_cache()
            return
        median = statistics.median(times)
        tflops = operations / median / 1e9
        batch, heads, seqlen, head_dim = shape
        rows.append({"step": name, "device": torch.cuda.get_device_name(), "batch": batch,
                     "heads": heads, "seqlen": seqlen, "head_dim": head_dim,
                     "median_ms": f"{median:.6g}", "min_ms": f"{min(times):.6g}",
                     "tflops": f"{tflops:.6g}"})
        print(f"{name} at {shape}: {median:.4g} ms, {tflops:.4g} TFLOP/s", flush=True)

    for seqlen in a.seqlen:
        shape = [a.batch, a.heads, seqlen, a.head_dim]
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(3))
        for name, attention in PEERS.items():
            if name == "pytorch-materialised" and a.batch * a.heads * seqlen**2 > 2**34:
                continue  # the scores and a copy or two of them fill the memory
            add(name, shape, 4 * a.batch * a.heads * seqlen**2 * a.head_dim,
                lambda: attention(q, k, v))
        del q, k, v
    if a.matmul:
        x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
        add("matmul-fp16", [1, 1, 8192, 8192], 2 * 8192**3, lambda: x @ y)

    new = not os.path.exists(a.csv) or os.path.getsize(a.csv) == 0
    with open(a.csv, "a", newline="") as file:
        writer = csv.DictWriter(file, a.header.split(","), restval="", lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


main()

# SPDX-License-Identifier: MIT
"""Measures what PyTorch carries, as rows of the same CSV as the steps.

FlashAttention-2 and cuDNN are backends of scaled_dot_product_attention, and so is 'efficient', which is
measured at the head dims that the others are not made for. What scaled_dot_product_attention cannot say
(windows, packed sequences) goes to the function under its FlashAttention-2. 'flash-attention-3-bf16' is
the wheel fa3-fwd, if it is installed: it has no fp16 kernels, so it has bf16 inputs at every problem
but fp8's, where 'flash-attention-3-fp8' has e4m3, with a scale per head as the steps have.
'pytorch-materialised' is the textbook's two products with a softmax between them, each a kernel: the
fp16 scores cross HBM four times, written by the first product, read and written by the softmax, read by
the second. (The scale is the first product's alpha. As a division of its own it would make six
crossings.) 'matmul-fp16' and 'matmul-bf16' are an 8192 x 8192 x 8192 product: the ceiling.

For each line that it reads it measures the problem of the CSV file's last row, and answers with a line. A
step's row says all of its problem, and the peers' rows say it in the same words. Where the line says
'plain' it measures the peers of the plain problem, where it says 'backward' their backward passes, where it says
'matmul' the products. 'alone NAME REST WARM_UP
RECORDED' is one peer after some seconds of rest, and launches for seconds that are not recorded and that are.

Times and SM clocks are taken as the steps' programs take them: each launch between two events, all queued before the
first is waited for; launches of less than a millisecond behind a kernel that holds the GPU until all are
queued, of a tenth of one ten at a time. A peer begins on a GPU that has been idle, as a step does, whose
program draws its inputs and checks the answer first: after a busy GPU, power holds the clock down sooner.
Each launch reads what the one before has read: what fits in the L2 cache, such as a short KV cache, comes
from there, for steps and peers alike. 'flash-attn-4' is the wheel of this name: its kernels for Hopper.
"""

import argparse
import csv
import ctypes
import statistics
import sys
import time
from dataclasses import dataclass, field

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
except ImportError:
    sys.exit("peers.py: SKIP: PyTorch is not installed here")
try:
    import fa3_fwd_interface as fa3
except (ImportError, OSError, RuntimeError):  # not there, or made for another PyTorch
    fa3 = None
try:
    from flash_attn.cute import flash_attn_func as cute
except (ImportError, OSError, RuntimeError):
    cute = None


class NotMade(RuntimeError):
    """This peer does not take this problem."""


@dataclass
class Problem:
    """As a row of the CSV file has it: the columns of these names."""
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    options: str
    operations: float
    kv_bytes: str
    said: dict = field(init=False)
    made: list = field(init=False, default_factory=list)  # the tensors, where gradients are asked for

    def __post_init__(self):
        self.said = dict(pair.partition("=")[::2] for pair in self.options.split())

    def number(self, name, otherwise):
        return int(self.said.get(name, otherwise))

    @property
    def seqlen_k(self):
        return self.number("seqlen-k", self.seqlen)

    @property
    def kv_heads(self):
        return self.number("kv-heads", self.heads)

    @property
    def dtype(self):
        return torch.bfloat16 if self.said.get("type") == "bf16" else torch.float16

    @property
    def is_fp8(self):
        return self.said.get("type") == "fp8"

    @property
    def lengths(self):
        """Of each sequence, its queries and its keys."""
        if "lengths" not in self.said:
            return [(self.seqlen, self.seqlen_k)] * self.batch
        pairs = [length.split(":") for length in self.said["lengths"].split(",")]
        return [(int(pair[0]), int(pair[-1])) for pair in pairs]

    def tensors(self, dtype):
        """Q, K and V as [batch, heads, seqlen, head_dim], or packed as [tokens, heads, head_dim]."""
        self.made = self.new_tensors(dtype)
        if torch.is_grad_enabled():
            for x in self.made:
                x.requires_grad_()
        return self.made

    def new_tensors(self, dtype):
        layout, d = self.said.get("layout", "bhnd"), self.head_dim
        heads = [self.heads, self.kv_heads, self.kv_heads]

        def new(*shape):
            return torch.randn(shape, device="cuda", dtype=dtype)

        if layout == "packed":
            tokens = [sum(pair[i] for pair in self.lengths) for i in (0, 1, 1)]
            return [new(n, h, d) for n, h in zip(tokens, heads)]
        if layout == "interleaved":
            every = new(self.batch, self.seqlen, sum(heads), d).split(heads, dim=2)
            return [x.transpose(1, 2) for x in every]
        rows = [self.seqlen, self.seqlen_k, self.seqlen_k]
        if layout == "bnhd":
            return [new(self.batch, n, h, d).transpose(1, 2) for n, h in zip(rows, heads)]
        return [new(self.batch, h, n, d) for n, h in zip(rows, heads)]

    def takes_only(self, *names):
        """Raises NotMade if the problem says anything but these options, or is fp8's."""
        if self.is_fp8:
            raise NotMade("not made for fp8")
        if other := set(self.said) - {"type", "layout", *names}:
            raise NotMade(f"not made for {' '.join(sorted(other))}")


def cumulative(lengths):
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return torch.tensor(sums, device="cuda", dtype=torch.int32)


def materialised(p):
    p.takes_only()
    if p.batch * p.heads * p.seqlen**2 > 2**34:
        raise NotMade("the scores and a copy or two of them fill the memory")
    q, k, v = (x.flatten(0, 1) for x in p.tensors(p.dtype))  # [batch * heads, seqlen, head_dim]
    none = q.new_empty(()).expand(q.shape[0], q.shape[1], k.shape[1])  # beta = 0: is not read

    def run():
        scores = torch.baddbmm(none, q, k.transpose(1, 2), beta=0, alpha=q.shape[-1] ** -0.5)
        return torch.bmm(torch.softmax(scores, dim=-1), v)
    return run


def backend(which):
    def of(p):
        p.takes_only("causal", "seqlen-k", "kv-heads")
        # Of one query the mask hides nothing. Else PyTorch's has the first of both at one position.
        causal = "causal" in p.said and p.seqlen > 1
        if causal and p.seqlen != p.seqlen_k or p.said.get("layout") == "packed":
            raise NotMade("scaled_dot_product_attention does not say this")
        q, k, v = p.tensors(p.dtype)

        def run():
            with sdpa_kernel(which):
                return scaled_dot_product_attention(q, k, v, is_causal=causal,
                                                    enable_gqa=p.heads != p.kv_heads)
        return run
    return of


def flash_attention_2(p):
    if "window" not in p.said and "lengths" not in p.said:
        return backend(SDPBackend.FLASH_ATTENTION)(p)
    p.takes_only("causal", "seqlen-k", "kv-heads", "window", "lengths")
    q, k, v = p.tensors(p.dtype)
    of_q, of_k, most_q, most_k = None, None, p.seqlen, p.seqlen_k
    if p.said.get("layout") == "packed":
        of_q, of_k = (cumulative(lengths) for lengths in zip(*p.lengths))
        most_q, most_k = (max(lengths) for lengths in zip(*p.lengths))
    elif "lengths" in p.said:
        raise NotMade("lengths, and not packed")
    else:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [batch, seqlen, heads, head_dim]
    left = p.number("window", 0) - 1  # keys before its own; -1: all
    right = 0 if "causal" in p.said or left >= 0 else -1
    return lambda: torch.ops.aten._flash_attention_forward(
        q, k, v, of_q, of_k, most_q, most_k, 0.0, "causal" in p.said and left < 0, False,
        window_size_left=left if left >= 0 else None, window_size_right=right if left >= 0 else None)


def flash_attention_3(p):
    if not fa3:
        raise NotMade("fa3-fwd is not installed")
    p.takes_only("causal", "seqlen-k", "kv-heads", "window", "lengths")
    q, k, v = p.tensors(torch.bfloat16)
    how = {"causal": "causal" in p.said}
    if window := p.number("window", 0):
        how = {"window_size": (window - 1, 0)}
    if p.said.get("layout") == "packed":
        of_q, of_k = (cumulative(lengths) for lengths in zip(*p.lengths))
        most_q, most_k = (max(lengths) for lengths in zip(*p.lengths))
        return lambda: fa3.flash_attn_varlen_func(q, k, v, of_q, of_k, most_q, most_k, **how)
    if "lengths" in p.said:
        raise NotMade("lengths, and not packed")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [batch, seqlen, heads, head_dim]
    if p.seqlen < 16:  # decoding: it splits the keys among blocks
        return lambda: fa3.flash_attn_with_kvcache(q, k, v, **how)
    return lambda: fa3.flash_attn_func(q, k, v, **how)


def flash_attention_3_fp8(p):
    if not fa3 or not p.is_fp8:
        raise NotMade("fa3-fwd is not installed, or these are 16 bits")

    def quantised(x):  # the largest of each head becomes e4m3's largest
        scale = x.abs().amax(dim=(2, 3)) / 448
        return (x / scale[:, :, None, None]).to(torch.float8_e4m3fn).transpose(1, 2), scale

    (q, of_q), (k, of_k), (v, of_v) = (quantised(x) for x in p.tensors(torch.float32))
    return lambda: fa3.flash_attn_func(q, k, v, causal="causal" in p.said, q_descale=of_q,
                                       k_descale=of_k, v_descale=of_v)


def flash_attn_4(p):
    if not cute:
        raise NotMade("flash-attn-4 is not installed")
    p.takes_only("causal", "seqlen-k", "kv-heads")
    if p.said.get("layout") == "packed":
        raise NotMade("packed")
    q, k, v = (x.transpose(1, 2) for x in p.tensors(p.dtype))  # [batch, seqlen, heads, head_dim]
    return lambda: cute(q, k, v, causal="causal" in p.said)


def efficient(p):
    if p.head_dim in (64, 128):
        raise NotMade("head dims 64 and 128 are the others'")
    return backend(SDPBackend.EFFICIENT_ATTENTION)(p)


def backward(of):
    """The backward pass of a peer, of a forward pass that has been run before."""
    def of_problem(p):
        with torch.enable_grad():
            O = of(p)()
            O = O[0] if isinstance(O, tuple) else O
        dO, made = torch.randn_like(O), p.made  # another peer of the problem has tensors of its own
        return lambda: torch.autograd.grad(O, made, dO, retain_graph=True)
    return of_problem


# Each returns the launch of a problem; raises NotMade if it has none.
PEERS = {
    "flash-attention-2": flash_attention_2,
    "cudnn": backend(SDPBackend.CUDNN_ATTENTION),
}
OF_PLAIN = {"pytorch-materialised": materialised}
OF_MODELS = {"flash-attention-3-bf16": flash_attention_3,
             "flash-attention-3-fp8": flash_attention_3_fp8, "flash-attn-4": flash_attn_4, "efficient": efficient}


def matmul(p):
    x, y = (torch.randn(p.seqlen, p.seqlen, device="cuda", dtype=p.dtype) for _ in range(2))
    return lambda: x @ y


def elapsed_clocks(readings, count, each):
    """The SM clocks of a launch from `readings` [count + EMPTY + 1, SMs], as gpu_device.cu has them."""
    seen = (readings > 0).all(dim=0)
    clocks = (readings[1:, seen] - readings[:-1, seen]).double().mean(dim=1).tolist()
    empty = statistics.median(clocks[count:])
    return [(c - empty) / each for c in clocks[:count]]


EMPTY = 5  # readings with no launch between them


def between_events(run, count, each, read=None):
    """The milliseconds of a launch, `count` times the mean of `each`, and the SM clocks if `read` reads them."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count + EMPTY)]
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    readings = torch.zeros(count + EMPTY + 1, sms, dtype=torch.int64, device="cuda")
    rows = [ctypes.c_void_p(readings.data_ptr() + 8 * sms * i) for i in range(count + EMPTY + 1)]
    read = read or (lambda row, sms, stream: None)
    read(rows[0], sms, None)
    for i, (begin, end) in enumerate(events):  # no waiting in between: Python stays ahead of the GPU
        begin.record()
        for _ in range(each if i < count else 0):
            run()
        end.record()
        read(rows[i + 1], sms, None)
    torch.cuda.synchronize()
    return ([begin.elapsed_time(end) / each for begin, end in events[:count]],
            elapsed_clocks(readings, count, each) if readings.any() else [])


def alone(run, read, rest, warm_up, recorded):
    """As between_events, of launches that follow a rest and a warm-up: all in seconds."""
    first = statistics.median(between_events(run, 3, 1)[0]) / 1000
    time.sleep(rest)
    between_events(run, max(1, int(warm_up / first)), 1, read)
    return between_events(run, max(1, int(recorded / first)), 1, read)


def timed(run, read, iters):
    """As between_events, `iters` times, after three launches that are not timed."""
    for _ in range(3):
        run()
    hold = 80_000_000  # cycles, 40 ms: Python takes up to 100 us for a call
    torch.cuda._sleep(hold // 40)
    first = between_events(run, 1, 1)[0][0]
    if first < 1:
        torch.cuda._sleep(hold)
    each = 10 if first < 0.1 else 1
    return between_events(run, iters, each, read)


def measure(problem, peers, time_of):
    """The peers' rows, by time_of(run, problem); says why one has none."""
    rows = []
    for name, of in peers.items():
        shape = (problem.batch, problem.heads, problem.seqlen, problem.head_dim)
        what = f"{name} at {shape} {problem.options}"
        try:
            run = of(problem)
            times, clocks = time_of(run, problem)
        except NotMade:
            continue
        except (RuntimeError, TypeError, AttributeError, AssertionError, ValueError) as error:
            print(f"{what}: left out: {(str(error).splitlines() or ['?'])[0]}", file=sys.stderr)
            continue
        finally:
            torch.cuda.empty_cache()
        median = statistics.median(times)
        tflops = problem.operations / median / 1e9
        rows.append({"step": name, "device": torch.cuda.get_device_name(), "batch": problem.batch,
                     "heads": problem.heads, "seqlen": problem.seqlen,
                     "head_dim": problem.head_dim, "options": problem.options,
                     "operations": f"{problem.operations:.0f}", "kv_bytes": problem.kv_bytes,
                     "median_ms": f"{median:.6g}", "min_ms": f"{min(times):.6g}",
                     "sm_clocks": f"{statistics.median(clocks):.6g}" if clocks else "",
                     "tflops": f"{tflops:.6g}"})
        print(f"{what}: {median:.4g} ms, {tflops:.4g} TFLOP/s", file=sys.stderr, flush=True)
    return rows


def measure_matmul(time_of):
    """The rows of the matrix product, the ceiling, in both types."""
    return [row for options, name in (("", "matmul-fp16"), ("type=bf16", "matmul-bf16"))
            for row in measure(Problem(1, 1, 8192, 8192, options, 2 * 8192**3, ""), {name: matmul},
                               time_of)]


def last_problem(path):
    """The problem of a file's last row, and the file's columns."""
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        *_, last = reader
    sizes = (int(last[column]) for column in ("batch", "heads", "seqlen", "head_dim"))
    return (Problem(*sizes, last["options"], float(last["operations"]), last["kv_bytes"]),
            reader.fieldnames)


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--csv", required=True, help="the file of the steps' rows, to append to")
    p.add_argument("--clocks", help="the shared library of sm_clock.cu; without it sm_clocks is empty")
    p.add_argument("--iters", type=int, default=20, help="default: %(default)s")
    a = p.parse_args()
    if not torch.cuda.is_available():
        sys.exit("peers.py: SKIP: no GPU")
    torch.set_grad_enabled(False)
    read = ctypes.CDLL(a.clocks).read_sm_clocks if a.clocks else None

    def by_default(run, p):
        time.sleep(1 if p.operations > 1e12 else 0.25)  # short launches meet no limit
        return timed(run, read, a.iters)

    for line in sys.stdin:
        problem, columns = last_problem(a.csv)
        what, *words = line.split() or [""]
        if what == "matmul":
            rows = measure_matmul(by_default)
        elif what == "plain":
            rows = measure(problem, PEERS | OF_PLAIN, by_default)
        elif what == "backward":
            all_peers = PEERS | OF_PLAIN | {"flash-attn-4": flash_attn_4}
            rows = measure(problem, {name: backward(of) for name, of in all_peers.items()}, by_default)
        elif what == "alone":
            name, seconds = words[0], [float(word) for word in words[1:]]
            rows = measure(problem, {name: (PEERS | OF_MODELS)[name]},
                           lambda run, _: alone(run, read, *seconds))
        else:
            rows = measure(problem, OF_MODELS | PEERS, by_default)  # FlashAttention-3 next to the step
        with open(a.csv, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, columns, restval="", lineterminator="\n").writerows(rows)
        print("measured", flush=True)


if __name__ == "__main__":
    main()

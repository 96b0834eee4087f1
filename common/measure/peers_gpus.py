# SPDX-License-Identifier: MIT
"""Measures what others do with one sequence on several GPUs of a machine, as rows of the CSV of the steps of Part VII.

'ring-flash-attention-3' is a ring by hand over the wheel fa3-fwd: K and V go to the next GPU while the kernel works, and
the hops' results are merged in fp32 by their log-sum-exp. It has no mask. 'context-parallel-cudnn' is PyTorch's
context_parallel over its cuDNN backend; with a mask it deals two ends of the sequence to each GPU. Both are timed on one
GPU, too, in the same process and without messages.

A time is the median over the launches, of the slowest GPU. Before each launch all GPUs wait for each other. Each answer is
compared with that of one GPU; a peer that is wrong, or that this PyTorch does not have, is left out and says why.
"""

import argparse
import csv
import os
import statistics
import sys

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn import functional
except ImportError:
    sys.exit("peers_gpus.py: SKIP: PyTorch is not installed here")
try:
    import fa3_fwd_interface as fa3
except (ImportError, OSError, RuntimeError):  # not there, or made for another PyTorch
    fa3 = None

COLUMNS = ["step", "device", "batch", "heads", "seqlen", "head_dim", "options", "operations", "kv_bytes", "median_ms",
           "min_ms", "sm_clocks", "tflops", "rms_error"]
HEADS, HEAD_DIM, LAUNCHES = 16, 128, 10


class NotMade(RuntimeError):
    """This peer does not take this problem."""


def own_rows(x, dim):
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def ring(q, k, v, causal):
    """Returns the launch on all GPUs and that on one, each of which returns rows of O and which rows these are."""
    if not fa3 or causal:
        raise NotMade("fa3-fwd is not installed, or there is a mask")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))  # [batch, seqlen, heads, head_dim]
    own_q, *own = (own_rows(x, 1) for x in (q, k, v))
    buffers = [[torch.empty_like(x) for x in own] for _ in range(2)]

    def attend(q, k, v):
        O, lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)[:2]
        return O, lse.transpose(1, 2).unsqueeze(-1)  # [batch, seqlen, heads, 1]

    def run():
        now, O, lse = own, None, None
        for hop in range(ranks):
            messages = []
            if hop + 1 < ranks:
                messages = dist.batch_isend_irecv(
                    [dist.P2POp(dist.isend, x, (rank + 1) % ranks) for x in now] +
                    [dist.P2POp(dist.irecv, x, (rank - 1) % ranks) for x in buffers[hop % 2]])
            O_hop, lse_hop = attend(own_q, *now)
            if hop == 0:
                O, lse = O_hop.float(), lse_hop
            else:
                both = torch.logaddexp(lse, lse_hop)
                O = O * (lse - both).exp() + O_hop * (lse_hop - both).exp()
                lse = both
            for message in messages:
                message.wait()
            now = buffers[hop % 2]
        return O.to(q.dtype).transpose(1, 2)
    return run, lambda: attend(q, k, v)[0].transpose(1, 2)


def context_parallel(q, k, v, causal):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as of_torch
    try:
        from torch.distributed.tensor.experimental._context_parallel import _attention
    except ImportError:  # before PyTorch 2.10
        from torch.distributed.tensor.experimental import _attention
    _attention._cp_options.enable_load_balance = causal  # without a mask all GPUs have as much to do anyway
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    parts, of_one_gpu = [x.clone() for x in (q, k, v)], functional.scaled_dot_product_attention

    def attend(function, q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return function(q, k, v, is_causal=causal)
    context = of_torch(mesh, buffers=parts, buffer_seq_dims=[2, 2, 2])
    context.__enter__()  # cuts the parts, and replaces PyTorch's function; what is timed runs within
    return (lambda: attend(functional.scaled_dot_product_attention, *parts), lambda: attend(of_one_gpu, q, k, v),
            lambda: context.__exit__(None, None, None))


PEERS = {"ring-flash-attention-3": ring, "context-parallel-cudnn": context_parallel}


def times(run, together):
    """The milliseconds of launches; if it is of all GPUs, of the slowest one."""
    for _ in range(3):
        run()
    meeting = torch.zeros(1, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(LAUNCHES)]
    for begin, end in events:
        if together:
            dist.all_reduce(meeting)
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    ms = torch.tensor([begin.elapsed_time(end) for begin, end in events], device="cuda")
    if together:
        dist.all_reduce(ms, op=dist.ReduceOp.MAX)
    return ms.tolist()


def check(O, whole, causal):
    """Raises NotMade if these rows of O are not those of one GPU."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    expected = own_rows(whole, 2)
    if causal:  # two ends
        chunks = whole.chunk(2 * ranks, 2)
        expected = torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], 2)
    wrong = torch.tensor(float((O.float() - expected.float()).abs().max()), device="cuda")
    dist.all_reduce(wrong, op=dist.ReduceOp.MAX)
    if not wrong < 0.02:
        raise NotMade(f"its answer differs by {float(wrong):.3g} from that of one GPU")


def measure(length, causal, name):
    torch.manual_seed(1)  # the same on all GPUs
    q, k, v = torch.randn(3, 1, HEADS, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    run, alone, *leave = PEERS[name](q, k, v, causal)
    try:
        check(run(), alone(), causal)
        rows = []
        for gpus, ms in ((1, times(alone, False)), (dist.get_world_size(), times(run, True))):
            operations = 4 * HEADS * HEAD_DIM * (length * (length + 1) // 2 if causal else length**2)
            median = statistics.median(ms)
            options = ("causal " if causal else "") + f"type=bf16 gpus={gpus}"
            rows.append([name, torch.cuda.get_device_name(), 1, HEADS, length, HEAD_DIM, options, operations,
                         4 * HEADS * HEAD_DIM * length, median, min(ms), "", operations / median / 1e9, ""])
        return rows
    finally:
        for each in leave:
            each()


def process(rank, arguments):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29571")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=arguments.gpus)
    for name in PEERS:
        for causal in (False, True):
            try:
                rows = measure(arguments.seqlen, causal, name)
            except (NotMade, ImportError, RuntimeError, TypeError, AttributeError, ValueError) as error:
                if rank == 0:
                    print(f"{name} at {arguments.seqlen}{' causal' * causal}: left out: "
                          f"{(str(error).splitlines() or ['?'])[0]}", file=sys.stderr)
                continue
            if rank == 0:
                is_new = not os.path.exists(arguments.csv)
                with open(arguments.csv, "a", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerows([COLUMNS] * is_new + rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", required=True)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--seqlen", type=int, required=True)
    given = parser.parse_args()
    if torch.cuda.device_count() < given.gpus:
        sys.exit(f"peers_gpus.py: SKIP: this machine has fewer than {given.gpus} GPUs")
    torch.multiprocessing.spawn(process, (given,), given.gpus)

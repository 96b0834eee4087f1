# SPDX-License-Identifier: MIT
"""Trains a GPT on a megabyte of text, this book's own, three times with the same seed: with PyTorch's sdpa, with sdpa
again, and with libattention.so. Writes the three curves of the loss.

sdpa's gradients are not the same bits in each run either, so the two runs with it say how far apart two curves are
that differ by nothing but roundings. The last losses of libattention and sdpa must differ by no more than --most.
--emulator trains a small model on the CPU for a few steps, with a library built for the emulator.
"""

import argparse
import glob
import math
import os
import sys
import time

try:
    import torch
    from torch import nn
    from torch.nn import functional
except ImportError as error:
    print(f"SKIP: {error.name} is not installed here")
    sys.exit(0)

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "57-library"))
from attention_torch import trainable_attention  # noqa: E402

TEXT_BYTES = 1_000_000
FILES = ("steps/*/README.md", "steps/*/attention.cu", "common/*/*.h", "common/*/*.cpp", "reference/*.cpp")


def book():
    """The first million bytes of the chapters and sources, as numbers."""
    text = b""
    for name in (name for pattern in FILES for name in sorted(glob.glob(pattern))):
        with open(name, "rb") as file:
            text += file.read()
    return torch.frombuffer(bytearray(text[:TEXT_BYTES]), dtype=torch.uint8)


def sdpa(q, k, v):
    o = functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return o.transpose(1, 2)


def ours(q, k, v):
    return trainable_attention(q, k, v, causal=True)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, attention):
        # [batch, rows, 3, heads, head_dim]: q, k and v are views of one tensor.
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).to(torch.bfloat16)
        x = x + self.out(attention(*qkv.unbind(2)).flatten(-2).to(x.dtype))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    def __init__(self, width, heads, layers, context):
        super().__init__()
        self.characters, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text, attention):
        x = self.characters(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for layer in self.layers:
            x = layer(x, attention)
        return self.logits(self.norm(x))


def train(name, attention, text, options, device):
    """Returns the loss of each step."""
    torch.manual_seed(options.seed)
    model = Gpt(options.width, options.heads, options.layers, options.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))
    draw = torch.Generator().manual_seed(options.seed)
    losses, begin = [], time.time()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * min(1, (step + 1) / 50)
        first = torch.randint(len(text) - options.context - 1, (options.batch, 1), generator=draw)
        rows = text[first + torch.arange(options.context + 1)].long().to(device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(rows[:, :-1], attention)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step % 50 == 0 or step == options.steps - 1:
            print(f"{name:12} step {step:5}  loss {loss.item():.4f}  {time.time() - begin:.1f} s", flush=True)
    return torch.stack(losses).tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 500), ("layers", 6), ("heads", 8), ("width", 512), ("context", 512), ("batch", 16),
                          ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--most", type=float, default=0.02, help="default: %(default)s")
    parser.add_argument("--csv", help="where the curves are written")
    parser.add_argument("--emulator", action="store_true", help="a small model on the CPU")
    options = parser.parse_args()
    if options.emulator:
        options.steps, options.layers, options.heads, options.width = min(options.steps, 5), 1, 2, 64
        options.context, options.batch = 64, 2
    elif not torch.cuda.is_available():
        print("SKIP: no GPU, or none that PyTorch was built for; --emulator runs on the CPU")
        return 0
    device, text = torch.device("cpu" if options.emulator else "cuda"), book()
    runs = {name: train(name, attention, text, options, device)
            for name, attention in (("sdpa", sdpa), ("sdpa-again", sdpa), ("libattention", ours))}
    if options.csv:
        with open(options.csv, "w") as file:
            print("step", *runs, sep=",", file=file)
            for step, losses in enumerate(zip(*runs.values())):
                print(step, *(f"{loss:.6f}" for loss in losses), sep=",", file=file)
    last = {name: sum(losses[-50:]) / len(losses[-50:]) for name, losses in runs.items()}
    apart = {name: abs(last[name] - last["sdpa"]) for name in ("sdpa-again", "libattention")}
    passed = apart["libattention"] <= options.most and all(map(math.isfinite, last.values()))
    print(f"mean loss of the last {min(50, options.steps)} steps: "
          + ", ".join(f"{name} {loss:.4f}" for name, loss in last.items()))
    print(f"apart from sdpa: sdpa again by {apart['sdpa-again']:.4f}, libattention by {apart['libattention']:.4f} "
          f"(at most {options.most}): {'passed' if passed else 'WRONG'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

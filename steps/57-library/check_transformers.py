# SPDX-License-Identifier: MIT
"""Generates with a Llama of random weights, in HuggingFace transformers, with libattention.so and with PyTorch's sdpa.

The tokens must be the same, but for ties: where they differ first, the fp32 logits of the two tokens differ by no
more than twice what sdpa's logits are off by. The prompts have unlike lengths, padded on the left. On a GPU prefill
and decoding are timed: medians of alternating rounds. --emulator runs a small model on the CPU, with a library built
for the emulator, and times nothing.
"""

import argparse
import os
import statistics
import sys
import time

try:
    import torch
    import transformers
except ImportError as error:
    print(f"SKIP: {error.name} is not installed here")
    sys.exit(0)

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from attention_torch import register  # noqa: E402

NAMES = ("libattention", "sdpa")
ROUNDS = 7


def make_model(emulator, device):
    hidden, layers, heads, kv_heads = (64, 2, 4, 2) if emulator else (2048, 16, 32, 8)
    config = transformers.LlamaConfig(
        vocab_size=256 if emulator else 32000, hidden_size=hidden, intermediate_size=2 * hidden,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=16384, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    return transformers.LlamaForCausalLM(config).to(device, torch.bfloat16).eval()


def prompts(model, lengths):
    """Tokens and their mask, [sequences, longest], padded on the left."""
    tokens = torch.randint(2, model.config.vocab_size, (len(lengths), max(lengths)), device=model.device)
    padding = max(lengths) - torch.tensor(lengths, device=model.device)[:, None]
    mask = torch.arange(max(lengths), device=model.device) >= padding
    return tokens.where(mask, 0), mask.long()


def generate(model, name, tokens, mask, count):
    model.set_attn_implementation(name)
    with torch.no_grad():
        return model.generate(tokens, attention_mask=mask, max_new_tokens=count, do_sample=False)[:, tokens.shape[1]:]


def last_logits(model, name, tokens, mask):
    model.set_attn_implementation(name)
    with torch.no_grad():
        return model(tokens, attention_mask=mask).logits[:, -1].float()


def is_tie(model, exact, tokens, mask, ours, theirs):
    """Whether two tokens that differ after this text are as likely as bf16 can tell."""
    reference = last_logits(exact, "eager", tokens, mask)[0]
    error = (last_logits(model, "sdpa", tokens, mask)[0] - reference).abs().max()
    gap = (reference[ours] - reference[theirs]).abs()
    print(f"  logits differ by {gap:.2e} in fp32, and sdpa's are off by up to {error:.2e}")
    return gap <= 2 * error


def check_tokens(model, lengths, count):
    tokens, mask = prompts(model, lengths)
    ours, theirs = (generate(model, name, tokens, mask, count) for name in NAMES)
    exact, right = None, True
    for b, length in enumerate(lengths):
        differ = (ours[b] != theirs[b]).nonzero()
        same = differ[0].item() if len(differ) else count
        print(f"prompt of {length}: {same} of {count} tokens before the first that differs")
        if same == count:
            continue
        exact = exact or type(model)(model.config).to(model.device).eval()
        exact.load_state_dict(model.state_dict())
        text = torch.cat([tokens[b, -length:], ours[b, :same]])[None]
        right &= bool(is_tie(model, exact, text, torch.ones_like(text), ours[b, same], theirs[b, same]))
    return right


def seconds(function):
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def print_times(model):
    """Of a prompt, and of a token: two numbers of tokens, whose difference leaves the prompt out."""
    tokens, mask = prompts(model, [4096] * 4)
    work = {"prefill of 4 x 4096, ms": (lambda name: seconds(lambda: generate(model, name, tokens, mask, 1)), 1e3),
            "a token of 4 sequences behind it, ms": (lambda name: (
                seconds(lambda: generate(model, name, tokens, mask, 33))
                - seconds(lambda: generate(model, name, tokens, mask, 1))) / 32, 1e3)}
    for what, (measure, unit) in work.items():
        for name in NAMES:
            measure(name)  # once before it counts
        rounds = [[measure(name) for name in NAMES] for _ in range(ROUNDS)]
        ratios = sorted(ours / theirs for ours, theirs in rounds)
        ours, theirs = (statistics.median(times) * unit for times in zip(*rounds))
        print(f"{what}: {ours:.3f}, sdpa {theirs:.3f}; ratio {statistics.median(ratios):.3f}, "
              f"{ratios[0]:.3f} to {ratios[-1]:.3f} in {ROUNDS} rounds")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulator", action="store_true", help="on the CPU")
    options = parser.parse_args()
    if not options.emulator and not torch.cuda.is_available():
        print("SKIP: no GPU, or none that PyTorch was built for; --emulator runs on the CPU")
        return 0
    torch.manual_seed(1)
    register()
    model = make_model(options.emulator, "cpu" if options.emulator else "cuda")
    right = check_tokens(model, [5, 19, 33] if options.emulator else [37, 700, 1500, 64], 6 if options.emulator else 64)
    if not options.emulator:
        print_times(model)
    print("passed" if right else "FAILED")
    return 0 if right else 1


sys.exit(main())

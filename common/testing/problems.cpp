// SPDX-License-Identifier: MIT
#include "common/testing/problems.h"

#include <algorithm>

#include "reference/random.h"

std::string draw_problem(const Description &program, int longest, int most_heads,
                         std::uint64_t &state) {
  const auto one_to = [&](int n) { return 1 + static_cast<int>(next_random(state) % n); };
  const auto coin = [&](const std::string &option) {
    const bool heads = next_random(state) % 2 == 0;
    return heads && program.takes_option(option);
  };
  const auto option = [](const std::string &name, int value) {
    return " --" + name + " " + std::to_string(value);
  };
  const int batch = one_to(3), kv_heads = one_to(3);
  const int group = coin("--kv-heads") ? one_to(4) : 1;
  longest = std::max(1, longest * most_heads / std::max(most_heads, batch * kv_heads * group));
  const bool rope = coin("--rope"), other_keys = coin("--seqlen-k");
  const bool strided = coin("--layout");
  const bool interleaved =
      strided && !other_keys && !program.takes_option("--latent") && one_to(2) == 1;
  const int seqlen = one_to(4) == 1 ? 1 : one_to(longest);
  // A query that is rotated is not before the first key.
  const int seqlen_k = !other_keys ? seqlen : rope ? seqlen + one_to(longest) : one_to(longest);
  const int head_dims = static_cast<int>(program.head_dims.size());
  std::string text = "--batch " + std::to_string(batch) + option("heads", kv_heads * group) +
                     option("seqlen", seqlen) + " --head-dim " +
                     program.head_dims[one_to(head_dims) - 1] + option("seed", one_to(1000000));
  if (group > 1) text += option("kv-heads", kv_heads);
  if (other_keys) text += option("seqlen-k", seqlen_k);
  if (coin("--causal")) text += " --causal";
  if (coin("--window")) {
    text += option("window", one_to(longest));
    if (coin("--sinks")) text += option("sinks", one_to(10));
  }
  if (!contains(text, "--window") && coin("--window-size")) {
    const auto side = [&] { return std::to_string(one_to(3) == 1 ? -1 : one_to(longest) - 1); };
    text += " --window-size " + side();
    text += ":" + side();
  }
  if (coin("--scale")) text += one_to(2) == 1 ? " --scale 0.3" : " --scale 0.01";
  if (coin("--softcap")) text += option("softcap", one_to(30));
  if (coin("--alibi")) text += " --alibi";
  if (coin("--sink-logits")) text += " --sink-logits";
  if (coin("--type")) text += " --type " + program.types.back();
  const int head_dim = std::stoi(text.substr(text.find("--head-dim ") + 11));
  if (rope) text += one_to(2) == 1 ? " --rope halves" : " --rope neighbours";
  if (rope && coin("--rope-dim")) text += option("rope-dim", 16 * one_to(head_dim / 16));
  const bool lengths = coin("--lengths"), packed = strided && !interleaved && lengths;
  if (strided)
    text += interleaved ? " --layout interleaved" : packed ? " --layout packed" : " --layout bnhd";
  const bool paged = !interleaved && coin("--page-size");
  if (paged) text += option("page-size", one_to(40 / program.page_rows) * program.page_rows);
  int fewest = seqlen_k;
  for (int i = 0; lengths && i < batch; i++) {
    const int k = one_to(seqlen_k + 1) - 1;
    const int q = one_to((rope ? std::min(seqlen, k) : seqlen) + 1) - 1;
    text += (i ? "," : " --lengths ") + std::to_string(q) + ":" + std::to_string(k);
    fewest = std::min(fewest, k);
  }
  if (!interleaved && (paged || !packed) && fewest > 0 && coin("--append"))
    text += option("append", one_to(fewest));
  if (coin("--gpus")) text += option("gpus", one_to(6));
  if (coin("--link")) text += " --link copies";
  if (coin("--leave-sms")) text += option("leave-sms", one_to(20) - 1);
  // One of Hopper's kernels, for 192 columns, has V in 128 of them, too.
  const bool hopper = program.needs == "sm_90a";
  if (!interleaved && !hopper && coin("--head-dim-v"))
    text += " --head-dim-v " + program.head_dims[one_to(head_dims) - 1];
  if (program.takes_option("--head-dim-v") && !interleaved && hopper && 128 < head_dim &&
      head_dim <= 192)
    text += option("head-dim-v", 80 + 24 * one_to(2));
  if (coin("--splits")) text += option("splits", one_to(8));
  return text;
}

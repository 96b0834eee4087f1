// Wrong kernels are found out. Each bug is planted in a copy of a step, which is compiled for the
// emulator and run: the check of the answer or the emulator must report it. The same runs of a copy
// without a bug must pass.
//
// STEPS_ONLY    how the names of the steps begin that are copied: 36, or 3 for those of Part IV
#include <doctest/doctest.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <map>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "common/testing/copies.h"

namespace {

const std::string kFolder = "build/planted/";

// What the check and the emulator say.
const char *const kWrong = ": WRONG";
const char *const kNotWritten = "elements are not finite";  // or computed from what was not written
const char *const kNobodyWrote = "memory that nobody wrote";
const char *const kRace = "races in shared memory";
const char *const kGlobalRace = "races in global memory";
const char *const kOutside = "row or column out of bounds";
const char *const kNoMemory = "outside of every allocation";
const char *const kStillWriting = "may still be writing: no cp_async_wait for its group yet";
const char *const kStillReading = "may still be reading: no cp_async_wait for its group yet";
const char *const kMisaligned = "an address that is not a multiple of";
const char *const kLaunchBefore = "of what the launch before may still be using";
const char *const kForEver = "threads wait for ever in";
const char *const kOtherInstruction = "lanes of one warp wait in different instructions";
// Of Hopper's instructions. '|' stands between reports of which the order of threads decides.
const char *const kNotLanded = "may still be writing: no mbarrier_wait for its phase yet";
const char *const kWrongParity =
    "may still be writing: no mbarrier_wait for its phase yet|threads wait for ever in "
    "mbarrier_wait";
const char *const kOverwritten =
    "may still be reading: no wgmma_wait for its group yet|races in shared memory with the wgmma";
const char *const kOverwrittenOrForEver =
    "may still be reading: no wgmma_wait for its group yet|races in shared memory with the wgmma|"
    "threads wait for ever in";
const char *const kUnderWay = "names accumulators that are still under way after a wait";
const char *const kTouched = "accumulators touched that the wgmma at";
const char *const kRegistersOfA = "the registers of A that the wgmma at";
const char *const kBeyondTheTile = "elements, and the tile has";
const char *const kNotAnAtom = "the first row is not a multiple of 8, the rows of a swizzle atom";
const char *const kWholeTile = ", the map's box";
const char *const kBeforeTheTensor = " of a tensor that has ";
const char *const kNoMbarrier = "of an mbarrier that nobody has initialised";
const char *const kNotTheWarpgroups = "operands are not those of the warpgroup's first lane";
const char *const kRegisters = "the block's warpgroups have";
const char *const kNotSoMany = "a multiple of 8 from 24 to 256 is allowed";
const char *const kBarrierId = "barriers 1 to 15 are allowed";
const char *const kOtherCount = "the barrier is for";
const char *const kOtherType = "wgmma of fp16 with a tile of bf16";
const char *const kInvisible = "no fence_proxy_async between them";
const char *const kStoredFrom =
    "may still be reading: no tma_store_wait_read for its group yet|races in shared memory with";
// In step 37, where a block copies before the other has read.
const char *const kTooEarly =
    "may still be writing: no mbarrier_wait for its phase yet|one arrival more than|"
    "may still be reading: no wgmma_wait for its group yet|races in shared memory with the wgmma";
// In step 36 on the emulator, blocks that take several tiles of Q.
const char *const kPersistent = "--heads 9 --seqlen 256";
const char *const kPersistentShort = "--heads 20 --seqlen 128";  // with one tile of keys

struct Plant {
  const char *step, *name;
  const char *find, *replace;     // `find` occurs once in the step
  const char *report;             // or several, one of which is given: '|' stands between them
  const char *inputs = "normal";  // or several: each must give the report
  const char *options = "";
};

const Plant kPlants[] = {
    // Step 00
    {"00", "K of head 0", "gK{K + head_offset,", "gK{K,", kWrong, "normal", "--heads 2"},
    {"00", "scale missing", "s[c] * scale", "s[c]", kWrong},
    {"00", "S of all heads in one", "std::int64_t{blockIdx.z} * seqlen * seqlen",
     "std::int64_t{blockIdx.z} * seqlen", kGlobalRace, "normal", "--heads 2"},
    {"00", "a Q tile without scores", "dim3(keys, rows, heads)", "dim3(keys, rows - 1, heads)",
     kNotWritten},
    {"00", "maximum of one warp",
     "m = warp_max(lane < softmax_num_warps ? float(smem.of_warp(0, lane)) : -INFINITY);", "",
     kWrong, "normal rising"},
    {"00", "sum of one warp",
     "l = warp_sum(lane < softmax_num_warps ? float(smem.of_warp(1, lane)) : 0.0f);", "", kWrong},
    {"00", "no maximum", "__expf(row(0, i) - m) / l", "__expf(row(0, i)) / l", kWrong},

    // Step 01
    {"01", "O not rescaled", "l_old * alpha * gO_sum(row, col)", "l_old * gO_sum(row, col)", kWrong,
     "rising"},
    {"01", "l not rescaled", "alpha * l_old + beta * l_tile", "l_old + beta * l_tile", kWrong,
     "rising"},
    {"01", "the new tile not rescaled", "beta * o[c]", "o[c]", kWrong, "normal one-hot"},
    {"01", "not divided by l", "+ beta * o[c]) / l_new", "+ beta * o[c])", kWrong},
    {"01", "O_sum not initialised",
     "for (int c = 0; c < d / 32; c++) gO_sum(row, lane + 32 * c) = 0.0f;", "", kNotWritten},
    {"01", "last tile of Q skipped", "for (int i = 0; i < seqlen; i += Br) {",
     "for (int i = 0; i < seqlen - Br; i += Br) {", kNotWritten},
    {"01", "O never written", "if (j + Bc < seqlen)", "if (j < seqlen)", kNotWritten},
    {"01", "l and m overwritten too soon",
     "__syncwarp();  // all lanes have read l, m and P; they are overwritten now\n        if (lane "
     "== 0) {\n          gl(row, 0) = l_new;  // line 13\n          gm(row, 0) = m_new;\n        }",
     "if (lane == 0) {\n gl(row, 0) = l_new;\n gm(row, 0) = m_new;\n }\n __syncwarp();",
     kGlobalRace},

    // Step 02
    {"02", "O not rescaled", "for (int c = 0; c < d / 32; c++) o[r][c] *= alpha;", "", kWrong,
     "rising"},
    {"02", "l not rescaled", "l[r] * alpha + warp_sum", "l[r] + warp_sum", kWrong, "rising"},
    {"02", "maximum begins at 0", "m[r] = -INFINITY", "m[r] = 0", kNotWritten, "rising"},
    {"02", "maximum begins at -10000", "m[r] = -INFINITY", "m[r] = -10000", kNotWritten, "rising"},
    {"02", "maximum begins at -100", "m[r] = -INFINITY", "m[r] = -100", kNotWritten, "rising"},
    {"02", "O begins with anything", "o[rows_per_warp][d / 32] = {}", "o[rows_per_warp][d / 32]",
     kNotWritten},
    {"02", "l begins with anything", "l[rows_per_warp] = {}", "l[rows_per_warp]", kNotWritten},
    {"02", "maximum forgotten", "m[r] = m_new;", "", kWrong},
    {"02", "not divided by l", "o[r][c] / l[r]", "o[r][c]", kWrong},
    {"02", "no scale", "1 / sqrtf(d)", "1", kWrong},
    {"02", "exp of unscaled scores", "fmaxf(m_new, s[c] *= scale)", "fmaxf(m_new, s[c] * scale)",
     kWrong},
    {"02", "last tile of K and V skipped", "j < seqlen;", "j < seqlen - Bc;", kWrong,
     "normal rising one-hot equal-keys"},
    {"02", "last tile of Q skipped", "grid(p.seqlen_q / Br,", "grid(p.seqlen_q / Br - 1,",
     kNotWritten},
    {"02", "K of the first tile", "gK(j + i / d,", "gK(i / d,", kWrong, "normal one-hot"},
    {"02", "V of head 0", "gV{V + head_offset,", "gV{V,", kWrong, "normal", "--heads 2"},
    {"02", "heads too close", "* seqlen * d;", "* seqlen * d / 2;", kGlobalRace, "normal",
     "--heads 2"},
    {"02", "heads too far apart", "* seqlen * d;", "* seqlen * (d + 8);", kNoMemory, "normal",
     "--heads 2"},
    {"02", "maximum of half a warp", "mask = 16; mask > 0; mask /= 2) x = fmaxf",
     "mask = 8; mask > 0; mask /= 2) x = fmaxf", kWrong},
    {"02", "sum of half a warp",
     "mask = 16; mask > 0; mask /= 2) x +=", "mask = 8; mask > 0; mask /= 2) x +=", kWrong},
    {"02", "a column beyond the tile", "smem.V(key, lane + 32 * c)",
     "smem.V(key, lane + 1 + 32 * c)", kOutside},
    {"02", "a row of Q beyond the matrix", "gQ(first_row + i / d,", "gQ(first_row + 1 + i / d,",
     kOutside},
    {"02", "O in the wrong row", "rows_per_warp + r, lane", "rows_per_warp + (r ^ 1), lane",
     kWrong},
    {"02", "O accumulated in fp16", "o[r][c] += p * __half2float(smem.V(key, lane + 32 * c));",
     "o[r][c] = __half2float(__float2half(o[r][c] + p * __half2float(smem.V(key, lane + 32 * "
     "c))));",
     kWrong},
    // Its barriers are one behind those of the others from here on.
    {"02", "a barrier for one warp", "__syncthreads();  // Q, K and V are there for all warps",
     "__syncthreads(); if (warp == 0) __syncthreads();", kRace},
    {"02", "a last barrier that lane 0 does not reach", "#pragma unroll\n  for (int r",
     "if (lane == 0) __syncwarp(); else __syncthreads();\n  for (int r", kForEver},
    {"02", "a barrier for half a warp", "__syncwarp();  // all lanes have read P",
     "if (lane < 16) __syncwarp();  //", kOtherInstruction},

    // Step 03
    {"03", "O not rescaled", "for (int c = 0; c < d / 32; c++) o[r][c] *= alpha;", "", kWrong,
     "rising"},
    {"03", "l not rescaled", "l[r] * alpha + warp_sum", "l[r] + warp_sum", kWrong, "rising"},
    {"03", "written without the swizzle",
     "smem.K(i / d, i % d) =", "smem.K(i / d, i % d ^ i / d % 32 * 2) =", kWrong, "normal one-hot"},
    {"03", "read without the swizzle", "s[c] += q * __half2float(smem.K(lane + 32 * c, col));",
     "s[c] += q * __half2float(smem.K(lane + 32 * c, col ^ (lane * 2)));", kWrong,
     "normal one-hot"},
    {"03", "a swizzle wider than the row", "row % 32 * 2", "row % 64 * 2", kOutside},

    // Step 04
    {"04", "O not rescaled", "for (int c = 0; c < d / 16; c++) o[r][c] *= alpha;", "", kWrong,
     "rising"},
    {"04", "l not rescaled", "l[r] *= alpha;", "", kWrong, "rising"},
    {"04", "columns of P in another order", "smem.KV(key + 16 * e,", "smem.KV(4 * key + e,", kWrong,
     "normal one-hot"},
    {"04", "a misaligned load", "load<4>(matrix(first_row + row + i, col))",
     "load<4>(matrix(first_row + row + i, col + 1))", kMisaligned},
    {"04", "a misaligned row of P", "Tile<float, Br, Bc + 16> P", "Tile<float, Br, Bc + 18> P",
     kMisaligned},
    {"04", "maximum of 8 lanes", "for (int mask = 16; mask > 1; mask /= 2)\n        m_new",
     "for (int mask = 16; mask > 2; mask /= 2)\n        m_new", kWrong},
    {"04", "sum of 8 lanes", "for (int mask = 16; mask > 1; mask /= 2) l[r]",
     "for (int mask = 8; mask > 1; mask /= 2) l[r]", kWrong},
    {"04", "V not loaded", "load_tile<Bc, d>(smem.KV, gV, j);", "", kWrong},
    {"04", "V of the first tile", "load_tile<Bc, d>(smem.KV, gV, j);",
     "load_tile<Bc, d>(smem.KV, gV, 0);", kWrong},

    // Step 05
    {"05", "O not rescaled", "x[e] *= alpha;", ";", kWrong, "rising"},
    {"05", "l not rescaled", "l[mt][r] *= alpha;", "", kWrong, "rising"},
    {"05", "P packed in the wrong order",
     "cvt_rn_f16x2(left[0], left[1]), cvt_rn_f16x2(left[2], left[3])",
     "cvt_rn_f16x2(left[2], left[3]), cvt_rn_f16x2(left[0], left[1])", kWrong},
    {"05", "pairs of P turned round", "cvt_rn_f16x2(right[0], right[1])",
     "cvt_rn_f16x2(right[1], right[0])", kWrong},
    {"05", "left and right of P exchanged", "&left = s[mt][key / 8], &right = s[mt][key / 8 + 1]",
     "&left = s[mt][key / 8 + 1], &right = s[mt][key / 8]", kWrong},
    {"05", "the wrong V half", "smem.V(key + lane_row, col)", "smem.V(key + (lane_row ^ 8), col)",
     kWrong},
    {"05", "fragments of K not sorted out", "{k[0], k[2]}", "{k[0], k[1]}", kWrong},
    {"05", "V without its transposition",
     "mma(o[mt][col / 8], p, ldmatrix_x2_trans(smem.V(key + lane_row, col)));",
     "{ const auto v = ldmatrix_x4(smem.V(key + lane_row, col / 16 * 16 + lane_col)); "
     "mma(o[mt][col / 8], p, {v[0], v[1]}); }",
     kWrong},
    {"05", "last tile of K and V skipped", "j < seqlen;", "j < seqlen - Bc;", kWrong,
     "normal rising one-hot equal-keys"},
    {"05", "rows of another warp", "warp_row = warp * m_tiles * 16", "warp_row = warp * 16",
     kWrong},
    {"05", "copies not waited for", "cp_async_wait<0>();", "", kStillWriting},
    {"05", "copies not committed", "cp_async_commit();", "", kStillWriting},
    {"05", "a misaligned copy", "part(i, 0)", "part(i, 1)", kMisaligned},
    {"05", "a misaligned row of Q", "Q + head_offset,", "Q + head_offset + 4,", kMisaligned},
    {"05", "quads of two lanes", "for (int mask = 1; mask < 4; mask *= 2)\n          m_new",
     "for (int mask = 1; mask < 2; mask *= 2)\n          m_new", kWrong},
    {"05", "O begins with anything", "o[m_tiles][d / 8] = {}", "o[m_tiles][d / 8]", kNotWritten},
    {"05", "l begins with anything", "l[m_tiles][2] = {}", "l[m_tiles][2]", kNotWritten},

    // Step 06
    {"06", "the swizzle on the write only", "smem.K(key + lane_row, col + lane_col)",
     "smem.K(key + lane_row, (col + lane_col) ^ lane_row % 8 * 8)", kWrong},
    {"06", "the swizzle on the read only", "tile(row + i, col)", "tile(row + i, col ^ row % 8 * 8)",
     kWrong},

    // Step 08
    {"08", "K not waited for", "cp_async_wait<0>();\n    __syncthreads();  // Q and K",
     "__syncthreads();  // Q and K", kStillWriting},
    {"08", "V not waited for", "cp_async_wait<0>();\n    __syncthreads();  // V is",
     "__syncthreads();  // V is", kStillWriting},
    {"08", "V waited for one group short", "cp_async_wait<0>();\n    __syncthreads();  // V is",
     "cp_async_wait<1>();\n    __syncthreads();  // V is", kStillWriting},
    {"08", "the wait after the barrier",
     "cp_async_wait<0>();\n    __syncthreads();  // V is there for all warps, and K has been read "
     "by "
     "all\n",
     "__syncthreads();\n    cp_async_wait<0>();\n", kRace},
    {"08", "a tile of K beyond the last", "if (j + Bc < seqlen) ", "", kOutside, "normal",
     "--heads 2"},
    {"08", "the next K too early", "// S = Q K^T.",
     "if (j + Bc < seqlen) load_tile<Bc, d>(smem.K, gK, j + Bc);\n    // ", kStillWriting},

    // Step 09
    {"09", "the wrong V half", "{v[2], v[3]}", "{v[0], v[1]}", kWrong},
    {"09", "fragments of V as of K", "{v[0], v[1]}", "{v[0], v[2]}", kWrong},

    // Step 10
    {"10", "powers of e", "1.44269504f / sqrtf(d)", "1 / sqrtf(d)", kWrong},
    {"10", "the maximum in other units", "m_new * scale_log2", "m_new", kWrong, "normal rising"},
    {"10", "O not rescaled", "x[e] *= alpha;", ";", kWrong, "rising"},

    // Step 11
    {"11", "one m tile twice", "warp_row + mt * 16 + lane_row", "warp_row + lane_row", kWrong},

    // Step 12
    {"12", "the fragment before its time", "{k[i % 2][0], k[i % 2][2]}",
     "{k[next % 2][0], k[next % 2][2]}", kWrong},
    {"12", "the fragment of V before", "v[next % 2] =", "v[0] =", kWrong},

    // Step 13
    {"13", "the old map", "lane_key = lane % 8 + lane / 16 * 8, lane_key_col = lane / 8 % 2 * 8",
     "lane_key = lane % 16, lane_key_col = lane / 16 * 8", kWrong},

    // Step 14
    {"14", "O not rescaled", "x[e] *= alpha;", ";", kWrong, "rising"},
    {"14", "l not rescaled", "l[mt][r] *= alpha;", "", kWrong, "rising"},
    {"14", "a threshold beyond fp16", "rescale_threshold = 8", "rescale_threshold = 100",
     kNotWritten, "rising"},
    {"14", "each lane for itself", "__any_sync(kAllLanes, must_rescale)", "must_rescale", kForEver,
     "one-hot"},
    {"14", "the new maximum not kept", "m[mt][r] = m_new;", "", kWrong, "rising"},

    // Step 15
    {"15", "V not waited for", "cp_async_wait<0>();\n    __syncthreads();  // V is",
     "__syncthreads();  // V is", kStillWriting},
    {"15", "last tile of K and V skipped", "j < seqlen;", "j < seqlen - Bc;", kWrong,
     "normal rising one-hot equal-keys"},
    {"15", "O begins with anything", "o[m_tiles][d / 8] = {}", "o[m_tiles][d / 8]", kNotWritten},
    {"15", "l begins with anything", "l[m_tiles][2] = {}", "l[m_tiles][2]", kNotWritten},

    // Step 16
    {"16", "V not waited for", "cp_async_wait<0>();\n    __syncthreads();  // V is",
     "__syncthreads();  // V is", kStillWriting},
    {"16", "V's copies not committed", "gV, j);\n        cp_async_commit();", "gV, j);",
     kStillWriting},
    {"16", "V copied before the barrier, too", "cp_async_wait<0>();\n    __syncthreads();  // Q",
     "load_tile<Bc, d>(smem.V, gV, j);\n    cp_async_commit();\n    cp_async_wait<0>();\n    "
     "__syncthreads();  // Q",
     kRace},
    {"16", "V copied in the first tile alone", "if (col == 0) {", "if (j + col == 0) {", kWrong},
    {"16", "V copied where head dim 64 has no columns", "if (col == 0) {", "if (col == 64) {",
     kNobodyWrote, "normal", "--head-dim 64"},
    {"16", "last tile of K and V skipped", "j < seqlen;", "j < seqlen - Bc;", kWrong,
     "normal rising one-hot equal-keys"},

    // Step 20
    {"20", "the diagonal hidden", "lane % 4 * 2 + e % 2 >", "lane % 4 * 2 + e % 2 >=", kNotWritten,
     "normal", "--causal"},
    {"20", "a key after the diagonal seen", "lane % 4 * 2 + e % 2 >", "lane % 4 * 2 + e % 2 - 1 >",
     kWrong, "normal", "--causal"},
    {"20", "a mask on the first tile of two", "if (causal && j + Bc - 1 > first_row + warp_row) {",
     "if (causal && j == first_row) {", kWrong, "normal", "--causal"},
    {"20", "a mask by the last row of the warp", "j + Bc - 1 > first_row + warp_row)",
     "j + Bc - 1 > first_row + warp_row + m_tiles * 16 - 1)", kWrong, "normal", "--causal"},
    {"20", "the last tile at the diagonal skipped", "causal ? first_row + Br : seqlen",
     "causal ? first_row + Br - Bc : seqlen", kWrong, "normal", "--causal"},
    {"20", "a mask where there is none", "if (causal && j", "if (j", kWrong},
    {"20", "a Q tile never written", "p.seqlen_q / Br, sections", "p.seqlen_q / Br - 1, sections",
     kNotWritten, "normal", "--causal"},
    {"20", "the number of the head for that of the tile", "(gridDim.y - 1 - blockIdx.y) * Br",
     "(gridDim.y - 1 - blockIdx.x) * Br", kGlobalRace, "normal", "--causal"},

    // Step 21
    {"21", "keys beyond the last seen", "min(seqlen_k, row + query_0_sees))", "row + query_0_sees)",
     kWrong, "normal", "--seqlen 100"},
    {"21", "the ragged tile skipped", "(keys_end + Bc - 1) / Bc * Bc - Bc",
     "keys_end / Bc * Bc - Bc", kWrong, "normal", "--seqlen 100"},
    {"21", "rows that are not there copied", "!ragged || i < part.rows)", "true)", kOutside,
     "normal", "--seqlen 100"},
    {"21", "the tail of K not filled", "load_tile<Bc, d, true>(smem.K, gK, last);",
     "for (int i = threadIdx.x / (d / 8); i < min(Bc, seqlen_k - last); i += num_warps * 32 / (d / "
     "8)) cp_async_16(smem.K(i, threadIdx.x % (d / 8) * 8), gK(last + i, threadIdx.x % (d / 8) * "
     "8));",
     kNobodyWrote, "normal", "--seqlen 100"},
    {"21", "the tail of V not filled", "load_tile<Bc, d, true>(smem.V, gV, j);",
     "for (int i = threadIdx.x / (d / 8); i < min(Bc, seqlen_k - j); i += num_warps * 32 / (d / "
     "8)) cp_async_16(smem.V(i, threadIdx.x % (d / 8) * 8), gV(j + i, threadIdx.x % (d / 8) * "
     "8));",
     kNobodyWrote, "normal", "--seqlen 100"},
    {"21", "rows that are not there stored", "if (row >= seqlen_q) continue;", "", kOutside,
     "normal", "--seqlen 100"},
    {"21", "positions aligned at the first row", "causal ? seqlen_k - seqlen_q + 1", "causal ? 1",
     kWrong, "normal", "--causal --seqlen 100 --seqlen-k 150"},
    {"21", "positions shifted the other way", "seqlen_k - seqlen_q + 1", "seqlen_q - seqlen_k + 1",
     kWrong, "normal", "--causal --seqlen 100 --seqlen-k 150"},
    {"21", "minus infinity for no maximum", "no_maximum = -1e30f", "no_maximum = -INFINITY",
     kNotWritten, "normal", "--causal --seqlen 200"},
    {"21", "a row without keys divided by zero", "if (l[mt][r] == 0) l[mt][r] = 1;", "",
     kNotWritten, "normal", "--causal --seqlen 100 --seqlen-k 20"},

    // Step 22
    {"22", "strides of Q for K", "problem.K, problem.K_strides", "problem.K, problem.Q_strides",
     kWrong, "normal", "--heads 2 --seqlen 100 --seqlen-k 150"},
    {"22", "strides of K for V", "problem.V, problem.V_strides", "problem.V, problem.K_strides",
     kWrong, "normal", "--batch 2 --seqlen 100 --layout bnhd"},
    {"22", "strides of O for Q", "problem.Q, problem.Q_strides", "problem.Q, problem.O_strides",
     kWrong, "normal", "--seqlen 100 --layout interleaved"},
    {"22", "strides of heads and rows swapped", "h * strides.head + start * strides.row",
     "h * strides.row + start * strides.head", kGlobalRace, "normal", "--heads 2 --seqlen 100"},
    {"22", "the first batch element for all", "b * strides.batch", "0 * strides.batch", kGlobalRace,
     "normal", "--seqlen 100 --batch 2"},
    {"22", "rows as of one head", "rows, d, strides.row};", "rows, d, d};", kGlobalRace, "normal",
     "--heads 2 --seqlen 100 --layout bnhd"},
    {"22", "lengths of keys ignored", "of_batch(problem.lengths_k, problem, b, problem.seqlen_k)",
     "problem.seqlen_k", kWrong, "normal", "--batch 2 --seqlen 100 --lengths 100:30,37:70"},
    {"22", "lengths of queries ignored",
     "of_batch(problem.lengths_q, problem, b, problem.seqlen_q)", "problem.seqlen_q", kWrong,
     "normal", "--batch 2 --seqlen 100 --lengths 30:100,70:37"},
    {"22", "lengths of the first sequence", "of_batch(problem.lengths_k, problem, b,",
     "of_batch(problem.lengths_k, problem, 0,", kWrong, "normal",
     "--batch 2 --seqlen 100 --lengths 100:30,37:70"},
    {"22", "the tail of V not filled", "load_tile<Bc, d, true>(smem.V, gV, j);",
     "load_tile<Bc, d>(smem.V, {gV.data, j + Bc, d, gV.stride}, j);", kWrong, "normal",
     "--seqlen 128 --lengths 70"},
    {"22", "the last tile of K for all", "(smem.K, gK, j - Bc)", "(smem.K, gK, last)", kWrong,
     "normal", "--seqlen 256"},
    {"22", "V from the last tile forwards", "(smem.V, gV, j)", "(smem.V, gV, last - j)", kWrong,
     "normal", "--seqlen 200"},
    // 9 heads are two sections of 5, since 8 of 8193 keys are more than 32 MB: one has a place for nobody.
    {"22", "a head that is not there", "if (b >= problem.batch) return;", "", kOutside, "normal",
     "--causal --batch 9 --heads 1 --head-dim 128 --seqlen 1 --seqlen-k 8193 --lengths "
     "1:8193,1:1,1:1,1:1,1:1,1:1,1:1,1:1,1:1"},
    {"22", "a head in two sections", "(gridDim.z - 1 - blockIdx.z) * gridDim.x",
     "(gridDim.z - 1 - blockIdx.z) * (gridDim.x - 1)", kGlobalRace, "normal",
     "--causal --batch 9 --heads 1 --head-dim 128 --seqlen 1 --seqlen-k 8193 --lengths "
     "1:8193,1:1,1:1,1:1,1:1,1:1,1:1,1:1,1:1"},
    {"22", "keys of the neighbour", "of_batch(problem.cu_seqlens_k, problem, b, 0)",
     "of_batch(problem.cu_seqlens_k, problem, (b + 1) % problem.batch, 0)", kWrong, "normal",
     "--batch 2 --seqlen 100 --layout packed --lengths 70,70"},
    {"22", "queries of the neighbour", "of_batch(problem.cu_seqlens_q, problem, b, 0)",
     "of_batch(problem.cu_seqlens_q, problem, (b + 1) % problem.batch, 0)", kWrong, "normal",
     "--batch 2 --seqlen 100 --layout packed --lengths 70,70"},
    {"22", "every sequence where the first begins", "of_batch(problem.cu_seqlens_q, problem, b, 0)",
     "0", kGlobalRace, "normal", "--batch 2 --seqlen 100 --layout packed --lengths 100,37"},
    {"22", "rows of the next sequence stored", "if (row >= seqlen_q) continue;",
     "if (row >= problem.seqlen_q) continue;", kOutside, "normal",
     "--batch 2 --seqlen 100 --layout packed --lengths 100,37"},

    // Step 23
    {"23", "heads of a group far apart", "h / (problem.heads / problem.kv_heads)",
     "h % problem.kv_heads", kWrong, "normal", "--seqlen 100 --heads 6 --kv-heads 3"},
    {"23", "as many heads per group as groups", "h / (problem.heads / problem.kv_heads)",
     "h / problem.kv_heads", kWrong, "normal", "--seqlen 100 --heads 6 --kv-heads 3"},
    {"23", "a head of K and V for each query head", "h / (problem.heads / problem.kv_heads)",
     "min(h, problem.kv_heads - 1)", kWrong, "normal", "--seqlen 100 --heads 6 --kv-heads 3"},
    {"23", "V of the group before", "problem.V_strides, b, kv_h,",
     "problem.V_strides, b, max(0, kv_h - 1),", kWrong, "normal",
     "--seqlen 100 --heads 6 --kv-heads 3"},
    {"23", "K of the first group", "problem.K_strides, b, kv_h,", "problem.K_strides, b, 0,",
     kWrong, "normal", "--seqlen 100 --heads 6 --kv-heads 3"},

    // Step 24
    {"24", "the angles of the wrong pairs", "halves ? col + 4 * n", "halves ? col + 4 * (1 - n)",
     kWrong, "normal", "--seqlen 200 --rope halves"},
    {"24", "halves for neighbours", "problem.rope == Rope::kHalves", "problem.rope != Rope::kNone",
     kWrong, "normal", "--seqlen 200 --rope neighbours"},
    {"24", "an element of each half for neighbours", "x[n][2 * e + 1]", "x[1 - n][2 * e + 1]",
     kWrong, "normal", "--seqlen 200 --rope neighbours"},
    {"24", "half of the pairs backwards", "sin[e] + b_before * cos[e]",
     "sin[e] - b_before * cos[e]", kWrong, "normal", "--seqlen 200 --rope halves"},
    {"24", "position off by one", "first_row + seqlen_k - seqlen_q);",
     "first_row + seqlen_k - seqlen_q - 1);", kWrong, "normal",
     "--seqlen 150 --seqlen-k 250 --rope halves"},
    {"24", "Q rotated by its row", "first_row + seqlen_k - seqlen_q);", "first_row);", kWrong,
     "normal", "--seqlen 150 --seqlen-k 250 --rope halves"},
    {"24", "K rotated by the position of the query in its place", "problem, first_row);\n}",
     "problem, first_row + problem.seqlen_k - problem.seqlen_q);\n}", kOutside, "normal",
     "--seqlen 150 --seqlen-k 250 --rope halves"},
    {"24", "K rotated by its row in the tile", "rotated_rows), problem, first_row);",
     "rotated_rows), problem, 0);", kWrong, "normal", "--seqlen 200 --rope halves"},
    {"24", "only Q rotated", "if (p.rope != Rope::kNone) rotate_keys_beforehand<d>(p);", "", kWrong,
     "normal", "--seqlen 200 --rope halves"},
    {"24", "only K rotated", "min(Br, seqlen_q - first_row)", "0", kWrong, "normal",
     "--seqlen 200 --rope halves"},
    {"24", "rotated keys where packed keys begin", "p.cu_seqlens_k ? 0 : sequence", "sequence",
     kNoMemory, "normal",
     "--heads 1 --seqlen 200 --batch 3 --lengths 100,150,200 --layout packed --rope halves"},
    {"24", "keys of the first sequence",
     "of_batch(problem.cu_seqlens_k, problem, b, 0) + first_row;", "first_row;", kGlobalRace,
     "normal", "--seqlen 200 --batch 3 --lengths 100,150,200 --layout packed --rope halves"},
    {"24", "one head of keys rotated", "rotated_rows, p.kv_heads, p.batch)",
     "rotated_rows, 1, p.batch)", kNotWritten, "normal", "--heads 2 --seqlen 200 --rope halves"},
    {"24", "Q rotated before it is there", "cp_async_wait<1>();", "", kStillWriting, "normal",
     "--seqlen 200 --rope halves"},

    // Step 25
    {"25", "pages of another sequence", "place_of<d>(p, b, kv_h, key,",
     "place_of<d>(p, 0, kv_h, key,", kWrong, "normal",
     "--batch 2 --seqlen 1 --seqlen-k 100 --page-size 16"},
    {"25", "the page before", "kv_h, key, seqlen_k", "kv_h, max(0, key - 16), seqlen_k", kWrong,
     "normal", "--seqlen 1 --seqlen-k 100 --page-size 16"},
    {"25", "heads of another group", "head = kv_h * group", "head = (kv_h ^ 1) * group", kWrong,
     "normal", "--heads 4 --kv-heads 2 --seqlen 1 --seqlen-k 100"},
    {"25", "new keys stored in the wrong row", "append<d>(p, b, kv_h, seqlen_k)",
     "append<d>(p, b, kv_h, seqlen_k - 1)", kStillReading, "normal",
     "--seqlen 1 --seqlen-k 100 --append 2"},
    {"25", "new keys not stored", "if (blockIdx.x == 0) append", "if (false) append", kWrong,
     "normal", "--seqlen 1 --seqlen-k 100 --append 2"},
    {"25", "new keys read from the cache", "kv_h, key, seqlen_k - p.seqlen_new)",
     "kv_h, key, seqlen_k)", kStillReading, "normal", "--seqlen 1 --seqlen-k 100 --append 2"},
    {"25", "a tail that is not there", "place, seqlen_k - next)", "place, keys)", kNoMemory,
     "normal", "--seqlen 1 --seqlen-k 100"},
    {"25", "a tail that is not masked", "if (j + keys > keys_seen(0))", "if (false)", kWrong,
     "normal", "--seqlen 1 --seqlen-k 100"},
    {"25", "each query masked as the first", ">= keys_seen(lane / 4 + e / 2 * 8)",
     ">= keys_seen(0)", kWrong, "normal", "--causal --seqlen 3 --seqlen-k 100"},
    {"25", "last tile of keys skipped", "j < keys_end;", "j + keys < keys_end;", kWrong, "normal",
     "--seqlen 1 --seqlen-k 100"},
    {"25", "a tile not waited for", "cp_async_wait<stages - 2>();\n    __syncwarp();",
     "__syncwarp();", kStillWriting, "normal", "--seqlen 1 --seqlen-k 300"},
    {"25", "copies into a tile that is being read", "__syncwarp();  // the tile is there", "//",
     kRace, "normal", "--seqlen 1 --seqlen-k 600"},
    {"25", "a part over the last V", "__syncwarp();  // the last V has", "// ", kRace, "normal",
     "--seqlen 1 --seqlen-k 100"},
    {"25", "parts not waited for", "__syncthreads();  // the parts", "//", kRace, "normal",
     "--seqlen 1 --seqlen-k 100"},
    {"25", "one warp's part missing", "for (auto &of_warp : smem.warp) sum.add(",
     "for (auto &of_warp : smem.warp) if (&of_warp > smem.warp) sum.add(", kWrong, "normal",
     "--seqlen 1 --seqlen-k 100"},

    // Step 26
    {"26", "a split skipped", "int j = 0; j < splits", "int j = 1; j < splits", kWrong, "normal",
     "--seqlen 1 --seqlen-k 200 --splits 3"},
    {"26", "weights of another row", "part_at<d>(parts, j * rows + i / d, i % d)",
     "part_at<d>(parts, j * rows + (i / d ^ 1), i % d)", kWrong, "normal",
     "--heads 4 --kv-heads 1 --seqlen 1 --seqlen-k 200 --splits 3"},
    {"26", "weights swapped", "sum.add(part_at<d>(parts, j * rows + i / d, i % d));",
     "{ Part part = part_at<d>(parts, j * rows + i / d, i % d); const float m = sum.m; "
     "sum.m = part.m; part.m = m; sum.add(part); }",
     kWrong, "normal", "--seqlen 1 --seqlen-k 200 --splits 3"},
    {"26", "every split has the first keys, too",
     "(tiles / splits * split + min(split, tiles % splits)) * keys", "0", kWrong, "normal",
     "--seqlen 1 --seqlen-k 200 --splits 3"},
    {"26", "the last is never found", "splits - 1) == 1", "splits) == 1", kNotWritten, "normal",
     "--seqlen 1 --seqlen-k 200 --splits 3"},
    {"26", "each thinks that it is the last", "splits - 1) == 1", "splits - 1) > 0", kGlobalRace,
     "normal", "--seqlen 1 --seqlen-k 200 --splits 3"},
    {"26", "a part counted before it is there", "__syncthreads();  // the part is there", "//",
     kGlobalRace, "normal", "--heads 4 --kv-heads 1 --seqlen 1 --seqlen-k 200 --splits 3"},
    {"26", "no fence before the counter", "__threadfence();  // and for every block", "//",
     kGlobalRace, "normal", "--seqlen 1 --seqlen-k 200 --splits 3"},
    {"26", "no fence after the counter", "__threadfence();  // and if it is the last", "//",
     kGlobalRace, "normal", "--seqlen 1 --seqlen-k 200 --splits 3"},
    // 17 tiles: more than the emulator's GPU runs at once.
    {"26", "a block of 4 warps loads as if it had 8", "next += num_warps * keys",
     "next += 8 * keys", kNobodyWrote, "normal",
     "--batch 17 --heads 1 --head-dim 128 --seqlen 1 --seqlen-k 140"},

    // Step 27
    {"27", "a window one key too long", "(k < sees - window &&", "(k < sees - window - 1 &&",
     kWrong, "normal", "--seqlen 200 --window 100"},
    {"27", "a window one key too short", "(k < sees - window &&", "(k < sees - window + 1 &&",
     kWrong, "normal", "--seqlen 200 --window 100"},
    {"27", "a window that goes on after the query", "problem.causal || problem.window ?",
     "problem.causal ?", kWrong, "normal", "--seqlen 200 --window 100"},
    {"27", "the edge of the window not masked", "(j < in_all_windows &&", "(false &&", kWrong,
     "normal", "--seqlen 200 --window 100"},
    {"27", "the edge of the first row of the warp",
     "warp_row + m_tiles * 16 - 1 + query_0_sees - window", "warp_row + query_0_sees - window",
     kWrong, "normal", "--seqlen 200 --window 100"},
    {"27", "the window of the last row of the tile", "max(0, first_row + query_0_sees - window)",
     "max(0, first_row + Br - 1 + query_0_sees - window)", kWrong, "normal",
     "--seqlen 200 --window 100"},
    {"27", "the sinks masked", " && k >= problem.sinks)", ")", kWrong, "normal",
     "--seqlen 200 --window 100 --sinks 4"},
    {"27", "one sink more", "k >= problem.sinks)", "k > problem.sinks)", kWrong, "normal",
     "--seqlen 200 --window 100 --sinks 4"},
    {"27", "a tile with a sink not masked", "&& j + Bc > problem.sinks)", "&& j >= problem.sinks)",
     kWrong, "normal", "--seqlen 200 --window 100 --sinks 4"},
    {"27", "tiles of sinks not visited", "min(j - Bc, sinks_last)", "-Bc", kWrong, "normal",
     "--seqlen 300 --window 50 --sinks 100"},
    {"27", "a tile of sinks jumped over", "min(problem.sinks, seqlen_k) + Bc - 1",
     "min(problem.sinks, seqlen_k)", kWrong, "normal", "--seqlen 300 --window 50 --sinks 100"},
    {"27", "the jump a tile early", "next = j == window_first ?", "next = j == window_first + Bc ?",
     kWrong, "normal", "--seqlen 300 --window 50 --sinks 100"},
    {"27", "tiles of sinks in the window visited twice",
     "for (int j = last, next; j >= 0; j = next) {\n    next = j == window_first ? min(j - Bc, "
     "sinks_last) :",
     "for (int j = last, next, jumped = 0; j >= 0; j = next) {\n    next = j == window_first && "
     "!jumped++ ? sinks_last :",
     kWrong, "normal", "--seqlen 200 --window 100 --sinks 100"},
    {"27", "K of the tile before the window", "(smem.K, gK, next)", "(smem.K, gK, j - Bc)", kWrong,
     "normal", "--seqlen 300 --window 50 --sinks 100"},
    {"27", "V of the tile before the window", "(smem.V, gV, j)", "(smem.V, gV, max(0, j - Bc))",
     kWrong, "normal", "--seqlen 300 --window 50 --sinks 100"},

    // Step 28
    {"28", "P of bf16 rounded as fp16", "cvt_rn_x2<T>(left[0], left[1])",
     "cvt_rn_f16x2(left[0], left[1])", kWrong, "normal", "--type bf16 --seqlen 130"},
    {"28", "half of the products of bf16 as of fp16", "mma<T>(s[mt][key / 8], q",
     "mma<half>(s[mt][key / 8], q", kWrong, "normal rising", "--type bf16 --seqlen 130 --causal"},
    {"28", "the last columns of Q K^T missed where they are 16",
     "col < d; col += 16) {\n      for (int mt",
     "col < d / 32 * 32; col += 16) {\n      for (int mt", kWrong, "normal",
     "--head-dim 80 --seqlen 130"},
    {"28", "the last columns of O missed where they are 16", "col < d; col += 16) {\n        const",
     "col < d / 32 * 32; col += 16) {\n        const", kWrong, "normal equal-keys",
     "--head-dim 80 --seqlen 130"},
    {"28", "rows of 96 written as if they were of 128", "tile(row + i, col + c)",
     "tile(row + i, (col + c) ^ (row / 2 ^ row) % 4 * 8)", kWrong, "normal one-hot",
     "--head-dim 96 --seqlen 130"},
    {"28", "copies by 8 threads of rows that 8 do not divide",
     "d % 64 == 0 ? 8 : d % 32 == 0 ? 4 : 2", "8", kOutside, "normal",
     "--head-dim 80 --seqlen 130"},
    {"28", "the rows of 4 warps for 8", "Br / tiling<d>.num_warps / 16", "Br / 4 / 16", kOutside,
     "normal", "--head-dim 192 --seqlen 130"},

    // Step 29
    {"29", "pages of the first sequence", "table(b, key / size)", "table(0, key / size)", kWrong,
     "normal", "--page-size 8 --batch 2 --seqlen 40"},
    {"29", "the upper half of a tile of pages as the lower", "row >= k * 32", "false", kWrong,
     "normal", "--page-size 8 --seqlen 100"},
    {"29", "new keys one row too early", "seqlen_k) - length + i", "seqlen_k) - length - 1 + i",
     kWrong, "normal", "--append 3 --seqlen 3 --seqlen-k 50"},
    {"29", "new keys turned as if they began the sequence", "left, right, to, key, col",
     "left, right, to, i, col", kWrong, "normal",
     "--append 3 --seqlen 3 --seqlen-k 50 --rope halves"},
    {"29", "new keys not stored where all keys turn", "if (p.K_new) {",
     "if (p.K_new && p.rope == Rope::kNone) {", kWrong, "normal",
     "--append 3 --seqlen 33 --seqlen-k 50 --rope neighbours"},
    {"29", "queries of new tokens not turned", "p.rope != Rope::kNone && position_of(row) >= 0",
     "false", kWrong, "normal", "--seqlen 2 --seqlen-k 50 --rope halves"},
    {"29", "values left in their pages", "left.V_strides = left.K_strides;", "", kNoMemory,
     "normal", "--page-size 8 --seqlen 40 --rope halves --layout bnhd"},
    {"29", "strides of K for V, of prompts", "problem.V, problem.V_strides",
     "problem.V, problem.K_strides", kWrong, "normal", "--batch 2 --seqlen 100 --layout bnhd"},
    {"29", "strides of K for V, of new tokens", "at(p.V, p.V_strides)", "at(p.V, p.K_strides)",
     kWrong, "normal", "--batch 2 --seqlen 2 --seqlen-k 300 --layout packed --lengths 2:300,1:200"},
    {"29", "sinks at the window", "tile < sink_tiles ? tile :", "tile < 0 ? tile :", kWrong,
     "normal", "--seqlen 2 --seqlen-k 300 --window 20 --sinks 5 --splits 1"},
    {"29", "a window one key too wide in decoding", "max(0, seen(row) - p.window)",
     "max(0, seen(row) - p.window - 1)", kWrong, "normal",
     "--seqlen 2 --seqlen-k 300 --window 20 --splits 1"},
    {"29", "a split begins a tile late", "split / splits + warp",
     "split / splits + warp + (split > 0)", kWrong, "normal",
     "--seqlen 1 --seqlen-k 300 --splits 3"},
    {"29", "a block of 4 warps loads as if it had 8", "next += num_warps;",
     "next += most_warps<d>;", kNobodyWrote, "normal",
     "--batch 17 --heads 1 --head-dim 128 --seqlen 1 --seqlen-k 140"},
    {"29", "the last block does not wait for what others have stored",
     "__threadfence();  // and if it is the last", "// and if it is the last", kGlobalRace,
     "normal", "--seqlen 1 --seqlen-k 300 --splits 2"},
    {"29", "the copy of the keys over the parts",
     "workspace + counters_bytes + parts_bytes<T, d>(problem)", "workspace + counters_bytes",
     kGlobalRace, "normal", "--seqlen 1 --seqlen-k 300 --splits 2 --rope halves"},

    // Step 30
    {"30", "V waited for by the wrong parity", "mbarrier_wait(smem.V_full, parity)",
     "mbarrier_wait(smem.V_full, parity ^ 1)", kWrongParity},
    {"30", "the parity never changed", "j += Bc, parity ^= 1", "j += Bc", kWrongParity},
    {"30", "more bytes of K expected than come",
     "mbarrier_arrive_expect_tx(smem.K_full, sizeof smem.Q + sizeof smem.K)",
     "mbarrier_arrive_expect_tx(smem.K_full, sizeof smem.Q + 2 * sizeof smem.K)", kForEver},
    {"30", "fewer bytes of V expected than come",
     "mbarrier_arrive_expect_tx(smem.V_full, sizeof smem.V)",
     "mbarrier_arrive_expect_tx(smem.V_full, sizeof smem.V - 128)", kForEver},
    {"30", "an arrival expected that nobody makes", "mbarrier_init(smem.V_full, 1)",
     "mbarrier_init(smem.V_full, 2)", kForEver},
    {"30", "a barrier not initialised", "mbarrier_init(smem.V_full, 1);", "", kNoMbarrier},
    {"30", "the next K over the one that is read", "// S = Q K^T. mma",
     "if (threadIdx.x == 0 && j + Bc < seqlen) {\n"
     "mbarrier_arrive_expect_tx(smem.K_full, sizeof smem.K);\n"
     "tma_load(smem.K, K, j + Bc, head, 0, smem.K_full);\n}\n// ",
     "may still be writing: no mbarrier_wait for its phase yet|"
     "TMA load races in shared memory with the load|threads wait for ever in"},
    {"30", "a box that is not the tile's", "map(p.K, Bc)", "map(p.K, Br)", kWholeTile},
    {"30", "V of the tile before", "tma_load(smem.V, V, j,", "tma_load(smem.V, V, j - Bc,",
     kBeforeTheTensor},
    {"30", "Q of head 0", "tma_load(smem.Q, Q, first_row, head,",
     "tma_load(smem.Q, Q, first_row, 0,", kWrong, "normal", "--heads 2"},
    {"30", "a swizzle of the reader's own", "smem.K(key + lane_key, col + lane_key_col)",
     "smem.K(key + lane_key, (col + lane_key_col) ^ lane % 8 * 8)", kWrong},
    {"30", "last tile of K and V skipped", "j < seqlen; j", "j < seqlen - Bc; j", kWrong,
     "normal rising one-hot equal-keys"},

    // Step 31
    {"31", "S waited for one group short", "wgmma_wait<0>(s[0], s[1]);",
     "wgmma_wait<1>(s[0], s[1]);", kUnderWay},
    {"31", "S read before it is waited for", "wgmma_wait<0>(s[0], s[1]);",
     "s[1](0) *= 1;\n wgmma_wait<0>(s[0], s[1]);", kTouched},
    {"31", "products not committed", "wgmma_commit();\n    wgmma_wait<0>(o[0], o[1]);",
     "wgmma_wait<0>(o[0], o[1]);", kUnderWay},
    {"31", "P written while the products read it",
     "wgmma_commit();\n    wgmma_wait<0>(o[0], o[1]);",
     "wgmma_commit();\n    p[0][0] = {};\n    wgmma_wait<0>(o[0], o[1]);", kRegistersOfA},
    {"31", "the next K over the one that is multiplied", "wgmma_wait<0>(s[0], s[1]);",
     "if (threadIdx.x == 0 && j + Bc < seqlen) {\n"
     "mbarrier_arrive_expect_tx(smem.K_full, sizeof smem.K);\n"
     "tma_load(smem.K, K, j + Bc, head, 0, smem.K_full);\n}\n"
     "wgmma_wait<0>(s[0], s[1]);",
     kOverwritten},
    {"31", "both m tiles the same rows of Q", "k_major(smem.Q, mt * 64, col)",
     "k_major(smem.Q, 0, col)", kWrong},
    {"31", "rows of Q that do not begin an atom", "k_major(smem.Q, mt * 64, col)",
     "k_major(smem.Q, mt * 60, col)", kNotAnAtom},
    {"31", "rows of K beyond the tile", "k_major(smem.K, 0, col)", "k_major(smem.K, 8, col)",
     kBeyondTheTile},
    {"31", "columns of K that are not those of Q", "k_major(smem.K, 0, col)",
     "k_major(smem.K, 0, col ^ 16)", kWrong},
    {"31", "the first keys of V for all", "mn_major(smem.V, key, 0)", "mn_major(smem.V, 0, 0)",
     kWrong},
    {"31", "a warp with operands of its own", "k_major(smem.Q, mt * 64, col)",
     "k_major(smem.Q, warp == 3 ? 0 : mt * 64, col)", kNotTheWarpgroups},
    {"31", "warps of a warpgroup that go different ways", "// O += P V. The sum",
     "if (warp == 3 && j > 0) return;\n    // ", "has exited"},
    {"31", "O begins with anything", "j > 0 || key > 0", "true", kNotWritten},

    // Step 32
    {"32", "a new ring's tiles count as full", "mbarrier_wait(to.empty[at.stage], at.parity ^ 1)",
     "mbarrier_wait(to.empty[at.stage], at.parity)", kForEver},
    {"32", "K waited for by the wrong parity", "mbarrier_wait(smem.K.full[k.stage], k.parity)",
     "mbarrier_wait(smem.K.full[k.stage], k.parity ^ 1)", kWrongParity},
    {"32", "empty when one warp has read it", "mbarrier_init(smem.V.empty[i], 4)",
     "mbarrier_init(smem.V.empty[i], 1)", kOverwrittenOrForEver},
    {"32", "empty when a fifth warp has read it", "mbarrier_init(smem.K.empty[i], 4)",
     "mbarrier_init(smem.K.empty[i], 5)", kForEver},
    {"32", "K released before its products have ended",
     "wgmma_wait<0>(s[0], s[1]);\n      if (lane == 0) mbarrier_arrive(smem.K.empty[k.stage]);",
     "if (lane == 0) mbarrier_arrive(smem.K.empty[k.stage]);\n      wgmma_wait<0>(s[0], s[1]);",
     kOverwritten},
    {"32", "half of a tile expected", "mbarrier_arrive_expect_tx(to.full[at.stage], sizeof(Tile))",
     "mbarrier_arrive_expect_tx(to.full[at.stage], sizeof(Tile) / 2)", kForEver},
    {"32", "more registers than the file has", "setmaxnreg_inc<232>()", "setmaxnreg_inc<240>()",
     kRegisters},
    {"32", "no registers given back", "setmaxnreg_dec<24>();", "", kForEver},
    {"32", "registers that do not come in eights", "setmaxnreg_dec<24>()", "setmaxnreg_dec<28>()",
     kNotSoMany},
    {"32", "K and V of head 0", "load(smem.V, v, V, j, head)", "load(smem.V, v, V, j, 0)", kWrong,
     "normal", "--heads 2"},
    {"32", "the last tile not loaded", "j < seqlen; j += Bc) {\n        load",
     "j < seqlen - Bc; j += Bc) {\n        load", kForEver},
    {"32", "the last tile not read", "j < seqlen; j += Bc) {\n      // S",
     "j < seqlen - Bc; j += Bc) {\n      // S", kWrong},

    // Step 33
    {"33", "empty when one warpgroup has read it", "ring_init(smem.K, consumers * 4)",
     "ring_init(smem.K, 4)", kOverwrittenOrForEver, "normal", "--seqlen 640"},
    {"33", "V released before its products have ended",
     "wgmma_wait<0>(o);\n      ring_release(smem.V, v);",
     "ring_release(smem.V, v);\n      wgmma_wait<0>(o);", kOverwritten, "normal", "--seqlen 640"},
    {"33", "both warpgroups the same rows of Q", "wg_row = warpgroup * 64", "wg_row = 0", kWrong},
    {"33", "rows of Q beyond the tile", "wg_row = warpgroup * 64", "wg_row = warpgroup * 128",
     kBeyondTheTile},
    {"33", "Q not told how much will come", "mbarrier_arrive_expect_tx(smem.Q_full, sizeof smem.Q)",
     "mbarrier_arrive(smem.Q_full)", kNotLanded},
    {"33", "registers that only one warpgroup gets", "setmaxnreg_inc<232>()",
     "setmaxnreg_inc<240>()", kForEver},
    {"33", "V of head 0", "ring_load(smem.V, v, map_V, j, head,",
     "ring_load(smem.V, v, map_V, j, 0,", kWrong, "normal", "--heads 2"},
    {"33", "products of bf16 as of fp16", "wgmma<T>(s,", "wgmma(s,", kOtherType, "normal",
     "--type bf16"},
    {"33", "P of bf16 rounded as fp16", "cvt_rn_x2<T>(s(i), s(i + 1))",
     "cvt_rn_f16x2(s(i), s(i + 1))", kWrong, "normal", "--type bf16"},
    {"33", "the parity never changed", "if (++stage == Stages) stage = 0, parity ^= 1",
     "if (++stage == Stages) stage = 0",
     "may still be writing|may still be reading|races in shared memory|threads wait for ever in|"
     "mbarrier_arrive: one arrival more than",
     "normal", "--seqlen 640"},

    // Step 34
    {"34", "nobody is first", "if (warpgroup == consumers - 1) next_turn();", "", kForEver},
    {"34", "the own barrier for the other's",
     "named_barrier_arrive(1 + (warpgroup + 1) % consumers,", "named_barrier_arrive(1 + warpgroup,",
     kForEver},
    {"34", "a barrier for half of the threads",
     "named_barrier_sync(1 + warpgroup, consumers * 128)",
     "named_barrier_sync(1 + warpgroup, consumers * 64)", kOtherCount},
    {"34", "a barrier for the producer, too",
     "named_barrier_arrive(1 + (warpgroup + 1) % consumers, consumers * 128)",
     "named_barrier_arrive(1 + (warpgroup + 1) % consumers, (consumers + 1) * 128)", kOtherCount},
    {"34", "the barrier of __syncthreads", "named_barrier_sync(1 + warpgroup,",
     "named_barrier_sync(warpgroup,", kBarrierId},
    {"34", "the last turn not passed on", "    }\n    next_turn();", "    }\n    ", kForEver},
    {"34", "a warpgroup that passes no turn on", "      next_turn();\n\n",
     "      if (warpgroup == 0) next_turn();\n\n", kForEver},

    // Step 35
    {"35", "S waited for one group short", "wgmma_wait<1>(s)", "wgmma_wait<2>(s)", kUnderWay},
    {"35", "P V started before Q K^T", "start_qk();\n      start_pv(j > Bc);",
     "start_pv(j > Bc);\n      start_qk();", kUnderWay},
    {"35", "P written while the products read it",
     "const bool must_rescale = softmax(s, m, l, alpha, scale_log2);",
     "const bool must_rescale = softmax(s, m, l, alpha, scale_log2);\n      p[0] = {};",
     kRegistersOfA},
    {"35", "O rescaled before its products have ended",
     "const bool must_rescale = softmax(s, m, l, alpha, scale_log2);",
     "const bool must_rescale = softmax(s, m, l, alpha, scale_log2);\n"
     "      if (must_rescale) o(0) *= alpha[0];",
     kTouched, "rising"},
    {"35", "O not rescaled", "if (must_rescale) {\n#pragma", "if (false) {\n#pragma", kWrong,
     "rising"},
    {"35", "V released before its products have ended, and again behind them",
     "const bool must_rescale = softmax(s, m, l, alpha, scale_log2);",
     "const bool must_rescale = softmax(s, m, l, alpha, scale_log2);\n"
     "      RingPosition<stages> early = v;\n"
     "      ring_release(smem.V, early);",
     "may still be reading|may still be writing|races in shared memory with the wgmma|"
     "one arrival more than|threads wait for ever in",
     "normal", "--seqlen 640"},
    {"35", "O begins with anything", "start_pv(j > Bc)", "start_pv(true)", kNotWritten},
    {"35", "the last tile of V skipped", "start_pv(seqlen > Bc);", "", kWrong},

    // Step 36
    {"36", "O over the next tile's Q", "stmatrix_x4(Q.tile[used.stage](row",
     "stmatrix_x4(Q.tile[q.stage](row", kOverwritten},
    {"36", "O stored without a fence", "fence_proxy_async();", "", kInvisible},
    {"36", "a fence of one thread, before it knows of the stores of others", "fence_proxy_async();",
     "if (threadIdx.x % 128 == 0) fence_proxy_async();", kInvisible},
    {"36", "O stored before all of it is there",
     "named_barrier_sync(1 + consumers + warpgroup, 128);", "__syncwarp();",
     "TMA store races in shared memory with the store"},
    {"36", "the next Q over O",
     "tma_store_wait_read<0>();\n        mbarrier_arrive(Q.empty[used.stage]);",
     "mbarrier_arrive(Q.empty[used.stage]);\n        tma_store_wait_read<0>();", kStoredFrom,
     "normal", kPersistent},
    {"36", "Q empty when two have read it", "ring_init(Q, 1)", "ring_init(Q, 2)", kForEver,
     "normal", kPersistent},
    {"36", "a barrier for both warpgroups", "named_barrier_sync(1 + consumers + warpgroup, 128)",
     "named_barrier_sync(1 + consumers + warpgroup, 256)", kForEver},
    {"36", "the last V of the next tile's head", "ring_load(smem.V, v, map_V, 0, at.head, at.b)",
     "ring_load(smem.V, v, map_V, 0, next.head, next.b)", kWrong, "normal", kPersistent},
    {"36", "Q of head 0", "map_Q, at.row + i * 64, at.head,", "map_Q, at.row + i * 64, 0,", kWrong,
     "normal", "--heads 2"},
    {"36", "keys of V that are not those of K", "ring_load(smem.V, v, map_V, j * Bc",
     "ring_load(smem.V, v, map_V, (j - 1) * Bc", kWrong},
    {"36", "O in the rows of the other warpgroup", "tma_store(map_O, at.row + warpgroup * 64,",
     "tma_store(map_O, at.row + (warpgroup ^ 1) * 64,", kWrong},
    {"36", "the last tile of Q not stored", "if (threadIdx.x % 128 == 0) {",
     "if (threadIdx.x % 128 == 0 && tile < tiles - 1) {", kNotWritten},
    {"36", "registers that only one warpgroup gets", "setmaxnreg_dec<40>()", "setmaxnreg_dec<56>()",
     kForEver},

    // Step 37
    {"37", "a tile of K that counts as empty when one block has read it",
     "ring_init(smem.K, cluster * consumers * 4)", "ring_init(smem.K, consumers * 4)", kTooEarly},
    {"37", "a tile that each block releases to itself alone",
     "mbarrier_arrive_at(ring.empty[at.stage], lane)",
     "mbarrier_arrive_at(ring.empty[at.stage], cluster_rank())", kTooEarly},
    {"37", "a tile that is released to the first block alone",
     "if (lane < cluster) mbarrier_arrive_at", "if (lane == 0) mbarrier_arrive_at", kForEver},
    {"37", "a block that does not stay", "cluster_sync();  // a block stays", "// a block stays",
     "which may have exited: no cluster_sync and no wait for it"},
    {"37", "the other block's barriers not waited for",
     "cluster_sync();  // the barriers are there", "__syncthreads();  // the barriers are there",
     "no cluster_sync between them|that nobody has initialised"},
    {"37", "barriers that the other block does not see", "mbarrier_fence_init();", ";",
     "no mbarrier_fence_init between them"},
    {"37", "the same half from both blocks", "part = rank * Bc / cluster", "part = 0 * rank",
     kNotLanded},
    {"37", "the rows of the first half twice", "map, row + part,", "map, row,", kWrong},
    {"37", "a half that its own block alone gets", "(1 << cluster) - 1);", "1 << rank);", kForEver},
    {"37", "half of the bytes expected", "sizeof ring.tile[0]);", "sizeof ring.tile[0] / cluster);",
     kNotLanded},

    // Step 38
    {"38", "the diagonal hidden", "+ i % 2 > row + i / 2 % 2 * 8", "+ i % 2 >= row + i / 2 % 2 * 8",
     kNotWritten, "normal", "--causal"},
    {"38", "a key after the diagonal seen", "+ i % 2 > row + i / 2 % 2 * 8",
     "+ i % 2 - 1 > row + i / 2 % 2 * 8", kWrong, "normal", "--causal"},
    {"38", "rows of the other warpgroup in the mask", "const int row = first_row + warp_index()",
     "const int row = at.row + warp_index()", kWrong, "normal", "--causal"},
    {"38", "a mask where there is none", "if (order.causal) mask_keys", "mask_keys", kWrong},
    {"38", "one tile on the diagonal masked", "order.causal && j * Bc > first_row",
     "order.causal && j < 0", kWrong, "normal", "--causal"},
    {"38", "m begins at minus infinity", "m[2] = {-FLT_MAX, -FLT_MAX}",
     "m[2] = {-INFINITY, -INFINITY}", kNotWritten, "normal", "--causal"},
    {"38", "O stored where there are no rows", "if (first_row < order.seqlen)", "if (true)",
     kBeforeTheTensor, "normal", "--seqlen 128"},
    {"38", "the last tile drawn by nobody", "drawn - 1 < unsigned(tiles - 1) ? tiles - drawn : 0",
     "drawn - 1 < unsigned(tiles - 1) ? tiles - drawn + 1 : 1", kNotWritten, "normal", kPersistent},
    {"38", "the tile's number not told with its Q", "return uniform(smem.tile(0, q.stage));",
     "return uniform(smem.tile(0, q.stage ^ 1));",
     "memory that nobody wrote|races in shared memory|threads wait for ever in", "normal",
     kPersistent},
    {"38", "the number told before the last one is read",
     "for (int i = 0; i < consumers; i++) mbarrier_wait(smem.Q[i].empty[q.stage], q.parity ^ 1);",
     "", kRace, "normal", kPersistentShort},
    {"38", "the last V of the next tile's head", "ring_load(smem.V, v, map_V, 0, at.head, at.b)",
     "ring_load(smem.V, v, map_V, 0, next.head, next.b)", kWrong, "normal", kPersistent},

    // Step 39
    {"39", "V's scale left out", "l[r] = V_scale / l[r];", "l[r] = 1 / l[r];", kWrong},
    {"39", "K's scale left out", " * of_head(scales.K, head)", "", kWrong},
    {"39", "another head's scales", "const int head = at.b * order.heads + at.head;",
     "const int head = at.b * order.heads + (at.head + 1) % order.heads;", kWrong, "normal",
     "--heads 2"},
    {"39", "keys in their order", "return place / 4 * 2 + place % 4 / 2 * 8 + place % 2;",
     "return place;", kWrong, "normal one-hot"},
    {"39", "blocks of scores in their order", "pack_here(pair(i), pair(i + 4))",
     "pack_here(pair(i), pair(i + 2))", kWrong},
    {"39", "columns of V exchanged", "store(out(col + i, group * 16), keys[i])",
     "store(out(col + (i ^ 1), group * 16), keys[i])", kWrong},
    {"39", "P beyond the largest e4m3 number", "constexpr float rise = 4; ",
     "constexpr float rise = 12; ", kWrong},
    {"39", "P below the smallest e4m3 number", "constexpr float rise = 4; ",
     "constexpr float rise = -6; ", kWrong},
    {"39", "no mask", "if (order.causal && j == own_tiles - 1)",
     "if (order.causal && j == own_tiles)", kWrong, "normal", "--causal"},
    {"39", "own tiles of the warpgroup before", "order.causal ? first_row + 64 : order.seqlen",
     "order.causal ? first_row : order.seqlen", kNotWritten, "normal", "--causal"},
    {"39", "own tiles of the warpgroup behind", "order.causal ? first_row + 64 : order.seqlen",
     "order.causal ? first_row + 128 : order.seqlen", kForEver, "normal", "--causal"},
    {"39", "a tile passed before all lanes have seen it full",
     "__syncwarp();  // all lanes have seen", "// all lanes have seen", kForEver, "normal",
     "--seqlen 640 --causal"},
    {"39", "O stored where there are no rows", "if (first_row < order.seqlen) tma_store(",
     "tma_store(", kBeforeTheTensor, "normal", "--seqlen 128"},
    {"39", "V from its other end", "ring_load(smem.V, v, map_V, j * d,",
     "ring_load(smem.V, v, map_V, (at.key_tiles - 1 - j) * d,", kWrong},
    {"39", "V before it is transposed", "griddepcontrol_wait();  // V^T is there", "",
     kLaunchBefore},
    {"39", "Q not waited for by all lanes before it is released",
     "named_barrier_sync(1 + warpgroup, 128);  // O's", "// O's", kRace, "normal", kPersistent},
    {"39", "Q never released", "ring_release(Q, q);", "q.next();", kForEver, "normal",
     "--heads 40 --seqlen 128"},
};

std::string step_name(const std::string &number) {
  for (const std::string &step : step_names())
    if (step.starts_with(number + "-")) return step;
  return number;
}

bool chosen(const std::string &step) {
  return step.starts_with(environment("STEPS_ONLY", ""));
}

/// The steps that are copied here.
std::vector<std::string> steps() {
  std::vector<std::string> all = step_names();
  std::erase_if(all, [](const std::string &step) { return !chosen(step); });
  return all;
}

/// A step's source; with a header of its own, and with the ring of Part IV, where they are included.
std::string source_of(const std::string &step) {
  std::string source = read_text("steps/" + step + "/attention.cu");
  const std::string own = "#include \"steps/" + step + "/",
                    ring = "#include \"common/kernel/ring.h";
  std::vector<std::string> included;
  for (std::size_t at; (at = std::min(source.find(own), source.find(ring))) != std::string::npos;) {
    const std::size_t end = source.find('\n', at);
    const std::string line = source.substr(at, end - at), quoted = line.substr(line.find('"') + 1);
    std::string header;
    if (std::find(included.begin(), included.end(), line) == included.end()) {
      header = read_text(quoted.substr(0, quoted.size() - 1));
      header.replace(header.find("#pragma once"), 12, "");
      included.push_back(line);
    }
    source.replace(at, end - at, header);
  }
  return source;
}

/// `text` with the one `find` in it replaced; empty if there is none, or another.
std::string replaced(std::string text, const std::string &find, const std::string &replace) {
  const std::size_t at = text.find(find);
  if (at == std::string::npos || text.find(find, at + 1) != std::string::npos) return "";
  return text.replace(at, find.size(), replace);
}

// --- copies --------------------------------------------------------------------------------------

struct Run {
  int tiles, seed;
  std::string inputs, options;
};

std::vector<Run> runs_of(const Plant &plant) {
  std::istringstream words(plant.inputs);
  const std::vector<std::string> inputs(std::istream_iterator<std::string>(words), {});
  std::vector<Run> runs;
  // At least two orders of threads.
  for (std::size_t i = 0; i < std::max<std::size_t>(inputs.size(), 2); i++)
    runs.push_back({2, static_cast<int>(i) + 1, inputs[i % inputs.size()], plant.options});
  return runs;
}

/// One head, if its options do not name more; head dim 64, if the step takes it.
std::string command(const std::string &program, const Description &step, const Run &run) {
  const bool has_64 = std::count(step.head_dims.begin(), step.head_dims.end(), "64") > 0;
  return program + " --check-only --device cpu --batch 1 --heads 1 --head-dim " +
         (has_64 ? "64" : step.head_dims.front()) + " --seqlen " +
         std::to_string(run.tiles * step.tile) + " --inputs " + run.inputs + " --seed " +
         std::to_string(run.seed) + " " + run.options;
}

std::string file_name(std::string name) {
  std::replace(name.begin(), name.end(), ' ', '-');
  return name;
}

std::string show(const std::string &line, const Finished &finished) {
  return "\n" + line + "\n" + finished.out + finished.err + "exit status " +
         std::to_string(finished.status) + "\n";
}

/// Whether a run ended with this report, or with one of these: '|' stands between them.
bool reports(const Finished &finished, const std::string &report) {
  const std::string said = finished.out + finished.err;
  std::istringstream all(report);
  for (std::string one; std::getline(all, one, '|');)
    if (finished.status == 1 && said.find(one) != std::string::npos) return true;
  return false;
}

std::string name_of(const Plant &plant) {
  return file_name(std::string(plant.step) + " " + plant.name);
}
std::string name_without_a_bug(const std::string &step) {
  return step.substr(0, 2) + "-without-a-bug";
}
std::string name_without_one_call(const std::string &step) {
  return step.substr(0, 2) + "-without-one-call";
}

// --- calls that are gone ---------------------------------------------------------------------------

/// What a step cannot do without: calls, each to be taken away alone.
const std::vector<std::string> kBarriers = {"__syncthreads()", "__syncwarp()",
                                            "cp_async_wait<0>()"};
// keep_loads_apart() is none: what it stands for is a hint to nvcc, and nothing may rely on it.
const std::vector<std::string> kHopperBarriers = {
    "__syncthreads(",        "mbarrier_wait(",
    "mbarrier_arrive(",      "mbarrier_arrive_expect_tx(",
    "mbarrier_fence_init(",  "wgmma_fence(",
    "wgmma_commit(",         "wgmma_wait<",
    "fence_proxy_async(",    "named_barrier_sync(",
    "named_barrier_arrive(", "tma_store_commit(",
    "tma_store_wait_read<",  "ring_release(",
    "cluster_sync(",         "mbarrier_arrive_at(",
    "griddepcontrol_wait("};

/// Calls that a step can do without, and why.
struct Spare {
  std::string call, why;
};
const std::vector<Spare> kSpare = {
    {"named_barrier_sync(1 + warpgroup, consumers * 128)",
     "ping-pong: whose turn it is changes when something is done, and no result"},
    {"named_barrier_sync(1 + warpgroup, 2 * 128)", "the same, of three warpgroups"},
};

/// A call in a source: where, and how much of the text it is.
struct Call {
  std::size_t at, size;
};

std::vector<Call> calls_of(const std::string &source, const std::vector<std::string> &names) {
  std::vector<Call> calls;
  for (const std::string &name : names)
    for (std::size_t at = 0; (at = source.find(name, at)) != std::string::npos; at++) {
      const std::size_t end = source.find(';', at), line = source.rfind('\n', at);
      if (source.substr(line, at - line).find("//") != std::string::npos) continue;
      if (at > 0 && (std::isalnum(source[at - 1]) || source[at - 1] == '_')) continue;
      const std::string call = source.substr(at, end - at);
      if (call.find('{') != std::string::npos) continue;  // its definition
      if (std::none_of(kSpare.begin(), kSpare.end(),
                       [&](const Spare &spare) { return spare.call == call; }))
        calls.push_back({at, end - at});
    }
  return calls;
}

/// The calls of a step that it cannot do without.
std::vector<Call> calls_of(const std::string &step, const std::string &source) {
  std::vector<Call> calls;
  for (const Call &call : calls_of(source, step < "30" ? kBarriers : kHopperBarriers))
    // Step 37 releases a tile to two blocks, and not by ring.h.
    if (source.substr(call.at, call.size) != "mbarrier_arrive(ring.empty[at.stage])" ||
        source.find("ring_release(smem") != std::string::npos)
      calls.push_back(call);
  return calls;
}

/// A step's source in which the call with the number GONE, of these, is not made: each a bug of its own, and all
/// are compiled at once.
std::string without_one(std::string source, const std::vector<Call> &calls) {
  std::vector<std::size_t> numbers(calls.size());
  std::iota(numbers.begin(), numbers.end(), 0);
  std::sort(numbers.begin(), numbers.end(),
            [&](std::size_t a, std::size_t b) { return calls[a].at > calls[b].at; });
  for (const std::size_t number : numbers) {  // the last first: where the others are is still true
    const auto [at, size] = calls[number];
    source.replace(at, size,
                   "(gone == " + std::to_string(number) + " ? void() : static_cast<void>(" +
                       source.substr(at, size) + "))");
  }
  // Which it is must be known from the first line of code on; lines keep their numbers.
  std::size_t code = 0;
  while (source[code] == '/' || source[code] == '#' || source[code] == '\n')
    code = source.find('\n', code) + 1;
  return source.insert(
      code, "const int gone = std::getenv(\"GONE\") ? std::atoi(std::getenv(\"GONE\")) : -1; ");
}

// --- all copies ------------------------------------------------------------------------------------

/// By name a copy of each step, one of it with each bug, and one whose calls can be gone. They are compiled
/// when they are first asked for.
const std::map<std::string, Copy> &planted() {
  static const std::map<std::string, Copy> by_name = [] {
    std::vector<Copy> copies;
    for (const std::string &step : steps()) {
      const std::string source = source_of(step);
      std::string options;
      for (const Plant &plant : kPlants)
        if (step.starts_with(plant.step)) options += std::string(" ") + plant.options;
      copies.push_back({step, name_without_a_bug(step), only_for(options, source)});
      copies.push_back({step, name_without_one_call(step),
                        only_for("", without_one(source, calls_of(step, source)))});
      for (const Plant &plant : kPlants) {
        if (!step.starts_with(plant.step)) continue;
        const std::string with_bug = replaced(source, plant.find, plant.replace);
        if (!with_bug.empty())
          copies.push_back({step, name_of(plant), only_for(plant.options, with_bug)});
      }
    }
    compile_copies(kFolder, copies);
    std::map<std::string, Copy> found;
    for (const Copy &copy : copies) found[copy.name] = copy;
    return found;
  }();
  return by_name;
}

}  // namespace

TEST_SUITE_BEGIN("planted");

TEST_CASE("copies without a bug pass all the runs below") {
  std::vector<Job> jobs;
  for (const std::string &step : steps()) {
    const Copy &copy = planted().at(name_without_a_bug(step));
    CHECK_MESSAGE(!copy.command.empty(), copy.complaint);
    if (copy.command.empty()) continue;
    const Description help = describe(copy.command);
    std::set<std::string> lines;
    for (const int seed : {1, 2})
      lines.insert(command(copy.command, help, {2, seed, "normal", ""}));
    for (const Plant &plant : kPlants)
      if (step.starts_with(plant.step))
        for (const Run &run : runs_of(plant)) lines.insert(command(copy.command, help, run));
    for (const std::string &line : lines)
      jobs.push_back({step,
                      [line] {
                        const Finished finished = run_command(line);
                        return finished.status == 0 ? "" : show(line, finished);
                      },
                      ""});
  }
  do_all(jobs);
}

TEST_CASE("every planted bug is reported, in every run") {
  planted();  // here, with all cores
  std::vector<Job> jobs;
  for (const Plant &plant : kPlants) {
    if (!chosen(plant.step)) continue;
    jobs.push_back({plant.step + std::string(" ") + plant.name,
                    [&plant] {
                      const auto found = planted().find(name_of(plant));
                      if (found == planted().end())
                        return std::string("the step does not hold exactly one '") + plant.find +
                               "'";
                      const Copy &copy = found->second;
                      if (copy.command.empty()) return copy.complaint;
                      std::string failures;
                      const Description help = describe(copy.command);
                      for (const Run &run : runs_of(plant)) {
                        const std::string line = command(copy.command, help, run);
                        const Finished finished = run_command(line);
                        if (!reports(finished, plant.report))
                          failures += show(line, finished) + "expected '" + plant.report + "'";
                      }
                      return failures;
                    },
                    ""});
  }
  do_all(jobs);
}

namespace {

/// What was wrong with a copy of a step in which a call is gone, or nothing. `many`: the call is of
/// a kernel for many queries, where a step has another for few.
std::string failures_without(const Copy &copy, bool many) {
  if (copy.command.empty()) return copy.complaint;
  std::string failures;
  const std::string &step = copy.step;
  const Description help = describe(copy.command);
  const auto takes = [&](const std::string &option) {
    return std::count(help.takes.begin(), help.takes.end(), option) > 0;
  };
  const bool hopper = step >= "30";
  // Several tiles; and what a step takes, it may have barriers for.
  std::string options = help.tile == 1 ? "--seqlen 256" : hopper ? "--seqlen 384" : "";
  if (takes("--rope")) options += " --rope halves";
  if (takes("--splits") && !many) options = "--seqlen 4 --seqlen-k 1500 --splits 3";
  std::vector<std::string> shapes = {options};
  if (step >= "36") shapes = {kPersistent, kPersistentShort, "--seqlen 1024"};
  if (help.tile > 128) shapes = {kPersistent};
  for (const int seed : {1, 2}) {  // one head: a barrier is of one block
    std::string said;              // in shapes in which the call is not missed
    bool reported = false;
    for (const std::string &shape : shapes) {
      if (reported) break;
      // In Part IV O is rescaled, from whichever end the keys come: accumulators are touched between
      // products.
      const std::string line =
          command(copy.command, help, {2, seed, hopper ? "one-hot" : "normal", shape});
      const Finished finished = run_command(line);
      reported = hopper ? finished.status == 1
                        : reports(finished, kRace) || reports(finished, kGlobalRace) ||
                              reports(finished, kNobodyWrote) || reports(finished, kStillWriting) ||
                              reports(finished, kNotWritten);
      said += show(line, finished);
    }
    if (!reported) failures += said;
  }
  return failures;
}

}  // namespace

TEST_CASE("every barrier and every wait is missed when it is gone, with any order of threads") {
  std::vector<Job> jobs;
  for (const std::string &step : steps()) {
    const std::string source = source_of(step);
    const std::vector<Call> calls = calls_of(step, source);
    for (std::size_t i = 0; i < calls.size(); i++) {
      const auto [at, size] = calls[i];
      const auto line = 1 + std::count(source.begin(), source.begin() + at, '\n');
      // Step 29 has two kernels: the later one in its source has many queries.
      const bool many = at > source.find("prefill(const Problem");
      jobs.push_back({step + ":" + std::to_string(line) + ": " + source.substr(at, size),
                      [step, i, many] {
                        Copy copy = planted().at(name_without_one_call(step));
                        if (!copy.command.empty())
                          copy.command = "GONE=" + std::to_string(i) + " " + copy.command;
                        return failures_without(copy, many);
                      },
                      ""});
    }
  }
  planted();  // here, with all cores
  do_all(jobs);
}

TEST_CASE("what a step of Part IV can do without is there, and is not missed") {
  std::vector<Copy> copies;
  for (const Spare &spare : kSpare)
    for (const std::string &step : steps()) {
      if (step < "30") continue;
      const std::string without = replaced(source_of(step), spare.call, "");
      if (without.empty()) continue;
      const std::string name = step.substr(0, 2) + "-spare-" + std::to_string(&spare - &kSpare[0]);
      copies.push_back({step, name, only_for("", without)});
    }
  compile_copies(kFolder, copies);
  std::vector<Job> jobs;
  for (const Copy &copy : copies)
    jobs.push_back({copy.name,
                    [&copy] {
                      if (copy.command.empty()) return copy.complaint;
                      const std::string line =
                          command(copy.command, describe(copy.command), {3, 1, "rising", ""});
                      const Finished finished = run_command(line);
                      return finished.status == 0 ? "" : show(line, finished);
                    },
                    ""});
  do_all(jobs);
}

namespace {

/// A layout that costs nothing but time, in a copy of a step; or none, in a step as it is.
struct Layout {
  std::string step, name, find, replace;
  int excess;  // wavefronts more than its bytes need
};
constexpr int kSome = -1;  // excess, whatever it is

/// From step 03 on no access to shared memory takes more wavefronts than its bytes need, except in
/// step 05, where ldmatrix takes 8 for 1, and for a few in the steps that decode.
std::vector<Layout> layouts() {
  std::vector<Layout> all = {
      {"03", "a swizzle of half the banks", "row % 32 * 2", "row % 16 * 2", kSome},
      {"04", "rows of P not padded", "Tile<float, Br, Bc + 16> P", "Tile<float, Br, Bc> P", kSome},
      {"06", "a swizzle of half the banks", "row % 8 * 8", "row % 4 * 8", kSome},
      {"15", "a swizzle of half the banks", "row % 8 * 8", "row % 4 * 8", kSome},
  };
  // Where new tokens are decoded, m and l of 8 rows lie in 4 banks: 8 warps store them twice.
  const std::map<std::string, int> excess = {{"05", kSome}, {"25", 16}, {"26", 16}, {"29", 16}};
  for (const std::string &step : step_names())
    if (const std::string number = step.substr(0, 2); number >= "03")
      all.push_back({number, "as it is", "", "", excess.count(number) ? excess.at(number) : 0});
  return all;
}

std::string name_of(const Layout &layout) {
  return file_name(layout.step + " layout " + layout.name);
}

/// The counts of a whole run, from what --profile-csv wrote.
std::map<std::string, std::uint64_t> totals(const std::string &file) {
  std::map<std::string, std::uint64_t> values;
  for (const std::string &row : lines_of(read_text(file)))
    if (const std::size_t name = row.find(",0,\""); name != std::string::npos) {
      const std::size_t end = row.rfind("\",");
      values[row.substr(name + 4, end - name - 4)] = std::stoull(row.substr(end + 2));
    }
  return values;
}

}  // namespace

TEST_CASE("a layout with bank conflicts gives the right answer, and the counts tell") {
  std::vector<Copy> copies;
  for (const Layout &layout : layouts()) {
    if (!chosen(layout.step) || layout.find.empty()) continue;
    const std::string step = step_name(layout.step);
    const std::string source = replaced(source_of(step), layout.find, layout.replace);
    CHECK_MESSAGE(!source.empty(), "the step does not hold exactly one '", layout.find, "'");
    if (!source.empty()) copies.push_back({step, name_of(layout), source});
  }
  compile_copies(kFolder, copies);
  std::map<std::string, std::string> programs;
  for (const Copy &copy : copies) {
    CHECK_MESSAGE(!copy.command.empty(), copy.complaint);
    programs[copy.name] = copy.command;
  }
  std::vector<Job> jobs;
  for (const Layout &layout : layouts()) {
    if (!chosen(layout.step)) continue;
    const std::string name = name_of(layout);
    const std::string program = layout.find.empty() ? "./step-" + layout.step : programs[name];
    if (program.empty()) continue;
    jobs.push_back({layout.step + " " + layout.name,
                    [layout, name, program] {
                      std::string failures;
                      const std::string csv = kFolder + name + ".csv";
                      const Description help = describe(program);
                      for (const std::string &head_dim : help.head_dims) {
                        std::filesystem::remove(csv);
                        const std::string line =
                            program + " --device cpu --batch 1 --heads 1 --head-dim " + head_dim +
                            " --seqlen " + std::to_string(help.tile) + " --profile-csv " + csv;
                        const Finished finished = run_command(line);
                        std::map<std::string, std::uint64_t> counts = totals(csv);
                        std::uint64_t wavefronts = 0;
                        for (const char *kind :
                             {"shared load", "shared store", "stmatrix", "cp.async", "wgmma"})
                          wavefronts += counts[kind + std::string(" wavefronts")];
                        const std::uint64_t ideal = counts["shared wavefronts, ideal"];
                        // From head dim 192 on step 29 decodes with 4 warps, not 8.
                        const bool half = layout.step == "29" && std::stoi(head_dim) > 128;
                        const int excess = half ? layout.excess / 2 : layout.excess;
                        const bool as_expected =
                            excess == kSome ? wavefronts > ideal : wavefronts == ideal + excess;
                        if (finished.status != 0 || ideal == 0 || !as_expected)
                          failures += show(line, finished) + std::to_string(wavefronts) +
                                      " wavefronts, ideal " + std::to_string(ideal) +
                                      ": expected " +
                                      (excess == kSome ? "more" : std::to_string(excess) + " more");
                      }
                      return failures;
                    },
                    ""});
  }
  do_all(jobs);
}

TEST_SUITE_END();

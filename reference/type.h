// What a problem names and the reference knows. (A header of its own: half.h cannot be read beside
// CUDA's.)
#pragma once

/// Of the elements of Q, K, V and O.
enum class Type { kFp16, kBf16 };

/// Which elements of a row are a pair, of head_dim / 2 pairs: c and c + head_dim / 2, or 2 c and
/// 2 c + 1.
enum class Rope { kNone, kHalves, kNeighbours };

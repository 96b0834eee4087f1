// The element types of Q, K, V and O. (A header of its own: half.h cannot be read beside CUDA's.)
#pragma once

enum class Type { kFp16, kBf16 };

// SPDX-License-Identifier: MIT
#include "common/emulator/copies.h"

namespace emulator {

void Copies::reset() {
  for (Thread &thread : threads_) {
    thread.copies.clear();
    thread.first = 0;
    thread.groups = 0;
  }
  reading_.fill(0);
}

void Copies::begin(unsigned thread, std::size_t offset, const void *global, SiteId site) {
  Thread &self = threads_[thread];
  const auto *source = static_cast<const std::byte *>(global);
  self.copies.push_back({offset, source, site, self.groups});
  if (source) reading_[piece_of(source)]++;
}

bool Copies::end_one(unsigned thread, int groups, Copy &copy) {
  Thread &self = threads_[thread];
  // A copy that is not committed has the group that comes next: no wait covers it.
  if (self.first == self.copies.size() || self.copies[self.first].group + groups >= self.groups) {
    self.copies.erase(self.copies.begin(), self.copies.begin() + self.first);
    self.first = 0;
    return false;
  }
  copy = self.copies[self.first++];
  if (copy.global) reading_[piece_of(copy.global)]--;
  return true;
}

Error Copies::check_store(const void *global, int bytes) const {
  const auto *begin = static_cast<const std::byte *>(global);
  if (bytes <= kPieceBytes && !reading_[piece_of(begin)] && !reading_[piece_of(begin + bytes - 1)])
    return {};
  for (unsigned thread = 0; thread < threads_.size(); thread++)
    for (std::size_t i = threads_[thread].first; i < threads_[thread].copies.size(); i++)
      if (const Copy &copy = threads_[thread].copies[i];
          copy.global && begin < copy.global + kCopyBytes && copy.global < begin + bytes)
        return under_way("store to global", Fault::kInUse, kCopyEngine, thread, copy.site);
  return {};
}

}  // namespace emulator

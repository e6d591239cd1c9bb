// How weights of bfloat16 are coded: see coded.h for the layout, and why.

#pragma once
#include <algorithm>
#include <atomic>
#include <vector>

#include "operations.h"
#include "team.h"

namespace headrace {

inline int exponent_of(uint16_t bits) { return bits >> 7 & 255; }

// Adds to counts [256] how many elements have each exponent.
inline void count_exponents(const uint16_t *elements, int64_t count, int64_t *counts) {
  const int64_t lot = 1 << 20, threads = team_threads();
  std::vector<int64_t> own(threads * 256);
  share((count + lot - 1) / lot, 1, static_cast<int>(threads), [&](int64_t task, int64_t end, int64_t member) {
    uint32_t tables[4][256] = {};  // of several, as one would wait for itself where neighbours are alike
    for (int64_t i = task * lot, last = std::min(end * lot, count); i < last; i++) tables[i & 3][exponent_of(elements[i])]++;
    for (int e = 0; e < 256; e++)
      for (const auto &table : tables) own[member * 256 + e] += table[e];
  });
  for (int64_t i = 0; i < threads * 256; i++) counts[i % 256] += own[i];
}

// Writes elements of float32 to `narrow` in bfloat16. False: that would lose something of one.
inline bool narrow_elements(const uint32_t *elements, int64_t count, uint16_t *narrow) {
  const int64_t lot = 1 << 18;
  std::atomic<bool> exact{true};
  share((count + lot - 1) / lot, 1, team_threads(), [&](int64_t task, int64_t end, int64_t) {
    for (; task < end && exact; task++) {
      uint32_t lost = 0;
      for (int64_t i = task * lot, last = std::min((task + 1) * lot, count); i < last; i++) {
        narrow[i] = static_cast<uint16_t>(elements[i] >> 16);
        lost |= elements[i] & 0xffff;
      }
      if (lost) exact = false;
    }
  });
  return exact;
}

struct Coding {
  const uint16_t *words;  // packed panels [panels, depth, panel, 2]
  int64_t panels, depth, panel, outputs;  // outputs: those that are not there are coded as anything
  int64_t register_bytes;          // see Operations::coded_register
  const uint8_t *exponents;        // [COMMON_EXPONENTS]
  uint8_t *coded;                  // [panels, depth, bytes of a coded row]
};

// Where the i-th element of a row stands in it: see coded.h.
inline int64_t coded_place(const Coding &c, int64_t i) {
  const int64_t of_register = i % c.register_bytes, of_vector = of_register % (c.register_bytes / 2);
  const int64_t vector = of_register / (c.register_bytes / 2);
  return i - of_register + of_vector / 8 * 16 + vector * 8 + i % 8;
}

// Codes one panel, and adds to the list what is not common.
inline void code_panel(const Coding &c, const std::vector<int64_t> &places, const uint8_t *codes, int64_t panel,
                       std::vector<Uncommon> &list) {
  const int64_t columns = std::min(c.outputs - panel * c.panel, c.panel);
  std::vector<uint8_t> each(2 * c.panel);
  for (int64_t k = 0; k < c.depth; k++) {
    const uint16_t *elements = c.words + (panel * c.depth + k) * 2 * c.panel;
    uint8_t *row = c.coded + (panel * c.depth + k) * coded_row_bytes(c.panel);
    for (int64_t i = 0; i < 2 * c.panel; i++) {
      const uint16_t bits = elements[i];
      const uint8_t code = codes[exponent_of(bits)];
      if (code == COMMON_EXPONENTS && i < 2 * columns)
        list.push_back({static_cast<uint32_t>(k), static_cast<uint16_t>(i), bits});
      each[places[i]] = code % COMMON_EXPONENTS;
      row[c.panel + places[i]] = static_cast<uint8_t>((bits & 0x7f) | (bits >> 8 & 0x80));
    }
    for (int64_t i = 0; i < c.panel; i++) row[i] = static_cast<uint8_t>(each[i] | each[c.panel + i] << 4);
  }
}

// Codes all panels; begins [panels + 1] and the list go on from begins[0]. False: more than `most` in the list.
inline bool code_panels(const Coding &c, uint32_t *begins, Uncommon *list, int64_t most) {
  uint8_t codes[256];
  std::fill(codes, codes + 256, static_cast<uint8_t>(COMMON_EXPONENTS));
  for (int64_t i = 0; i < COMMON_EXPONENTS; i++) codes[c.exponents[i]] = static_cast<uint8_t>(i);
  std::vector<int64_t> places(2 * c.panel);
  for (int64_t i = 0; i < 2 * c.panel; i++) places[i] = coded_place(c, i);
  std::vector<std::vector<Uncommon>> lists(c.panels);
  share(c.panels, 1, team_threads(), [&](int64_t panel, int64_t end, int64_t) {
    for (; panel < end; panel++) code_panel(c, places, codes, panel, lists[panel]);
  });
  for (int64_t panel = 0; panel < c.panels; panel++) {
    begins[panel + 1] = begins[panel] + static_cast<uint32_t>(lists[panel].size());
    if (begins[panel + 1] > most) return false;
    std::copy(lists[panel].begin(), lists[panel].end(), list + begins[panel]);
  }
  return true;
}

}  // namespace headrace

// The adapters of a step's rows, as a pass of the stack adds what they change: see adapters.h for the products. A step
// without such rows does nothing here.

#pragma once
#include <algorithm>
#include <vector>

#include "operations.h"
#include "team.h"

namespace headrace {

enum AdapterPlace { ADAPT_QKV, ADAPT_OUTPUT, ADAPT_GATE_UP, ADAPT_DOWN, ADAPTER_PLACES };

class StepAdapters {
 public:
  StepAdapters(const AdapterRows *rows, int64_t groups, int64_t layers, int64_t element_bytes, int dtype)
      : rows_(rows, rows + groups), element_bytes_(element_bytes), dtype_(dtype) {
    for (int64_t place = 0; place < layers * ADAPTER_PLACES; place++) {
      int64_t inner = 0;
      for (const AdapterRows &each : rows_) inner += each.count * each.changes[place].rank;
      most_inner_ = std::max(most_inner_, inner);
    }
  }

  bool any() const { return !rows_.empty(); }

  // The adapters of `count` tokens for the experts of a layer; null: none changes them. It lasts until the next call.
  const ExpertAdapters *experts(int64_t layer, int64_t count) {
    changes_.clear();
    bool any = false;
    for (const AdapterRows &rows : rows_) {
      changes_.push_back(rows.experts[layer]);
      any = any || rows.experts[layer];
    }
    if (!any) return nullptr;
    of_token_.assign(count, -1);
    for (size_t g = 0; g < rows_.size(); g++)
      for (int64_t i = 0; i < rows_[g].count; i++) of_token_[rows_[g].tokens[i]] = static_cast<int32_t>(g);
    experts_ = {of_token_.data(), changes_.data(), static_cast<int64_t>(rows_.size())};
    return &experts_;
  }

  // From now on only the tokens at `kept_at`, which ascend, are computed.
  void keep(const int64_t *kept_at, int64_t kept) {
    kept_.resize(rows_.size());
    for (size_t g = 0; g < rows_.size(); g++) {
      AdapterRows &rows = rows_[g];
      for (int64_t i = 0, t = 0; i < kept; i++) {
        while (t < rows.count && rows.tokens[t] < kept_at[i]) t++;
        if (t < rows.count && rows.tokens[t] == kept_at[i]) kept_[g].push_back(i);
      }
      rows.tokens = kept_[g].data();
      rows.count = static_cast<int64_t>(kept_[g].size());
    }
    rows_.erase(std::remove_if(rows_.begin(), rows_.end(), [](const AdapterRows &rows) { return !rows.count; }), rows_.end());
  }

  // out, the outputs of a linear layer for x, with what the adapters add.
  void add(const Operations &run, int64_t layer, AdapterPlace place, const StackLinear &l, const void *x, void *out) {
    if (!any()) return;
    const int64_t threads = team_threads();
    inner_.resize(most_inner_ * element_bytes_ + 64);
    gathered_.resize(std::max<size_t>(gathered_.size(), threads * run.adapter_rows * l.inputs * element_bytes_ + 64));
    run.adapt({rows_.data(), static_cast<int64_t>(rows_.size()), layer * ADAPTER_PLACES + place, x, out, aligned(inner_),
               aligned(gathered_), l.inputs, l.outputs, dtype_, static_cast<int>(threads)});
  }

 private:
  static void *aligned(std::vector<char> &room) {
    return reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64);
  }

  std::vector<AdapterRows> rows_;
  std::vector<std::vector<int64_t>> kept_;
  std::vector<int32_t> of_token_;
  std::vector<const AdapterChange *> changes_;
  ExpertAdapters experts_ = {};
  std::vector<char> inner_, gathered_;
  int64_t element_bytes_, most_inner_ = 0;
  int dtype_;
};

}  // namespace headrace

// Probabilities of the candidates of all leaves of a step, and what is learned of them: see calibration.py, whose
// functions do the same for one leaf, operation by operation (-ffp-contract=off).

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr int kBins = 11;
constexpr double kRankedMass = 0.95, kAcceptance = 0.75;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// As calibration._Table.
struct Table {
  const Table* parent;
  double* cells;  // [ranks][kBins][2]: hits, observations
  int64_t num_ranks;
  double keep, weight;

  double value(int64_t at, double prior) const {
    return at < num_ranks * kBins ? (cells[2 * at] + weight * prior) / (cells[2 * at + 1] + weight) : prior;
  }
  void add(int64_t at, double hit) const {
    if (at >= num_ranks * kBins) return;
    cells[2 * at] = keep * cells[2 * at] + hit;
    cells[2 * at + 1] = keep * cells[2 * at + 1] + 1.0;
  }
};

// The cell of a rank and a gap: bisect_right(_EDGES, gap), NaN behind all of them.
int64_t cell(int64_t rank, double gap) {
  int bin = 0;
  for (double edge = 0.03; bin < kBins - 1 && !(gap < edge); edge *= 2.0) ++bin;
  return rank * kBins + bin;
}

double sum(const double* x, int64_t n) {
  double total = 0.0;
  for (int64_t i = 0; i < n; ++i) total += x[i];
  return total;
}

double at_least_one(double x) { return 1.0 > x ? 1.0 : x; }

// Calibration.probabilities; `probs` holds the priors before.
void calibrate(const Table& table, int64_t n, const double* gaps, double* probs) {
  double least = kInfinity;
  for (int64_t rank = 0; rank < n; ++rank) {
    const int64_t at = cell(rank, gaps[rank]);
    if (table.parent) probs[rank] = table.parent->value(at, probs[rank]);
    probs[rank] = table.value(at, probs[rank]);
    if (probs[rank] > least) probs[rank] = least;
    else least = probs[rank];
  }
  if (n == 0) return;
  const double rest = sum(probs + 1, n - 1);
  if (!(rest > 1.0 - probs[0])) return;
  const double scale = (1.0 - probs[0]) / rest;
  for (int64_t rank = 1; rank < n; ++rank) probs[rank] *= scale;
}

// The priors of evidence_of.
void priors(int64_t n, const double* gaps, bool sampled, double* probs) {
  for (int64_t i = 1; i < n; ++i) probs[i] = std::exp(-gaps[i]);
  probs[0] = 1.0;
  const double scale = sampled ? (1.0 - kAcceptance) / at_least_one(sum(probs + 1, n - 1)) : kRankedMass / sum(probs, n);
  for (int64_t i = 0; i < n; ++i) probs[i] *= scale;
  if (sampled) probs[0] = kAcceptance;
}

// bonus_probs.
struct Bonus {
  std::vector<int64_t> order;
  std::vector<double> behind, gaps, found, probs;

  const double* operator()(const Table& table, int64_t n, const double* of_candidates) {
    order.clear(), behind.clear(), found.clear(), probs.resize(n);
    for (int64_t i = 0; i < n; ++i) {
      auto at = order.end();
      while (at != order.begin() && of_candidates[i] < of_candidates[at[-1]]) --at;
      order.insert(at, i);
    }
    for (int64_t i : order) behind.push_back(of_candidates[i]);
    for (double gap : behind) found.push_back(std::exp(-gap));
    const double scale = kRankedMass / at_least_one(sum(found.data(), n));
    for (double& weight : found) weight *= scale;
    gaps = behind;
    gaps[0] = n > 1 && behind[0] < kInfinity ? behind[1] - behind[0] : kInfinity;
    calibrate(table, n, gaps.data(), found.data());
    for (int64_t i = 0; i < n; ++i) probs[order[i]] = found[i];
    return probs.data();
  }
};

}  // namespace

extern "C" {

// calibration.expect. `sizes` [rows]: candidates of each row; `tables` [rows]: its calibration; `gaps`: of all rows,
// one behind the other. The last three are null where no row has bonus gaps, and else of each row the calibration of
// bonus tokens, null for a row without, the share, and one bonus gap for each gap. Returns the probabilities, as `gaps`,
// and how many of each row are worth a node.
void paceline_expect(int64_t rows, double least, const int64_t* sizes, const Table* const* tables, const double* gaps,
                     double* probs, int64_t* kept, const Table* const* of_bonus, const double* shares,
                     const double* bonus_gaps) {
  Bonus bonus;
  for (int64_t row = 0, at = 0; row < rows; at += sizes[row++]) {
    int64_t num = sizes[row];
    if (num > 0) {
      const bool sampled = of_bonus && of_bonus[row];
      double* found = probs + at;
      priors(num, gaps + at, sampled, found);
      calibrate(*tables[row], num, gaps + at, found);
      const double* guesses = sampled ? bonus(*of_bonus[row], num, bonus_gaps + at) : nullptr;
      const auto worth = [&](int64_t i) {
        const double guess = sampled ? shares[row] * guesses[i] : 0.0;
        return guess > found[i] ? guess : found[i];
      };
      while (num > 1 && worth(num - 1) < least) --num;
    }
    kept[row] = num;
  }
}

// Calibration.observe; `taken`: the rank that the target took, -1 for none.
void paceline_observe(const Table* table, int64_t n, const double* gaps, int64_t taken) {
  for (int64_t rank = 0; rank < n; ++rank) {
    const int64_t at = cell(rank, gaps[rank]);
    const double hit = rank == taken ? 1.0 : 0.0;
    table->add(at, hit);
    if (table->parent) table->parent->add(at, hit);
  }
}
}

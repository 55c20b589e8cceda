/* The moments of flat arrays in one pass, as hookline/statistics/moments.py computes them by NumPy.

   Slots: count, non-finite, zeros, the sums of x, x^2 and x^4 in double, the greatest -x and x.
   A block whose sum of squares is finite has finite numbers alone; others are read again, number by
   number. The lanes and their order are fixed, so equal arrays give equal bits on each machine. */

typedef long long whole;
typedef double doubles __attribute__((vector_size(64), aligned(8), may_alias));
typedef float floats __attribute__((vector_size(32), aligned(4), may_alias));
typedef int float_mask __attribute__((vector_size(32)));
typedef whole double_mask __attribute__((vector_size(64)));

enum { LANES = 8, BLOCK = 1024, SLOTS = 8 };

struct sums {
  double first, second, fourth, least, most;
  whole zeros;
};

static void add(struct sums *to, double x) {
  double square = x * x;
  to->first += x;
  to->second += square;
  to->fourth += square * square;
  to->zeros += x == 0;
  if (x < to->least) to->least = x;
  if (x > to->most) to->most = x;
}

static int is_finite(double x) { return x - x == 0; }

#define MEASURE(NAME, NUMBER, NUMBERS, MASK)                                                  \
  void NAME(const NUMBER *x, whole n, double *slots) {                                        \
    const NUMBER infinity = __builtin_inf();                                                  \
    const struct sums empty = {0, 0, 0, infinity, -infinity, 0};                              \
    slots[0] += n;                                                                            \
    for (; n > 0; x += BLOCK, n -= BLOCK) {                                                   \
      whole size = n < BLOCK ? n : BLOCK, at = 0, bad = 0;                                    \
      doubles first = {0}, second = {0}, fourth = {0};                                        \
      NUMBERS least = (NUMBERS){0} + infinity, most = -least;                                 \
      MASK zeros = {0};                                                                       \
      for (; at + LANES <= size; at += LANES) {                                               \
        NUMBERS numbers = *(const NUMBERS *)(x + at);                                         \
        doubles wide = __builtin_convertvector(numbers, doubles), square = wide * wide;       \
        first += wide;                                                                        \
        second += square;                                                                     \
        fourth += square * square;                                                            \
        zeros -= (MASK)(numbers == 0);                                                        \
        MASK is_less = (MASK)(numbers < least), is_more = (MASK)(numbers > most);             \
        least = (NUMBERS)(((MASK)numbers & is_less) | ((MASK)least & ~is_less));              \
        most = (NUMBERS)(((MASK)numbers & is_more) | ((MASK)most & ~is_more));                \
      }                                                                                       \
      struct sums all = empty;                                                                \
      for (int lane = 0; lane < LANES; lane++) {                                              \
        all.first += first[lane];                                                             \
        all.second += second[lane];                                                           \
        all.fourth += fourth[lane];                                                           \
        all.zeros += zeros[lane];                                                             \
        if (least[lane] < all.least) all.least = least[lane];                                 \
        if (most[lane] > all.most) all.most = most[lane];                                     \
      }                                                                                       \
      for (; at < size; at++) add(&all, x[at]);                                               \
      if (!is_finite(all.second)) {                                                           \
        all = empty;                                                                          \
        for (at = 0; at < size; at++) {                                                       \
          if (is_finite(x[at])) add(&all, x[at]);                                             \
          else bad++;                                                                         \
        }                                                                                     \
      }                                                                                       \
      slots[1] += bad;                                                                        \
      slots[2] += all.zeros;                                                                  \
      slots[3] += all.first;                                                                  \
      slots[4] += all.second;                                                                 \
      slots[5] += all.fourth;                                                                 \
      if (-all.least > slots[6]) slots[6] = -all.least;                                       \
      if (all.most > slots[7]) slots[7] = all.most;                                           \
    }                                                                                         \
  }

MEASURE(measure_float32, float, floats, float_mask)
MEASURE(measure_float64, double, doubles, double_mask)

/* Measure many arrays, each into slots of its own. */
void measure_many(const float *const *x, const whole *n, whole count, double *slots) {
  for (whole k = 0; k < count; k++) measure_float32(x[k], n[k], slots + SLOTS * k);
}

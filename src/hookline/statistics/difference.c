/* How far two arrays of rows lie apart, as hookline/statistics/difference.py measures it by torch.

   Differences, squares and sums are in double. The lanes and their order are fixed, so equal arrays
   give equal bits on each machine. Sums of arrays with NaN or infinity are not finite. */

typedef long long whole;
typedef double doubles __attribute__((vector_size(64), aligned(8), may_alias));
typedef float floats __attribute__((vector_size(32), aligned(4), may_alias));
typedef whole mask __attribute__((vector_size(64)));

enum { LANES = 8, GROUP = 128 };

static double sum_of(doubles lanes) {
  double sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
  return sum;
}

static double larger(double x, double y) { return x > y ? x : y; }

static double size_of(double x) { return x < 0 ? -x : x; }

static doubles sizes_of(doubles x) { return (doubles)((mask)x & 0x7fffffffffffffff); }

/* Slots of the sums: the squares of the difference, of a and of b; the norms of the rows of b; the
   number of elements that are not equal.

   Slots of the worst: the worst row and its number, the worst element and its number; the norm of a
   row, and the size of an element, by which smaller ones are measured; the squares of both. */
#define DIFFERENCE(SUMS, WORST, NUMBER, NUMBERS)                                              \
  void SUMS(const NUMBER *a, const NUMBER *b, whole n_rows, whole width, double *slots) {     \
    for (whole row = 0; row < n_rows; row++, a += width, b += width) {                        \
      doubles gaps = {0}, squares_a = {0}, squares_b = {0};                                   \
      mask unequal = {0};                                                                     \
      whole at = 0, n_unequal = 0;                                                            \
      for (; at + LANES <= width; at += LANES) {                                              \
        doubles x = __builtin_convertvector(*(const NUMBERS *)(a + at), doubles);             \
        doubles y = __builtin_convertvector(*(const NUMBERS *)(b + at), doubles);             \
        doubles gap = x - y;                                                                  \
        gaps += gap * gap;                                                                    \
        squares_a += x * x;                                                                   \
        squares_b += y * y;                                                                   \
        unequal -= (mask)(x != y);                                                            \
      }                                                                                       \
      double of_gap = sum_of(gaps), of_a = sum_of(squares_a), of_b = sum_of(squares_b);       \
      for (int lane = 0; lane < LANES; lane++) n_unequal += unequal[lane];                    \
      for (; at < width; at++) {                                                              \
        double x = a[at], y = b[at], gap = x - y;                                             \
        of_gap += gap * gap;                                                                  \
        of_a += x * x;                                                                        \
        of_b += y * y;                                                                        \
        n_unequal += x != y;                                                                  \
      }                                                                                       \
      slots[0] += of_gap;                                                                     \
      slots[1] += of_a;                                                                       \
      slots[2] += of_b;                                                                       \
      slots[3] += __builtin_sqrt(of_b);                                                       \
      slots[4] += n_unequal;                                                                  \
    }                                                                                         \
  }                                                                                           \
                                                                                              \
  void WORST(const NUMBER *a, const NUMBER *b, whole n_rows, whole width, double *slots) {    \
    const double least_row = slots[4], least = slots[5];                                      \
    const NUMBER *const begin = b;                                                            \
    for (whole row = 0; row < n_rows; row++, a += width, b += width) {                        \
      doubles gaps = {0}, squares = {0};                                                      \
      double of_gap = 0, of_b = 0;                                                            \
      for (whole group = 0; group < width; group += GROUP) {                                  \
        whole end = group + GROUP < width ? group + GROUP : width, at = group;                \
        mask is_worse = {0};                                                                  \
        doubles worst = (doubles){0} + slots[2];                                              \
        for (; at + LANES <= end; at += LANES) {                                              \
          doubles x = __builtin_convertvector(*(const NUMBERS *)(a + at), doubles);           \
          doubles y = __builtin_convertvector(*(const NUMBERS *)(b + at), doubles);           \
          doubles gap = x - y, size = sizes_of(y), most = (doubles){0} + least;               \
          mask is_large = (mask)(size > least);                                               \
          most = (doubles)(((mask)size & is_large) | ((mask)most & ~is_large));               \
          gaps += gap * gap;                                                                  \
          squares += y * y;                                                                   \
          is_worse |= (mask)(sizes_of(gap) > worst * most);                                   \
        }                                                                                     \
        whole any = at < end;                                                                 \
        for (int lane = 0; lane < LANES; lane++) any |= is_worse[lane];                       \
        for (; at < end; at++) {                                                              \
          double y = b[at], gap = a[at] - y;                                                  \
          of_gap += gap * gap;                                                                \
          of_b += y * y;                                                                      \
        }                                                                                     \
        if (!any) continue;                                                                   \
        for (at = group; at < end; at++) {                                                    \
          double y = b[at], ratio = size_of(a[at] - y) / larger(size_of(y), least);           \
          if (ratio > slots[2]) {                                                             \
            slots[2] = ratio;                                                                 \
            slots[3] = b + at - begin;                                                        \
          }                                                                                   \
        }                                                                                     \
      }                                                                                       \
      of_gap += sum_of(gaps);                                                                 \
      of_b += sum_of(squares);                                                                \
      slots[6] += of_gap + of_b;                                                              \
      double ratio = __builtin_sqrt(of_gap) / larger(__builtin_sqrt(of_b), least_row);        \
      if (ratio > slots[0]) {                                                                 \
        slots[0] = ratio;                                                                     \
        slots[1] = row;                                                                       \
      }                                                                                       \
    }                                                                                         \
  }

DIFFERENCE(sums_float32, worst_float32, float, floats)
DIFFERENCE(sums_float64, worst_float64, double, doubles)

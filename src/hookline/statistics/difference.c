/* How far two arrays of rows lie apart, as hookline/statistics/difference.py measures it by torch.

   Numbers are read in their own dtype; differences, squares and sums are in double. The lanes of a
   sum and their order are fixed, so equal arrays give equal bits on each machine. Sums of arrays
   with NaN or infinity are not finite. */

/* Compilers make slow code of vectors that are longer than the processor's. */
#if defined(__AVX512F__)
enum { BYTES = 64 };
#elif defined(__AVX__)
enum { BYTES = 32 };
#else
enum { BYTES = 16 };
#endif
enum { WIDTH = BYTES / 8, LANES = 8, PARTS = LANES / WIDTH, GROUP = 128 };

typedef long long whole;
typedef enum { float32, float64, bfloat16, float16 } kind;
typedef double doubles __attribute__((vector_size(BYTES), aligned(8), may_alias));
typedef whole mask __attribute__((vector_size(BYTES), aligned(8), may_alias));
typedef float floats __attribute__((vector_size(BYTES / 2), aligned(4), may_alias));
typedef unsigned words __attribute__((vector_size(BYTES / 2)));
typedef unsigned short halves __attribute__((vector_size(BYTES / 4), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE whole bytes_of(kind dtype) { return dtype == float64 ? 8 : dtype == float32 ? 4 : 2; }

/* The float32 bits of float16 bits. Of numbers below the least normal one, the bits are the
   distance from 0.5 to the numbers above it. */
INLINE words widened(words bits) {
  words size = bits & 0x7fff;
  words is_small = (words)(size < 0x400), is_odd = (words)(size > 0x7bff); /* infinity and NaN */
  words small = (words)((floats)(size | 0x3f000000) - 0.5f);
  words other = (size << 13) + (112u << 23) + (is_odd & (112u << 23));
  return (small & is_small) | (other & ~is_small) | ((bits & 0x8000) << 16);
}

INLINE doubles doubled(floats x) {
#if defined(__AVX512F__) && !defined(__clang__)
  return __builtin_ia32_cvtps2pd512_mask(x, (doubles){0}, -1, 4); /* GCC converts it in halves */
#else
  return __builtin_convertvector(x, doubles);
#endif
}

INLINE doubles load(kind dtype, const char *from) {
  if (dtype == float64) return *(const doubles *)from;
  if (dtype == float32) return doubled(*(const floats *)from);
  words bits = __builtin_convertvector(*(const halves *)from, words);
  bits = dtype == bfloat16 ? bits << 16 : widened(bits);
  return doubled((floats)bits);
}

/* The next n numbers of a row, of n_left in the array; 0 in the lanes behind them. */
INLINE void take(kind dtype, const char *from, whole n, whole n_left, doubles *to) {
  static const whole LANE[LANES] = {0, 1, 2, 3, 4, 5, 6, 7};
  const whole size = bytes_of(dtype);
  char end[8 * LANES];
  if (n_left < LANES && n < LANES) {
    for (whole at = 0; at < n * size; at++) end[at] = from[at];
    from = end;
  }
  for (int part = 0; part < PARTS; part++) {
    to[part] = load(dtype, from + part * WIDTH * size);
    if (n < LANES) to[part] = (doubles)((mask)to[part] & (*(const mask *)(LANE + part * WIDTH) < n));
  }
}

INLINE double sum_of(const doubles *parts) {
  double sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += parts[lane / WIDTH][lane % WIDTH];
  return sum;
}

INLINE whole whole_sum_of(const mask *parts) {
  whole sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += parts[lane / WIDTH][lane % WIDTH];
  return sum;
}

INLINE double larger(double x, double y) { return x > y ? x : y; }

INLINE double positive(double x) { return x < 0 ? -x : x; }

/* -- the size of b ---------------------------------------------------------------------------- */

INLINE void add_size(kind dtype, const char *b, whole n, whole n_left, doubles *squares) {
  doubles y[PARTS];
  take(dtype, b, n, n_left, y);
  for (int part = 0; part < PARTS; part++) squares[part] += y[part] * y[part];
}

/* Slots: the sum of the squares of b, and of the norms of its rows. */
INLINE void sizes(kind dtype, const char *b, whole n_rows, whole width, double *slots) {
  const whole size = bytes_of(dtype);
  for (whole n_left = n_rows * width; n_left > 0; n_left -= width, b += width * size) {
    doubles squares[PARTS] = {{0}};
    whole at = 0;
    for (; at + LANES <= width; at += LANES) add_size(dtype, b + at * size, LANES, LANES, squares);
    if (at < width) add_size(dtype, b + at * size, width - at, n_left - at, squares);
    double of_b = sum_of(squares);
    slots[0] += of_b;
    slots[1] += __builtin_sqrt(of_b);
  }
}

/* -- how far a lies from b --------------------------------------------------------------------- */

typedef struct {
  double gap, a, n_unequal;        /* the squares of the difference and of a */
  double worst_row, row;           /* the worst, and its number */
  double worst_element, element;
  double least_row, least_element; /* smaller ones are measured by these */
} difference;

/* The sums of a row, and the lanes where an element may be worse than the worst so far. */
typedef struct {
  doubles gap[PARTS], a[PARTS], b[PARTS];
  mask unequal[PARTS], is_worse[PARTS];
} sums;

/* What the square of a difference exceeds where an element is worse: this part of b's square, and
   the least. */
typedef struct {
  double ratio, least;
} bound;

INLINE bound bound_of(const difference *so_far) {
  double worst = so_far->worst_element, least = so_far->least_element;
  if (worst < 1e-140 || worst * least < 1e-140) return (bound){0, 0}; /* squares would lose bits */
  double ratio = worst * worst * (1 - 1e-12);
  return (bound){ratio, ratio * least * least};
}

INLINE void add_gap(
    kind dtype, const char *a, const char *b, whole n, whole n_left, bound worst, sums *to) {
  doubles x[PARTS], y[PARTS];
  take(dtype, a, n, n_left, x);
  take(dtype, b, n, n_left, y);
  for (int part = 0; part < PARTS; part++) {
    doubles gap = x[part] - y[part], square = gap * gap, of_b = y[part] * y[part];
    to->gap[part] += square;
    to->a[part] += x[part] * x[part];
    to->b[part] += of_b;
    to->unequal[part] -= (mask)(x[part] != y[part]);
    to->is_worse[part] |= (mask)(square > worst.least) & (mask)(square > worst.ratio * of_b);
  }
}

/* Look for the worst element among n numbers of a row. */
INLINE void look(kind dtype, const char *a, const char *b, whole n, whole number, difference *to) {
  for (whole at = 0; at < n; at++) {
    doubles x[PARTS], y[PARTS];
    take(dtype, a + at * bytes_of(dtype), 1, 1, x);
    take(dtype, b + at * bytes_of(dtype), 1, 1, y);
    double ratio = positive(x[0][0] - y[0][0]) / larger(positive(y[0][0]), to->least_element);
    if (ratio > to->worst_element) {
      to->worst_element = ratio;
      to->element = number + at;
    }
  }
}

INLINE void gaps(
    kind dtype, const char *a, const char *b, whole n_rows, whole width, difference *to) {
  const whole size = bytes_of(dtype);
  for (whole row = 0; row < n_rows; row++, a += width * size, b += width * size) {
    sums of = {{{0}}, {{0}}, {{0}}, {{0}}, {{0}}};
    for (whole group = 0; group < width; group += GROUP) {
      const whole stop = group + GROUP < width ? group + GROUP : width;
      const bound worst = bound_of(to);
      whole at = group;
      for (; at + LANES <= stop; at += LANES)
        add_gap(dtype, a + at * size, b + at * size, LANES, LANES, worst, &of);
      if (at < stop) {
        whole n_left = (n_rows - row) * width - at;
        add_gap(dtype, a + at * size, b + at * size, stop - at, n_left, worst, &of);
      }
      if (!whole_sum_of(of.is_worse)) continue;
      look(dtype, a + group * size, b + group * size, stop - group, row * width + group, to);
      for (int part = 0; part < PARTS; part++) of.is_worse[part] = (mask){0};
    }
    double of_gap = sum_of(of.gap);
    double ratio = __builtin_sqrt(of_gap) / larger(__builtin_sqrt(sum_of(of.b)), to->least_row);
    to->gap += of_gap;
    to->a += sum_of(of.a);
    to->n_unequal += whole_sum_of(of.unequal);
    if (ratio > to->worst_row) {
      to->worst_row = ratio;
      to->row = row;
    }
  }
}

#define OF(DTYPE)                                                                             \
  void sizes_##DTYPE(const char *b, whole n_rows, whole width, double *slots) {               \
    sizes(DTYPE, b, n_rows, width, slots);                                                    \
  }                                                                                           \
  void gaps_##DTYPE(const char *a, const char *b, whole n_rows, whole width, difference *to) { \
    gaps(DTYPE, a, b, n_rows, width, to);                                                     \
  }

OF(float32)
OF(float64)
OF(bfloat16)
OF(float16)
